"""Plan a request that continues or saves handoffs: its prompt, its parts, what is loaded."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from baton.admission.fair_threads import in_own_thread
from baton.config.groups import HandoffSettings
from baton.engines.backend import Json, Operation
from baton.engines.engine import LocalEngine
from baton.engines.transfers import TransferRequest
from baton.errors import InvalidRequest
from baton.images.image import ClientImage, PlacedImage, with_distinct_images
from baton.library.handoff import Handoff, common_tokens
from baton.library.library import Library
from baton.relay.asked import HandoffOptions, NewHandoff, SaveOptions, part_name
from baton.relay.audit import Audits
from baton.relay.cost import Choice, Decision, LoadCost
from baton.relay.join import JoinedContext, Part, continued_parts, join, require_fit, require_joinable
from baton.relay.move import moved_parts, require_usable_with_moves
from baton.relay.prompt.chat import ContextPrompt, Writer, write_prompt
from baton.relay.run import JoinedPart, PlannedRequest
from baton.relay.sources import Source, has_kv_of
from baton.telemetry.ids import RequestContext
from baton.telemetry.metrics import HandoffMetrics
from baton_kv.contract import MovedPart


@dataclass(frozen=True)
class Ask:
    """The wishes of a client, checked.

    Attributes:
        operation: an operation that supports handoffs.
        parts: the handoffs that it continues, in the order in which they are joined.
        save: how its context is saved; None: it is not.
        latent_steps: number of latent steps after the prompt.
        answered: an answer follows the prompt; otherwise the context ends with the last message.
        moves: the KV of all parts but the first is moved to its place, where that can be done.
        translated_from: the handoff of other weights whose text the context holds; None: of none.
        target: the handoff to save, which was registered before; None: none was.
    """

    operation: Operation
    body: Json
    parts: Sequence[Part]
    save: SaveOptions | None
    latent_steps: int
    answered: bool = True
    moves: bool = False
    translated_from: Handoff | None = None
    target: Handoff | None = None

    @property
    def source(self) -> Handoff | None:
        """The handoff that it continues, or the first of several."""
        return self.parts[0].record if self.parts else None

    @property
    def exact(self) -> bool:
        """True if all KV that it uses is what the engine would compute."""
        return not self.moves and (len(self.parts) != 1 or self.parts[0].record.exact)

    @property
    def may_load(self) -> Handoff | None:
        """The handoff whose KV may be loaded: its source, unless moved KV would begin an exact join."""
        source = self.source
        return source if source is not None and (source.exact or not self.exact) else None

    @property
    def parents(self) -> list[str]:
        """The handoffs that a saved context continues, as the client named them."""
        translated = [self.translated_from.id] if self.translated_from is not None else []
        return [part.named for part in self.parts] or translated

    @property
    def joins_alone(self) -> bool:
        """True if nothing follows the joined contexts, neither a prompt nor an answer."""
        text = self.operation is Operation.COMPLETIONS and self.body.get("prompt") is None
        return text and self.prompt_only and len(self.parts) > 1

    @property
    def prompt_only(self) -> bool:
        """True if the saved context ends before the answer."""
        return self.save is not None and self.save.scope == "prompt"

    @property
    def steps_of_context(self) -> int:
        """Number of latent steps in the context, with those of its source."""
        return self.latent_steps + (self.source.latent_steps if self.source is not None else 0)


async def parts_in_order(
    cost: LoadCost,
    engine: LocalEngine,
    sources: Sequence[Source],
    options: HandoffOptions | NewHandoff,
    field: str,
) -> Sequence[Part]:
    """Return handoffs in the order in which they are joined.

    Args:
        options: how they are joined. With the order `any` one that must come first does (see
            `Part.must_be_first`), or the one whose stored KV saves most time, of those that no other one
            continues.
        field: the field of the request that names them.
    """
    parts = [
        Part(each.record, part_name(field, index), translated=each.translated)
        for index, each in enumerate(sources)
    ]
    if options.order == "given" or len(parts) < 2:
        return parts
    continued = await in_own_thread(continued_parts, parts)

    def worth(part: Part) -> tuple[bool, bool, float, int]:
        loads = has_kv_of(part.record, engine) and (part.record.exact or options.join == "moved")
        saving = cost.saving(engine, part.record) if loads else 0.0
        return part.must_be_first, part.where not in continued, saving, len(part.record.tokens)

    first = max(parts, key=worth)
    return [first, *(part for part in parts if part is not first)]


# Prepare a request that uses a handoff: prompt, load decision, new record. Returns a `PlannedRequest` to run.
#
# `Plans.open` does everything that may be refused: it writes the prompt, decides what to load, and
# registers the handoff that will be saved. It returns a planned request, of which only `run` is left to call.


@dataclass(frozen=True)
class Plans:
    """Plans the requests of one gateway.

    Attributes:
        cost: decides whether KV is loaded or prefilled.
        metrics: where handoffs are counted.
        audits: computes some answers again.
    """

    handoffs: Library
    cost: LoadCost
    metrics: HandoffMetrics
    settings: HandoffSettings
    audits: Audits

    async def open(
        self,
        engine: LocalEngine,
        operation: Operation,
        body: Json,
        context: RequestContext,
        options: HandoffOptions,
        sources: Sequence[Source] = (),
        images: Sequence[ClientImage] = (),
    ) -> PlannedRequest:
        """Plan a request with a `handoff` field.

        Args:
            images: the images of the request, in the order of its prompt.

        Raises:
            BatonError: the request cannot be carried out with this handoff; nothing was registered.
        """
        moves = options.join == "moved" and len(sources) > 1
        parts = await parts_in_order(self.cost, engine, sources, options, "handoff.from")
        wanted = Ask(operation, body, parts, options.saving, options.latent_steps, moves=moves)
        if not wanted.exact:
            require_usable_with_moves(operation, body, options.latent_steps)
        if wanted.steps_of_context and body.get("prompt_logprobs") is not None:
            raise InvalidRequest(
                "'prompt_logprobs' cannot be used with latent steps: leave it out.", param="prompt_logprobs"
            )
        return await self._plan(engine, context, wanted, images)

    async def open_new(
        self,
        engine: LocalEngine,
        body: Json,
        context: RequestContext,
        options: NewHandoff,
        sources: Sequence[Source] = (),
        images: Sequence[ClientImage] = (),
        target: Handoff | None = None,
    ) -> PlannedRequest:
        """Plan `POST /v1/handoffs`: the context is computed and saved, without an answer.

        Args:
            engine: see `open`, as for the others.
            target: the handoff to save, from `begin_joined`; None: it is registered here.

        Raises:
            BatonError: the context cannot be computed; nothing was registered.
        """
        operation = Operation.COMPLETIONS if options.messages is None else Operation.CHAT
        save = SaveOptions(ttl_s=options.ttl_s, pin=options.pin, label=options.label, scope="prompt")
        wanted = Ask(
            operation,
            body,
            await parts_in_order(self.cost, engine, sources, options, "from"),
            save,
            options.latent_steps,
            answered=operation is not Operation.CHAT,
            moves=options.join == "moved" and len(sources) > 1,
            target=target,
        )
        if not wanted.exact:
            require_usable_with_moves(operation, body, options.latent_steps)
        return await self._plan(engine, context, wanted, images)

    def begin_joined(self, engine: LocalEngine, tenant: str, options: NewHandoff) -> Handoff:
        """Register the handoff that joins several ahead, before all of these are ready."""
        return self.handoffs.begin(
            engine,
            tenant,
            parents=options.sources,
            label=options.label,
            ttl_s=options.ttl_s,
            pin=options.pin,
            exact=options.join == "exact",
        )

    def open_translation(
        self,
        engine: LocalEngine,
        context: RequestContext,
        source: Handoff,
        prompt: ContextPrompt,
        save: SaveOptions,
    ) -> PlannedRequest:
        """Plan to compute and save what a handoff of other weights says.

        Raises:
            BatonError: the context cannot be computed; nothing was registered.
        """
        wanted = Ask(Operation.COMPLETIONS, {}, (), save, 0, translated_from=source)
        return self._planned(engine, context, wanted, prompt, [])

    async def _plan(
        self, engine: LocalEngine, context: RequestContext, wanted: Ask, images: Sequence[ClientImage]
    ) -> PlannedRequest:
        prompt, ends = await self._write(engine, context, wanted, images)
        return self._planned(engine, context, wanted, prompt, ends)

    def _planned(
        self,
        engine: LocalEngine,
        context: RequestContext,
        wanted: Ask,
        prompt: ContextPrompt,
        ends: Sequence[int],
    ) -> PlannedRequest:
        source = wanted.source
        _require_few_images(engine, prompt.images)
        if wanted.latent_steps:
            _require_few_steps(wanted.steps_of_context, self.settings)
            prompt = prompt.with_latent_steps(wanted.latent_steps, engine.placeholder)
        if wanted.save is not None:
            _require_light_images(prompt.images, self.settings)
        stored = wanted.may_load
        if stored is not None and not has_kv_of(stored, engine):
            stored = None
        decision = self._decide(engine, stored, prompt)
        moved = self._moved(engine, wanted, prompt, ends, decision)
        target = self._register(engine, context, wanted)
        load = key_for_engine(source, decision, target)
        in_order = [part for part in moved if part is not None]
        salt = salt_of(stored, in_order)
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
        return PlannedRequest(
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
            [JoinedPart(part, end, each) for part, end, each in zip(wanted.parts, ends, moved, strict=False)],
            owns_target=wanted.target is None,
        )

    def _moved(
        self,
        engine: LocalEngine,
        wanted: Ask,
        prompt: ContextPrompt,
        ends: Sequence[int],
        decision: Decision | None,
    ) -> list[MovedPart | None]:
        """Return for each part what is moved of it: nothing where computing all of it is faster."""
        loads = decision is not None and decision.choice is Choice.LOAD
        if wanted.moves and loads and prompt.tokens and self.cost.moves(engine, ends[-1] - ends[0]):
            found = moved_parts(prompt.tokens, wanted.parts, ends)
            parts = zip(found, wanted.parts, strict=True)
            return [each if has_kv_of(part.record, engine) else None for each, part in parts]
        return [None] * len(ends)

    async def _write(
        self, engine: LocalEngine, context: RequestContext, wanted: Ask, images: Sequence[ClientImage]
    ) -> tuple[ContextPrompt, Sequence[int]]:
        """Write the whole prompt; returns it, and where the part of each of several sources ends."""
        record, seen, ends = wanted.source, list[PlacedImage](), list[int]()
        if record is not None and len(wanted.parts) > 1:
            joined = await self._join(engine, context, wanted.parts)
            record, seen, ends = joined.as_record(record), joined.images, joined.ends
            if wanted.joins_alone:
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

    async def _join(
        self, engine: LocalEngine, context: RequestContext, parts: Sequence[Part]
    ) -> JoinedContext:
        continued = await self.require_joinable(engine, parts)
        images, known = list[Sequence[PlacedImage]](), dict[str, ClientImage]()
        for part in parts:
            found = await self.handoffs.images(part.record) if part.where not in continued else []
            # Bytes of an image that several parts hold are kept once.
            images.append(
                [replace(each, image=known.setdefault(each.image.digest, each.image)) for each in found]
            )
        read = [replace(part, images=theirs) for part, theirs in zip(parts, images, strict=True)]
        joined = await join(engine, context, read, continued)
        require_fit(engine, parts, joined)
        return joined

    async def require_joinable(self, engine: LocalEngine, parts: Sequence[Part]) -> Mapping[str, str]:
        """Refuse handoffs that cannot be joined; returns those of which nothing is written.

        Args:
            parts: the handoffs, in the order in which they are joined.

        Returns:
            See `continued_parts`.

        Raises:
            BatonError: of one of them; `param` names it.
        """
        continued = await in_own_thread(continued_parts, parts)
        require_joinable(engine, parts, continued)
        _require_light_parts(parts, self.settings)
        return continued

    def _decide(self, engine: LocalEngine, source: Handoff | None, prompt: ContextPrompt) -> Decision | None:
        if source is None:
            return None
        shared = None
        if prompt.tokens is not None:
            images = [each.ref for each in prompt.images]
            shared = common_tokens(source.distinct_tokens, with_distinct_images(prompt.tokens, images))
        decision = self.cost.decide(engine, source, shared, self.handoffs.skipped_fetch_s(source))
        self.metrics.decisions.labels(decision.choice.value).inc()
        return decision

    def _register(self, engine: LocalEngine, context: RequestContext, wanted: Ask) -> Handoff | None:
        if (target := wanted.target) is not None:
            target.set_parents(wanted.parents)  # in the order in which they were joined
        if wanted.save is None or target is not None:
            return target
        return self.handoffs.begin(
            engine,
            context.tenant,
            parents=wanted.parents,
            translated_from=wanted.translated_from.id if wanted.translated_from is not None else None,
            exact=wanted.exact,
            label=wanted.save.label,
            ttl_s=wanted.save.ttl_s,
            pin=wanted.save.pin,
        )


def key_for_engine(source: Handoff | None, decision: Decision | None, target: Handoff | None) -> str | None:
    """Return the key of stored KV that the engine gets: to load it, or to share its files with what it saves.

    Args:
        decision: whether its KV is loaded.
    """
    if source is None or decision is None:
        return None
    shares = target is not None and source.exact  # files with moved KV are only for what loads it
    return source.key if decision.loads or shares else None


LATENT_STEPS_PER_CONTEXT = 512
"""Most latent steps of a context, unless one request may ask for more: lost KV of all of them is recomputed
in one step of the engine."""


def _require_few_steps(steps: int, settings: HandoffSettings) -> None:
    """Refuse more latent steps than a context may hold.

    Args:
        steps: number of steps, with those of the handoff that it continues.
    """
    most = max(LATENT_STEPS_PER_CONTEXT, settings.latent_steps_max)
    if steps > most:
        raise InvalidRequest(
            f"The context would hold {steps} latent steps, with those of the handoff that it continues; "
            f"at most {most} are allowed.",
            param="latent_steps",
        )


def _require_few_images(engine: LocalEngine, images: Sequence[PlacedImage]) -> None:
    """Refuse more images, in the handoff and the request together, than the model takes."""
    found, most = len(images), engine.images.limit
    if found > most:
        raise InvalidRequest(
            f"The context holds {found} images, with those of its handoff; the model '{engine.name}' "
            f"takes at most {most}.",
            param="messages",
        )


def _require_light_images(images: Sequence[PlacedImage], settings: HandoffSettings) -> None:
    """Refuse images that are too large to save, before the engine begins."""
    size = sum({each.image.digest: len(each.image.data) for each in images}.values())
    if size > (most := settings.image_bytes):
        raise InvalidRequest(
            f"The context's images take {size} bytes; a handoff may hold at most {most} "
            "(setting handoffs.image_bytes). Send smaller images, or do not save a handoff.",
            param="messages",
        )


def _require_light_parts(parts: Sequence[Part], settings: HandoffSettings) -> None:
    """Refuse to join handoffs whose images take more bytes than those of one handoff may.

    Args:
        parts: the handoffs, in the order in which they are joined.
    """
    sizes = dict[str, int]()
    for part in parts:
        sizes |= {image.digest: image.bytes for image in part.record.images}
        if (size := sum(sizes.values())) > (most := settings.image_bytes):
            raise InvalidRequest(
                f"{part.where}: the images of the joined contexts take at least {size} bytes; they may "
                f"take {most} (setting handoffs.image_bytes). Join fewer.",
                param=part.where,
            )


def salt_of(source: Handoff | None, moved: Sequence[MovedPart]) -> str | None:
    """Return a salt that sets a request's prefix cache apart; None: its KV is what the engine computes.

    It is the request's alone: what another one with the same parts has loaded cannot be told from what it has
    computed.
    """
    if source is None or (source.exact and not moved):
        return None
    return secrets.token_hex(16)
