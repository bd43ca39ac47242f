"""Handoffs that the gateway saves and loads by itself, for requests that name none."""
