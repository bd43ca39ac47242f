"""Checks of a request's body."""
