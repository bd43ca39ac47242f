"""Compute the fingerprint of a model and its KV layout; KV is only used where fingerprints are equal."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from blake3 import blake3

from baton_kv.entry_format import FORMAT
from baton_kv.known_digests import KnownDigests, digest_of

WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.pt")
CONFIGS = ("config.json", "preprocessor_config.json", "processor_config.json")
"""Configuration of the model, and of its processor, which decides the pixels that the model sees."""


def fingerprint(facts: Mapping[str, Any]) -> str:
    """Return the BLAKE3 digest, hexadecimal, of all facts that decide what the bytes of a block mean.

    Args:
        facts: model, dtype, layout and version, by name; see `engine_facts.facts_of`.
    """
    canonical = json.dumps({"format": FORMAT} | dict(facts), sort_keys=True, default=str)
    return blake3(canonical.encode()).hexdigest()


def moved_fingerprint(fingerprint: str) -> str:
    """Return the fingerprint of entries that hold moved KV, which is not what their model would compute."""
    return blake3(f"{fingerprint} moved".encode()).hexdigest()


def renewed_fingerprint(fingerprint: str) -> str:
    """Return a fingerprint that no other engine has, for weights that may have been replaced since."""
    return blake3(f"{fingerprint} {secrets.token_hex(16)}".encode()).hexdigest()


def weights_digest(model: str, revision: str | None = None, known: KnownDigests | None = None) -> str:
    """Identify a model's weights and configuration, so that other weights under the same name differ.

    For a local folder or file this is the BLAKE3 digest of its bytes, for a hub id `hub:ID@COMMIT` with the
    commit in the local cache.

    Args:
        model: a folder, a file, or a hub id.
        revision: revision of the hub id.
        known: digests that were computed before; None: the files are read.

    Raises:
        ValueError: the folder holds no weights, or the hub id is not in the local cache, so its commit is
            unknown.
    """
    path, digest = Path(model), digest_of if known is None else known.digest
    if path.is_dir():
        configs, weights = ([*_matching(path, patterns)] for patterns in (CONFIGS, WEIGHTS))
        if not weights:  # vLLM leaves such folders for weights that it streams from elsewhere
            raise ValueError(
                f"baton_kv: there are no weights in '{model}' ({', '.join(WEIGHTS)}), so that two models of "
                "one configuration could not be told apart: download them into the folder, or set "
                "handoff = false"
            )
        return digest([*configs, *weights])
    if path.is_file():
        return digest([path])
    from huggingface_hub import try_to_load_from_cache  # not needed where models are folders

    cached = try_to_load_from_cache(model, CONFIGS[0], revision=revision)
    if not isinstance(cached, str):
        raise ValueError(
            f"baton_kv: the commit of '{model}' is unknown: it is not in the local Hugging Face cache; "
            "set `model` to a local folder instead"
        )
    return f"hub:{model}@{Path(cached).parent.name}"


def _matching(folder: Path, patterns: Sequence[str]) -> Iterator[Path]:
    """Yield a folder's files that match, pattern by pattern, each time in the order of their names."""
    for pattern in patterns:
        yield from sorted(folder.glob(pattern))
