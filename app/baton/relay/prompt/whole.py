"""Write the whole prompt of a request."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from baton.engines.backend import Json, Operation
from baton.errors import InvalidRequest
from baton.images.placed_image import PlacedImage
from baton.library.handoff import Conversation, Handoff
from baton.relay.asked import WRITTEN_BY_THE_ENGINE
from baton.relay.prompt.chat import AFTER_THE_PROMPT, Chat, Writer, conversation_of, with_text
from baton_latent.contract import prepare_latent_prompt


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
        writer: writes with the engine's template and tokenizer.
        source: the handoff that the request continues.
        seen: the images of that handoff's context.
        operation: completions or chat.
        body: the body of the request.
        prompt_only: the answer is not saved.
        latent: latent steps follow the prompt.
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
    if source is None and not (prompt_only or latent or writer.client_images):
        return ContextPrompt(
            conversation=conversation_of(body, AFTER_THE_PROMPT)
        )  # the engine writes it, as for every other chat
    prompt = _of_chat(await _chat(writer, source, seen, body, answered=True))
    if prompt_only and not latent:  # the placeholders of latent steps must follow the whole prompt
        return await _without_answer(prompt, writer, source, seen, body)
    return prompt


def _written_by_the_engine(source: Handoff | None) -> ContextPrompt:
    """Leave the prompt to the engine: it is what the request says, and KV is of use for what they share.

    Raises:
        InvalidRequest: the handoff holds latent steps.
    """
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
    """Let the saved context end after the last message, if that is a prefix of the prompt."""
    unanswered = await _chat(writer, source, seen, body, answered=False)
    if prompt.tokens is None or prompt.tokens[: len(unanswered.tokens)] != unanswered.tokens:
        return prompt
    return replace(prompt, saved_tokens=len(unanswered.tokens), conversation=unanswered.conversation)
