"""ASGI middleware, one class a file. `server.create_app` adds them in order."""
