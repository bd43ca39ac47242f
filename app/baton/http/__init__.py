"""HTTP: routes, middleware, validation and the pipeline of a request. Nothing here imports vLLM."""
