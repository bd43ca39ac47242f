"""Join several handoffs into one context, which a request continues as if it were one handoff's.

Contexts of plain text are joined as token ids: what all begin with, then the rest of each. Chats are joined
as conversations: the messages that all begin with, then the other messages and the answer of each, as the
model's template writes them one after another. The joined token ids alone decide the answer: the first
handoff's KV is loaded, the rest is computed.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from baton.engines.port import Engine, Json
from baton.errors import InvalidRequest, TemplateUnsupported
from baton.handoffs.conversation import Writer
from baton.handoffs.history import INSTRUCTIONS, fingerprint
from baton.handoffs.image_refs import count_images, shift_images
from baton.handoffs.messages import conversation_from
from baton.handoffs.records.prefix_index import shared_tokens
from baton.handoffs.records.record import Conversation, HandoffRecord
from baton.images.placed_image import PlacedImage
from baton.telemetry.ids import RequestContext


@dataclass(frozen=True)
class Part:
    """One of the handoffs that are joined.

    Attributes:
        record: the handoff.
        images: the images of its context, in order.
        where: the field that names it.
    """

    record: HandoffRecord
    images: list[PlacedImage]
    where: str


@dataclass(frozen=True)
class JoinedContext:
    """Several contexts as one.

    Attributes:
        tokens: every token id.
        images: the images that the tokens stand for, in order.
        conversation: its messages; None: it is no chat.
        ends: for each part the number of tokens up to its end.
    """

    tokens: list[int]
    images: list[PlacedImage]
    conversation: Conversation | None
    ends: list[int]

    def as_record(self, first: HandoffRecord) -> HandoffRecord:
        """Return the context as a record, which was never saved.

        Args:
            first: the first of its parts.
        """
        changed = {"tokens": array("i", self.tokens), "conversation": self.conversation}
        return first.model_copy(update=changed)


async def join(engine: Engine, context: RequestContext, parts: Sequence[Part]) -> JoinedContext:
    """Join the contexts of several handoffs, in this order.

    Args:
        engine: the engine that will compute the context.
        context: the request that it is joined for.
        parts: at least two handoffs that the engine can continue.

    Raises:
        InvalidRequest: the contexts cannot be joined; `param` names the part.
        TemplateUnsupported: the model's template does not write their conversations one after another.
    """
    first = parts[0]
    for part in parts[1:]:
        if part.record.latent_steps:
            raise _refused(
                part, "it holds latent steps, which were computed behind its own context: put it first"
            )
        if (part.record.conversation is None) is not (first.record.conversation is None):
            raise _refused(
                part, f"a chat and a plain text cannot be joined, and '{first.where}' is of the other kind"
            )
    if first.record.conversation is None:
        return _joined_texts(parts)
    return await _joined_chats(engine, context, parts)


def _joined_texts(parts: Sequence[Part]) -> JoinedContext:
    first = parts[0].record
    shared = min(shared_tokens(first.distinct_tokens, part.record.distinct_tokens) for part in parts[1:])
    tokens, images, ends = list(first.tokens), list(parts[0].images), [len(first.tokens)]
    for part in parts[1:]:
        own = [image for image in part.images if image.offset >= shared]
        images += shift_images(own, len(tokens) - shared)
        tokens += part.record.tokens[shared:]
        ends.append(len(tokens))
    return JoinedContext(tokens, images, None, ends)


async def _joined_chats(engine: Engine, context: RequestContext, parts: Sequence[Part]) -> JoinedContext:
    pasts = [_past(part) for part in parts]
    shared = _shared_messages(pasts)
    first = parts[0].record
    joined = JoinedContext(list(first.tokens), list(parts[0].images), pasts[0], [len(first.tokens)])
    for part, past in zip(parts[1:], pasts[1:], strict=True):
        if past.template != pasts[0].template:
            raise _refused(part, f"its tools or template settings are not those of '{parts[0].where}'")
        own = past.messages[shared:]
        if any(message.get("role") in INSTRUCTIONS for message in own):
            raise _refused(part, f"its system message is not that of '{parts[0].where}'")
        joined = await _with_chat(engine, context, joined.as_record(first), joined, part, own)
    return joined


async def _with_chat(
    engine: Engine,
    context: RequestContext,
    before: HandoffRecord,
    joined: JoinedContext,
    part: Part,
    messages: list[Json],
) -> JoinedContext:
    """Return a joined context with the messages and the answer of one more chat."""
    before_it, past = before.conversation, _past(part)
    if before_it is None or before_it.text_only:  # together they are too long to be stored as messages
        raise TemplateUnsupported(param=part.where)
    skipped = len(past.messages) - len(messages)
    images = part.images[count_images(past.messages[:skipped]) :]
    writer = Writer(engine, context, [image.image for image in images])
    answered = past.answer_from is not None
    chat = await writer.after(before, before_it, messages, past.template, answered=answered)
    tokens, conversation = chat.tokens, chat.conversation
    if answered and not conversation.text_only:
        shift = len(conversation.messages) - len(past.messages)
        fingerprints = {at + shift: each for at, each in past.answer_fingerprints.items() if at >= skipped}
        known = conversation.answer_fingerprints | fingerprints
        conversation = conversation_from(
            conversation.messages, conversation.template, len(tokens), known
        ).model_copy(update={"ended": past.ended})
    tokens = [*tokens, *part.record.tokens[past.answer_from :]] if answered else tokens
    return JoinedContext(tokens, [*joined.images, *chat.images], conversation, [*joined.ends, len(tokens)])


def _past(part: Part) -> Conversation:
    past = part.record.conversation
    assert past is not None
    if past.text_only:
        raise TemplateUnsupported(param=part.where)
    return past


def _shared_messages(pasts: Sequence[Conversation]) -> int:
    """Return the number of messages that all conversations begin with."""
    written = [[fingerprint(message) for message in past.messages] for past in pasts]
    shortest = min(map(len, written))
    places = enumerate(zip(*written, strict=False))
    return next((index for index, each in places if len(set(each)) > 1), shortest)


def _refused(part: Part, why: str) -> InvalidRequest:
    return InvalidRequest(f"{part.where}: the handoff cannot be joined: {why}.", param=part.where)
