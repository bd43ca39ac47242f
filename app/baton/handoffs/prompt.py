"""Write the whole prompt of a request with a handoff: the handoff's token ids, then the request's own.

The prompt is the whole truth. An entry only brings KV for the tokens that it shares with the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from baton.engines.port import Json, Operation, PlacedImage
from baton.errors import InvalidRequest
from baton.handoffs.conversation import AFTER_THE_PROMPT, Chat, Writer, conversation_of, with_text
from baton.handoffs.record import Conversation, HandoffRecord
from baton_latent.contract import prepare_latent_prompt


@dataclass(frozen=True)
class ContextPrompt:
    """A prompt, and what it is as a conversation.

    Attributes:
        tokens: every token id; None: the engine makes them of the request's body.
        images: the images that the tokens stand for, in order.
        conversation: the messages, if it is a chat.
        rests_at: how many of the tokens are saved where the answer is not; None: all.
        resent: how many of the request's messages were the handoff's own, and were not written again.
    """

    tokens: list[int] | None = None
    images: list[PlacedImage] = field(default_factory=list)
    conversation: Conversation | None = None
    rests_at: int | None = None
    resent: int = 0

    def with_latent_steps(self, steps: int, placeholder: int | None) -> ContextPrompt:
        """Return the prompt with the placeholders of latent steps after it.

        Args:
            steps: how many, at least one.
            placeholder: the token id that stands for one.

        Raises:
            InvalidRequest: there is no prompt to think about.
        """
        assert placeholder is not None  # see `require_latent`
        if not self.tokens:
            raise InvalidRequest("Latent steps follow a prompt of at least one token.", param="prompt")
        conversation = self.conversation
        if conversation is not None and conversation.answer_from == len(self.tokens):
            conversation = conversation.model_copy(update={"answer_from": len(self.tokens) + steps})
        tokens = prepare_latent_prompt(self.tokens, steps, placeholder)
        return replace(self, tokens=tokens, conversation=conversation)


async def write_prompt(
    writer: Writer,
    source: HandoffRecord | None,
    seen: list[PlacedImage],
    operation: Operation,
    body: Json,
    *,
    prompt_only: bool,
    latent: bool,
    answered: bool = True,
) -> ContextPrompt:
    """Write the whole prompt, where the body alone does not say it.

    Args:
        writer: writes in the engine's words.
        source: the handoff it starts from.
        seen: the images of that handoff's context.
        operation: completions or chat.
        body: of the request.
        prompt_only: the answer is not saved.
        latent: latent steps follow the prompt.
        answered: an answer follows; else a chat rests after its last message.

    Raises:
        BatonError: the request does not go on from the handoff.
    """
    if operation is Operation.COMPLETIONS:
        return await _completion(writer, source, seen, body, written=latent or not answered)
    if not answered:
        return _of_chat(await _chat(writer, source, seen, body, answered=False))
    if source is None and not (prompt_only or latent or writer.client_images):
        return ContextPrompt(conversation=conversation_of(body, AFTER_THE_PROMPT))  # as every other chat
    prompt = _of_chat(await _chat(writer, source, seen, body, answered=True))
    if prompt_only and not latent:  # latent steps come after the prompt, where the answer begins
        return await _resting(prompt, writer, source, seen, body)
    return prompt


async def _completion(
    writer: Writer, source: HandoffRecord | None, seen: list[PlacedImage], body: Json, *, written: bool
) -> ContextPrompt:
    prompt = body.get("prompt") or ""
    if source is not None:
        own, images = await writer.plain(prompt, special=False, after=len(source.tokens))
        conversation = with_text(source.conversation)
        return ContextPrompt([*source.tokens, *own], [*seen, *images], conversation)
    if not (written or writer.client_images):
        return ContextPrompt()
    special = body.get("add_special_tokens") is not False
    return ContextPrompt(*await writer.plain(prompt, special=special))


async def _chat(
    writer: Writer, source: HandoffRecord | None, seen: list[PlacedImage], body: Json, *, answered: bool
) -> Chat:
    if source is None:
        return await writer.begun(body, answered=answered)
    return await writer.continued(source, seen, body, answered=answered)


def _of_chat(chat: Chat) -> ContextPrompt:
    return ContextPrompt(chat.tokens, chat.images, chat.conversation, resent=chat.resent)


async def _resting(
    prompt: ContextPrompt, writer: Writer, source: HandoffRecord | None, seen: list[PlacedImage], body: Json
) -> ContextPrompt:
    """End the saved context after the last message, where the template writes that as a prefix."""
    resting = await _chat(writer, source, seen, body, answered=False)
    if prompt.tokens is None or prompt.tokens[: len(resting.tokens)] != resting.tokens:
        return prompt
    return replace(prompt, rests_at=len(resting.tokens), conversation=resting.conversation)
