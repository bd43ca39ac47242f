"""A chat that starts from a handoff: which token ids its new messages add.

They are what the model's own template writes after what was said, and nothing else: no turn lost or
doubled, no second system prompt. That holds only where the template writes the past the same way
whatever follows it, so that is looked at, and everything else refused.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from baton.engines.port import Engine, Json, Operation, PlacedImage, WholeReply
from baton.errors import GenerationFailed, ImagesMisplaced, InvalidRequest, TemplateUnsupported
from baton.handoffs.history import has_answer, resent
from baton.handoffs.image_parts import count_images, moved, named
from baton.handoffs.record import Conversation, HandoffRecord
from baton.images.client_image import ClientImage
from baton.telemetry.ids import RequestContext

TEMPLATE_FIELDS = (
    "tools",
    "tool_choice",
    "documents",
    "chat_template_kwargs",
    "reasoning_effort",
)
"""Fields of a chat request that decide how the template writes its messages."""
AFTER_THE_PROMPT = 0
"""Stands for where an answer begins while the prompt's tokens are not known yet."""
MAX_BYTES = 1024 * 1024
"""Of a conversation's messages; with more it goes on as plain text only."""
MAX_OVERLAP = 8
"""Tokens that end a turn: few."""


@dataclass(frozen=True)
class Chat:
    """A chat request's whole prompt, and the conversation it is then.

    Attributes:
        tokens: every token id of the prompt.
        conversation: what it is as messages; the answer, if one follows, begins after the tokens.
        images: the images that the tokens stand for, in order.
        resent: how many of the request's messages were the handoff's own, and are not written again.
    """

    tokens: list[int]
    conversation: Conversation
    images: list[PlacedImage] = field(default_factory=list)
    resent: int = 0


def template_of(body: Json) -> Json:
    """The fields of a chat request that decide how its messages are written."""
    return {field: body[field] for field in TEMPLATE_FIELDS if body.get(field) is not None}


def conversation_of(body: Json, answer_from: int | None) -> Conversation | None:
    """A chat request as a conversation; None: it is none, which the engine will say."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return None
    return _kept(messages, template_of(body), answer_from)


def _kept(
    messages: list[Json], template: Json, answer_from: int | None, told: Mapping[int, str] | None = None
) -> Conversation:
    """A conversation to be remembered; of one that is too large only that it was one."""
    weight = _weight([messages, template])
    if weight > MAX_BYTES:
        return Conversation(messages=[], torn=True)
    return Conversation(
        messages=messages,
        template=template,
        answer_from=answer_from,
        told=dict(told or {}),
        weight=weight,
    )


def _weight(value: object) -> int:
    """About how many bytes a JSON value takes; counts on only until it is too much."""
    weight, open_values = 0, [value]
    while open_values and weight <= MAX_BYTES:
        current = open_values.pop()
        weight += 16 + (len(current) if isinstance(current, str) else 0)
        if isinstance(current, dict):
            open_values += [*current.keys(), *current.values()]
        elif isinstance(current, list):
            open_values += current
    return weight


def with_text(past: Conversation | None) -> Conversation | None:
    """A conversation that plain text follows: more of the open answer, or the end of all turns."""
    if past is None:
        return None
    if past.answer_from is not None and not past.ended:  # what its client was given is not all of it any more
        told = {index: form for index, form in past.told.items() if index < len(past.messages)}
        return past.model_copy(update={"told": told})
    return past.model_copy(update={"torn": True})


class Writer:
    """Writes conversations in one engine's words.

    Args:
        engine: whose template and tokenizer.
        context: of the request this is done for.
        client_images: the images in the request's messages, in order.
    """

    def __init__(
        self, engine: Engine, context: RequestContext, client_images: Sequence[ClientImage] = ()
    ) -> None:
        self._engine = engine
        self._context = context
        self.client_images = client_images

    async def begun(self, body: Json, *, answered: bool, begins: bool = True) -> Chat:
        """A chat that starts from nothing.

        Args:
            body: of the request.
            answered: the model is to answer; else the conversation rests after the last message.
            begins: nothing at all stands before it.
        """
        messages, template = _messages(body), template_of(body)
        text = await self._text(messages, template, answered)
        tokens = await self._tokenized(text, special=bool(body.get("add_special_tokens")))
        tokens, images = await self._placed(tokens, begins=begins)
        return Chat(tokens, _conversation(messages, template, tokens, answered), images)

    async def continued(
        self, source: HandoffRecord, seen: list[PlacedImage], body: Json, *, answered: bool
    ) -> Chat:
        """Write a chat that goes on from a handoff; messages of its own that come again are left out.

        Args:
            source: the handoff.
            seen: the images of its context.
            body: of the request.
            answered: as for `begun`.

        Raises:
            TemplateUnsupported: the template cannot write what follows without rewriting what was said.
            InvalidRequest: the messages repeat a part of the handoff's conversation.
        """
        messages = _messages(body)
        past = source.conversation
        if past is None:
            return await self._after_text(source, seen, body, answered=answered)
        if past.torn:
            raise TemplateUnsupported()
        again = await self._resent(source, past, messages)
        new, client_images = messages[again:], self.client_images[count_images(messages[:again]) :]
        writer = Writer(self._engine, self._context, client_images)
        template = past.template | template_of(body)
        chat = await writer._after_chat(source, past, new, template, answered=answered)
        return replace(chat, images=[*seen, *chat.images], resent=again)

    async def _resent(self, source: HandoffRecord, past: Conversation, messages: list[Json]) -> int:
        """How many of the messages are the handoff's own conversation."""
        answer = None
        if past.answer_from is not None and has_answer(messages):
            tokens = source.tokens[past.answer_from :]
            answer = await self._words(list(tokens[:-1] if past.ended else tokens))
        return await asyncio.to_thread(resent, past, messages, answer)

    async def _after_chat(
        self,
        source: HandoffRecord,
        past: Conversation,
        messages: list[Json],
        template: Json,
        *,
        answered: bool,
    ) -> Chat:
        """New messages after a handoff that is a chat, with their own images only."""
        said: list[Json] = []
        if past.answer_from is None:
            base = await self._text(past.messages, past.template, False)
            text = await self._rest(base, [*past.messages, *messages], template, answered)
            own, images = await self._placed(await self.tokens(text))
            tokens, images = [*source.tokens, *own], moved(images, len(source.tokens))
        else:
            tokens, images, said = await self._after_answer(source, past, messages, template, answered)
        everything = [*past.messages, *said, *messages]
        return Chat(tokens, _conversation(everything, template, tokens, answered, past.told), images)

    async def plain(
        self, prompt: str | list[int], *, special: bool, after: int = 0
    ) -> tuple[list[int], list[PlacedImage]]:
        """The token ids of a plain prompt, and its images where they stand in it.

        Args:
            prompt: has a place for each image, as the model's prompts mark them.
            special: add the tokens that a text begins with.
            after: so many tokens stand before it.

        Raises:
            ImagesMisplaced: it has not one place for each image.
        """
        tokens = await self._tokenized(prompt, special=special) if isinstance(prompt, str) else prompt
        try:
            tokens, images = await self._placed(tokens, begins=not after)
        except ImagesMisplaced:
            raise self._misplaced() from None
        return tokens, moved(images, after)

    def _misplaced(self) -> ImagesMisplaced:
        marks = " or ".join(f"'{text}'" for text in self._engine.images.texts) or "a token of the model's own"
        return ImagesMisplaced(
            f"prompt: it must have one place for each of its images, {len(self.client_images)} here. Images "
            f"stand where {marks} does, once for each; a model without such a token takes them at its "
            "beginning.",
            param="prompt",
        )

    async def tokens(self, text: str) -> list[int]:
        """The token ids of a text, nothing added to them."""
        return await self._tokenized(text, special=False)

    async def _after_text(
        self, source: HandoffRecord, seen: list[PlacedImage], body: Json, *, answered: bool
    ) -> Chat:
        """The first messages after a context that was never a chat."""
        chat = await self.begun(body, answered=answered, begins=False)
        start = await self._tokenized("", special=True)
        added = chat.tokens
        if start and added[: len(start)] == start and list(source.tokens[: len(start)]) == start:
            added = added[len(start) :]  # a text begins once
        tokens = [*source.tokens, *added]
        said = chat.conversation
        images = [*seen, *moved(chat.images, len(tokens) - len(chat.tokens))]
        return Chat(tokens, _conversation(said.messages, said.template, tokens, answered), images)

    async def _after_answer(
        self, source: HandoffRecord, past: Conversation, messages: list[Json], template: Json, answered: bool
    ) -> tuple[list[int], list[PlacedImage], list[Json]]:
        """The prompt with the assistant's turn closed and the new messages after it; the images of those,
        and that turn's message.

        The token that ended the answer goes, for the template writes the turn's end itself.
        """
        base = await self._text(past.messages, past.template, True)
        mark = secrets.token_hex(16)
        marked = [*past.messages, {"role": "assistant", "content": mark}, *messages]
        before, found, after = (await self._rest(base, marked, template, answered)).partition(mark)
        if before or not found:
            raise TemplateUnsupported()
        added, images = await self._placed(await self.tokens(after))
        tokens = list(source.tokens[:-1] if past.ended else source.tokens)
        ended = _overlap(tokens[past.answer_from :], added)
        answer = await self._words(tokens[past.answer_from : len(tokens) - ended])
        said = [{"role": "assistant", "content": answer}]
        if answer.strip():
            whole = await self._rest(base, [*past.messages, *said, *messages], template, answered)
            if not whole.endswith(after) or whole.removesuffix(after).strip() != answer.strip():
                raise TemplateUnsupported()
        if images and images[0].offset < ended:
            raise TemplateUnsupported()
        return [*tokens, *added[ended:]], moved(images, len(tokens) - ended), said

    async def _placed(
        self, tokens: list[int], *, begins: bool = False
    ) -> tuple[list[int], list[PlacedImage]]:
        """The token ids of the request's own messages, with their images in them."""
        if not self.client_images:
            return tokens, []
        return await self._engine.place(tokens, self.client_images, begins=begins)

    async def _rest(self, base: str, messages: list[Json], template: Json, answered: bool) -> str:
        """What the template writes after `base`, which must come out as it was."""
        whole = await self._text(messages, template, answered)
        if not whole.startswith(base):
            raise TemplateUnsupported()
        return whole.removeprefix(base)

    async def _text(self, messages: list[Json], template: Json, answered: bool) -> str:
        body = {"model": self._engine.name, "messages": messages, "add_generation_prompt": answered}
        return await self._engine.render(template | body)

    async def _tokenized(self, text: str, *, special: bool) -> list[int]:
        body = {"model": self._engine.name, "prompt": text, "add_special_tokens": special}
        if not text and not special:
            return []
        found: list[int] = (await self._asked(Operation.TOKENIZE, body))["tokens"]
        return found

    async def _words(self, tokens: list[int]) -> str:
        said = [token for token in tokens if token != self._engine.placeholder]  # what was thought is no word
        if not said:
            return ""
        body = {"model": self._engine.name, "tokens": said}
        return str((await self._asked(Operation.DETOKENIZE, body))["prompt"])

    async def _asked(self, operation: Operation, body: Json) -> Json:
        reply = await self._engine.call(operation, body, self._context)
        if not isinstance(reply, WholeReply):
            raise GenerationFailed()
        answer: Json = json.loads(reply.body)
        return answer


def _messages(body: Json) -> list[Json]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise InvalidRequest("messages: Input should be a list of messages", param="messages")
    if not messages:
        raise InvalidRequest("messages: There must be at least one", param="messages")
    return named(messages)


def _conversation(
    messages: list[Json],
    template: Json,
    tokens: list[int],
    answered: bool,
    told: Mapping[int, str] | None = None,
) -> Conversation:
    return _kept(messages, template, len(tokens) if answered else None, told)


def _overlap(said: list[int], added: list[int]) -> int:
    """How many tokens the end of what was said and the beginning of what is added share."""
    longest = min(len(said), len(added), MAX_OVERLAP)
    return next((count for count in range(longest, 0, -1) if said[-count:] == added[:count]), 0)
