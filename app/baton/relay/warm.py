"""Bring stored KV into the memory of the engines that would load it, ahead: while a tool runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.admission.fair_queue import FairQueue
from baton.config.groups import HandoffSettings
from baton.engines.adapters import base_of
from baton.engines.backend import EngineState
from baton.engines.engine import LocalEngine
from baton.errors import BatonError, EngineUnavailable, GatewayOverloaded, HandoffNotFound, HandoffPending
from baton.library.handoff import Handoff, HandoffState, HandoffWarm, HintResult, WarmedHandoff
from baton.library.library import Library
from baton.relay.asked import KvHintAction, KvHints, WarmContexts
from baton.relay.automatic import key_digest
from baton.relay.report import KV_IS_GONE, REASONS
from baton_kv.contract import TransferFailure, Warmed

AT_ONCE = 2
"""Handoffs of one tenant that are brought into memory at once; others have places of their own."""
MOST_WAITING = 64
MOST_CONTEXTS = 8
"""Contexts with one `prompt_cache_key` that are brought, the newest; a conversation's turns make one."""
RETRY_AFTER_S = 5
PREFETCH = "kv.prefetch"
"""The action of `kv_hints` that means this, as the proposals of vLLM, SGLang and TensorRT-LLM name it."""
PREFETCH_VERSIONS = ("0.1", "1.0")
WHY = REASONS | {TransferFailure.BUSY: "busy", TransferFailure.NOT_WHOLE: "kv_gone"}
"""Why KV is not in memory, by what failed."""
To = Callable[[LocalEngine], bool]
"""Returns whether KV may be brought to an engine."""


def warms_busy(_waited_s: float | None) -> BatonError:
    """Refuse to bring more KV into memory."""
    return GatewayOverloaded(
        "Too much KV waits to be brought into memory already; try again shortly.", retry_after_s=RETRY_AFTER_S
    )


@dataclass(frozen=True)
class Warming:
    """Brings handoffs of one gateway into memory; of several requests for one, all wait for the same work.

    Attributes:
        engines: returns the engines that run here.
        queue: gives tenants turns.
    """

    library: Library
    engines: Callable[[], Sequence[LocalEngine]]
    settings: HandoffSettings
    queue: FairQueue
    _running: dict[tuple[str, tuple[str, ...]], asyncio.Task[list[WarmedHandoff]]] = field(
        default_factory=dict
    )

    async def handoff(self, handoff_id: str, tenant: str, to: To) -> HandoffWarm:
        """Bring one handoff into memory; waits for it as long as requests wait for a pending one.

        Args:
            to: returns whether it may be brought to an engine, if that would load it.

        Raises:
            HandoffNotFound: it is unknown, expired, deleted or failed, or another tenant's.
            HandoffPending: the request that saves it has not ended.
            GatewayOverloaded: too many wait already.
        """
        record = await self._ready(handoff_id, tenant)
        done, data = await self._bring([record], to)
        if record not in self.library:
            raise HandoffNotFound()
        return HandoffWarm(id=record.id, state=done, contexts=1, data=data, actions=None)

    async def _ready(self, handoff_id: str, tenant: str) -> Handoff:
        record = await self.library.get(handoff_id, tenant)
        if record.state is not HandoffState.FAILED and await self.library.settled(
            record, self.settings.wait_s
        ):
            record = await self.library.get(handoff_id, tenant)
        if record.state is HandoffState.FAILED or record not in self.library:
            raise HandoffNotFound()
        if record.state is HandoffState.PENDING:
            raise HandoffPending()
        return record

    async def contexts(self, asked: WarmContexts, tenant: str, to: To) -> HandoffWarm:
        """Bring contexts that the gateway saved by itself into memory, by their key, or what hints name.

        Raises:
            GatewayOverloaded: too many wait already.
        """
        if asked.kv_hints is not None:
            return await self._hinted(asked.kv_hints, tenant, to)
        records = self._keyed(asked.prompt_cache_key or "", tenant)
        done, data = await self._bring(records, to)
        return HandoffWarm(id=None, state=done, contexts=len(records), data=data, actions=None)

    def _keyed(self, cache_key: str, tenant: str) -> list[Handoff]:
        return self.library.keyed(tenant, key_digest(cache_key))[:MOST_CONTEXTS]

    async def _hinted(self, hints: KvHints, tenant: str, to: To) -> HandoffWarm:
        """Do what hints ask for, as far as that is known here; the answer says of each what became of it."""
        records, results = dict[str, Handoff](), list[HintResult]()
        for action in hints.actions:
            if (reason := why_unsupported(hints, action)) is not None:
                results.append(HintResult(action_id=action.action_id, status="unsupported", reason=reason))
                continue
            found = await self._named(action, tenant)
            records |= {each.id: each for each in found}
            status = "done" if found else "not_found"
            results.append(HintResult(action_id=action.action_id, status=status, reason=None))
        done, data = await self._bring(list(records.values()), to)
        told = [
            each.model_copy(update={"status": done}) if each.status == "done" else each for each in results
        ]
        return HandoffWarm(id=None, state=done, contexts=len(records), data=data, actions=told)

    async def _named(self, action: KvHintAction, tenant: str) -> list[Handoff]:
        """Find the contexts that an action names; one that is pending, or no longer there, is left out."""
        if (cache_key := action.payload.get("prompt_cache_key")) is not None:
            return self._keyed(cache_key, tenant)
        try:
            record = await self.library.get(action.payload["handoff"], tenant)
        except HandoffNotFound:
            return []
        return [record] if record.state is HandoffState.READY else []

    def begin(self, hints: KvHints, tenant: str, to: To) -> list[str]:
        """Begin what a request's hints ask for, beside it; returns the actions of which nothing is done."""
        left = [action for action in hints.actions if why_unsupported(hints, action) is not None]
        done = [action for action in hints.actions if action not in left]
        if done:
            wanted = hints.model_copy(update={"actions": done})
            self.library.in_background(self._hinted(wanted, tenant, to))
        return [f"{action.action_type}@{action.action_version}" for action in left]

    async def _bring(self, records: Sequence[Handoff], to: To) -> tuple[str, list[WarmedHandoff]]:
        """Bring records into memory and wait a while; returns the state and what is there."""
        tasks = [self._begin(record, to) for record in records]
        if tasks:
            await asyncio.wait(tasks, timeout=self.settings.wait_s)
        ended = [task.result() for task in tasks if task.done()]
        together: dict[str, WarmedHandoff] = {}
        for each in (each for found in ended for each in found):
            before = together.get(each.engine)
            together[each.engine] = each if before is None else _both(before, each)
        return "done" if len(ended) == len(tasks) else "pending", list(together.values())

    def _begin(self, record: Handoff, to: To) -> asyncio.Task[list[WarmedHandoff]]:
        """Begin to bring a record into memory, unless that is under way."""
        engines = [
            each
            for each in self.engines()
            if each.supports_handoffs and each.weights == base_of(record.weights) and to(each)
        ]
        name = (record.id, tuple(each.name for each in engines))
        if (running := self._running.get(name)) is None:
            running = self.library.in_background(self._brought(record, engines))
            self._running[name] = running
            running.add_done_callback(lambda _: self._running.pop(name, None))
        return running

    async def _brought(self, record: Handoff, engines: Sequence[LocalEngine]) -> list[WarmedHandoff]:
        async with self.queue.place(record.tenant):
            if engines:
                await self.library.fetch_here(record, engines[0], ahead=True)
            return list(await asyncio.gather(*(self._at(each, record) for each in engines)))

    async def _at(self, engine: LocalEngine, record: Handoff) -> WarmedHandoff:
        """Bring a record into one engine's memory."""
        reason, found = None, Warmed()
        if engine.state is not EngineState.READY:
            reason = "not_ready"
        elif not record.bytes:
            reason = REASONS[TransferFailure.MISSING]
        else:
            try:
                found = await engine.warm(record.key)
            except EngineUnavailable:
                reason = "not_ready"
        if found.failure in KV_IS_GONE and record in self.library:
            self.library.kv_gone(record)
        if found.failure is not None:
            reason = WHY.get(found.failure, "unsupported")
        if reason is None and not found.whole:
            reason = "no_room" if found.memory else "off"
        return WarmedHandoff(
            engine=engine.name, bytes=found.bytes, tokens=found.tokens, whole=found.whole, reason=reason
        )


def why_unsupported(hints: KvHints, action: KvHintAction) -> str | None:
    """Explain why nothing is done for an action of `kv_hints`; None: it is."""
    if hints.protocol_version not in PREFETCH_VERSIONS:
        return f"Version '{hints.protocol_version}' of the protocol is not known here."
    if action.action_type != PREFETCH or action.action_version not in PREFETCH_VERSIONS:
        known = f"'{PREFETCH}' in version {' or '.join(PREFETCH_VERSIONS)}"
        return f"Only {known} is known here; KV is kept and evicted by the store's own rules."
    named = [name for name in ("handoff", "prompt_cache_key") if name in action.payload]
    if len(named) != 1 or not isinstance(action.payload[named[0]], str):
        return "Its payload must name one context, by 'handoff' or 'prompt_cache_key'."
    if set(action.payload) != set(named):
        return f"Its payload may hold '{named[0]}' alone: nothing else of it could be done."
    return None


def _both(one: WarmedHandoff, other: WarmedHandoff) -> WarmedHandoff:
    return WarmedHandoff(
        engine=one.engine,
        bytes=one.bytes + other.bytes,
        tokens=one.tokens + other.tokens,
        whole=one.whole and other.whole,
        reason=one.reason or other.reason,
    )
