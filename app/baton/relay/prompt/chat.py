"""Write the whole prompt of a request: a chat from its messages, or after the context that it continues."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from baton.admission.fair_threads import in_own_thread
from baton.engines.backend import Json, Operation
from baton.engines.engine import LocalEngine
from baton.errors import ImagesMisplaced, InvalidRequest, OperationUnsupported, TemplateUnsupported
from baton.images.image import ClientImage, PlacedImage
from baton.library.handoff import Conversation, Handoff
from baton.relay.asked import WRITTEN_BY_THE_ENGINE
from baton.relay.prompt.resent import Resent, has_answer, resent
from baton.relay.prompt.text import EngineText, count_images, shift_images, with_image_refs
from baton.telemetry.ids import RequestContext
from baton_latent.contract import prepare_latent_prompt

# Convert a chat request's messages into the conversation that a handoff's record stores.


TEMPLATE_FIELDS = (
    "tools",
    "tool_choice",
    "documents",
    "chat_template_kwargs",
    "reasoning_effort",
)
"""Fields of a chat request that decide how the template writes its messages."""
AFTER_THE_PROMPT = 0
"""Value of `Conversation.answer_from` while the prompt's tokens are not known yet."""
MAX_BYTES = 1024 * 1024
"""Largest conversation that is stored; a handoff with a larger one can only be continued as plain text."""


def template_of(body: Json) -> Json:
    """Return the fields of a chat request that decide how its messages are written."""
    return {field: body[field] for field in TEMPLATE_FIELDS if body.get(field) is not None}


def conversation_of(body: Json, answer_from: int | None) -> Conversation | None:
    """Return a chat request as a conversation; None: its messages are invalid, and the engine refuses."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return None
    return conversation_from(messages, template_of(body), answer_from)


def conversation_from(
    messages: list[Json],
    template: Json,
    answer_from: int | None,
    fingerprints: Mapping[int, str] | None = None,
) -> Conversation:
    """Return messages as a conversation; one that is too large is marked as `text_only`.

    Args:
        messages: the messages, without the answer that may follow.
        template: from `template_of`.
        answer_from: index of the answer's first token; None: no answer follows.
        fingerprints: of the answers among the messages, as their clients received them.
    """
    weight = _weight([messages, template])
    if weight > MAX_BYTES:
        return Conversation(messages=[], text_only=True)
    return Conversation(
        messages=messages,
        template=template,
        answer_from=answer_from,
        answer_fingerprints=dict(fingerprints or {}),
        weight=weight,
    )


def with_text(past: Conversation | None) -> Conversation | None:
    """Return a conversation after plain text was added: to its open answer, or after its last turn."""
    if past is None:
        return None
    if past.answer_from is not None and not past.ended:  # the answer is longer than what its client received
        fingerprints = {
            index: found for index, found in past.answer_fingerprints.items() if index < len(past.messages)
        }
        return past.model_copy(update={"answer_fingerprints": fingerprints})
    return past.model_copy(update={"text_only": True})


def _weight(value: object) -> int:
    """Return about how many bytes a JSON value takes; counting stops above `MAX_BYTES`."""
    weight, open_values = 0, [value]
    while open_values and weight <= MAX_BYTES:
        current = open_values.pop()
        weight += 16 + (len(current) if isinstance(current, str) else 0)
        if isinstance(current, dict):
            open_values += [*current.keys(), *current.values()]
        elif isinstance(current, list):
            open_values += current
    return weight


# Write the prompt of a chat: from its messages alone, or as the continuation of a handoff.
#
# A chat that continues a handoff adds what the model's own template writes after the handoff's messages. So
# no turn is lost or doubled, and there is no second system prompt. Where the template writes the earlier
# messages in another way once others follow them, or the request holds a changed conversation, the whole
# prompt is written again from its messages: KV is loaded for what it shares with the handoff, the rest is
# computed.


TRIMMED = 8
"""Most tokens at an answer's end that are looked at one by one where the template trims the answer."""


@dataclass(frozen=True)
class Chat:
    """A chat request's whole prompt, and the conversation that it holds.

    Attributes:
        tokens: every token id of the prompt.
        conversation: its messages; the answer, if one follows, begins after the tokens.
        images: the images that the tokens stand for, in order.
        resent: number of the request's messages that repeat the handoff's, and were not written again.
    """

    tokens: list[int]
    conversation: Conversation
    images: list[PlacedImage] = field(default_factory=list)
    resent: int = 0


class Writer:
    """Writes prompts with one engine's template and tokenizer.

    Args:
        context: the request that the prompt is written for.
        client_images: the images in the request's messages, in order.
        joined: whether the contexts that are continued are several handoffs', which one client's messages do
            not hold, so that they are never written again from these.
    """

    def __init__(
        self,
        engine: LocalEngine,
        context: RequestContext,
        client_images: Sequence[ClientImage] = (),
        *,
        joined: bool = False,
    ) -> None:
        self.engine = engine
        self._context = context
        self._text = EngineText(engine, context)
        self.client_images = client_images
        self.joined = joined

    async def write_chat(self, body: Json, *, answered: bool, begins: bool = True) -> Chat:
        """Write a chat that continues no handoff.

        Args:
            answered: the model answers it; otherwise the context ends with the last message.
        """
        messages, template = _messages(body), template_of(body)
        text = await self._text.render(messages, template, answered)
        tokens = await self._text.tokenize(text, special=bool(body.get("add_special_tokens")))
        tokens, images = await self._place_images(tokens, begins=begins)
        return Chat(tokens, _conversation(messages, template, tokens, answered), images)

    async def continue_chat(
        self, source: Handoff, seen: list[PlacedImage], body: Json, *, answered: bool
    ) -> Chat:
        """Write a chat that continues a handoff; messages that repeat the handoff's are left out.

        Args:
            answered: as for `write_chat`.

        Raises:
            TemplateUnsupported: the handoff's messages are not known, or would have to be written in another
                way although it holds images or latent steps.
            InvalidRequest: the messages repeat only a part from the middle of the handoff's conversation.
        """
        messages = _messages(body)
        past = source.conversation
        if past is None:
            return await self._after_text(source, seen, body, answered=answered)
        if past.text_only:
            raise TemplateUnsupported()
        again = await self._resent(source, past, messages)
        whole = body | past.template | template_of(body)
        if again.changed and self.joined:
            raise InvalidRequest(
                "messages: they hold a part of the joined conversations, which the contexts hold already: "
                "send the new messages only.",
                param="messages",
            )
        if again.changed:
            return await self._write_again(source, body, again, answered=answered)
        new = messages[again.messages :]
        client_images = self.client_images[count_images(messages[: again.messages]) :]
        writer = Writer(self.engine, self._context, client_images)
        try:
            chat = await writer.after(source, past, new, template_of(whole), answered=answered)
        except TemplateUnsupported:
            if again.messages and not self.joined:
                return await self._write_again(source, whole, again, answered=answered)
            if seen or self.joined:  # images would have to be read again in their places
                raise
            said = await self._last_answer(source, past)
            whole |= {"messages": [*past.messages, *said, *body["messages"]]}
            chat = await self._write_again(source, whole, again, answered=answered)
            known = {"answer_fingerprints": past.answer_fingerprints}
            return replace(chat, conversation=chat.conversation.model_copy(update=known))
        return replace(chat, images=[*seen, *chat.images], resent=again.messages)

    async def _write_again(self, source: Handoff, body: Json, again: Resent, *, answered: bool) -> Chat:
        """Write a whole conversation from its messages, which shares a prefix with the handoff at most."""
        past = source.conversation
        if source.latent_steps or (past is not None and past.after_text):
            raise TemplateUnsupported()
        return replace(await self.write_chat(body, answered=answered), resent=again.messages)

    async def _last_answer(self, source: Handoff, past: Conversation) -> list[Json]:
        """Return the answer that ends a handoff's context as a message; none if a message ends it."""
        if past.answer_from is None:
            return []
        tokens = source.tokens[past.answer_from :]
        content = await self._text.detokenize(list(tokens[:-1] if past.ended else tokens))
        return [{"role": "assistant", "content": content}]

    async def said(self, source: Handoff) -> tuple[list[Json], str | None]:
        """Return the messages of a handoff's context, its last answer too, and its text if that is more."""
        past = source.conversation
        if past is None or past.text_only:
            return [], await self._text.detokenize(source.tokens)
        text = await self._text.detokenize(source.tokens) if past.after_text else None
        return [*past.messages, *await self._last_answer(source, past)], text

    async def plain(
        self, prompt: str | list[int], *, special: bool, after: int = 0
    ) -> tuple[list[int], list[PlacedImage]]:
        """Return the token ids of a prompt without messages, and its images where they stand in it.

        Args:
            prompt: text or token ids, with one placeholder for each image.
            special: add the tokens that a text begins with.
            after: number of tokens before it.

        Raises:
            ImagesMisplaced: the prompt does not have one placeholder for each image.
        """
        tokens = await self._text.tokenize(prompt, special=special) if isinstance(prompt, str) else prompt
        try:
            tokens, images = await self._place_images(tokens, begins=not after)
        except ImagesMisplaced:
            raise self._misplaced() from None
        return tokens, shift_images(images, after)

    async def _resent(self, source: Handoff, past: Conversation, messages: list[Json]) -> Resent:
        """Compare the messages with the handoff's conversation."""
        said = await self._last_answer(source, past) if has_answer(messages) else []
        answer = said[0]["content"] if said else None
        return await in_own_thread(resent, past, messages, answer)

    async def after(
        self,
        source: Handoff,
        past: Conversation,
        messages: list[Json],
        template: Json,
        *,
        answered: bool,
    ) -> Chat:
        """Write new messages after a context that is a chat; returns only their own images.

        Args:
            template: from `template_of`.
            answered: as for `write_chat`.

        Raises:
            TemplateUnsupported: the template writes the context in another way once messages follow.
        """
        answer: list[Json] = []
        if past.answer_from is None:
            base = await self._text.render(past.messages, past.template, False)
            text = await self._suffix(base, [*past.messages, *messages], template, answered)
            own, images = await self._place_images(await self._text.tokenize(text))
            tokens, images = [*source.tokens, *own], shift_images(images, len(source.tokens))
        else:
            tokens, images, answer = await self._after_answer(source, past, messages, template, answered)
        everything = [*past.messages, *answer, *messages]
        conversation = _conversation(everything, template, tokens, answered, past.answer_fingerprints)
        conversation = conversation.model_copy(update={"after_text": past.after_text})
        return Chat(tokens, conversation, images)

    async def _after_text(
        self, source: Handoff, seen: list[PlacedImage], body: Json, *, answered: bool
    ) -> Chat:
        """Write the first messages after a context that is not a chat."""
        chat = await self.write_chat(body, answered=answered, begins=False)
        start = await self._text.begin_tokens()
        added = chat.tokens
        if start and added[: len(start)] == start and list(source.tokens[: len(start)]) == start:
            added = added[len(start) :]  # the handoff's context has these tokens already
        tokens = [*source.tokens, *added]
        new = chat.conversation
        images = [*seen, *shift_images(chat.images, len(tokens) - len(chat.tokens))]
        conversation = _conversation(new.messages, new.template, tokens, answered)
        return Chat(tokens, conversation.model_copy(update={"after_text": True}), images)

    async def _after_answer(
        self, source: Handoff, past: Conversation, messages: list[Json], template: Json, answered: bool
    ) -> tuple[list[int], list[PlacedImage], list[Json]]:
        """Close the assistant's turn and write the new messages after it.

        Returns:
            The prompt's tokens, the images of the new messages, and the assistant's message.
        """
        base = await self._text.render(past.messages, past.template, True)
        mark = secrets.token_hex(16)
        marked = [*past.messages, {"role": "assistant", "content": mark}, *messages]
        before, found, after = (await self._suffix(base, marked, template, answered)).partition(mark)
        if before or not found:
            raise TemplateUnsupported()
        added, images = await self._place_images(await self._text.tokenize(after))
        tokens = list(source.tokens[:-1] if past.ended else source.tokens)
        said = await self._text.detokenize(tokens[past.answer_from :])
        answer = [{"role": "assistant", "content": said}]
        if said.strip():
            whole = await self._suffix(base, [*past.messages, *answer, *messages], template, answered)
            written = whole.removesuffix(after)
            if not whole.endswith(after) or written.strip() != said.strip():
                raise TemplateUnsupported()
            if written != said:
                tokens = await self._trimmed(tokens, past.answer_from or 0, written)
        return [*tokens, *added], shift_images(images, len(tokens)), answer

    async def _trimmed(self, tokens: list[int], begin: int, written: str) -> list[int]:
        """Return a context whose answer, from the token `begin` on, is as the template writes it."""
        for count in range(len(tokens), max(begin, len(tokens) - TRIMMED), -1):
            said = await self._text.detokenize(tokens[begin:count])
            if written.startswith(said):
                return [*tokens[:count], *await self._text.tokenize(written.removeprefix(said))]
        return [*tokens[:begin], *await self._text.tokenize(written)]

    def _misplaced(self) -> ImagesMisplaced:
        marks = " or ".join(f"'{text}'" for text in self.engine.images.texts)
        return ImagesMisplaced(
            "prompt: it must have one placeholder for each image of 'images' "
            f"({len(self.client_images)} in this request). The placeholder is "
            f"{marks or 'a token of the model'}; "
            "a model without one takes the images at the beginning of the prompt.",
            param="prompt",
        )

    async def _place_images(
        self, tokens: list[int], *, begins: bool = False
    ) -> tuple[list[int], list[PlacedImage]]:
        """Return the token ids of the request's own messages with their images in place."""
        if not self.client_images:
            return tokens, []
        return await self.engine.place(tokens, self.client_images, begins=begins)

    async def _suffix(self, base: str, messages: list[Json], template: Json, answered: bool) -> str:
        """Cut the text that the template adds to `base`, which it must write unchanged before it."""
        whole = await self._text.render(messages, template, answered)
        if not whole.startswith(base):
            raise TemplateUnsupported()
        return whole.removeprefix(base)


def _messages(body: Json) -> list[Json]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise InvalidRequest("messages: it must be a list of messages, each a JSON object.", param="messages")
    if not messages:
        raise InvalidRequest("messages: there must be at least one message.", param="messages")
    return with_image_refs(messages)


def _conversation(
    messages: list[Json],
    template: Json,
    tokens: list[int],
    answered: bool,
    fingerprints: Mapping[int, str] | None = None,
) -> Conversation:
    return conversation_from(messages, template, len(tokens) if answered else None, fingerprints)


@dataclass(frozen=True)
class ContextPrompt:
    """A prompt with its images and its conversation.

    Attributes:
        tokens: every token id; None: the engine makes them from the request's body.
        images: the images that the tokens stand for, in order.
        conversation: its messages, if it is a chat.
        saved_tokens: number of tokens that are saved when the answer is not; None: all.
        resent: number of the request's messages that repeat the handoff's, and were not written again.
    """

    tokens: list[int] | None = None
    images: list[PlacedImage] = field(default_factory=list)
    conversation: Conversation | None = None
    saved_tokens: int | None = None
    resent: int = 0

    def with_latent_steps(self, steps: int, placeholder: int | None) -> ContextPrompt:
        """Return the prompt with the placeholders of latent steps after it.

        Args:
            steps: number of steps, at least one.
            placeholder: token id of a step.

        Raises:
            InvalidRequest: the prompt is empty.
        """
        assert placeholder is not None  # see `require_latent`
        if not self.tokens:
            raise InvalidRequest(
                "prompt: latent steps need a prompt of at least one token before them.", param="prompt"
            )
        conversation = self.conversation
        if conversation is not None and conversation.answer_from == len(self.tokens):
            conversation = conversation.model_copy(update={"answer_from": len(self.tokens) + steps})
        tokens = prepare_latent_prompt(self.tokens, steps, placeholder)
        return replace(self, tokens=tokens, conversation=conversation)


async def write_prompt(
    writer: Writer,
    source: Handoff | None,
    seen: list[PlacedImage],
    operation: Operation,
    body: Json,
    *,
    prompt_only: bool,
    latent: bool,
    answered: bool = True,
) -> ContextPrompt:
    """Write the whole prompt of a request, unless the engine makes the same one from the body.

    Args:
        answered: an answer follows; otherwise the context ends with the last message.

    Raises:
        BatonError: the request cannot continue the handoff.
    """
    if operation in WRITTEN_BY_THE_ENGINE:
        return _written_by_the_engine(source)
    if operation is Operation.COMPLETIONS:
        return await _completion(writer, source, seen, body, written=latent or not answered)
    if not answered:
        return _of_chat(await _chat(writer, source, seen, body, answered=False))
    if source is not None and source.cut_off and body.get("messages") in (None, []):
        return _gone_on(writer, source, seen, body)
    if source is None and not (prompt_only or latent or writer.client_images):
        return ContextPrompt(
            conversation=conversation_of(body, AFTER_THE_PROMPT)
        )  # the engine writes it, as for every other chat
    prompt = _of_chat(await _chat(writer, source, seen, body, answered=True))
    if prompt_only and not latent:  # the placeholders of latent steps must follow the whole prompt
        return await _without_answer(prompt, writer, source, seen, body)
    return prompt


def _gone_on(writer: Writer, source: Handoff, seen: list[PlacedImage], body: Json) -> ContextPrompt:
    """Go on with the answer of a chat that a drain ended.

    Raises:
        InvalidRequest: it is not of a chat, or several contexts are joined.
        OperationUnsupported: the model's thoughts are told apart from its words.
    """
    past = source.conversation
    if past is None or past.answer_from is None or past.ended or past.text_only or writer.joined:
        raise InvalidRequest(
            "messages: there must be at least one message, as the handoff is no chat's alone: what a drain "
            "ended goes on by the same route.",
            param="messages",
        )
    if tells_thoughts(writer.engine):
        raise OperationUnsupported(
            "messages: an answer of this model cannot go on, as its thoughts are told apart from its words: "
            "send a message.",
            param="messages",
        )
    body["messages"] = past.messages  # vLLM wants some; the prompt is of token ids
    return ContextPrompt(list(source.tokens), list(seen), with_text(past))


def tells_thoughts(engine: LocalEngine) -> bool:
    """Whether an engine tells thoughts apart from words, which it could not of an answer in two parts."""
    return any("reasoning" in (card.get("capabilities") or ()) for card in engine.cards())


def _written_by_the_engine(source: Handoff | None) -> ContextPrompt:
    """Leave the prompt to the engine: it is what the request says, and KV is of use for what they share."""
    if source is not None and source.latent_steps:
        raise InvalidRequest(
            "Handoffs with latent steps are for /v1/completions and /v1/chat/completions: use one of these.",
            param="handoff",
        )
    # Its messages are not known in the form that chats have, so that no chat can continue it.
    return ContextPrompt(conversation=Conversation(messages=[], text_only=True))


async def _completion(
    writer: Writer, source: Handoff | None, seen: list[PlacedImage], body: Json, *, written: bool
) -> ContextPrompt:
    prompt = body.get("prompt") or ""
    if source is not None:
        if source.positions:
            raise InvalidRequest(
                "The handoff holds images that came by /v1/messages or /v1/responses and keeps none of them: "
                "continue it there.",
                param="handoff.from",
            )
        own, images = await writer.plain(prompt, special=False, after=len(source.tokens))
        conversation = with_text(source.conversation)
        return ContextPrompt([*source.tokens, *own], [*seen, *images], conversation)
    if not (written or writer.client_images):
        return ContextPrompt()
    special = body.get("add_special_tokens") is not False
    return ContextPrompt(*await writer.plain(prompt, special=special))


async def _chat(
    writer: Writer, source: Handoff | None, seen: list[PlacedImage], body: Json, *, answered: bool
) -> Chat:
    if source is None:
        return await writer.write_chat(body, answered=answered)
    return await writer.continue_chat(source, seen, body, answered=answered)


def _of_chat(chat: Chat) -> ContextPrompt:
    return ContextPrompt(chat.tokens, chat.images, chat.conversation, resent=chat.resent)


async def _without_answer(
    prompt: ContextPrompt, writer: Writer, source: Handoff | None, seen: list[PlacedImage], body: Json
) -> ContextPrompt:
    """End the saved context after the last message, if that is a prefix of the prompt."""
    unanswered = await _chat(writer, source, seen, body, answered=False)
    if prompt.tokens is None or prompt.tokens[: len(unanswered.tokens)] != unanswered.tokens:
        return prompt
    return replace(prompt, saved_tokens=len(unanswered.tokens), conversation=unanswered.conversation)
