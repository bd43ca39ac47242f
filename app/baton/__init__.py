"""Baton: several vLLM engines behind one OpenAI-compatible gateway."""

__version__ = "0.1.0"
