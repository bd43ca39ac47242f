"""Join several handoffs into one context, which a request continues as if it were one handoff's.

Contexts of plain text are joined as token ids: the lines that all begin with, then the rest of each. Chats
are joined as conversations: the messages that all begin with, then the other messages and the answer of each,
as the model's template writes them one after another. The joined token ids alone decide the answer: the first
handoff's KV is loaded, the rest is computed.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from baton.admission.fair_threads import in_own_thread
from baton.engines.backend import Json
from baton.engines.engine import LocalEngine
from baton.errors import BatonError, ContextTooLong, InvalidRequest, TemplateUnsupported
from baton.images.image import PlacedImage
from baton.library.handoff import Conversation, Handoff, common_tokens
from baton.relay.prompt.chat import Writer
from baton.relay.prompt.resent import INSTRUCTIONS, fingerprint
from baton.relay.prompt.text import EngineText, count_images, shift_images
from baton.relay.sources import Translated
from baton.telemetry.ids import RequestContext


@dataclass(frozen=True)
class Part:
    """One of the handoffs that are joined.

    Attributes:
        images: the images of its context, in order.
        translated: how it came from a handoff of other weights; None: it is of the engine's.
    """

    record: Handoff
    where: str
    images: Sequence[PlacedImage] = ()
    translated: Translated | None = None

    @property
    def named(self) -> str:
        """The id that the client named it by."""
        return self.record.id if self.translated is None else self.translated.source.id

    @property
    def must_be_first(self) -> bool:
        """True if it can be joined as the first part alone: what it begins with can be nowhere else."""
        conversation = self.record.conversation
        after_text = conversation is not None and conversation.after_text
        return self.record.latent_steps > 0 or after_text or self.begins_with_images

    @property
    def begins_with_images(self) -> bool:
        """True if its model takes its images at the beginning of a context alone."""
        return any(not image.target for image in self.record.images)

    @property
    def is_chat(self) -> bool:
        """True if it is a chat whose messages are known."""
        conversation = self.record.conversation
        return conversation is not None and not conversation.text_only

    @property
    def past(self) -> Conversation:
        """The conversation of a part that is a chat."""
        assert self.record.conversation is not None
        return self.record.conversation


@dataclass(frozen=True)
class JoinedContext:
    """Several contexts as one.

    Attributes:
        images: the images that the tokens stand for, in order.
        conversation: its messages; None: it is no chat.
        ends: for each part the number of tokens up to its end.
    """

    tokens: list[int]
    images: list[PlacedImage]
    conversation: Conversation | None
    ends: list[int]

    def as_record(self, first: Handoff) -> Handoff:
        """Return the context as a record, which was never saved."""
        changed = {"tokens": array("i", self.tokens), "conversation": self.conversation}
        return first.model_copy(update=changed)

    def part_at(self, parts: Sequence[Part], place: int) -> Part:
        """Return the part that a token belongs to.

        Args:
            place: index of the token.
        """
        return next(part for part, end in zip(parts, self.ends, strict=True) if place < end)


def refused(part: Part, why: str) -> InvalidRequest:
    """Return the error that refuses to join a part."""
    return InvalidRequest(f"{part.where}: the handoff cannot be joined: {why}.", param=part.where)


# Find what the conversations of several handoffs have in common, so that it is written once.


def shared_messages(parts: Sequence[Part]) -> int:
    """Return the number of messages that all chats begin with.

    Raises:
        InvalidRequest: their system messages differ.
    """
    written = [_marks(part) for part in parts]
    heads = [_head(part.past.messages) for part in parts]
    for part, each, head in zip(parts, written, heads, strict=True):
        if each[:head] != written[0][: heads[0]]:
            raise refused(part, f"its system message is not that of '{parts[0].where}'")
        if any(message.get("role") in INSTRUCTIONS for message in part.past.messages[head:]):
            raise refused(part, "it has a system message behind its first turn")
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


def continued_parts(parts: Sequence[Part]) -> dict[str, str]:
    """Return which chats hold nothing that another one does not: the field that names it, by that of each."""
    chats = [(part, _marks(part)) for part in parts if part.is_chat]
    return {
        part.where: other.where
        for part, marks in chats
        for other, others in chats
        if part is not other and _is_within(part, marks, other, others)
    }


def _marks(part: Part) -> list[str]:
    return [fingerprint(message) for message in part.past.messages]


def _is_within(part: Part, marks: list[str], other: Part, others: list[str]) -> bool:
    """Return whether a chat is continued by another one, which has its answer as one of its messages."""
    past, count = part.past, len(marks)
    answered = past.answer_from is not None
    if len(others) < count + answered or marks != others[:count]:
        return False
    if not answered:
        return len(others) > count or other.past.answer_from is not None
    if others[count] == past.answer_fingerprints.get(count):
        return True
    tokens = part.record.distinct_tokens
    return common_tokens(tokens, other.record.distinct_tokens) >= len(tokens) - past.ended


# Refuse handoffs that cannot be joined, or that make more than their model takes.


def require_joinable(engine: LocalEngine, parts: Sequence[Part], continued: Mapping[str, str]) -> None:
    """Refuse handoffs that cannot be joined, before anything of them is read.

    Args:
        parts: at least two handoffs that the engine can continue, in the order in which they are joined.
        continued: from `continued_parts`; of these nothing is written.

    Raises:
        InvalidRequest: of one of them; `param` names it.
        ContextTooLong: all of them together are longer than the model's context.
    """
    first = parts[0]
    if first.where in continued:
        raise refused(first, f"'{continued[first.where]}' continues it: name that one first, or alone")
    written = [part for part in parts if part.where not in continued]
    for part in written[1:]:
        if part.record.latent_steps:
            raise refused(
                part, "it holds latent steps, which were computed behind its own context: put it first"
            )
        if (part.record.conversation is None) is not (first.record.conversation is None):
            raise refused(part, f"of it and '{first.where}' one is a chat and one a plain text")
        if part.begins_with_images:
            raise refused(part, "its model takes images only at the beginning of a context")
    for part in written if first.record.conversation is not None else ():
        if part.past.text_only:
            raise refused(part, "it is no chat that messages can follow")
        if part.past.after_text and part is not first:
            raise refused(part, "a text stands before its messages: put it first")
    _require_short(engine, written)


def _require_short(engine: LocalEngine, parts: Sequence[Part]) -> None:
    """Refuse what is too much whatever the parts share: these are the least that the joined context holds."""
    images, tokens, first = set[str](), 0, parts[0].record.distinct_tokens
    for part in parts:
        images |= {image.digest for image in part.record.images}
        if len(images) > engine.images.limit:
            raise _too_many_images(engine, len(images), part)
        own = part.record.distinct_tokens
        tokens += len(own) - (common_tokens(first, own) if part is not parts[0] else 0)
        if max(tokens, len(own)) >= engine.context_tokens:
            raise _too_long(engine, part)


def require_fit(engine: LocalEngine, parts: Sequence[Part], joined: JoinedContext) -> None:
    """Refuse a joined context that is more than its model takes.

    Args:
        parts: the handoffs, in the order in which they were joined.

    Raises:
        InvalidRequest: it holds too many images; `param` names the part that brings the first one too many.
        ContextTooLong: it is too long; `param` names the part that passes the end.
    """
    if len(joined.images) > (most := engine.images.limit):
        raise _too_many_images(engine, len(joined.images), joined.part_at(parts, joined.images[most].offset))
    if len(joined.tokens) >= engine.context_tokens:  # a token of an answer must fit too
        raise _too_long(engine, joined.part_at(parts, engine.context_tokens - 1))


def _too_long(engine: LocalEngine, part: Part) -> ContextTooLong:
    return ContextTooLong(
        f"{part.where}: the joined contexts fill this model's context of {engine.context_tokens} tokens; "
        "join fewer.",
        param=part.where,
    )


def _too_many_images(engine: LocalEngine, images: int, part: Part) -> InvalidRequest:
    return InvalidRequest(
        f"{part.where}: the joined contexts hold at least {images} images; the model '{engine.name}' takes "
        f"at most {engine.images.limit}.",
        param=part.where,
    )


async def join(
    engine: LocalEngine, context: RequestContext, parts: Sequence[Part], continued: Collection[str]
) -> JoinedContext:
    """Join the contexts of several handoffs, in this order.

    Args:
        parts: handoffs that `require_joinable` has found nothing wrong with, with their images.
        continued: the fields that name those of which nothing is written, from `continued_parts`.

    Raises:
        BatonError: the contexts cannot be joined; `param` names the part.
    """
    if parts[0].record.conversation is None:
        return await _joined_texts(EngineText(engine, context), parts)
    return await _joined_chats(engine, context, parts, continued)


async def _joined_texts(text: EngineText, parts: Sequence[Part]) -> JoinedContext:
    first = parts[0].record
    shared = min(common_tokens(first.distinct_tokens, part.record.distinct_tokens) for part in parts[1:])
    shared = await text.begin_of_line(first.tokens, shared, whole=[len(part.record.tokens) for part in parts])
    begin = await text.begin_tokens()
    tokens, images, ends = list(first.tokens), list(parts[0].images), [len(first.tokens)]
    for part in parts[1:]:
        theirs = part.record.tokens
        skipped = shared or (len(begin) if list(theirs[: len(begin)]) == begin else 0)
        own = [image for image in part.images if image.offset >= skipped]
        images += shift_images(own, len(tokens) - skipped)
        tokens += theirs[skipped:]
        ends.append(len(tokens))
    return JoinedContext(tokens, images, None, ends)


async def _joined_chats(
    engine: LocalEngine, context: RequestContext, parts: Sequence[Part], continued: Collection[str]
) -> JoinedContext:
    first = parts[0]
    shared = await _shared(engine, context, [part for part in parts if part.where not in continued])
    joined = JoinedContext(
        list(first.record.tokens), list(first.images), first.past, [len(first.record.tokens)]
    )
    for part in parts[1:]:
        if part.past.template != first.past.template:
            raise refused(part, f"its tools or template settings are not those of '{first.where}'")
        if part.where in continued:
            joined.ends.append(len(joined.tokens))
            continue
        with _naming(part):
            own = part.past.messages[shared:]
            joined = await _with_chat(engine, context, joined.as_record(first.record), joined, part, own)
    return joined


async def _shared(engine: LocalEngine, context: RequestContext, parts: Sequence[Part]) -> int:
    """Return the number of messages that are written once: those that all chats begin with.

    What a chat has behind them may be its answer alone, to the question that they end with. That question is
    written again before it, unless only other answers to it stand between and the template takes several.
    """
    shared = await in_own_thread(shared_messages, parts)
    answers = [part.past.answer_from is not None and not part.past.messages[shared:] for part in parts]
    if not any(answers[1:]):
        return shared
    messages, answer = parts[0].past.messages[:shared], {"role": "assistant", "content": "1"}
    last = len(parts) - 1 - answers[::-1].index(True)
    if all(answers[:last]) and await EngineText(engine, context).can_render(
        [*messages, answer, answer], parts[0].past.template
    ):
        return shared
    asked = [index for index, message in enumerate(messages) if message.get("role") == "user"]
    return asked[-1] if asked else shared


async def _with_chat(
    engine: LocalEngine,
    context: RequestContext,
    before: Handoff,
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


@contextmanager
def _naming(part: Part) -> Iterator[None]:
    """Name the part in errors that are raised inside."""
    try:
        yield
    except TemplateUnsupported:
        message = f"{part.where}: the model's chat template cannot write its conversation after the others'."
        raise TemplateUnsupported(message, param=part.where) from None
    except BatonError as error:
        error.message, error.param = f"{part.where}: {error.message}", part.where
        raise
