"""Gateways over one folder of handoffs, with clocks that tests move."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from baton.config.groups import HandoffSettings
from baton.engines.fake.engine import FakeEngine
from baton.engines.transfers import TransferRequest
from baton.errors import HandoffNotFound
from baton.library.handoff import Handoff, HandoffState
from baton.library.here.images import ImageStore
from baton.library.here.records import RecordFolder
from baton.library.library import Library
from baton.library.tiers import Here
from baton.relay.audit import Audits
from baton.telemetry.events import Events
from baton.telemetry.metrics import AuditMetrics, HandoffMetrics
from baton_kv.stores.file import FileStore

ENGINE = FakeEngine("a", supports_handoffs=True)


async def becomes(condition: Callable[[], object]) -> None:
    """Wait until it holds, for as long as no machine takes that is only busy."""
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("it did not become so")


@dataclass
class Clocks:
    monotonic: float = 1000.0
    wall: float = 1_700_000_000.0

    def pass_(self, seconds: float) -> None:
        self.monotonic += seconds
        self.wall += seconds


@dataclass
class House:
    folder: Path
    clocks: Clocks
    events: Events | None = None

    def handoffs(self, **settings: Any) -> Library:
        return Library(
            HandoffSettings(**settings),
            Here(
                FileStore(self.folder / "store"),
                RecordFolder(self.folder / "records"),
                ImageStore(self.folder / "store" / "images"),
            ),
            HandoffMetrics(CollectorRegistry()),
            clock=lambda: self.clocks.monotonic,
            wall=lambda: self.clocks.wall,
            events=self.events,
        )

    async def left(
        self, handoffs: Library, size: int = 10, tokens: Sequence[int] = (1, 2, 3), **more: Any
    ) -> Handoff:
        """A handoff whose KV is in the store."""
        record = handoffs.begin(ENGINE, "local", **more)
        FileStore(self.folder / "store").put(record.key, [b"k" * size])
        handoffs.end(record, TransferRequest(), tokens)
        await handoffs.settled(record, 5)
        await asyncio.gather(*handoffs.background.running)
        assert (record.state, record.bytes) == (HandoffState.READY, size)
        return record


def audits_of(handoffs: Library, settings: HandoffSettings, **more: Any) -> Audits:
    return Audits(settings, handoffs, AuditMetrics(CollectorRegistry()), **more)


async def there(handoffs: Library, record: Handoff) -> bool:
    try:
        await handoffs.get(record.id, "local")
    except HandoffNotFound:
        return False
    return True
