"""Fetch files that clients name by URL, from hosts that the operator allows.

This is a library, not a plugin of vLLM: the gateway uses it for images, `baton_geo` for rasters. It needs
only httpx.
"""
