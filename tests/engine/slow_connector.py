"""Our connector over a store as slow as a file beside it says: `echo 5e6 > STORE/speed`, in bytes a second."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from baton_kv import connector
from baton_kv.stores.base import Reader


class SlowReader:
    def __init__(self, reader: Reader, speed: Path) -> None:
        self._reader = reader
        self._speed = speed

    def __len__(self) -> int:
        return len(self._reader)

    def read(self, start: int, stop: int) -> bytes:
        return self._reader.read(start, stop)

    def read_into(self, start: int, buffers: Sequence[memoryview]) -> int:
        count = self._reader.read_into(start, buffers)
        if self._speed.exists():
            time.sleep(count / float(self._speed.read_text()))
        return count


class SlowStore:
    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    @contextmanager
    def open(self, key: str, part: int | None = None) -> Iterator[SlowReader]:
        with self._store.open(key, part) as reader:
            yield SlowReader(reader, self._store.root / "speed")


class BatonConnector(connector.BatonConnector):
    """Named as ours is: latent steps take no other."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._store = SlowStore(self._store)  # type: ignore[assignment]  # the worker is made later, with this one
