"""HTTP: routes, and what stands between a socket and them. Nothing here knows vLLM."""
