"""HTTP: the routes, and what stands between a socket and them. Nothing here imports vLLM."""
