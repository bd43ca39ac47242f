"""Find, fetch, decode and check the images of requests. Imports no HTTP server and no vLLM."""
