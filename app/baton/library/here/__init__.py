"""Handoffs on this machine."""
