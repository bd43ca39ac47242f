"""Prepare a request that uses a handoff: prompt, load decision, new record. Returns a `Session` to run.

`Sessions.open` does everything that may be refused: it writes the prompt, decides what to load, and registers
the handoff that will be saved. It returns a session, of which only `run` is left to call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.config.groups import HandoffSettings
from baton.engines.kv_transfer import TransferRequest
from baton.engines.port import Engine, Json, Operation
from baton.errors import InvalidRequest
from baton.handoffs.audits.service import Audits
from baton.handoffs.conversation import Writer
from baton.handoffs.joins.joining import JoinedContext, Part, join, require_joinable
from baton.handoffs.joins.moving import moved_parts, require_movable, salt_of
from baton.handoffs.options import HandoffOptions, NewHandoff, Order, SaveOptions, part_name
from baton.handoffs.planner import Decision, Planner
from baton.handoffs.prompt import ContextPrompt, write_prompt
from baton.handoffs.records.prefix_index import shared_tokens
from baton.handoffs.records.record import HandoffRecord
from baton.handoffs.service import Handoffs
from baton.handoffs.session import JoinedPart, Session
from baton.handoffs.source import Source
from baton.images.client_image import ClientImage
from baton.images.placed_image import PlacedImage
from baton.telemetry.ids import RequestContext
from baton.telemetry.metrics import HandoffMetrics
from baton_kv.contract import MovedPart

LATENT_STEPS_PER_CONTEXT = 512
"""Most latent steps of a context, unless one request may ask for more: lost KV of all of them is recomputed
in one step of the engine."""


@dataclass(frozen=True)
class SessionRequest:
    """What a client asked for.

    Attributes:
        operation: an operation that supports handoffs.
        body: the body of the request.
        parts: the handoffs that it continues, in the order in which they are joined.
        save: how its context is saved; None: it is not.
        latent_steps: number of latent steps after the prompt.
        answered: an answer follows the prompt; otherwise the context ends with the last message.
        moves: the KV of all parts but the first is moved to its place, where that can be done.
        translated_from: the handoff of other weights whose text the context holds; None: of none.
    """

    operation: Operation
    body: Json
    parts: Sequence[Part]
    save: SaveOptions | None
    latent_steps: int
    answered: bool = True
    moves: bool = False
    translated_from: HandoffRecord | None = None

    @property
    def source(self) -> HandoffRecord | None:
        """The handoff whose KV may be loaded; the others' is computed."""
        return self.parts[0].record if self.parts else None

    @property
    def parents(self) -> list[str]:
        """The handoffs that a saved context continues, as the client named them."""
        translated = [self.translated_from.id] if self.translated_from is not None else []
        return [part.named for part in self.parts] or translated

    @property
    def joins_alone(self) -> bool:
        """Whether nothing follows the joined contexts, neither a prompt nor an answer."""
        text = self.operation is Operation.COMPLETIONS and self.body.get("prompt") is None
        return text and self.prompt_only and len(self.parts) > 1

    @property
    def prompt_only(self) -> bool:
        """Whether the saved context ends before the answer."""
        return self.save is not None and self.save.scope == "prompt"

    @property
    def steps_of_context(self) -> int:
        """Number of latent steps in the context, with those of its source."""
        return self.latent_steps + (self.source.latent_steps if self.source is not None else 0)


@dataclass(frozen=True)
class Sessions:
    """Opens the sessions of one gateway.

    Attributes:
        handoffs: all handoffs.
        planner: decides whether KV is loaded or prefilled.
        metrics: where handoffs are counted.
        settings: limits of handoffs.
        audits: computes some answers again.
    """

    handoffs: Handoffs
    planner: Planner
    metrics: HandoffMetrics
    settings: HandoffSettings
    audits: Audits

    async def open(
        self,
        engine: Engine,
        operation: Operation,
        body: Json,
        context: RequestContext,
        options: HandoffOptions,
        sources: Sequence[Source] = (),
        images: Sequence[ClientImage] = (),
    ) -> Session:
        """Plan a request with a `handoff` field.

        Args:
            engine: the engine that answers.
            operation: an operation that supports handoffs.
            body: the body of the request.
            context: the client and the request's ids.
            options: the `handoff` field.
            sources: the handoffs that the request continues.
            images: the images of the request, in the order of its prompt.

        Raises:
            BatonError: the request cannot be carried out with this handoff; nothing was registered.
        """
        parts = in_order(sources, options.order, "handoff.from")
        moves = options.join == "moved" and len(parts) > 1
        wanted = SessionRequest(operation, body, parts, options.saving, options.latent_steps, moves=moves)
        if moves:
            require_movable(engine, "handoff.join")
        if moves and body.get("prompt_logprobs") is not None:
            raise InvalidRequest(
                "'prompt_logprobs' cannot be used with KV that is moved: leave it out.",
                param="prompt_logprobs",
            )
        if wanted.steps_of_context and body.get("prompt_logprobs") is not None:
            raise InvalidRequest(
                "'prompt_logprobs' cannot be used with latent steps: leave it out.", param="prompt_logprobs"
            )
        return await self._plan(engine, context, wanted, images)

    async def open_new(
        self,
        engine: Engine,
        body: Json,
        context: RequestContext,
        options: NewHandoff,
        sources: Sequence[Source] = (),
        images: Sequence[ClientImage] = (),
    ) -> Session:
        """Plan `POST /v1/handoffs`: the context is computed and saved, without an answer.

        The arguments are those of `open`.

        Raises:
            BatonError: the context cannot be computed; nothing was registered.
        """
        operation = Operation.COMPLETIONS if options.messages is None else Operation.CHAT
        save = SaveOptions(ttl_s=options.ttl_s, pin=options.pin, label=options.label, scope="prompt")
        if moves := options.join == "moved" and len(sources) > 1:
            require_movable(engine, "join")
        wanted = SessionRequest(
            operation,
            body,
            in_order(sources, options.order, "from"),
            save,
            options.latent_steps,
            answered=operation is not Operation.CHAT,
            moves=moves,
        )
        return await self._plan(engine, context, wanted, images)

    def open_translation(
        self,
        engine: Engine,
        context: RequestContext,
        source: HandoffRecord,
        prompt: ContextPrompt,
        save: SaveOptions,
    ) -> Session:
        """Plan to compute and save what a handoff of other weights says.

        Args:
            engine: the engine that computes it.
            context: the client and the request's ids.
            source: the handoff.
            prompt: what it says, as the engine's prompt.
            save: how it is kept.

        Raises:
            BatonError: the context cannot be computed; nothing was registered.
        """
        wanted = SessionRequest(Operation.COMPLETIONS, {}, (), save, 0, translated_from=source)
        return self._session(engine, context, wanted, prompt, [])

    async def _plan(
        self, engine: Engine, context: RequestContext, wanted: SessionRequest, images: Sequence[ClientImage]
    ) -> Session:
        prompt, ends = await self._write(engine, context, wanted, images)
        return self._session(engine, context, wanted, prompt, ends)

    def _session(
        self,
        engine: Engine,
        context: RequestContext,
        wanted: SessionRequest,
        prompt: ContextPrompt,
        ends: Sequence[int],
    ) -> Session:
        source = wanted.source
        _require_few_images(engine, prompt.images)
        moved: list[MovedPart | None] = [None] * len(ends)
        if wanted.moves and prompt.tokens is not None:
            moved = moved_parts(prompt.tokens, wanted.parts, ends)
        if wanted.latent_steps:
            self._require_few_steps(wanted.steps_of_context)
            prompt = prompt.with_latent_steps(wanted.latent_steps, engine.placeholder)
        if wanted.save is not None:
            self._require_light_images(prompt.images)
        decision = self._decide(engine, source, prompt)
        target = self._register(engine, context, wanted)
        load = entry_to_name(source, decision, target)
        in_order = [part for part in moved if part is not None]
        salt = salt_of(source, in_order)
        transfer = TransferRequest(
            prompt.tokens,
            prompt.images,
            save=target.key if target is not None else None,
            prompt_only=wanted.prompt_only,
            load=load,
            limit=decision.limit if decision is not None else None,
            moved=in_order,
            salt=salt,
            latent_steps=wanted.steps_of_context,
            audited=load is not None and salt is None and self.audits.chosen(),
        )
        return Session(
            self.handoffs,
            self.metrics,
            self.audits,
            engine,
            context,
            prompt,
            transfer,
            source,
            decision,
            target,
            wanted.parts[0].translated if wanted.parts else None,
            [
                JoinedPart(part.named, end, each)
                for part, end, each in zip(wanted.parts, ends, moved, strict=False)
            ],
        )

    async def _write(
        self, engine: Engine, context: RequestContext, wanted: SessionRequest, images: Sequence[ClientImage]
    ) -> tuple[ContextPrompt, Sequence[int]]:
        """Write the whole prompt; returns it, and where the part of each of several sources ends."""
        record, seen, ends = wanted.source, list[PlacedImage](), list[int]()
        if record is not None and len(wanted.parts) > 1:
            joined = await self._join(engine, context, wanted.parts)
            record, seen, ends = joined.as_record(record), joined.images, joined.ends
            if wanted.joins_alone:
                _refuse_steps(wanted)
                return ContextPrompt(joined.tokens, joined.images, joined.conversation), ends
        elif record is not None:
            seen = await self.handoffs.images(record)
        prompt = await write_prompt(
            Writer(engine, context, images, joined=bool(ends)),
            record,
            seen,
            wanted.operation,
            wanted.body,
            prompt_only=wanted.prompt_only,
            latent=bool(wanted.latent_steps),
            answered=wanted.answered,
        )
        return prompt, ends

    async def _join(self, engine: Engine, context: RequestContext, parts: Sequence[Part]) -> JoinedContext:
        require_joinable(engine, parts)
        self._require_light(sum(part.record.image_bytes for part in parts))
        read = [replace(part, images=await self.handoffs.images(part.record)) for part in parts]
        return await join(engine, context, read)

    def _decide(self, engine: Engine, source: HandoffRecord | None, prompt: ContextPrompt) -> Decision | None:
        if source is None:
            return None
        shared = shared_tokens(source.tokens, prompt.tokens) if prompt.tokens is not None else None
        decision = self.planner.decide(engine, source, shared)
        self.metrics.decisions.labels(decision.choice.value).inc()
        return decision

    def _register(
        self, engine: Engine, context: RequestContext, wanted: SessionRequest
    ) -> HandoffRecord | None:
        if wanted.save is None:
            return None
        return self.handoffs.begin(
            engine,
            context.tenant,
            parents=wanted.parents,
            translated_from=wanted.translated_from.id if wanted.translated_from is not None else None,
            label=wanted.save.label,
            ttl_s=wanted.save.ttl_s,
            pin=wanted.save.pin,
        )

    def _require_few_steps(self, steps: int) -> None:
        most = max(LATENT_STEPS_PER_CONTEXT, self.settings.latent_steps_max)
        if steps > most:
            raise InvalidRequest(
                f"The context would hold {steps} latent steps, with those of the handoff that it continues; "
                f"at most {most} are allowed.",
                param="latent_steps",
            )

    def _require_light_images(self, images: Sequence[PlacedImage]) -> None:
        """Refuse images that are too large to save, before the engine begins."""
        self._require_light(sum({image.digest: len(image.image.data) for image in images}.values()))

    def _require_light(self, size: int) -> None:
        most = self.settings.image_bytes
        if size > most:
            raise InvalidRequest(
                f"The context's images take {size} bytes; a handoff may hold at most {most} "
                "(setting handoffs.image_bytes). Send smaller images, or do not save a handoff.",
                param="messages",
            )


def in_order(sources: Sequence[Source], order: Order, field: str) -> Sequence[Part]:
    """Return handoffs in the order in which they are joined.

    Args:
        sources: the handoffs.
        order: with `any` one that must come first does (with latent steps, or a text before its messages), or
            the longest one.
        field: the field of the request that names them.
    """
    parts = [
        Part(each.record, part_name(field, index), translated=each.translated)
        for index, each in enumerate(sources)
    ]
    if order == "given" or not parts:
        return parts
    first = max(parts, key=lambda part: (part.must_be_first, len(part.record.tokens)))
    return [first, *(part for part in parts if part is not first)]


def _refuse_steps(wanted: SessionRequest) -> None:
    """Refuse latent steps behind joined contexts, the last of which may end with an answer."""
    if wanted.latent_steps:
        raise InvalidRequest(
            "'latent_steps' need a 'prompt' or 'messages' behind joined contexts.", param="latent_steps"
        )


def entry_to_name(
    source: HandoffRecord | None, decision: Decision | None, target: HandoffRecord | None
) -> str | None:
    """Return the key of the source's KV, which the engine is told if it loads it or saves what continues it.

    Args:
        source: the handoff that the request continues.
        decision: whether its KV is loaded.
        target: the handoff that the request saves.
    """
    named = source is not None and decision is not None and (decision.loads or target is not None)
    return source.key if source is not None and named else None


def _require_few_images(engine: Engine, images: Sequence[PlacedImage]) -> None:
    """Refuse more images, in the handoff and the request together, than the model takes."""
    found, most = len(images), engine.images.limit
    if found > most:
        raise InvalidRequest(
            f"The context holds {found} images, with those of its handoff; the model '{engine.name}' "
            f"takes at most {most}.",
            param="messages",
        )
