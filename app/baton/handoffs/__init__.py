"""The rules of handoffs: requests that save or load one, and the `records` there are. No vLLM, no HTTP."""
