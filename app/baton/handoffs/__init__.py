"""Handoffs: what one is, who may use it, how long it lives. Nothing here knows vLLM or HTTP."""
