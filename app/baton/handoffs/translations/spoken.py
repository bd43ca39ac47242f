"""Read what a handoff's context says, as messages or text that another model can take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from baton.engines.port import Engine, Json
from baton.errors import HandoffIncompatible
from baton.handoffs.prompts.conversation import Writer
from baton.handoffs.prompts.engine_text import EngineText
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
        fingerprints: of the answers among the messages, as their clients received them.
    """

    body: Json | None
    texts: Sequence[str]
    images: Sequence[ClientImage]
    fingerprints: Mapping[int, str] = field(default_factory=dict)

    async def written(self, engine: Engine, context: RequestContext) -> ContextPrompt:
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


async def _texts(text: EngineText, record: HandoffRecord, images: Sequence[PlacedImage]) -> list[str]:
    """Return the pieces of a plain text between its images."""
    texts, begin = [], 0
    for stop, after in [*((image.offset, image.offset + image.length) for image in images), (None, None)]:
        texts.append(await text.detokenize(_words(text.engine, record, begin, stop)))
        begin = after or 0
    return texts


def _words(engine: Engine, record: HandoffRecord, begin: int, stop: int | None) -> list[int]:
    """Return some of a context's token ids, without those that no text holds."""
    special = engine.special_tokens | {record.placeholder}
    return [token for token in record.tokens[begin:stop] if token not in special]
