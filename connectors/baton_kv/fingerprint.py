"""What must be the same on both sides before one byte of KV is used."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from blake3 import blake3

from baton_kv.entry import FORMAT

WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.pt")
CONFIGS = ("config.json", "preprocessor_config.json", "processor_config.json")
"""The model's own, and what decides which pixels an image's KV comes from."""


def fingerprint(facts: Mapping[str, Any]) -> str:
    """A digest of everything that decides what the bytes of a block mean.

    Args:
        facts: model, dtype, layout and version, by name; see `connector.facts_of`.
    """
    told = json.dumps({"format": FORMAT} | dict(facts), sort_keys=True, default=str)
    return blake3(told.encode()).hexdigest()


def weights_digest(model: str, revision: str | None = None) -> str:
    """What tells a model's weights and configuration from any others, of the same name too.

    Of a local folder or file the bytes; of a hub id the commit that lies in the local cache.

    Args:
        model: a folder, a file, or a hub id.
        revision: of the hub id.

    Raises:
        ValueError: a hub id whose commit cannot be told.
    """
    path = Path(model)
    if path.is_dir():
        return _digest(file for pattern in (*CONFIGS, *WEIGHTS) for file in sorted(path.glob(pattern)))
    if path.is_file():
        return _digest([path])
    from huggingface_hub import try_to_load_from_cache  # not needed where models are folders

    cached = try_to_load_from_cache(model, CONFIGS[0], revision=revision)
    if not isinstance(cached, str):
        raise ValueError(
            f"baton_kv: which weights '{model}' stands for cannot be told: name a local folder instead"
        )
    return f"hub:{model}@{Path(cached).parent.name}"


def _digest(files: Iterable[Path]) -> str:
    digest = blake3(max_threads=blake3.AUTO)
    for file in files:
        digest.update(f"{file.name}:{file.stat().st_size}:".encode())
        digest.update_mmap(file)
    return digest.hexdigest()
