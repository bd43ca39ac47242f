"""Join several handoffs into one context, which a request continues as if it were one handoff's.

Contexts of plain text are joined as token ids: the lines that all begin with, then the rest of each. Chats
are joined as conversations: the messages that all begin with, then the other messages and the answer of each,
as the model's template writes them one after another. The joined token ids alone decide the answer: the first
handoff's KV is loaded, the rest is computed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from baton.admission.fair_threads import in_own_thread
from baton.engines.port import Engine, Json
from baton.errors import BatonError, InvalidRequest, TemplateUnsupported
from baton.handoffs.joins.overlap import shared_messages
from baton.handoffs.joins.parts import JoinedContext, Part, refused
from baton.handoffs.prompts.conversation import Writer
from baton.handoffs.prompts.engine_text import EngineText
from baton.handoffs.prompts.image_refs import count_images, shift_images
from baton.handoffs.records.prefix_index import shared_tokens
from baton.handoffs.records.record import HandoffRecord
from baton.telemetry.ids import RequestContext


async def join(
    engine: Engine, context: RequestContext, parts: Sequence[Part], continued: Collection[str]
) -> JoinedContext:
    """Join the contexts of several handoffs, in this order.

    Args:
        engine: the engine that will compute the context.
        context: the request that it is joined for.
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
    shared = min(shared_tokens(first.distinct_tokens, part.record.distinct_tokens) for part in parts[1:])
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
    engine: Engine, context: RequestContext, parts: Sequence[Part], continued: Collection[str]
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


async def _shared(engine: Engine, context: RequestContext, parts: Sequence[Part]) -> int:
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
