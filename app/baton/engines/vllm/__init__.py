"""Run engines on vLLM; the only package of the gateway that imports vLLM."""
