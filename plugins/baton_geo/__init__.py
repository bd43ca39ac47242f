"""Satellite scenes to georeferenced masks in vLLM: a Prithvi-EO model and the IO processor that feeds it.

The two functions are entry points; they import nothing heavy until vLLM calls them.
"""

from __future__ import annotations


def register() -> None:
    """`vllm.general_plugins`: make the model and its configuration known. May be called again."""
    from baton_geo.registration import register_model

    register_model()


def io_processor() -> str:
    """`vllm.io_processor_plugins`: where the plugin's class is."""
    return "baton_geo.plugin.GeoProcessor"
