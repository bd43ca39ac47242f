"""Ask an engine's chat template and tokenizer for text and token ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from baton.engines.port import Engine, Json, Operation, WholeReply
from baton.errors import GenerationFailed, InvalidRequest
from baton.telemetry.ids import RequestContext

LINE_TOKENS = 8192
"""Most tokens that are looked at for the end of a line."""


@dataclass(frozen=True)
class EngineText:
    """The template and the tokenizer of one engine, asked for one request.

    Attributes:
        engine: the engine.
        context: the request.
    """

    engine: Engine
    context: RequestContext

    async def render(self, messages: Sequence[Json], template: Json, answered: bool) -> str:
        """Return messages as the model's template writes them.

        Args:
            messages: the messages.
            template: from `template_of`.
            answered: an answer follows; otherwise the text ends with the last message.

        Raises:
            InvalidRequest: the template does not accept them.
        """
        body = {"model": self.engine.name, "messages": [*messages], "add_generation_prompt": answered}
        return await self.engine.render(template | body)

    async def can_render(self, messages: Sequence[Json], template: Json) -> bool:
        """Return whether the model's template accepts messages in this order.

        Args:
            messages: the messages.
            template: from `template_of`.
        """
        try:
            await self.render(messages, template, False)
        except InvalidRequest:
            return False
        return True

    async def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        """Return the token ids of a text.

        Args:
            text: the text.
            special: add the tokens that a text begins with.
        """
        if not text and not special:
            return []
        body = {"model": self.engine.name, "prompt": text, "add_special_tokens": special}
        found: list[int] = (await self._call(Operation.TOKENIZE, body))["tokens"]
        return found

    async def begin_tokens(self) -> list[int]:
        """Return the token ids that every text begins with, such as the beginning-of-sequence token."""
        return await self.tokenize("", special=True)

    async def detokenize(self, tokens: Sequence[int]) -> str:
        """Return the text that token ids stand for; latent steps have none."""
        spoken = [token for token in tokens if token != self.engine.placeholder]
        if not spoken:
            return ""
        body = {"model": self.engine.name, "tokens": spoken}
        return str((await self._call(Operation.DETOKENIZE, body))["prompt"])

    async def begin_of_line(self, tokens: Sequence[int], count: int, *, whole: Sequence[int]) -> int:
        """Return the last place, among the first `count` tokens, at which a text may be cut.

        Args:
            tokens: token ids.
            count: number of tokens that may be cut off together.
            whole: lengths of whole contexts, which may be cut off as they are.

        Returns:
            The place behind the last token that ends a line; `count` if it is the end of a context; 0: there
            is none among the last `LINE_TOKENS` tokens.
        """
        if count in whole:
            return count
        ends: dict[int, bool] = {}
        for place in range(count, max(0, count - LINE_TOKENS), -1):
            token = tokens[place - 1]
            if token not in ends:
                ends[token] = (await self.detokenize([token])).endswith("\n")
            if ends[token]:
                return place
        return 0

    async def _call(self, operation: Operation, body: Json) -> Json:
        reply = await self.engine.call(operation, body, self.context)
        if not isinstance(reply, WholeReply):
            raise GenerationFailed()
        answer: Json = json.loads(reply.body)
        return answer
