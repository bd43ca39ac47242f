"""Two engines, reduced to their pools and connector roles, that share a file store."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import torch

from baton_kv.blocks import GroupBlocks, KVBlocks
from baton_kv.contract import new_key, params_to_load
from baton_kv.copies import HostStaging
from baton_kv.entry import Entry
from baton_kv.format import EntryInvalid
from baton_kv.messages import LoadJob, SaveJob, StepJobs
from baton_kv.scheduler_role import SchedulerRole
from baton_kv.stores.base import Reader, Store
from baton_kv.stores.file import FileStore
from baton_kv.worker_role import WorkerRole

SECRET = b"s" * 32
BLOCK, LAYERS, HEADS = 16, 3, 2
SLAB_BYTES = BLOCK * 8 * 4  # tokens, values, float32
TOKENS = tuple(range(100, 150))
SAVED, LOADED = (3, 7, 1, 9), (8, 2, 5, 4)
MIB = 1024 * 1024
NOBODY = 65534


class Engine:
    """A pool and both roles, as one engine has them.

    Attributes:
        resident: bytes of the last job that were in the worker's memory.
    """

    def __init__(
        self,
        store: Store,
        model: str = "one",
        *,
        secret: bytes = SECRET,
        seed: int = 0,
        resident: int = 0,
        verify: bool = True,
        values: int = 8,
    ) -> None:
        pool = torch.rand((12, LAYERS, HEADS, BLOCK, values), generator=torch.Generator().manual_seed(seed))
        self.blocks = KVBlocks([pool[:, layer] for layer in range(LAYERS)])
        self.scheduler = SchedulerRole(store, secret, model, BLOCK)
        self.worker = WorkerRole(store, secret, self.blocks, resident=resident, verify=verify)
        self.model = model
        self.resident = 0
        self._requests = itertools.count()

    def run(self, jobs: StepJobs) -> str | None:
        """Why a job failed; its request is released, and reported as failed if it was a load."""
        self.worker.start(jobs)
        deadline = time.monotonic() + 30
        while not (finished := self.worker.poll()).outcomes:
            assert time.monotonic() < deadline, "the job did not end"
            time.sleep(0.0005)
        (outcome,) = finished.outcomes
        failure, self.resident = outcome.failure, outcome.resident
        assert finished.saved | finished.loaded == {"r"}
        assert finished.failed == ({"r"} if failure and jobs.loads else set())
        return failure

    def save(self, key: str) -> str | None:
        return self.run(
            StepJobs(saves=[SaveJob("r", key, TOKENS, 49, (GroupBlocks(0, SAVED),), self.model, "0" * 32)])
        )

    def load(self, key: str) -> str | None:
        return self.run(StepJobs(loads=[LoadJob("r", key, (GroupBlocks(0, LOADED),), 49, self.model)]))

    def offered(self, key: str) -> int:
        return self.scheduler.matched(f"{next(self._requests)}", params_to_load(key), [*TOKENS, 1], 0)

    def held(self, block_ids: tuple[int, ...]) -> list[bytes]:
        return [
            b"".join(HostStaging().gather(self.blocks.pool(layer, range(HEADS)), block_ids))
            for layer in range(LAYERS)
        ]


class Relay:
    """A store, an engine that saved an entry in it, and one that may load that."""

    def __init__(self, root: Path, budget: int | None = None) -> None:
        self.store = FileStore(root, budget=budget)
        self.saver, self.loader = Engine(self.store), Engine(self.store, seed=1)
        self.key = new_key("acme")
        assert self.saver.save(self.key) is None
        self.sound = self.path(self.key).read_bytes()

    def path(self, key: str) -> Path:
        return self.store.root / "entries" / f"{key}.kv"

    def being_written(self) -> list[Path]:
        return list((self.store.root / "writing").iterdir())

    def hits(self, data: bytes, key: str) -> int:
        """Of a look and a load, each of a file with these bytes, how many would use it."""
        self.path(key).parent.mkdir(mode=0o700, exist_ok=True)
        self.path(key).write_bytes(data)
        offered = self.loader.offered(key)
        self.path(key).write_bytes(data)
        return (offered > 0) + (self.loader.load(key) is None)

    def refused(self, data: bytes) -> bool:
        """Whether a load of a file with these bytes fails, and puts it into quarantine."""
        self.path(self.key).write_bytes(data)
        refused = self.loader.load(self.key) == "corrupt" and not self.store.exists(self.key)
        return refused and data in [path.read_bytes() for path in (self.store.root / "quarantine").iterdir()]

    def works(self) -> bool:
        """Whether all is as if nothing had ever happened."""
        key = new_key("acme")
        return (self.saver.save(key), self.loader.offered(key), self.loader.load(key)) == (None, 49, None)


def used(reader: Reader, key: str, secret: bytes) -> object:
    """All that would be used of an entry; None: nothing."""
    try:
        found = Entry(reader, key, secret)
        told = found.description
        chunks = [
            bytes(found.run(layer, index))
            for layer in range(len(told.layers))
            for index in range(told.runs(layer))
        ]
        return told, found.tokens.tolist(), chunks
    except EntryInvalid:
        return None
