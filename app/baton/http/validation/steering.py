"""Remove request fields that would bypass the gateway's control of an engine."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

STEERING_KEYS = (
    "kv_transfer_params",
    "ec_transfer_params",
    "cache_salt",
    "mm_processor_kwargs",
    "media_io_kwargs",
    "priority",
)
"""Fields of vLLM's requests that steer its caches, its scheduler or its image reading past the gateway."""
ARGUMENTS = "vllm_xargs"
"""Arguments for extensions of an engine: a connector, a logits processor, a model."""


def strip_steering(body: dict[str, Any]) -> list[str]:
    """Drop the fields that would steer the engine, also inside `vllm_xargs`; returns their names."""
    stripped = [key for key in STEERING_KEYS if body.pop(key, None) is not None]
    extra = body.get(ARGUMENTS)
    if isinstance(extra, dict):
        stripped += [key for key in STEERING_KEYS if extra.pop(key, None) is not None]
    return stripped


def strip_arguments(body: dict[str, Any], allowed: Collection[str]) -> int:
    """Drop the arguments that clients may not set in `vllm_xargs`; returns their number."""
    extra = body.get(ARGUMENTS)
    if not isinstance(extra, dict):
        return 0
    kept = {name: value for name, value in extra.items() if name in allowed}
    if kept:
        body[ARGUMENTS] = kept
    else:
        del body[ARGUMENTS]
    return len(extra) - len(kept)
