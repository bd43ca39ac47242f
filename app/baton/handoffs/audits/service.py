"""Audit loads: compute the first token of some answers again, without any stored KV, and compare.

An audited answer notes the log probabilities of its first token. When its engine has nothing else to do, the
same prompt is computed as a whole, and the two are compared: whatever went wrong between the save and the
answer shows here. KV that led to another answer is moved to the store's quarantine.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable

import structlog

from baton.config.groups import HandoffSettings
from baton.engines.kv_transfer import TransferReport, TransferRequest
from baton.engines.port import Engine, Json, Operation
from baton.errors import BatonError
from baton.handoffs.audits.comparison import Comparison, compare
from baton.handoffs.audits.queue import Audit, AuditQueue
from baton.handoffs.records.public import HandoffAudit
from baton.handoffs.records.record import HandoffRecord
from baton.handoffs.service import Handoffs
from baton.telemetry.audit_metrics import AuditMetrics, AuditResult
from baton.telemetry.ids import NO_TENANT, RequestContext, new_request_id

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
        handoffs: all handoffs.
        metrics: where audits are counted.
        draw: returns a random number of at least 0 and below 1.
    """

    def __init__(
        self,
        settings: HandoffSettings,
        handoffs: Handoffs,
        metrics: AuditMetrics,
        *,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._settings = settings
        self._handoffs = handoffs
        self._metrics = metrics
        self._draw = draw
        self._queue = AuditQueue()
        self._engines: dict[str, Engine] = {}

    def chosen(self) -> bool:
        """Draw whether a request that is about to load KV is audited."""
        return self._draw() < self._settings.audit

    def note(self, engine: Engine, record: HandoffRecord, transfer: TransferRequest) -> None:
        """Note that a request has ended which was to load a handoff's KV; audit it later if it was chosen."""
        report = transfer.report
        self._engines[engine.name] = engine
        if not transfer.audited or not report.loaded or report.lost or transfer.latent_steps:
            return
        if report.first_token and not self._queue.add(Audit(engine, record, transfer)):
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
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                self._metrics.count(AuditResult.DROPPED, self._queue.drop_old())
                while (audit := self._queue.take()) is not None:
                    await self._audit(audit)
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


async def _call(engine: Engine, transfer: TransferRequest) -> None:
    assert transfer.prompt is not None
    body: Json = {"model": engine.name, "prompt": transfer.prompt, "max_tokens": 1, "temperature": 0}
    images = frozenset(image.digest for image in transfer.images)
    context = RequestContext(new_request_id(), tenant=NO_TENANT, images=images)
    await engine.call(Operation.COMPLETIONS, body, context, transfer)
