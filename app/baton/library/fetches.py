"""Copy KV of handoffs to this machine before requests that load it are given to an engine."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, defaultdict, deque

import structlog

from baton.engines.engine import LocalEngine
from baton.engines.transfers import LEAST_LOADS
from baton.errors import GatewayOverloaded, HandoffStoreUnavailable
from baton.library.handoff import Handoff
from baton.library.here.entries import FetchCutOff
from baton.library.holdings import Holdings
from baton.telemetry.metrics import HandoffMetrics
from baton_kv.stores.base import StoreError

RATES_KEPT = 2
"""The faster of so many fetches counts, once there were as many: one may have waited for a busy processor."""
MAX_SKIPPED = 1000
SMALL_BYTES = 1024 * 1024
"""Fetches of fewer bytes say nothing about the rate."""
MEASURE_EVERY = 4
"""Beside every so many requests that compute because it is faster, KV is fetched: the rate stays known."""


class Fetches:
    """The fetches of one gateway. Several requests for one handoff wait for one fetch."""

    def __init__(self, holdings: Holdings, metrics: HandoffMetrics, within_s: float) -> None:
        self._holdings = holdings
        self._tier = holdings.tier
        self._metrics = metrics
        self._within_s = within_s
        self.running: dict[str, asyncio.Future[bool]] = {}
        self._rates: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=RATES_KEPT))
        self._slower = 0
        self._skipped: OrderedDict[str, float] = OrderedDict()
        self._log = structlog.get_logger("baton.handoffs")

    async def fetch_here(self, record: Handoff, engine: LocalEngine, *, ahead: bool = False) -> bool:
        """Copy KV to this machine, unless it is here, or faster to compute; returns whether it is here.

        Args:
            ahead: it is copied also where computing is faster.
        """
        self._skipped.pop(record.id, None)
        source = await self._holdings.run(record.tenant, self._far_source, record)
        if source is None:
            return True
        seconds = None if ahead else self._seconds_if_slower(record, engine, self._rate(source))
        if seconds is None:
            fetch = self._begin(record, source)
            done, _ = await asyncio.wait({fetch}, timeout=self._within_s)
            return fetch in done and not fetch.cancelled() and fetch.result()
        self._metrics.fetches.labels("slower").inc()
        self._note_skipped(record, seconds)
        if self._slower % MEASURE_EVERY == 0:
            self._begin(record, source)
        return False

    def _rate(self, source: str) -> float | None:
        """Return the bytes a second of fetches from there; None: too few were measured."""
        rates = self._rates[source]
        return max(rates) if len(rates) == RATES_KEPT else None

    def _far_source(self, record: Handoff) -> str | None:
        """Return where a handoff's KV would be fetched from; None: it is here."""
        return None if self._holdings.here.is_here(record) else self._tier.source_of(record)

    def skipped_s(self, record: Handoff) -> float | None:
        """Return the estimated seconds of a fetch that was skipped for computing; None: none was."""
        return self._skipped.get(record.id)

    def _note_skipped(self, record: Handoff, seconds: float) -> None:
        self._slower += 1
        self._skipped[record.id] = seconds
        while len(self._skipped) > MAX_SKIPPED:
            self._skipped.popitem(last=False)

    def _begin(self, record: Handoff, source: str) -> asyncio.Future[bool]:
        running = self.running.get(record.id)
        if running is None:
            running = asyncio.ensure_future(self._fetch(record, source))
            self.running[record.id] = running
            running.add_done_callback(lambda _: self.running.pop(record.id, None))
        return running

    def _seconds_if_slower(self, record: Handoff, engine: LocalEngine, rate: float | None) -> float | None:
        """Estimate the seconds of a fetch that is slower than computing; None: it is not, or nobody knows.

        Of KV that is here `relay/cost.py` decides.
        """
        throughput = engine.throughput
        prefill_s = throughput.prefill_s(len(record.tokens), record.latent_steps)
        if rate is None or prefill_s is None or record.latent_steps:
            return None
        load_s = throughput.load_s(record.bytes) if throughput.loads >= LEAST_LOADS else None
        fetch_s = record.bytes / rate
        cut_off = fetch_s > self._within_s
        return fetch_s if cut_off or fetch_s + (load_s or 0.0) > prefill_s else None

    async def _fetch(self, record: Handoff, source: str) -> bool:
        """Fetch a handoff's KV; returns whether it is here then."""
        began = time.monotonic()
        try:
            size, here = await self._holdings.threads.fetches.run(record.tenant, self._fetched, record)
        except (StoreError, HandoffStoreUnavailable, GatewayOverloaded) as error:
            if isinstance(error, FetchCutOff):
                self._note_cut_off(source, error.got, time.monotonic() - began)
            self._metrics.fetches.labels("failed").inc()
            self._log.warning("handoff_not_fetched", handoff=record.id, reason=str(error))
            return False
        except Exception as error:  # noqa: BLE001  # the context is computed; every request that waits goes on
            self._metrics.fetches.labels("failed").inc()
            self._log.error("handoff_not_fetched", handoff=record.id, exc_info=error)
            return False
        self._metrics.fetches.labels("fetched" if size else "missing").inc()
        if size >= SMALL_BYTES:
            self._rates[source].append(size / max(1e-6, time.monotonic() - began))
        return here

    def _fetched(self, record: Handoff) -> tuple[int, bool]:
        return self._tier.fetch(record, self._within_s), self._holdings.here.is_here(record)

    def _note_cut_off(self, source: str, got: int, seconds: float) -> None:
        """Note the rate of a fetch that was cut off, alone: the next one would wait as long."""
        self._rates[source].extend([max(got, SMALL_BYTES) / max(1e-6, seconds)] * RATES_KEPT)
