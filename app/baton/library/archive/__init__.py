"""Handoffs in an archive of objects."""
