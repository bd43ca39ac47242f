"""Write prompts in an engine's own tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.engines.backend import Json, Operation, WholeReply
from baton.engines.engine import LocalEngine
from baton.errors import GenerationFailed, InvalidRequest
from baton.images.image import PlacedImage
from baton.telemetry.ids import RequestContext

# Replace the images in a chat's messages by references, which conversations store and templates render.


def with_image_refs(messages: list[Json]) -> list[Json]:
    """Return messages whose images are references without data.

    The engine's template writes them as it writes messages with image data.

    Example:
        >>> image = {"type": "image_url", "image_url": {"url": "data:..."}, "uuid": "ab12"}
        >>> with_image_refs([{"role": "user", "content": [image]}])
        [{'role': 'user', 'content': [{'type': 'image_url', 'image_url': None, 'uuid': 'ab12'}]}]
    """
    return [
        message | {"content": [_image_ref(part) for part in content]}
        if isinstance(content := message.get("content"), list)
        else message
        for message in messages
    ]


def count_images(messages: list[Json]) -> int:
    """Return how many images messages hold."""
    parts = (part for message in messages for part in _parts(message))
    return sum(isinstance(part, dict) and part.get("type") == "image_url" for part in parts)


def shift_images(images: list[PlacedImage], by: int) -> list[PlacedImage]:
    """Return a prompt's images, moved by as many tokens as were put before the prompt."""
    return [replace(image, offset=image.offset + by) for image in images]


def _image_ref(part: object) -> object:
    if not isinstance(part, dict) or part.get("type") != "image_url":
        return part
    return {"type": "image_url", "image_url": None, "uuid": part["uuid"]}


def _parts(message: Json) -> list[object]:
    content = message.get("content")
    return content if isinstance(content, list) else []


# Ask an engine's chat template and tokenizer for text and token ids.


LINE_TOKENS = 8192
"""Most tokens that are looked at for the end of a line."""


@dataclass(frozen=True)
class EngineText:
    """The template and the tokenizer of one engine, asked for one request."""

    engine: LocalEngine
    context: RequestContext

    async def render(self, messages: Sequence[Json], template: Json, answered: bool) -> str:
        """Return messages as the model's template writes them.

        Args:
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
