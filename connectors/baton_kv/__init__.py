"""The KV connector behind handoffs: a request's computed KV cache leaves the engine, and comes back exact.

Use it from plain vLLM by its module path, see connectors/README.md.
"""
