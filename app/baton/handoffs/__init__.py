"""The rules of handoffs: requests that save or load one, and the `records` of those that exist. No vLLM, no HTTP."""
