"""Join several handoffs into one context, which a request continues as if it were one handoff's.

Contexts of plain text are joined as token ids: the lines that all begin with, then the rest of each. Chats
are joined as conversations: the messages that all begin with, then the other messages and the answer of each,
as the model's template writes them one after another. The joined token ids alone decide the answer: the first
handoff's KV is loaded, the rest is computed.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from baton.engines.port import Engine, Json
from baton.errors import BatonError, ContextTooLong, InvalidRequest, TemplateUnsupported
from baton.handoffs.prompts.conversation import Writer
from baton.handoffs.prompts.history import INSTRUCTIONS, fingerprint
from baton.handoffs.prompts.image_refs import count_images, shift_images
from baton.handoffs.records.prefix_index import shared_tokens
from baton.handoffs.records.record import Conversation, HandoffRecord
from baton.handoffs.source import Translated
from baton.images.placed_image import PlacedImage
from baton.telemetry.ids import RequestContext


@dataclass(frozen=True)
class Part:
    """One of the handoffs that are joined.

    Attributes:
        record: the handoff.
        where: the field that names it.
        images: the images of its context, in order.
        translated: how it came from a handoff of other weights; None: it is of the engine's.
    """

    record: HandoffRecord
    where: str
    images: Sequence[PlacedImage] = ()
    translated: Translated | None = None

    @property
    def named(self) -> str:
        """The id that the client named it by."""
        return self.record.id if self.translated is None else self.translated.source.id

    @property
    def must_be_first(self) -> bool:
        """Whether it can be joined as the first part alone: its KV or its text is not in its messages."""
        conversation = self.record.conversation
        return self.record.latent_steps > 0 or (conversation is not None and conversation.after_text)

    @property
    def past(self) -> Conversation:
        """The conversation of a part that is a chat."""
        assert self.record.conversation is not None
        return self.record.conversation


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


def require_joinable(engine: Engine, parts: Sequence[Part]) -> None:
    """Refuse handoffs that cannot be joined, before anything of them is read.

    Args:
        engine: the engine that will compute the context.
        parts: at least two handoffs that the engine can continue, in the order in which they are joined.

    Raises:
        InvalidRequest: of one of them; `param` names it.
        ContextTooLong: all of them together are longer than the model's context.
    """
    first = parts[0]
    for part in parts[1:]:
        if part.record.latent_steps:
            raise _refused(
                part, "it holds latent steps, which were computed behind its own context: put it first"
            )
        if (part.record.conversation is None) is not (first.record.conversation is None):
            raise _refused(part, f"of it and '{first.where}' one is a chat and one a plain text")
        if any(not image.target for image in part.record.images):
            raise _refused(part, "its model takes images only at the beginning of a context")
    for part in parts if first.record.conversation is not None else ():
        if part.past.text_only:
            raise _refused(part, "it is no chat that messages can follow")
        if part.past.after_text and part is not first:
            raise _refused(part, "a text stands before its messages: put it first")
    _require_short(engine, parts)


def _require_short(engine: Engine, parts: Sequence[Part]) -> None:
    images = sum(len(part.record.images) for part in parts)
    if images > engine.images.limit:
        raise InvalidRequest(
            f"The joined contexts hold {images} images; the model '{engine.name}' takes at most "
            f"{engine.images.limit}.",
            param=parts[-1].where,
        )
    most = engine.cards()[0]["max_model_len"]
    longest = max(len(part.record.tokens) for part in parts)
    rest = [part.record.distinct_tokens for part in parts]
    own = sum(len(tokens) - shared_tokens(rest[0], tokens) for tokens in rest[1:])
    if max(longest, len(rest[0]) + own) > most:
        raise ContextTooLong(
            f"The joined contexts are longer than this model's context of {most} tokens; join fewer.",
            param=parts[-1].where,
        )


async def join(engine: Engine, context: RequestContext, parts: Sequence[Part]) -> JoinedContext:
    """Join the contexts of several handoffs, in this order.

    Args:
        engine: the engine that will compute the context.
        context: the request that it is joined for.
        parts: handoffs that `require_joinable` has found nothing wrong with, with their images.

    Raises:
        BatonError: the contexts cannot be joined; `param` names the part.
    """
    if parts[0].record.conversation is None:
        return await _joined_texts(Writer(engine, context), parts)
    return await _joined_chats(engine, context, parts)


async def _joined_texts(writer: Writer, parts: Sequence[Part]) -> JoinedContext:
    first = parts[0].record
    shared = min(shared_tokens(first.distinct_tokens, part.record.distinct_tokens) for part in parts[1:])
    shared = await writer.begin_of_line(
        first.tokens, shared, whole=[len(part.record.tokens) for part in parts]
    )
    begin = await writer.text_begin()
    tokens, images, ends = list(first.tokens), list(parts[0].images), [len(first.tokens)]
    for part in parts[1:]:
        theirs = part.record.tokens
        skipped = shared or (len(begin) if list(theirs[: len(begin)]) == begin else 0)
        own = [image for image in part.images if image.offset >= skipped]
        images += shift_images(own, len(tokens) - skipped)
        tokens += theirs[skipped:]
        ends.append(len(tokens))
    return JoinedContext(tokens, images, None, ends)


async def _joined_chats(engine: Engine, context: RequestContext, parts: Sequence[Part]) -> JoinedContext:
    first = parts[0]
    continued = await asyncio.to_thread(_continued, parts)
    if first.where in continued:
        raise _refused(first, f"'{continued[first.where]}' continues it: name that one first, or alone")
    shared = await asyncio.to_thread(
        _shared_messages, [part for part in parts if part.where not in continued]
    )
    joined = JoinedContext(
        list(first.record.tokens), list(first.images), first.past, [len(first.record.tokens)]
    )
    for part in parts[1:]:
        if part.past.template != first.past.template:
            raise _refused(part, f"its tools or template settings are not those of '{first.where}'")
        if part.where in continued:
            joined.ends.append(len(joined.tokens))
            continue
        own = part.past.messages[shared:]
        with _naming(part):
            joined = await _with_chat(engine, context, joined.as_record(first.record), joined, part, own)
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
    known, past = before.conversation, part.past
    if known is None or known.text_only:
        raise InvalidRequest("The joined conversations are too long to be stored as messages; join fewer.")
    skipped = len(past.messages) - len(messages)
    images = part.images[count_images(past.messages[:skipped]) :]
    writer = Writer(engine, context, [image.image for image in images])
    answered = past.answer_from is not None
    chat = await writer.after(before, known, messages, past.template, answered=answered)
    tokens, conversation = chat.tokens, chat.conversation
    shift = len(conversation.messages) - len(past.messages)
    theirs = {at + shift: each for at, each in past.answer_fingerprints.items() if at >= skipped}
    changed = {"answer_fingerprints": conversation.answer_fingerprints | theirs, "ended": past.ended}
    if not conversation.text_only:
        conversation = conversation.model_copy(update=changed)
    tokens = [*tokens, *part.record.tokens[past.answer_from :]] if answered else tokens
    return JoinedContext(tokens, [*joined.images, *chat.images], conversation, [*joined.ends, len(tokens)])


def _shared_messages(parts: Sequence[Part]) -> int:
    """Return the number of messages that all chats begin with.

    Raises:
        InvalidRequest: their system messages differ.
    """
    written = [[fingerprint(message) for message in part.past.messages] for part in parts]
    heads = [_head(part.past.messages) for part in parts]
    for part, each, head in zip(parts, written, heads, strict=True):
        if each[:head] != written[0][: heads[0]]:
            raise _refused(part, f"its system message is not that of '{parts[0].where}'")
        if any(message.get("role") in INSTRUCTIONS for message in part.past.messages[head:]):
            raise _refused(part, "it has a system message behind its first turn")
    places = enumerate(zip(*written, strict=False))
    shared = next((index for index, each in places if len(set(each)) > 1), min(map(len, written)))
    while shared > heads[0] and any(_answers(part.past.messages[shared:]) for part in parts[1:]):
        shared -= 1  # to the question that they answer in different ways
    return shared


def _answers(messages: Sequence[Json]) -> bool:
    """Return whether messages begin with an answer, or a tool's result, to what stands before them."""
    return bool(messages) and messages[0].get("role") != "user"


def _head(messages: Sequence[Json]) -> int:
    """Return the number of system messages that a conversation begins with."""
    roles = enumerate(message.get("role") for message in messages)
    return next((index for index, role in roles if role not in INSTRUCTIONS), len(messages))


def _continued(parts: Sequence[Part]) -> dict[str, str]:
    """Return which parts hold nothing that another one does not, by the field that names each."""
    return {
        part.where: other.where
        for part in parts
        for other in parts
        if part is not other and _is_within(part, other)
    }


def _is_within(part: Part, other: Part) -> bool:
    """Return whether a chat is continued by another one, which has its answer as one of its messages."""
    past, messages = part.past, other.past.messages
    count, answered = len(past.messages), past.answer_from is not None
    if len(messages) < count + answered:
        return False
    if [fingerprint(each) for each in past.messages] != [fingerprint(each) for each in messages[:count]]:
        return False
    if not answered:
        return len(messages) > count or other.past.answer_from is not None
    if fingerprint(messages[count]) == past.answer_fingerprints.get(count):
        return True
    tokens = part.record.distinct_tokens
    return shared_tokens(tokens, other.record.distinct_tokens) >= len(tokens) - past.ended


@contextmanager
def _naming(part: Part) -> Iterator[None]:
    """Let the errors of a part say which one it is."""
    try:
        yield
    except TemplateUnsupported:
        message = f"{part.where}: the model's chat template cannot write its conversation after the others'."
        raise TemplateUnsupported(message, param=part.where) from None
    except BatonError as error:
        error.message, error.param = f"{part.where}: {error.message}", part.where
        raise


def _refused(part: Part, why: str) -> InvalidRequest:
    return InvalidRequest(f"{part.where}: the handoff cannot be joined: {why}.", param=part.where)
