"""Segment satellite scenes in vLLM: a Prithvi-EO model, and the IO processor that turns scenes into masks.

The two functions are vLLM entry points; heavy modules are imported only when vLLM calls them.
"""

from __future__ import annotations


def register() -> None:
    """Register the model and its configuration (entry point `vllm.general_plugins`); may be called again."""
    from baton_geo.registration import register_model

    register_model()


def io_processor() -> str:
    """Return the import path of the plugin's class (entry point `vllm.io_processor_plugins`)."""
    return "baton_geo.plugin.GeoProcessor"
