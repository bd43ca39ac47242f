"""Audit loads: compute the first token of some answers again, without any stored KV, and compare.

An audited answer notes the log probabilities of its first token. When its engine has nothing else to do, the
same prompt is computed as a whole, and the two are compared: whatever went wrong between the save and the
answer shows here. KV that led to another answer is moved to the store's quarantine.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field

import structlog

from baton.config.groups import HandoffSettings
from baton.engines.backend import Json, Operation
from baton.engines.engine import LocalEngine, is_idle
from baton.engines.transfers import TransferReport, TransferRequest
from baton.errors import BatonError
from baton.library.handoff import Handoff, HandoffAudit
from baton.library.library import Library
from baton.telemetry.ids import NO_TENANT, RequestContext, new_request_id
from baton.telemetry.metrics import AuditMetrics, AuditResult

# Compare the log probabilities of a token that was computed from loaded KV and from nothing.


FAINT = -6.0
"""Tokens whose log probability is lower in both computations do not count: rounding shows in them most."""
LogProbs = Mapping[int, float]
"""Natural log probabilities of the likeliest tokens at one place, by token id."""


@dataclass(frozen=True)
class Comparison:
    """The findings of an audit.

    Attributes:
        difference: largest difference of a log probability, in nats.
        same_token: whether the likeliest token is the same.
    """

    difference: float
    same_token: bool


def compare(loaded: LogProbs, computed: LogProbs) -> Comparison:
    """Compare the likeliest tokens of two computations of one place.

    A token that only one of them lists differs at least by how far it is above the other's least likely one.

    Args:
        loaded: from loaded KV; not empty.
        computed: with all KV computed; not empty.
    """
    shared = loaded.keys() & computed.keys()
    both = max(
        (
            _distance(loaded[token], computed[token])
            for token in shared
            if not (loaded[token] <= FAINT and computed[token] <= FAINT)
        ),
        default=0.0,
    )
    one = max(_above(loaded, computed), _above(computed, loaded))
    return Comparison(max(both, one), _likeliest(loaded) == _likeliest(computed))


def _above(some: LogProbs, others: LogProbs) -> float:
    """Return by how much tokens that only `some` lists are at least above what `others` gives them."""
    least = max(FAINT, min(others.values()))
    return max(
        (_distance(some[token], least) for token in some.keys() - others.keys() if some[token] > least),
        default=0.0,
    )


def _distance(one: float, other: float) -> float:
    if one == other:  # also of two that are minus infinity
        return 0.0
    return math.inf if math.isnan(one) or math.isnan(other) else abs(one - other)


def _likeliest(values: LogProbs) -> int:
    return max(values, key=lambda token: values[token])


# Hold the audits that wait until their engines have nothing else to do.


MOST = 64
"""Most audits of an engine that wait."""
MOST_BYTES = 64 * 1024 * 1024
"""Most bytes of the prompts and images of all audits that wait."""
WAITS_S = 600.0
"""An audit whose engine was never idle for so long is dropped."""
BYTES_PER_TOKEN = 16
SAVED_WITHIN_S = 60.0
"""A request's own save is waited for, but not longer: what it saved may have to be moved away too."""


@dataclass(eq=False)
class Audit:
    """One answer that was computed from loaded KV.

    Attributes:
        record: the handoff whose KV was loaded.
        transfer: the request to the engine, with its report.
        noted_at: monotonic seconds.
        tries: number of times that the audit was interrupted.
    """

    engine: LocalEngine
    record: Handoff
    transfer: TransferRequest
    noted_at: float = field(default_factory=time.monotonic)
    tries: int = 0

    @property
    def bytes(self) -> int:
        """Bytes that it takes in memory, about: Python's integers, and images."""
        report, prompt = self.transfer.report, self.transfer.prompt or ()
        tokens = len(prompt) + len(report.prompt_ids) + len(report.output_ids)
        return 1024 + BYTES_PER_TOKEN * tokens + sum(len(image.image.data) for image in self.transfer.images)

    @property
    def saved(self) -> str | None:
        """Key of the entry that the request saves; None: it saves none."""
        return self.transfer.save if self.transfer.report.saves else None

    @property
    def age_s(self) -> float:
        """Seconds since it was noted."""
        return time.monotonic() - self.noted_at

    @property
    def may_begin(self) -> bool:
        """True if its request's save has ended."""
        over = self.transfer.report.save_over.is_set()
        return self.saved is None or over or self.age_s > SAVED_WITHIN_S


class AuditQueue:
    """The waiting audits, the oldest first."""

    def __init__(self) -> None:
        self._waiting: list[Audit] = []
        self._idle: set[str] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, audit: Audit) -> bool:
        """Add an audit; returns False if there are too many."""
        size = audit.bytes + sum(each.bytes for each in self._waiting)
        mine = sum(each.engine.base == audit.engine.base for each in self._waiting)
        if mine >= MOST or size > MOST_BYTES:
            return False
        self._waiting.append(audit)
        return True

    def take(self) -> Audit | None:
        """Take the oldest audit of an engine that was idle at the last call too; None: there is none.

        Between the two calls there should be a moment: an agent's next request comes at once.
        """
        before = self._idle
        engines = {each.engine.name: each.engine for each in self._waiting}
        self._idle = {name for name, engine in engines.items() if is_idle(engine)}
        for place, each in enumerate(self._waiting):
            if each.engine.name in self._idle & before and each.may_begin:
                return self._waiting.pop(place)
        return None

    def drop_old(self) -> int:
        """Drop the audits that have waited too long; returns their number."""
        young = [each for each in self._waiting if each.age_s <= WAITS_S]
        dropped, self._waiting = len(self._waiting) - len(young), young
        return dropped


LOOK_EVERY_S = 0.2
"""Seconds between two looks for an idle engine."""
GIVE_WAY_EVERY_S = 0.02
"""Seconds between two looks, during an audit, for a request of a client."""
LARGEST = 1e6
"""A difference that is infinite is shown as this, because JSON has no infinity."""
MOST_TRIES = 10
"""An audit that was interrupted so often is dropped."""

log = structlog.get_logger("baton.handoffs")


class Audits:
    """The audits of one gateway.

    Args:
        settings: the share of the loads, and how much may differ.
        draw: returns a random number of at least 0 and below 1.
    """

    def __init__(
        self,
        settings: HandoffSettings,
        handoffs: Library,
        metrics: AuditMetrics,
        *,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._settings = settings
        self._handoffs = handoffs
        self._metrics = metrics
        self._draw = draw
        self._queue = AuditQueue()
        self._come = asyncio.Event()
        self._engines: dict[str, LocalEngine] = {}

    def chosen(self) -> bool:
        """Draw whether a request that is about to load KV is audited."""
        return self._draw() < self._settings.audit

    def note(self, engine: LocalEngine, record: Handoff, transfer: TransferRequest) -> None:
        """Note that a request has ended which was to load a handoff's KV; audit it later if it was chosen."""
        report = transfer.report
        self._engines[engine.name] = engine
        if not transfer.audited or not report.loaded or report.lost or transfer.latent_steps:
            return
        if report.first_token:
            if self._queue.add(Audit(engine, record, transfer)):
                self._come.set()
            else:
                self._metrics.count(AuditResult.DROPPED)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Audit while inside."""
        task = asyncio.create_task(self._run(), name="handoff-audits")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await self._come.wait()
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                self._metrics.count(AuditResult.DROPPED, self._queue.drop_old())
                while (audit := self._queue.take()) is not None:
                    await self._audit(audit)
                if not self._queue:
                    self._come.clear()
            except Exception as error:  # the border of the audits: the next one may work
                log.error("handoff_audit_failed", exc_info=error)

    async def _audit(self, audit: Audit) -> None:
        # An automatic one may have given way to one that continues it; others were deleted or have expired.
        if not audit.record.automatic and audit.record not in self._handoffs:
            self._metrics.count(AuditResult.DROPPED)
            return
        try:
            tolerance = self._settings.audit_tolerance or audit.engine.rounding_nats
            computed = await self._compute(audit)
        except BatonError as error:
            log.warning("handoff_audit_dropped", engine=audit.engine.name, reason=str(error))
            self._metrics.count(AuditResult.DROPPED)
            return
        if computed is None:
            audit.tries += 1
            if audit.tries >= MOST_TRIES or not self._queue.add(audit):
                self._metrics.count(AuditResult.DROPPED)
        elif not computed.first_token:
            self._metrics.count(AuditResult.DROPPED)
        else:
            found = compare(audit.transfer.report.first_token, computed.first_token)
            await self._judge(audit, found, tolerance)

    async def _compute(self, audit: Audit) -> TransferReport | None:
        """Compute an audit's prompt without stored KV; None: a client's request came and took precedence."""
        asked, prompt = audit.transfer, audit.transfer.report.prompt_ids
        transfer = TransferRequest(prompt, asked.images, audited=True, computed=True)
        call = asyncio.ensure_future(_call(audit.engine, transfer))
        try:
            while not call.done():
                await asyncio.wait({call}, timeout=GIVE_WAY_EVERY_S)
                if not call.done() and audit.engine.active > 1:
                    return None
            await call
            return transfer.report
        finally:
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    async def _judge(self, audit: Audit, found: Comparison, tolerance: float) -> None:
        matches = found.difference <= tolerance
        result = AuditResult.MATCH if matches else AuditResult.MISMATCH
        if not matches:
            log.error(
                "handoff_audit_mismatch",
                handoff=audit.record.id,
                engine=audit.engine.name,
                loaded=audit.transfer.report.loaded,
                difference=found.difference,
                same_token=found.same_token,
            )
            for engine in self._engines.values():
                if engine.weights == audit.engine.weights:  # it may have loaded the same KV
                    engine.forget_prefixes()
            await self._handoffs.distrust(audit.record, audit.saved)
        await self._handoffs.note_audit(
            audit.record,
            HandoffAudit(
                result=result,
                difference=min(found.difference, LARGEST),
                same_token=found.same_token,
                at=int(time.time()),
            ),
        )
        self._metrics.count(result)
        self._metrics.difference.observe(found.difference)


async def _call(engine: LocalEngine, transfer: TransferRequest) -> None:
    assert transfer.prompt is not None
    body: Json = {"model": engine.name, "prompt": transfer.prompt, "max_tokens": 1, "temperature": 0}
    images = frozenset(each.image.digest for each in transfer.images)
    context = RequestContext(new_request_id(), tenant=NO_TENANT, images=images)
    await engine.call(Operation.COMPLETIONS, body, context, transfer)
