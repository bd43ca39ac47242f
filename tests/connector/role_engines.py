"""An engine reduced to its pool and both roles of the connector."""

from __future__ import annotations

import time

import torch
from support.memory_store import MemoryStore

from baton_kv.blocks import KVBlocks
from baton_kv.contract import (
    PARAMS_KEY,
)
from baton_kv.format import ImageRef
from baton_kv.scheduler_role import SchedulerRole
from baton_kv.worker_role import FinishedJobs, WorkerRole

SECRET = b"s" * 32
BLOCK = 16
PROMPT = list(range(100, 150))


class Engine:
    """A pool and both roles, as one engine has them; `strided` as vLLM lays layers out."""

    def __init__(
        self,
        store: MemoryStore,
        fingerprint: str = "one",
        seed: int = 0,
        *,
        verify: bool = True,
        resident: int = 0,
        savers: int = 1,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        pool = torch.rand((12, 3, 2, BLOCK, 8), generator=generator)  # blocks, layers, heads, tokens, values
        self.layers = [pool[:, layer] for layer in range(3)]
        self.scheduler = SchedulerRole(store, SECRET, fingerprint, BLOCK)
        self.worker = WorkerRole(
            store, SECRET, KVBlocks(self.layers), verify=verify, resident=resident, savers=savers
        )

    def run(self, jobs: int) -> FinishedJobs:
        """Let this step's jobs end."""
        self.worker.start(self.scheduler.step())
        finished = FinishedJobs()
        deadline = time.monotonic() + 10
        while len(finished.outcomes) < jobs:
            assert time.monotonic() < deadline, "the jobs did not end"
            found = self.worker.poll()
            finished.saved |= found.saved
            finished.loaded |= found.loaded
            finished.failed |= found.failed
            finished.outcomes += found.outcomes
        self.scheduler.report(finished.outcomes)
        return finished

    def save(
        self,
        params: object,
        blocks: list[int],
        tokens: list[int] = PROMPT,
        images: tuple[ImageRef, ...] = (),
        adapter: str | None = None,
    ) -> str:
        held, answer = self.scheduler.finished(
            "a",
            params,
            tokens=tokens,
            prompt=len(tokens) - 1,
            computed=len(tokens),
            block_ids=(blocks,),
            whole=True,
            images=images,
            adapter=adapter,
        )
        assert held
        assert answer is not None
        assert self.run(1).saved == {"a"}
        key: str = answer[PARAMS_KEY]["load"]
        return key
