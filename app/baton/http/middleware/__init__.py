"""ASGI middleware, one a file. `server.py` joins them, and its list is their order."""
