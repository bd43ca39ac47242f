"""What must be the same on both sides before one byte of KV is used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blake3 import blake3

from baton_kv.entry import FORMAT

WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.pt")
CONFIGS = ("config.json",)


def fingerprint(facts: Mapping[str, Any]) -> str:
    """A digest of everything that decides what the bytes of a block mean.

    Args:
        facts: model, dtype, layout and version, by name; see `connector.facts_of`.
    """
    told = json.dumps({"format": FORMAT} | dict(facts), sort_keys=True, default=str)
    return blake3(told.encode()).hexdigest()


def weights_digest(model: str) -> str:
    """A digest of a model's weights and configuration.

    Of a local folder every weight file's bytes; of a hub id, its name: the revision stands beside it.
    """
    folder = Path(model)
    if not folder.is_dir():
        return f"hub:{model}"
    digest = blake3(max_threads=blake3.AUTO)
    for pattern in (*CONFIGS, *WEIGHTS):
        for path in sorted(folder.glob(pattern)):
            digest.update(f"{path.name}:{path.stat().st_size}:".encode())
            digest.update_mmap(path)
    return digest.hexdigest()
