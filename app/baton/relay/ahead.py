"""Join handoffs ahead: in the background, once all are ready and their engine has nothing else to do."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence

from baton.admission.tenants import Admission, Ticket
from baton.engines.backend import Json
from baton.engines.engine import LocalEngine, is_idle, until_idle
from baton.errors import BatonError, EngineOverloaded, HandoffNotFound, RateLimited
from baton.library.handoff import Handoff, HandoffState
from baton.library.library import Library
from baton.relay.asked import NewHandoff, translates
from baton.relay.move import require_movable
from baton.relay.plan import Plans, parts_in_order
from baton.relay.sources import Source, Sources, is_compatible
from baton.relay.translate import Translations
from baton.telemetry.ids import RequestContext

IDLE_WITHIN_S = 30.0
"""Handoffs are joined when their engine is idle, when somebody waits for them, or after so many seconds."""
PARTS_WITHIN_S = 600.0
"""Seconds that pending parts are waited for."""
MOST_PENDING = 32
"""Most joins of a tenant that may wait."""
RETRY_AFTER_S = 5
FIELD = "from"


class JoinsAhead:
    """Runs joins ahead: on an engine at most one of a tenant, and one of those that nobody waits for yet."""

    def __init__(
        self,
        handoffs: Library,
        sources: Sources,
        translations: Translations,
        plans: Plans,
        admission: Admission,
    ) -> None:
        self._handoffs = handoffs
        self._sources = sources
        self._translations = translations
        self._plans = plans
        self._admission = admission
        self._turns: defaultdict[tuple[str, str], asyncio.Lock] = defaultdict(asyncio.Lock)
        self._idle_turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._pending: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[Json]] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Cancel at the end what has not been joined."""
        try:
            yield
        finally:
            for task in self._tasks:
                task.cancel()

    async def begin(
        self, engine: LocalEngine, context: RequestContext, options: NewHandoff
    ) -> tuple[Handoff, asyncio.Task[Json], bool]:
        """Begin to join handoffs.

        Returns:
            The handoff, which is pending; its computation, with the `handoff` object as its result; whether
            that begins at once.

        Raises:
            RateLimited: too many joins of the tenant wait already.
            BatonError: a part is unknown, or cannot be joined; `param` names it.
        """
        if self._pending[context.tenant] >= MOST_PENDING:
            raise RateLimited(
                f"{MOST_PENDING} of your joins wait to be computed, and no more may; try again later.",
                retry_after_s=RETRY_AFTER_S,
            )
        self._pending[context.tenant] += 1  # before anything is awaited: others come meanwhile
        try:
            return await self._begin(engine, context, options)
        except BaseException:
            self._release(context.tenant)
            raise

    async def _begin(
        self, engine: LocalEngine, context: RequestContext, options: NewHandoff
    ) -> tuple[Handoff, asyncio.Task[Json], bool]:
        if options.join == "moved":
            require_movable(engine, "join")
        records = await self._sources.usable(
            options.sources, engine, context.tenant, FIELD, translates=translates(options.translate, engine)
        )
        ready = all(record.state is HandoffState.READY for record in records)
        if ready and all(is_compatible(record, engine) for record in records):
            sources = [Source(record) for record in records]
            parts = await parts_in_order(self._plans.cost, engine, sources, options, FIELD)
            await self._plans.require_joinable(engine, parts)
        target = self._plans.begin_joined(engine, context.tenant, options)
        at_once = ready and is_idle(engine)
        task = self._handoffs.in_background(self._join(engine, context, options, target))
        self._tasks.add(task)
        task.add_done_callback(lambda ended: self._ended(ended, context.tenant))
        return target, task, at_once

    def _ended(self, task: asyncio.Task[Json], tenant: str) -> None:
        self._tasks.discard(task)
        self._release(tenant)

    def _release(self, tenant: str) -> None:
        self._pending[tenant] -= 1
        if not self._pending[tenant]:
            del self._pending[tenant]

    async def _join(
        self, engine: LocalEngine, context: RequestContext, options: NewHandoff, target: Handoff
    ) -> Json:
        """Join handoffs when that keeps nobody waiting; returns the `handoff` object."""
        try:
            records = await self._sources.all(
                options.sources,
                engine,
                context.tenant,
                FIELD,
                translates=translates(options.translate, engine),
                wait_s=PARTS_WITHIN_S,
            )
            return await self._in_turn(engine, context, options, target, records)
        except BaseException as error:
            self._handoffs.end(target, None, reason=error.message if isinstance(error, BatonError) else None)
            raise

    async def _in_turn(
        self,
        engine: LocalEngine,
        context: RequestContext,
        options: NewHandoff,
        target: Handoff,
        records: Sequence[Handoff],
    ) -> Json:
        """Compute a join when its engine is idle; where others fill the engine's queue, later."""

        def is_due() -> bool:
            return self._handoffs.is_awaited(target) or time.monotonic() > due

        due, deadline = time.monotonic() + IDLE_WITHIN_S, time.monotonic() + PARTS_WITHIN_S
        while True:
            await until_idle(engine, IDLE_WITHIN_S, unless=is_due)
            async with self._turns[engine.name, context.tenant], self._idle_turn(engine, due=is_due()):
                await self._require_there(target, records)
                if is_idle(engine) or is_due():
                    try:
                        return await self._compute(engine, context, options, target, records)
                    except EngineOverloaded:
                        if time.monotonic() > deadline:
                            raise
            await asyncio.sleep(RETRY_AFTER_S if is_due() else 0)

    def _idle_turn(self, engine: LocalEngine, *, due: bool) -> contextlib.AbstractAsyncContextManager[None]:
        """Take the turn of joins that wait for an idle engine, which one at a time may begin."""
        return contextlib.nullcontext() if due else self._idle_turns[engine.name]

    async def _require_there(self, target: Handoff, records: Sequence[Handoff]) -> None:
        """Give up a join that was deleted, or one of whose parts was."""
        if target not in self._handoffs:
            raise HandoffNotFound()
        await self._sources.require_there(records, target.tenant, FIELD)

    async def _compute(
        self,
        engine: LocalEngine,
        context: RequestContext,
        options: NewHandoff,
        target: Handoff,
        records: Sequence[Handoff],
    ) -> Json:
        sources = await self._translations.sources(engine, context, records, where=FIELD)
        ticket = Ticket()
        try:
            await self._admission.enter(ticket, context.tenant, engine.base)
            await self._require_there(target, records)  # it may have waited for long
            body = {"model": engine.name}
            planned = await self._plans.open_new(engine, body, context, options, sources, target=target)
            return await planned.compute("")
        finally:
            ticket.answered()
