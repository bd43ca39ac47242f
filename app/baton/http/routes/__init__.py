"""The routes. `forwarded` is the table of those that pass a request on to an engine unchanged."""
