"""Copy KV of handoffs to this machine before requests that load it are given to an engine."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import structlog

from baton.engines.port import Engine
from baton.errors import HandoffStoreUnavailable
from baton.handoffs.records.record import HandoffRecord
from baton.handoffs.records.storage import HandoffStorage
from baton.telemetry.metrics import HandoffMetrics
from baton_kv.stores.base import StoreError

THREADS = 4
"""Fetches at once; they are not the threads that files of this machine are read by."""
NEWEST_SHARE = 0.3
"""Weight of the newest fetch in the estimate of the rate."""
SMALL_BYTES = 1024 * 1024
"""Fetches of fewer bytes say nothing about the rate."""


class Fetches:
    """The fetches of one gateway. Several requests for one handoff wait for one fetch.

    Args:
        storage: the handoffs' KV, here and elsewhere.
        metrics: where fetches are counted.
        within_s: seconds that one may take.
    """

    def __init__(self, storage: HandoffStorage, metrics: HandoffMetrics, within_s: float) -> None:
        self._storage = storage
        self._metrics = metrics
        self._within_s = within_s
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="handoff-fetch")
        self._running: dict[str, asyncio.Future[None]] = {}
        self._rates: dict[str, float] = {}
        self._log = structlog.get_logger("baton.handoffs")

    def close(self) -> None:
        """Begin no more fetches; those under way end by their deadlines."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def bring(self, record: HandoffRecord, engine: Engine) -> None:
        """Copy a handoff's KV to this machine, unless it is here, or faster to compute.

        Args:
            record: the handoff.
            engine: the engine that is to load it.
        """
        if await asyncio.to_thread(self._storage.is_here, record):
            return
        source = await asyncio.to_thread(self._storage.source_of, record)
        if self._is_slower(record, engine, self._rates.get(source)):
            self._metrics.fetches.labels("slower").inc()
            return
        running = self._running.get(record.id)
        if running is None:
            running = asyncio.ensure_future(self._fetch(record, source))
            self._running[record.id] = running
            running.add_done_callback(lambda _: self._running.pop(record.id, None))
        await asyncio.wait({running}, timeout=self._within_s)

    def _is_slower(self, record: HandoffRecord, engine: Engine, rate: float | None) -> bool:
        """Return whether fetching and loading takes longer than computing, as far as that is known."""
        load_s = engine.throughput.load_s(record.bytes)
        prefill_s = engine.throughput.prefill_s(len(record.tokens), record.latent_steps)
        if rate is None or prefill_s is None or record.latent_steps:
            return False
        return record.bytes / rate + (load_s or 0.0) > prefill_s

    async def _fetch(self, record: HandoffRecord, source: str) -> None:
        began = time.monotonic()
        try:
            size = await asyncio.get_running_loop().run_in_executor(
                self._threads, self._storage.fetch, record, self._within_s
            )
        except (StoreError, HandoffStoreUnavailable) as error:
            self._metrics.fetches.labels("failed").inc()
            self._log.warning("handoff_not_fetched", handoff=record.id, reason=str(error))
            return
        self._metrics.fetches.labels("fetched" if size else "missing").inc()
        if size >= SMALL_BYTES:
            rate = size / max(1e-6, time.monotonic() - began)
            before = self._rates.get(source, rate)
            self._rates[source] = before + NEWEST_SHARE * (rate - before)
