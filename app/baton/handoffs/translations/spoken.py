"""Read what a handoff's context says, as messages or text that another model can take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.engines.port import Engine, Json
from baton.errors import HandoffIncompatible
from baton.handoffs.prompts.conversation import Writer
from baton.handoffs.prompts.prompt import ContextPrompt
from baton.handoffs.records.record import HandoffRecord
from baton.images.client_image import ClientImage
from baton.images.placed_image import PlacedImage
from baton.telemetry.ids import RequestContext


@dataclass(frozen=True)
class Spoken:
    """What a context says.

    Attributes:
        body: a chat's `messages` with the fields that its template reads; None: it is a plain text.
        texts: the pieces of a plain text, between its images.
        images: its images, in order.
    """

    body: Json | None
    texts: Sequence[str]
    images: Sequence[ClientImage]

    async def written(self, engine: Engine, context: RequestContext) -> ContextPrompt:
        """Write it as an engine's prompt, as if a client had sent it there.

        Raises:
            BatonError: the engine's model cannot take it.
        """
        writer = Writer(engine, context, self.images)
        if self.body is not None:
            chat = await writer.write_chat(self.body, answered=False)
            return ContextPrompt(chat.tokens, chat.images, chat.conversation)
        mark = engine.images.texts[0] if engine.images.texts else ""
        return ContextPrompt(*await writer.plain(mark.join(self.texts), special=True))


async def spoken(
    engine: Engine, context: RequestContext, record: HandoffRecord, images: Sequence[PlacedImage]
) -> Spoken:
    """Read what a context says.

    Args:
        engine: an engine of its weights, which knows what its tokens say.
        context: the request that it is read for.
        record: the handoff.
        images: its images, in order.

    Raises:
        HandoffIncompatible: text stands before or after its messages, which no chat can hold.
    """
    writer, past = Writer(engine, context), record.conversation
    own = [image.image for image in images]
    if past is None:
        return Spoken(None, await _texts(writer, engine, record, images), own)
    if past.text_only or past.after_text:
        raise HandoffIncompatible(
            "The handoff cannot be translated: plain text stands before or after its messages, or they were "
            "too long to be kept.",
            param="handoff.from",
        )
    messages = await writer.whole_conversation(record, past)
    return Spoken(past.template | {"messages": messages}, [], own)


async def _texts(
    writer: Writer, engine: Engine, record: HandoffRecord, images: Sequence[PlacedImage]
) -> list[str]:
    """Return the pieces of a plain text between its images, without the tokens that no text holds."""
    texts, begin = [], 0
    for stop, after in [*((image.offset, image.offset + image.length) for image in images), (None, None)]:
        tokens = [token for token in record.tokens[begin:stop] if token not in engine.special_tokens]
        texts.append(await writer.text_of(tokens))
        begin = after or 0
    return texts
