"""Engines on vLLM. The only package of the gateway that imports vLLM."""
