"""Answer requests that continue or save handoffs, and create handoffs: all that the rest knows of the relay.

The order holds for every request: handoffs that are still pending are waited for, and those of other models
translated, before the request takes a place at its engine, because what they wait for may need that place.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

from baton.admission.fair_queue import QueueLimits, watched_queue
from baton.admission.tenants import Admission, Ticket
from baton.config.groups import AutomaticMode
from baton.config.settings import Settings
from baton.engines.backend import Json, Operation, Reply, StreamReply
from baton.engines.engine import Engine, LocalEngine
from baton.engines.fleet import Fleet
from baton.engines.transfers import TransferRequest
from baton.errors import HandoffNotFound, HandoffPending, InvalidRequest
from baton.images.image import ClientImage
from baton.library.handoff import Handoff, HandoffState
from baton.library.library import Library
from baton.relay.ahead import JoinsAhead
from baton.relay.asked import (
    HINTS_HEADER,
    VIA_ROSETTA,
    HandoffOptions,
    NewHandoff,
    SaveOptions,
    take_hints,
    take_options,
    translates,
)
from baton.relay.audit import Audits
from baton.relay.automatic import AutomaticHandoffs, SaveRule
from baton.relay.cost import LoadCost
from baton.relay.move import require_movable
from baton.relay.plan import Plans
from baton.relay.prompt.chat import Writer
from baton.relay.report import explained
from baton.relay.rosetta import Rosetta
from baton.relay.run import LeftBehind
from baton.relay.same_store import SameStore
from baton.relay.sources import Source, Sources, is_compatible, require_compatible
from baton.relay.translate import Translations
from baton.relay.warm import AT_ONCE, MOST_WAITING, Warming, warms_busy
from baton.telemetry.ids import Cut, RequestContext
from baton.telemetry.metrics import GatewayMetrics

TakePlace = Callable[[], Awaitable[Ticket]]
"""Waits for the request's place at its engine; raises `EngineOverloaded`."""


@dataclass(frozen=True)
class Relay:
    """The door to handoffs: all that one gateway does for requests that use them. `open_relay` makes it.

    Attributes:
        settings: the gateway's; of handoffs.
        sources: finds those that a request continues.
        translations: makes handoffs of what those of other models say.
        rosetta: starts requests from one vector of another model.
        ahead: joins handoffs in the background.
        automatic: chooses handoffs for requests that name none.
        audits: computes some answers again.
        same_store: knows which gateways elsewhere use this one's store.
        engines: the engines that run here.
        modes: what is automatic for each engine, by its name.
        warming: brings KV into the engines' memory ahead.
    """

    settings: Settings
    library: Library
    sources: Sources
    plans: Plans
    translations: Translations
    rosetta: Rosetta
    ahead: JoinsAhead
    automatic: AutomaticHandoffs
    audits: Audits
    same_store: SameStore
    engines: list[LocalEngine]
    modes: dict[str, AutomaticMode]
    warming: Warming

    def follow(self, engines: Sequence[LocalEngine], settings: Settings) -> None:
        """Work with these engines from now on: some came, went, or have other settings."""
        self.engines[:] = engines
        self.modes.clear()
        self.modes.update(_modes(settings))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Audit and join in the background while inside; at the end wait a moment for saves under way."""
        async with self.library.settling(), self.audits.running(), self.ahead.running():
            yield

    def asked(self, engine: LocalEngine, operation: Operation, body: Json) -> HandoffOptions | None:
        """Take the `handoff` field out of a body; None: there is none.

        Raises:
            InvalidRequest: the field is not valid, or does not go with the rest of the body.
            OperationUnsupported: the operation, or the engine, does not support what it asks for.
        """
        return take_options(body, engine, operation, self.settings.handoffs.latent_steps_max)

    async def messages(self, engine: LocalEngine | None, record: Handoff, context: RequestContext) -> Json:
        """Return the messages or the text of a handoff's context, as its route shows them.

        Args:
            engine: an engine of its weights that is ready; None: there is none, so that tokens are not text.

        Raises:
            HandoffPending: the request that saves it has not ended.
            HandoffNotFound: that request failed.
        """
        if record.state is HandoffState.FAILED:
            raise HandoffNotFound()
        if record.state is HandoffState.PENDING and not record.tokens:
            # With tokens only its KV is still being saved.
            raise HandoffPending()
        shown: Json = {"object": "list", "handoff": record.id, "text": None, "complete": True, "why": None}
        if engine is not None:
            data, text = await Writer(engine, context).said(record)
            return shown | {"data": data, "text": text}
        past = record.conversation
        if past is not None and past.messages and past.answer_from is None and not past.after_text:
            return shown | {"data": past.messages}
        what = "The last answer" if past is not None and past.messages else "The text"
        why = f"{what} is not known while no engine of the weights of '{record.model}' is ready here."
        return shown | {"data": past.messages if past is not None else [], "complete": False, "why": why}

    async def answer(
        self,
        engine: LocalEngine,
        operation: Operation,
        body: Json,
        context: RequestContext,
        options: HandoffOptions,
        images: Sequence[ClientImage],
        take_place: TakePlace,
    ) -> Reply:
        """Answer a request with a `handoff` field; the reply holds the `handoff` object.

        Args:
            options: the field, from `asked`.
            images: the images of the request, in the order of its prompt.
            take_place: called once what the request continues is ready.

        Raises:
            BatonError: a handoff cannot be continued, or the engine failed.
        """
        options, records = await self._found(engine, operation, options, context)
        if options.via_rosetta:
            thought = await self.rosetta.open(engine, operation, body, context, records[0], images)
            await take_place()
            return await thought.run(operation, body)
        sources = await self._sources(engine, context, records, "handoff.from")
        await take_place()
        planned = await self.plans.open(engine, operation, body, context, options, sources, images)
        context.cut = _cut_of(operation, body)
        return await planned.run(operation, body)

    async def _found(
        self, engine: LocalEngine, operation: Operation, options: HandoffOptions, context: RequestContext
    ) -> tuple[HandoffOptions, list[Handoff]]:
        """Find the handoffs that a request continues, once they are ready; returns them, and how."""
        if options.via_rosetta:
            self.rosetta.require_possible(engine, operation, options)
        if not options.sources:
            return options, []
        if options.join == "moved" and len(options.sources) > 1:
            require_movable(engine, "handoff.join")
        wanted = translates(options.translate, engine)
        thoughts = self.rosetta.enabled and self.rosetta.is_target(engine)
        records = await self.sources.all(
            options.sources, engine, context.tenant, translates=wanted or thoughts
        )
        if thoughts and self.rosetta.is_default(engine, operation, options, records):
            options = options.model_copy(update={"translate": VIA_ROSETTA})
        elif not wanted:
            for record in records:
                require_compatible(record, engine)
        return options, records

    async def _sources(
        self, engine: LocalEngine, context: RequestContext, records: Sequence[Handoff], where: str
    ) -> list[Source]:
        """Take the handoffs that a request names as they are, or make their translations."""
        if all(is_compatible(record, engine) for record in records):
            return [Source(record) for record in records]
        return await self.translations.sources(engine, context, records, where=where)

    def hint(
        self, engine: Engine, body: Json, context: RequestContext, to: Callable[[LocalEngine], bool]
    ) -> None:
        """Take `kv_hints` out of a body and begin what they ask for; a header tells what is not done.

        Args:
            to: returns whether KV may be brought to an engine.

        Raises:
            InvalidRequest: the field is no envelope of hints.
        """
        hints = take_hints(body)
        if hints is None:
            return
        if engine.forwarding is None and engine.supports_handoffs:
            unused = self.warming.begin(hints, context.tenant, to)
        else:
            unused = [f"{each.action_type}@{each.action_version}" for each in hints.actions]
        if unused:
            context.answer_headers[HINTS_HEADER] = ", ".join(dict.fromkeys(unused))

    async def call(
        self, engine: LocalEngine, operation: Operation, body: Json, context: RequestContext
    ) -> Reply:
        """Call an engine for a request that names no handoff; the gateway may choose one for it.

        The answer says why nothing of the prompt was stored, where that was looked for.
        """
        chooser = self.automatic.request(engine, operation, body, context.tenant)
        context.cut = _cut_of(operation, body)
        reply = await engine.call(operation, body, context, chooser=chooser)
        if context.cut is not None and isinstance(reply, StreamReply):
            left = LeftBehind(self.library, self.plans.metrics, engine, context, body)
            reply = StreamReply(left.events(reply.events), reply.headers)
        return reply if chooser is None else explained(reply, operation, lambda: chooser.diagnostics(context))

    async def create(
        self,
        engine: LocalEngine,
        body: Json,
        context: RequestContext,
        options: NewHandoff,
        images: Sequence[ClientImage],
        take_place: TakePlace,
        keep: Callable[[asyncio.Task[Json]], None],
    ) -> tuple[Handoff, Json]:
        """Compute a context and save it, without an answer: `POST /v1/handoffs`.

        Args:
            take_place: called once what the context continues is ready.
            keep: keeps the engine from being unloaded until work that outlives the request is done.

        Returns:
            The handoff, which may be pending after `handoffs.wait_s`, and the object that shows it.

        Raises:
            BatonError: the context cannot be computed.
        """
        if options.adds_nothing and len(options.sources) > 1:
            target, work, at_once = await self.ahead.begin(engine, context, options)
            keep(work)
            return target, await self._shown(target, work, self.settings.handoffs.wait_s if at_once else 0)
        records = await self.sources.all(
            options.sources, engine, context.tenant, "from", translates=translates(options.translate, engine)
        )
        if options.translates_alone:
            return await self._translate(engine, context, options, records[0])
        if options.join == "moved" and len(records) > 1:
            require_movable(engine, "join")
        sources = await self._sources(engine, context, records, "from")
        ticket = await take_place()
        planned = await self.plans.open_new(engine, body, context, options, sources, images)
        assert planned.target is not None
        work = self.library.in_background(planned.compute(options.prompt or ""))
        ticket.keep_until(work)
        try:
            return planned.target, await self._shown(planned.target, work, self.settings.handoffs.wait_s)
        except asyncio.CancelledError:
            planned.fail()  # work that has not begun yet cannot fail the handoff itself
            raise

    async def _shown(self, target: Handoff, work: asyncio.Task[Json], wait_s: float) -> Json:
        """Wait a while until a handoff is saved; a client that leaves, and gets no id, ends the work."""
        until = time.monotonic() + wait_s
        try:
            done, _ = await asyncio.wait({work}, timeout=wait_s)
        except asyncio.CancelledError:
            work.cancel()
            raise
        if not done:
            return target.public()
        shown = work.result()
        await self.library.settled(target, max(0.0, until - time.monotonic()))
        return shown | target.public()

    async def _translate(
        self, engine: LocalEngine, context: RequestContext, options: NewHandoff, record: Handoff
    ) -> tuple[Handoff, Json]:
        """Make the translation of a handoff of other weights, unless it is there."""
        if is_compatible(record, engine):
            raise InvalidRequest(
                f"from: '{engine.name}' can continue the handoff as it is: name it without 'translate'.",
                param="from",
            )
        given = options.model_dump(include={"ttl_s", "pin", "label"}, exclude_unset=True)
        save = SaveOptions.model_validate(given)
        (source,) = await self.translations.sources(engine, context, [record], save, "from")
        assert source.translated is not None
        return source.record, source.record.public() | {"source": source.translated.public(source.record)}


def open_relay(
    settings: Settings, fleet: Fleet, library: Library, admission: Admission, metrics: GatewayMetrics
) -> Relay:
    """Make the relay of one gateway.

    Args:
        admission: gives places at the engines to what the relay computes by itself.
    """
    handoffs, engines, cost = settings.handoffs, list(fleet.here), LoadCost()
    audits = Audits(handoffs, library, metrics.audits)
    plans = Plans(library, cost, metrics.handoffs, handoffs, audits)
    sources = Sources(library, handoffs.wait_s)
    translations = Translations(engines, library, plans, admission)
    modes = _modes(settings)
    rule = SaveRule(handoffs.auto_min_tokens)
    waiting = QueueLimits(AT_ONCE, waiting=MOST_WAITING)
    warms = watched_queue(waiting, warms_busy, metrics.queues, "handoff_warms")
    return Relay(
        settings,
        library,
        sources,
        plans,
        translations,
        Rosetta(engines, library, plans, admission, handoffs.rosetta),
        JoinsAhead(library, sources, translations, plans, admission),
        AutomaticHandoffs(library, cost, metrics.handoffs, handoffs, modes, rule, audits),
        audits,
        SameStore(library),
        engines,
        modes,
        Warming(library, lambda: fleet.here, handoffs, warms),
    )


def _cut_of(operation: Operation, body: Json) -> Cut | None:
    """Make what ends an answer before it is complete, if its client can have it go on: see `LeftBehind`."""
    if operation not in (Operation.COMPLETIONS, Operation.CHAT) or body.get("stream") is not True:
        return None
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and not all(type(token) is int for token in prompt)
    if several or body.get("n") not in (None, 1) or body.get("use_beam_search"):
        return None
    return Cut()


def _modes(settings: Settings) -> dict[str, AutomaticMode]:
    return {engine.name: engine.auto or settings.handoffs.auto for engine in settings.engines}


async def complete_with_images(
    engine: LocalEngine, body: Json, context: RequestContext, client_images: Sequence[ClientImage]
) -> Reply:
    """Complete a plain prompt with images, which vLLM's own handler has no field for.

    Raises:
        BatonError: the prompt does not have one placeholder for each image, or the engine failed.
    """
    special = body.get("add_special_tokens") is not False
    tokens, images = await Writer(engine, context, client_images).plain(body["prompt"], special=special)
    return await engine.call(
        Operation.COMPLETIONS, body, context, TransferRequest(prompt=tokens, images=images)
    )
