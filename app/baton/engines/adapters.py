"""Read LoRA adapters from folders, and keep in a file which of them operators loaded."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3
from filelock import FileLock
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from baton.config.groups import EngineName

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1024 * 1024
READ_BYTES = 4 * 1024 * 1024


class AdapterInvalid(Exception):
    """A folder holds no adapter that can be used; the text says why, without the folder."""


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter of one engine.

    Attributes:
        name: the word by which a request's `model` picks it.
        path: its folder, absolute.
        digest: BLAKE3 of its configuration and weights, hexadecimal.
        rank: largest rank of its matrices.
    """

    name: str
    path: Path
    digest: str
    rank: int

    def weights(self, base: str) -> str:
        """Return the identity of an engine's weights with this adapter on them.

        Args:
            base: identity of the engine's weights.
        """
        return f"{base}+{self.name}:{self.digest}"


def base_of(weights: str) -> str:
    """Return the identity of the weights below an adapter, which does not change what token ids mean."""
    return weights.partition("+")[0]


def read_adapter(name: str, folder: Path) -> Adapter:
    """Read what an adapter's folder holds; it takes as long as reading its weights.

    Raises:
        AdapterInvalid: it cannot be used.
    """
    folder = folder.expanduser().absolute()
    config, weights = folder / CONFIG, folder / WEIGHTS
    try:
        if config.stat().st_size > MAX_CONFIG_BYTES:
            raise AdapterInvalid(f"its {CONFIG} is larger than {MAX_CONFIG_BYTES} bytes")
        read = json.loads(config.read_bytes())
        digest = _digest(config, weights)
    except FileNotFoundError as error:
        raise AdapterInvalid(f"there is no {Path(error.filename or CONFIG).name} in its folder") from None
    except OSError as error:
        raise AdapterInvalid(f"its files cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise AdapterInvalid(f"its {CONFIG} is not JSON") from None
    return Adapter(name, folder, digest, _rank(read))


def _digest(*files: Path) -> str:
    """Digest names, sizes and bytes of files.

    They are read, not mapped into memory: if somebody cut a mapped file meanwhile, SIGBUS would end the
    gateway.
    """
    digest = blake3(max_threads=blake3.AUTO)
    for file in files:
        with file.open("rb", buffering=0) as opened:
            digest.update(f"{file.name}:{os.fstat(opened.fileno()).st_size}:".encode())
            while piece := opened.read(READ_BYTES):
                digest.update(piece)
    return digest.hexdigest()


def _rank(config: Any) -> int:
    """Return the largest rank that an adapter's configuration names."""
    found = config if isinstance(config, Mapping) else {}
    if found.get("peft_type", "LORA") != "LORA":
        raise AdapterInvalid(f"its {CONFIG} is not of a LoRA adapter")
    special = found.get("rank_pattern") or {}
    ranks = [found.get("r"), *(special.values() if isinstance(special, Mapping) else [None])]
    if any(type(rank) is not int or rank < 1 for rank in ranks):
        raise AdapterInvalid(f"its {CONFIG} names no rank `r` above 0")
    return int(max(ranks))


class KeptAdapter(BaseModel):
    """An entry of the file.

    Attributes:
        engine: name of the engine that it was loaded on.
        name: see `Adapter`.
        path: its folder.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: EngineName
    name: EngineName
    path: Path


FILE = TypeAdapter(list[KeptAdapter])


class KeptAdapters:
    """The adapters that operators loaded, in a file of this user: gateways that share it share them.

    Raises:
        AdapterInvalid: the file cannot be read or written, or is not such a file.
    """

    def __init__(self, file: Path) -> None:
        self._file = file

    def read(self) -> list[KeptAdapter]:
        """Read the entries; a file that is not there has none."""
        with self._errors():
            try:
                return FILE.validate_json(self._file.read_bytes())
            except FileNotFoundError:
                return []
            except ValidationError:
                raise AdapterInvalid(f"{self._file} is no list of adapters: mend or remove it") from None

    def add(self, entry: KeptAdapter) -> None:
        """Add an entry, in the place of one of the same name."""
        self._change(entry.engine, entry.name, [entry])

    def remove(self, engine: str, name: str) -> None:
        """Remove an entry, if it is there."""
        self._change(engine, name, [])

    def _change(self, engine: str, name: str, instead: list[KeptAdapter]) -> None:
        with self._errors():
            self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with FileLock(self._file.with_name(f".{self._file.name}.lock"), mode=0o600):
                others = [each for each in self.read() if (each.engine, each.name) != (engine, name)]
                self._write([*others, *instead])

    def _write(self, entries: list[KeptAdapter]) -> None:
        descriptor, temporary = tempfile.mkstemp(dir=self._file.parent, prefix=".adapters-")
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(FILE.dump_json(entries, indent=2))
            os.replace(temporary, self._file)
        except OSError:
            Path(temporary).unlink(missing_ok=True)
            raise

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise AdapterInvalid(f"{self._file}: {error.strerror or 'cannot be used'}") from None
