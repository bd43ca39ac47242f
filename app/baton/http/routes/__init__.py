"""The routes: `forwarded` is the table of those that hand a request to an engine as it comes."""
