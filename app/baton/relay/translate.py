"""Translate a handoff for another model, which continues it by its text, never by its KV.

What the handoff says is written by the other model's own template and tokenizer, computed once, and kept as a
handoff of that model, which lives as long as the one it was made from. KV never crosses from one model's
weights to another's, not between fine-tunes of equal shape either.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace

from baton.admission.tenants import Admission, Ticket
from baton.engines.adapters import base_of
from baton.engines.backend import EngineState, Json
from baton.engines.engine import LocalEngine
from baton.errors import BatonError, HandoffIncompatible, HandoffNotFound
from baton.images.image import ClientImage, PlacedImage
from baton.library.handoff import Handoff, HandoffState
from baton.library.library import Library
from baton.relay.asked import SaveOptions, part_name
from baton.relay.plan import Plans
from baton.relay.prompt.chat import ContextPrompt, Writer
from baton.relay.prompt.text import EngineText
from baton.relay.sources import Source, Translated, is_compatible, naming
from baton.telemetry.ids import RequestContext, new_request_id

# Read what a handoff's context says, as messages or text that another model can take.


@dataclass(frozen=True)
class Spoken:
    """A context as words.

    Attributes:
        body: a chat's `messages` with the fields that its template reads; None: it is a plain text.
        texts: the pieces of a plain text, between its images.
        images: its images, in order.
        fingerprints: of the answers among the messages, as their clients received them.
    """

    body: Json | None
    texts: Sequence[str]
    images: Sequence[ClientImage]
    fingerprints: Mapping[int, str] = field(default_factory=dict)

    async def written(self, engine: LocalEngine, context: RequestContext) -> ContextPrompt:
        """Write it as an engine's prompt, as if a client had sent it there.

        Raises:
            BatonError: the engine's model cannot take it.
        """
        writer = Writer(engine, context, self.images)
        if self.body is not None:
            chat = await writer.write_chat(self.body, answered=False)
            known = {"answer_fingerprints": dict(self.fingerprints)}
            return ContextPrompt(chat.tokens, chat.images, chat.conversation.model_copy(update=known))
        mark = engine.images.texts[0] if engine.images.texts else ""
        return ContextPrompt(*await writer.plain(mark.join(self.texts), special=True))


async def spoken(
    engine: LocalEngine, context: RequestContext, record: Handoff, images: Sequence[PlacedImage]
) -> Spoken:
    """Read what a context says.

    Args:
        engine: an engine of its weights, which knows what its tokens say.
        images: its images, in order.

    Raises:
        HandoffIncompatible: text stands before or after its messages, which no chat can hold.
    """
    text, past = EngineText(engine, context), record.conversation
    own = [image.image for image in images]
    if past is None:
        return Spoken(None, await _texts(text, record, images), own)
    if past.text_only or past.after_text:
        raise HandoffIncompatible(
            "The handoff cannot be translated: plain text stands before or after its messages, or they were "
            "too long to be kept.",
            param="handoff.from",
        )
    messages = [*past.messages]
    if past.answer_from is not None:
        said = await text.detokenize(_words(engine, record, past.answer_from, None))
        messages.append({"role": "assistant", "content": said})
    return Spoken(past.template | {"messages": messages}, [], own, past.answer_fingerprints)


async def _texts(text: EngineText, record: Handoff, images: Sequence[PlacedImage]) -> list[str]:
    """Return the pieces of a plain text between its images."""
    texts, begin = [], 0
    for stop, after in [*((image.offset, image.offset + image.length) for image in images), (None, None)]:
        texts.append(await text.detokenize(_words(text.engine, record, begin, stop)))
        begin = after or 0
    return texts


def _words(engine: LocalEngine, record: Handoff, begin: int, stop: int | None) -> list[int]:
    """Return some of a context's token ids, without those that no text holds."""
    special = engine.special_tokens | {record.placeholder}
    return [token for token in record.tokens[begin:stop] if token not in special]


CHANGES = ("ttl_s", "pin", "label")
SAVED_WITHIN_S = 10.0
"""A new translation's KV is waited for so long, so that it can be loaded at once."""


class Translations:
    """Makes the translations of one gateway, each once however many requests need it."""

    def __init__(
        self, engines: Sequence[LocalEngine], handoffs: Library, plans: Plans, admission: Admission
    ) -> None:
        self._engines = engines
        self._handoffs = handoffs
        self._plans = plans
        self._admission = admission
        self._making: dict[tuple[str, str], asyncio.Task[tuple[Handoff, int]]] = {}

    async def sources(
        self,
        engine: LocalEngine,
        context: RequestContext,
        records: Sequence[Handoff],
        save: SaveOptions | None = None,
        where: str = "handoff.from",
    ) -> list[Source]:
        """Take the handoffs that a request names as they are, or make their translations.

        Call it before the request takes a place: a translation takes one of its own.

        Raises:
            BatonError: a handoff cannot be translated; of several `param` names the one at fault.
        """
        found = []
        for index, record in enumerate(records):
            try:
                found.append(await self._source(engine, context, record, save or SaveOptions()))
            except BatonError as error:
                if len(records) > 1:
                    raise naming(error, part_name(where, index)) from None
                error.param = error.param or where
                raise
        return found

    async def _source(
        self, engine: LocalEngine, context: RequestContext, record: Handoff, save: SaveOptions
    ) -> Source:
        if is_compatible(record, engine):
            return Source(record)
        origin = record
        if record.translated_from is not None:  # translations are of what was said first
            origin = await self._handoffs.get(record.translated_from, context.tenant)
        found, computed = origin, 0
        # It may have the engine's weights, and latent steps that the engine does not compute.
        if not is_compatible(origin, engine):
            found, computed = await self._once(engine, context, origin, save)
        await self._handoffs.fetch_here(found, engine)  # as of any other handoff that a request continues
        return Source(found, Translated(record, computed))

    async def _once(
        self, engine: LocalEngine, context: RequestContext, record: Handoff, save: SaveOptions
    ) -> tuple[Handoff, int]:
        """Return the translation of a handoff, and how many of its tokens were computed for this request."""
        key = (record.id, engine.weights)
        begins = key not in self._making
        if begins:
            work = self._translate(engine, replace(context, request_id=new_request_id()), record, save)
            self._making[key] = self._handoffs.in_background(work)
            self._making[key].add_done_callback(lambda _: self._making.pop(key, None))
        try:
            made, computed = await asyncio.shield(self._making[key])  # others may wait for it too
        except BatonError as error:
            raise copy(error) from None  # each of them names its own field in it
        changes = save.model_dump(include=set(CHANGES), exclude_unset=True)
        if changes and not (begins and computed):
            await self._handoffs.change(made, changes)
        return made, computed if begins else 0

    async def _translate(
        self, engine: LocalEngine, context: RequestContext, record: Handoff, save: SaveOptions
    ) -> tuple[Handoff, int]:
        said = await self._spoken(context, record)
        if len(said.images) > engine.images.limit:
            raise HandoffIncompatible(
                f"The handoff holds {len(said.images)} images; the model '{engine.name}' takes at most "
                f"{engine.images.limit}.",
            )
        prompt = await said.written(engine, context)
        if not prompt.tokens:
            raise HandoffIncompatible("The handoff holds no text that could be translated.")
        if (kept := self._kept(record, engine, prompt)) is not None:
            await self._handoffs.settled(kept, SAVED_WITHIN_S)
            return kept, 0
        return await self._make(engine, context, record, prompt, save)

    async def _spoken(self, context: RequestContext, record: Handoff) -> Spoken:
        """Read what a handoff says, with an engine of its weights.

        Raises:
            HandoffIncompatible: no engine here has its tokenizer.
        """
        theirs = [each for each in self._engines if each.weights == base_of(record.weights)]
        if not theirs:
            raise HandoffIncompatible(
                f"The handoff of the model '{record.model}' cannot be translated: no engine here serves that "
                "model, whose tokenizer reads it."
            )
        reader = next((each for each in theirs if each.state is EngineState.READY), theirs[0])
        return await spoken(reader, context, record, await self._handoffs.images(record))

    def _kept(self, record: Handoff, engine: LocalEngine, prompt: ContextPrompt) -> Handoff | None:
        """Return the translation that was made before, if it still says the same."""
        tokens = array("i", prompt.tokens or [])
        return next(
            (
                each
                for each in self._handoffs.translations_of(record)
                if (each.weights, each.state) == (engine.weights, HandoffState.READY)
                and each.tokens == tokens
            ),
            None,
        )

    async def _make(
        self,
        engine: LocalEngine,
        context: RequestContext,
        record: Handoff,
        prompt: ContextPrompt,
        save: SaveOptions,
    ) -> tuple[Handoff, int]:
        left = max(1, math.floor(self._handoffs.seconds_left(record)))
        save = save.model_copy(update={"ttl_s": min(save.ttl_s or left, left), "scope": "prompt"})
        ticket = Ticket()
        try:
            await self._admission.enter(ticket, context.tenant, engine.base)
            if record not in self._handoffs:
                raise HandoffNotFound()
            planned = self._plans.open_translation(engine, context, record, prompt, save)
            target = planned.target
            assert target is not None
            await planned.compute([])
        finally:
            ticket.answered()
        await self._handoffs.settled(target, SAVED_WITHIN_S)
        return target, planned.computed
