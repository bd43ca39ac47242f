"""Prompts with images in token ids, by the engine's own renderer and processor.

vLLM knows images in the messages of a chat only, and writes that chat's token ids anew. A relay's prompt is
token ids that were written before, the answers of models among them, so its images are laid over those:
each at the place that is on record, with exactly the tokens there that the model's processor makes of it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import structlog
from vllm.inputs import TokensPrompt
from vllm.inputs.engine import mm_input
from vllm.renderers.chat_utils import parse_chat_messages_async
from vllm.renderers.inputs.preprocess import parse_model_prompt

from baton.engines.port import PlacedImage
from baton.engines.vllm.multimodal import IMAGE
from baton.errors import HandoffIncompatible, ImagesMisplaced, InvalidRequest
from baton.images.client_image import ClientImage

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

KEPT = ("arrival_time", "prompt")
"""Of a prompt of token ids, beside them."""
ADDED = 1
"""Tokens that a model's processor may put at a prompt's end by itself."""
log = structlog.get_logger("baton.engine")


class ImagePrompts:
    """What one engine makes of images.

    Args:
        client: the engine.
        name: as clients call it.
    """

    def __init__(self, client: AsyncLLM, name: str) -> None:
        self._client = client
        self._name = name

    async def place(
        self, prompt: list[int], images: Sequence[ClientImage], *, begins: bool
    ) -> tuple[list[int], list[PlacedImage]]:
        """See `Engine.place`. Raises anything at all where vLLM cannot do it."""
        digests = await asyncio.to_thread(lambda: [image.digest for image in images])
        parts = await asyncio.to_thread(_parts, images, digests)
        rendered = await self._processed(prompt, parts, cached=False)
        ranges = _ranges(rendered, digests)
        tokens = list(rendered["prompt_token_ids"])
        inserted = self._inserted(prompt, tokens, ranges)
        target = () if inserted else _target(prompt, tokens, ranges)
        if target is None:
            raise ImagesMisplaced()
        if not target and not begins:
            raise InvalidRequest(
                f"The model '{self._name}' takes images at the beginning of a context only, and this one "
                "goes on from a handoff.",
            )
        rows = zip(images, digests, ranges, strict=True)
        return tokens, [
            PlacedImage(image, digest, span.offset, span.length, target) for image, digest, span in rows
        ]

    def _inserted(self, prompt: list[int], tokens: list[int], ranges: Sequence[Any]) -> bool:
        """Whether a model has put its images before a prompt and left that as it was, but for how it begins
        and ends: PaliGemma closes a prompt with a newline, Fuyu takes off the beginning of the text and adds
        that of the answer.
        """
        text = _without(tokens, ranges)
        first = self._client.renderer.get_tokenizer().bos_token_id
        begun, given = ([*ids[1:]] if ids[:1] == [first] else ids for ids in (text, prompt))
        leading = ranges[-1].offset + ranges[-1].length <= len(tokens) - len(begun)
        return leading and begun[: len(given)] == given and len(begun) - len(given) <= ADDED

    async def laid_over(self, prompt: Any, placed: Sequence[PlacedImage]) -> Any:
        """A prompt of token ids as vLLM's multimodal input.

        Args:
            prompt: vLLM's `TokensInput`.
            placed: every image its ids stand for, in order.

        Raises:
            HandoffIncompatible: the images are not what the ids stand for, by this engine's processor.
        """
        tokens = list(prompt["prompt_token_ids"])
        rendered = await self._known(_outline(tokens, placed), placed)
        ranges = _ranges(rendered, [each.digest for each in placed])
        for each, span in zip(placed, ranges, strict=True):
            made = rendered["prompt_token_ids"][span.offset : span.offset + span.length]
            if list(made) != tokens[each.offset : each.offset + each.length]:
                raise _unfit("another run of tokens")
        spans = [replace(span, offset=each.offset) for each, span in zip(placed, ranges, strict=True)]
        whole: Any = mm_input(tokens, rendered["mm_kwargs"], rendered["mm_hashes"], {IMAGE: spans})
        return {name: prompt[name] for name in KEPT if name in prompt} | whole

    async def _known(self, prompt: list[int], placed: Sequence[PlacedImage]) -> Any:
        """What the engine makes of images, of those it knows without looking at them again."""
        digests = [each.digest for each in placed]
        cache = self._client.renderer.mm_processor_cache
        new = [cache is None or not cache.is_cached_item(digest) for digest in digests]
        if not all(new):
            parts = await asyncio.to_thread(_parts, [each.image for each in placed], digests, new)
            with contextlib.suppress(ValueError):  # one has left the cache just now
                return await self._processed(prompt, parts, cached=True)
        parts = await asyncio.to_thread(_parts, [each.image for each in placed], digests)
        return await self._processed(prompt, parts, cached=True)

    async def _processed(self, prompt: list[int], parts: list[Any], *, cached: bool) -> Any:
        """The engine's own words for a prompt and its images.

        Args:
            prompt: token ids in which the images have no room yet.
            parts: the images, in order.
            cached: what the engine's processes keep of them may be used. Only where the prompt goes to the
                engine next: they keep the same only as long as each sees what the other does.
        """
        config = self._client.model_config
        settings = config.multimodal_config
        _, data, names = await parse_chat_messages_async(
            [{"role": "user", "content": parts}],
            config,
            "string",
            media_io_kwargs=settings.media_io_kwargs if settings is not None else None,
        )
        asked = TokensPrompt(prompt_token_ids=prompt, multi_modal_data=data, multi_modal_uuids=names)
        (rendered,) = await self._client.renderer.render_cmpl_async(
            [parse_model_prompt(config, asked)], skip_mm_cache=not cached
        )
        return rendered


def _parts(
    images: Sequence[ClientImage], digests: Sequence[str], wanted: Sequence[bool] | None = None
) -> list[Any]:
    """Images as parts of a chat's message, which is how vLLM reads them. Not for the event loop.

    Args:
        images: the images.
        digests: their names.
        wanted: which of them are to be looked at; the others are only named. None: all.
    """
    urls = [
        {"url": image.url} if look else None
        for image, look in zip(images, wanted or [True] * len(images), strict=True)
    ]
    return [
        {"type": "image_url", "image_url": url, "uuid": digest}
        for url, digest in zip(urls, digests, strict=True)
    ]


def _ranges(rendered: Any, digests: list[str]) -> list[Any]:
    """Where each image stands, in order.

    Raises:
        HandoffIncompatible: the engine knows one by another name than ours, or not as an image.
    """
    if rendered.get("type") != "multimodal" or set(rendered["mm_placeholders"]) != {IMAGE}:
        raise _unfit("no image")
    ranges = list(rendered["mm_placeholders"][IMAGE])
    if rendered["mm_hashes"][IMAGE] != digests:
        raise _unfit("another name")  # an image with settings of its own: its digest is not all there is
    reached = 0
    for span in ranges:
        if span.offset < reached:
            raise _unfit("another order")
        reached = span.offset + span.length
    return ranges


def _target(prompt: list[int], tokens: list[int], ranges: Sequence[Any]) -> tuple[int, ...] | None:
    """The tokens that gave way to each image; none where a model puts images in without being told where.

    Args:
        prompt: before.
        tokens: after.
        ranges: where the images stand now.

    Returns:
        None where that cannot be told, or one is left that gave way to no image.
    """
    rest = len(tokens) - sum(span.length for span in ranges)
    each, odd = divmod(len(prompt) - rest, len(ranges))
    if each < 0 or odd:
        return None
    before, at, target = 0, 0, None
    for span in ranges:
        text = tokens[at : span.offset]
        start = before + len(text)
        gone = tuple(prompt[start : start + each])
        if prompt[before:start] != text or target not in (None, gone) or _holds(text, gone):
            return None
        before, at, target = start + each, span.offset + span.length, gone
    text = tokens[at:]
    return target if prompt[before:] == text and target is not None and not _holds(text, target) else None


def _without(tokens: list[int], ranges: Sequence[Any]) -> list[int]:
    """A prompt without its images."""
    images = {index for span in ranges for index in range(span.offset, span.offset + span.length)}
    return [token for index, token in enumerate(tokens) if index not in images]


def _holds(tokens: list[int], run: tuple[int, ...]) -> bool:
    """Whether a run of tokens is among these."""
    starts = range(len(tokens) - len(run) + 1) if run else ()
    return any(tuple(tokens[start : start + len(run)]) == run for start in starts)


def _outline(tokens: list[int], placed: Sequence[PlacedImage]) -> list[int]:
    """A short prompt in which the model's processor finds a place for each image, in order."""
    targets = [token for each in placed for token in each.target]
    behind = placed[-1].offset + placed[-1].length
    return targets or [*tokens[: placed[0].offset], *tokens[behind : behind + 1]]


def _unfit(what: str) -> HandoffIncompatible:
    log.error("relay_image_not_placed", found=what)
    return HandoffIncompatible(
        "This engine makes something else of the context's images than a handoff of it would hold; "
        "send the images without 'handoff'.",
        param="handoff",
    )
