"""Compute the fingerprint of a model and its KV layout; KV is only used where fingerprints are equal."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from blake3 import blake3

from baton_kv.format import FORMAT

WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.pt")
CONFIGS = ("config.json", "preprocessor_config.json", "processor_config.json")
"""Configuration of the model, and of its processor, which decides the pixels that the model sees."""
MAX_REMEMBERED = 64
SETTLED_AFTER_S = 2.0
"""A file that changed this recently may change again without a new time stamp, so it is not remembered."""


def fingerprint(facts: Mapping[str, Any]) -> str:
    """Return the BLAKE3 digest, hexadecimal, of all facts that decide what the bytes of a block mean."""
    canonical = json.dumps({"format": FORMAT} | dict(facts), sort_keys=True, default=str)
    return blake3(canonical.encode()).hexdigest()


def kv_version(version: str) -> str:
    """Return the oldest version of vLLM whose KV is proved to be that of a version: its own, if none is.

    `versions.toml` has the proofs; a version that it does not name has KV of its own.
    """
    text = files("baton_kv").joinpath("versions.toml").read_text(encoding="utf-8")
    for row in tomllib.loads(text)["same"]:
        if version in row["versions"]:
            return str(row["versions"][0])
    return version


def moved_fingerprint(fingerprint: str) -> str:
    """Return the fingerprint of entries that hold moved KV, which is not what their model would compute."""
    return blake3(f"{fingerprint} moved".encode()).hexdigest()


def adapter_fingerprint(fingerprint: str, name: str, digest: str) -> str:
    """Return the fingerprint of entries that were computed with a LoRA adapter.

    Args:
        fingerprint: of the model without it.
        digest: of the adapter's configuration and weights.
    """
    return blake3(f"{fingerprint} adapter {digest} {name}".encode()).hexdigest()


def renewed_fingerprint(fingerprint: str) -> str:
    """Return a fingerprint that no other engine has, for weights that may have been replaced since."""
    return blake3(f"{fingerprint} {secrets.token_hex(16)}".encode()).hexdigest()


def weights_digest(model: str, revision: str | None = None, known: KnownDigests | None = None) -> str:
    """Identify a model's weights and configuration, so that other weights under the same name differ.

    For a local folder or file this is the BLAKE3 digest of its bytes, for a hub id `hub:ID@COMMIT` with the
    commit in the local cache.

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


class KnownDigests:
    """A small JSON file of digests, by the paths, sizes, times and inodes of the files they are of.

    Only its owner may write the folder that it is in. If it cannot be read it counts as empty, and if it
    cannot be written nothing is remembered: the weights are then read again.
    """

    def __init__(self, file: Path) -> None:
        self._file = file

    def digest(self, files: Sequence[Path]) -> str:
        """Return the BLAKE3 digest, hexadecimal, of the names, sizes and bytes of these files.

        Raises:
            OSError: a file cannot be read.
        """
        known, name = self._read(), _state(files)
        if name in known:
            return known[name]
        began = time.time()
        found = digest_of(files)
        if _state(files) == name and all(file.stat().st_ctime < began - SETTLED_AFTER_S for file in files):
            self._write(dict([*known.items(), (name, found)][-MAX_REMEMBERED:]))
        return found

    def _read(self) -> dict[str, str]:
        try:
            with open(os.open(self._file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
                held = json.load(file)
        except (OSError, ValueError):
            return {}
        pairs = held.items() if isinstance(held, dict) else ()
        return {name: digest for name, digest in pairs if isinstance(digest, str) and len(digest) == 64}

    def _write(self, known: dict[str, str]) -> None:
        beside = self._file.with_name(f"{self._file.name}.{secrets.token_hex(8)}")
        with contextlib.suppress(OSError):
            try:
                with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                    json.dump(known, file)
                beside.replace(self._file)
            finally:
                beside.unlink(missing_ok=True)


def digest_of(files: Sequence[Path]) -> str:
    """Return the BLAKE3 digest, hexadecimal, of the names, sizes and bytes of files.

    Raises:
        OSError: a file cannot be read.
    """
    digest = blake3(max_threads=blake3.AUTO)
    for file in files:
        digest.update(f"{file.name}:{file.stat().st_size}:".encode())
        digest.update_mmap(file)
    return digest.hexdigest()


def _state(files: Sequence[Path]) -> str:
    """Return a digest of all properties that change when a file does, except its bytes."""
    seen = []
    for file in files:
        stat = file.stat()
        seen.append(
            (
                str(file.absolute()),
                stat.st_dev,
                stat.st_ino,
                stat.st_size,
                stat.st_mtime_ns,
                stat.st_ctime_ns,
            )
        )
    return blake3(json.dumps(seen).encode()).hexdigest()
