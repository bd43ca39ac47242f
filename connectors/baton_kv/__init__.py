"""A KV connector for vLLM that saves a request's KV cache to a store and loads it into other requests.

It is the transport of Baton's handoffs, and works with plain vLLM too: see connectors/README.md.
"""
