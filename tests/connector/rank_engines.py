"""An engine of several tensor-parallel ranks, reduced to their pools and the connector's roles."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field

import torch

from baton_kv.blocks import HeadShard, KVBlocks
from baton_kv.contract import PARAMS_KEY, TransferOutcome, params_to_load, params_to_save
from baton_kv.scheduler_role import SchedulerRole
from baton_kv.stores.base import Store
from baton_kv.worker_role import FinishedJobs, WorkerRole

SECRET = b"s" * 32
BLOCKS, BLOCK, LAYERS, VALUES = 12, 16, 3, 8
PROMPT = list(range(100, 150))
SAVED, LOADED = [3, 7, 1, 9], [8, 2, 5, 4]


@dataclass
class Ended:
    """What the ranks have told of a step's jobs.

    Attributes:
        saved: for each rank, the requests whose blocks it releases.
        loaded: for each rank, the requests whose load it has ended.
        failed: the requests whose load failed on some rank.
    """

    saved: list[set[str]] = field(default_factory=list)
    loaded: list[set[str]] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)


class RankedEngine:
    """One scheduler and so many workers, each with its heads of a model's KV.

    Args:
        store: the store that all ranks share.
        heads: KV heads of the model.
        ranks: number of ranks.
        seed: of the KV in the pools; the same seed, heads and any number of ranks is the same KV.

    Attributes:
        kv: the whole model's KV, `[layers, blocks, heads, tokens, values]`; a rank's pool is a copy of its heads.
    """

    def __init__(
        self,
        store: Store,
        heads: int,
        ranks: int,
        seed: int = 0,
        *,
        verify: bool = True,
        resident: int = 0,
    ) -> None:
        shape = (LAYERS, BLOCKS, heads, BLOCK, VALUES)
        self.kv = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
        self.shards = [HeadShard.of_rank(heads, rank, ranks) for rank in range(ranks)]
        self.pools = [
            [layer[:, shard.first : shard.first + shard.count].clone() for layer in self.kv]
            for shard in self.shards
        ]
        self.scheduler = SchedulerRole(store, SECRET, "one", BLOCK, ranks)
        self.workers = [
            WorkerRole(
                store,
                SECRET,
                KVBlocks(pool, BLOCKS, shard),
                rank=rank,
                ranks=ranks,
                verify=verify,
                resident=resident,
            )
            for rank, (pool, shard) in enumerate(zip(self.pools, self.shards, strict=True))
        ]
        self._requests = map(str, itertools.count())

    def run(self) -> Ended:
        """Let every rank end this step's one job, and tell the scheduler."""
        jobs, ended = self.scheduler.step(), Ended()
        for worker in self.workers:
            worker.start(jobs)
        for worker in self.workers:
            finished = self.wait(worker)
            ended.saved.append(finished.saved)
            ended.loaded.append(finished.loaded)
            ended.failed |= finished.failed
        return ended

    def wait(self, worker: WorkerRole) -> FinishedJobs:
        """Wait until a rank has ended a job, and tell the scheduler."""
        finished = worker.poll()
        deadline = time.monotonic() + 30
        while not finished.outcomes:
            assert time.monotonic() < deadline, "the job did not end"
            time.sleep(0.0005)
            finished = worker.poll()
        self.scheduler.report(finished.outcomes)
        return finished

    def save(self) -> tuple[str, Ended, TransferOutcome]:
        """Save the blocks `SAVED`; the entry's key, and how it ended."""
        request = next(self._requests)
        held, answer = self.scheduler.finished(
            request,
            params_to_save(),
            tokens=PROMPT,
            prompt=len(PROMPT),
            computed=len(PROMPT),
            block_ids=(SAVED,),
            whole=True,
        )
        assert held
        assert answer is not None
        ended = self.run()
        (outcome,) = self.scheduler.take_outcomes()
        key: str = answer[PARAMS_KEY]["load"]
        return key, ended, outcome

    def load(self, key: str) -> tuple[Ended, TransferOutcome]:
        """Load an entry into the blocks `LOADED`; how it ended."""
        request = next(self._requests)
        count = self.scheduler.matched(request, params_to_load(key), [*PROMPT, 1], 0)
        assert count == len(PROMPT) - 1
        self.scheduler.allocated(request, (LOADED,), count)
        ended = self.run()
        (outcome,) = self.scheduler.take_outcomes()
        return ended, outcome

    def held(self, blocks: list[int]) -> list[torch.Tensor]:
        """The KV in some blocks, for each head of the model and each rank that holds it."""
        return [
            torch.stack([pool[layer][blocks, head] for layer in range(LAYERS)])
            for pool, shard in zip(self.pools, self.shards, strict=True)
            for head in range(shard.count)
        ]

    def expected(self, kv: torch.Tensor, blocks: list[int]) -> list[torch.Tensor]:
        """The same of the whole model's KV."""
        return [kv[:, blocks, head] for shard in self.shards for head in shard.heads]

    def shutdown(self) -> None:
        for worker in self.workers:
            worker.shutdown()
