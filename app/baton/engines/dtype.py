"""Choose the dtype that an engine on a CPU computes in, where its settings name none.

Most models are published in bfloat16. A processor without instructions for it emulates every product:
SmolLM2 prefills 1,000 tokens in 16.1 s instead of 3.2 s on two cores with AVX2, and in 4.1 s instead of
1.5 s with AVX-512 (bench/RESULTS.md). float32 takes twice the memory, for weights and for KV; where that
memory is missing, vLLM decides.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.config.groups import CPU_KV_CACHE_BYTES, EngineSettings
from baton.engines.cpu import Processor
from baton.models.catalog import EMBEDDED

HALVES = ("bfloat16", "float16")
WIDE = "float32"
WIDE_BYTES = 4
BLOCK_TOKENS = 128
"""Tokens of one KV block on a CPU; the pool holds whole blocks."""
MEMORY_SHARE = 2
"""The weights may take the machine's memory divided by this; KV pools and other engines need the rest."""
WEIGHTS = ("*.safetensors", "*.bin", "*.pt")


def dtype_for(
    settings: EngineSettings, model: Path, processor: Processor, *, memory: int | None
) -> str | None:
    """Choose the dtype of one engine.

    Args:
        settings: the engine's table of the settings.
        model: folder of its weights.
        processor: the processor that runs it.
        memory: bytes of memory that this machine has; None: unknown.

    Returns:
        `float32`, or None where vLLM decides: the settings name a dtype, the processor has bfloat16, the
        model is quantized or not in half precision, or float32 would not fit.
    """
    embedded = EMBEDDED.get(settings.model)
    args = {**(embedded.args if embedded else {}), **settings.args}
    if "dtype" in args or args.get("quantization") or not processor.emulates_bfloat16:
        return None
    config = _config(model)
    if _own_dtype(config) not in HALVES or config.get("quantization_config"):
        return None
    weights = 2 * sum(file.stat().st_size for pattern in WEIGHTS for file in model.glob(pattern))
    if memory is not None and weights * MEMORY_SHARE > memory:
        return None
    pool = settings.kv_cache_memory or CPU_KV_CACHE_BYTES
    return WIDE if _kv_bytes(config, args) <= pool else None


def _config(model: Path) -> dict[str, Any]:
    try:
        found = json.loads((model / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _own_dtype(config: Mapping[str, Any]) -> object:
    for place in (config, _text(config)):
        for key in ("dtype", "torch_dtype"):
            if place.get(key) is not None:
                return place[key]
    return None


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a configuration that describes the language model."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def _kv_bytes(config: Mapping[str, Any], args: Mapping[str, Any]) -> float:
    """Return the bytes of KV that one context of maximum length takes in float32; infinity: unknown."""
    text = _text(config)
    try:
        heads = text["num_attention_heads"]
        size = text.get("head_dim") or text["hidden_size"] // heads
        keys = text.get("num_key_value_heads") or heads
        length = args.get("max_model_len") or text["max_position_embeddings"]
        blocks = math.ceil(length / BLOCK_TOKENS) + 1  # vLLM keeps one for itself
        return float(2 * text["num_hidden_layers"] * keys * size * WIDE_BYTES * blocks * BLOCK_TOKENS)
    except (KeyError, TypeError, ZeroDivisionError):
        return math.inf
