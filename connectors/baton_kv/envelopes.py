"""Subclass vLLM's metadata and statistics types, which carry the connector's messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from baton_kv.contract import TransferOutcome
from baton_kv.entry_format import LayerShape
from baton_kv.messages import StepJobs

MAX_OUTCOMES = 1000
"""Outcomes kept in one report; older ones are dropped."""


@dataclass
class StepMetadata(KVConnectorMetadata):
    """The jobs of one step, from the scheduler to the worker.

    Attributes:
        jobs: the jobs.
        idle: whether the step computes nothing.
    """

    jobs: StepJobs = field(default_factory=StepJobs)
    idle: bool = False


@dataclass(frozen=True)
class WorkerLayout(KVConnectorHandshakeMetadata):
    """The layers whose KV a worker holds, from the worker to the scheduler, once at the start.

    Attributes:
        names: name of each layer.
        shapes: shape of each layer in the whole model.
        rows_a_block: rows (kernel blocks) that one block of the pool is split into; on CPUs each packs its K
            and V by itself.
        backends: from `engine_facts.backends_of`.
    """

    names: tuple[str, ...]
    shapes: tuple[LayerShape, ...]
    rows_a_block: int = 1
    backends: tuple[tuple[str, ...], ...] = ()

    def facts(self) -> list[tuple[str, int, int, int]]:
        """Return name, heads, bytes and rows a block of each layer, for the fingerprint."""
        return [
            (name, shape.heads, shape.slab_bytes, self.rows_a_block)
            for name, shape in zip(self.names, self.shapes, strict=True)
        ]


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """The outcomes of the worker's jobs, from the worker to the scheduler."""

    outcomes: list[TransferOutcome] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, WorkerReport)
        return WorkerReport(self.outcomes + other.outcomes)


@dataclass
class TransferStats(KVConnectorStats):
    """What the connector reports to vLLM's stat loggers; plain values, since it crosses a process.

    Attributes:
        data: `{"outcomes": [TransferOutcome.message(), ...]}`, and since the last report: for a model with
            latent steps `"latent": {"steps": int, "seconds": float}`, for a model with an image encoder
            `"encoded": int`, the number of images it encoded.
    """

    data: dict[str, Any] = field(default_factory=dict)

    @property
    def outcomes(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.data.setdefault("outcomes", [])
        return found

    def reset(self) -> None:
        self.data = {"outcomes": []}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        both = [*self.outcomes, *other.data.get("outcomes", [])]
        reports = [data["latent"] for data in (self.data, other.data) if "latent" in data]
        latent = {name: sum(report[name] for report in reports) for name in ("steps", "seconds")}
        encoded = sum(data.get("encoded", 0) for data in (self.data, other.data))
        return TransferStats(
            {"outcomes": both[-MAX_OUTCOMES:]}
            | ({"latent": latent} if reports else {})
            | ({"encoded": encoded} if encoded else {})
        )

    def reduce(self) -> dict[str, int | float]:
        rows = self.outcomes
        return {
            f"{kind} {name}": sum(row[name] for row in rows if row["kind"] == kind and not row["failure"])
            for kind in ("load", "save")
            for name in ("tokens", "bytes")
        } | {"failed": sum(1 for row in rows if row["failure"])}

    def is_empty(self) -> bool:
        return not self.outcomes and "latent" not in self.data and "encoded" not in self.data
