"""Put images into prompts as an engine's model takes them, and know which its caches hold."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import structlog
from vllm.inputs import TokensPrompt
from vllm.inputs.engine import mm_input
from vllm.multimodal.cache import BaseMultiModalProcessorCache, LruKeyReplicatedSenderCache
from vllm.renderers.chat_utils import parse_chat_messages_async
from vllm.renderers.inputs.preprocess import parse_model_prompt

from baton.admission.fair_threads import in_own_thread
from baton.engines.backend import ImageInput
from baton.errors import EngineUnavailable, HandoffIncompatible, ImagesMisplaced, InvalidRequest
from baton.images.image import ClientImage, PlacedImage
from baton_kv.format import ImageRef

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


# Keep vLLM's cache of images that its process has correct.
#
# vLLM caches processed images twice: this process records which images the engine process was sent, and sends
# each once. But it records an image when it is processed, not when it is sent: a request that is refused or
# cancelled in between leaves a record of an image that never arrived, and the next request with that image
# fails.


def hashes_of(prompt: Any) -> list[str]:
    """Return the keys of a rendered prompt's multimodal items in vLLM's caches."""
    hashes = prompt.get("mm_hashes") if isinstance(prompt, Mapping) else None
    return [name for names in (hashes or {}).values() for name in names]


class ConfirmedSenderCache(LruKeyReplicatedSenderCache):
    """vLLM's record of the items that the engine process has, which only counts confirmed ones.

    An item that was processed but not confirmed is processed and sent again.

    Args:
        known: the record that vLLM made; the entries are shared with it.
    """

    def __init__(self, known: LruKeyReplicatedSenderCache) -> None:
        self._cache = known._cache
        self._confirmed: set[str] = set()

    def confirm(self, hashes: Iterable[str]) -> None:
        """Count these items from now on: the engine process has worked on them, and so has them."""
        self._confirmed.update(hashes)
        if len(self._confirmed) > 2 * len(self._cache) + 64:
            self._confirmed = {name for name in self._confirmed.copy() if name in self._cache}

    def is_cached_item(self, mm_hash: str) -> bool:
        return mm_hash in self._confirmed and super().is_cached_item(mm_hash)

    def get_and_update_item(self, mm_item: Any, mm_hash: str) -> Any:
        if mm_item is not None:
            self.invalidate(mm_hash)
        return super().get_and_update_item(mm_item, mm_hash)

    def invalidate(self, mm_hash: str) -> None:
        self._confirmed.discard(mm_hash)
        super().invalidate(mm_hash)

    def clear_cache(self) -> None:
        self._confirmed.clear()
        super().clear_cache()


def confirm_before_reuse(client: Any) -> None:
    """Replace the record of an engine's client with a `ConfirmedSenderCache`, where it can go wrong.

    Args:
        client: the engine's `AsyncLLM`, before its first request.
    """
    renderer = client.renderer
    if type(renderer._mm_processor_cache) is LruKeyReplicatedSenderCache:
        renderer._mm_processor_cache = ConfirmedSenderCache(renderer._mm_processor_cache)


@dataclass(frozen=True)
class Sent:
    """The images of one request that is sent to the engine process.

    Attributes:
        cache: vLLM's record of the items that the process has; None: it keeps none.
        hashes: the images' keys in it.
    """

    cache: BaseMultiModalProcessorCache | None = None
    hashes: Sequence[str] = ()

    def settle(self, *, failed: bool) -> None:
        """Confirm the images after the request's first output, unless it failed.

        Raises:
            EngineUnavailable: the request failed because the engine process did not have an image after all.
                vLLM has dropped its record by then, so that a retry sends it.
        """
        if not isinstance(self.cache, ConfirmedSenderCache) or not self.hashes:
            return
        if not failed:
            self.cache.confirm(self.hashes)
        elif not all(self.cache.is_cached(list(self.hashes))):
            raise EngineUnavailable("An image of this request did not reach the engine; try again.")


IMAGE = "image"
TOKEN_NAMES = ("image_token_id", "image_token_index")
"""Keys of a model's configuration for the token that stands for an image."""


def image_input(client: Any) -> ImageInput:
    """Read how an engine's model takes images."""
    config = client.model_config
    processor = client.renderer.mm_processor if config.is_multimodal_model else None
    if processor is None or client.renderer.tokenizer is None:
        return ImageInput()
    limit = processor.info.allowed_mm_limits.get(IMAGE, 0)
    found = (getattr(config.hf_config, name, None) for name in TOKEN_NAMES)
    tokens = frozenset(token for token in found if isinstance(token, int))
    written = [client.renderer.tokenizer.decode([token]).strip() for token in tokens]
    written.append((_placeholder(config) or "").strip())
    texts = tuple(dict.fromkeys(text for text in written if text))
    images = config.multimodal_config
    named = not (images.mm_processor_kwargs or images.media_io_kwargs)  # else vLLM's caches hash these too
    return ImageInput(limit, tokens, texts, named)


def _placeholder(config: Any) -> str | None:
    """Return the text that vLLM puts into a chat for an image, where the model's template does not."""
    from vllm.model_executor.model_loader import (
        get_model_cls,  # takes seconds, and vLLM has imported it by now
    )

    try:
        text = get_model_cls(config).get_placeholder_str(IMAGE, 1)
    except ValueError:  # the model has none
        return None
    return text if isinstance(text, str) else None


def stray_placeholders(prompt: Any, tokens: frozenset[int]) -> int:
    """Count the image placeholder tokens of a rendered prompt that belong to no image."""
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None
    if not ids or not any(token in ids for token in tokens):
        return 0
    ranges = [item for items in (prompt.get("mm_placeholders") or {}).values() for item in items]
    theirs = [ids[item.offset : item.offset + item.length] for item in ranges]
    return sum(ids.count(token) - sum(part.count(token) for part in theirs) for token in tokens)


def image_positions(prompt: Any) -> list[ImageRef] | None:
    """Find the places of images in a rendered prompt, in order.

    None: it holds no token ids, or more than token ids and images.
    """
    if not isinstance(prompt, Mapping) or prompt.get("prompt_token_ids") is None:
        return None
    if prompt.get("prompt_embeds") is not None or prompt.get("multi_modal_data"):
        return None
    ranges, names = prompt.get("mm_placeholders") or {}, prompt.get("mm_hashes") or {}
    if not ranges.keys() <= {IMAGE} or ranges.keys() != names.keys():
        return None
    found = [
        ImageRef(name, each.offset, each.length)
        for name, each in zip(names.get(IMAGE, ()), ranges.get(IMAGE, ()), strict=True)
    ]
    return sorted(found, key=lambda image: image.offset)


# Put images into prompts of token ids, with the engine's own renderer and processor.
#
# vLLM takes images only in the messages of a chat, and renders that chat's token ids itself. The prompt of a
# request with a handoff is token ids that were rendered before, models' answers among them, so its images are
# put into those: each at its recorded place, which must hold the tokens that the model's processor makes of
# it.


KEPT = ("arrival_time", "prompt")
"""Keys of vLLM's `TokensInput` that are kept."""
ADDED = 1
"""Most tokens that a model's processor may add at a prompt's end by itself."""
log = structlog.get_logger("baton.engine")


class ImagePrompts:
    """The prompts with images of one engine."""

    def __init__(self, client: AsyncLLM, name: str) -> None:
        self._client = client
        self._name = name

    async def place(
        self, prompt: list[int], images: Sequence[ClientImage], *, begins: bool
    ) -> tuple[list[int], list[PlacedImage]]:
        """Do `LocalEngine.place`. Raises what vLLM raises: anything."""
        parts = await in_own_thread(_parts, images)
        rendered = await self._processed(prompt, parts, cached=False)
        ranges = _ranges(rendered, images)
        tokens = list(rendered["prompt_token_ids"])
        inserted = self._inserted(prompt, tokens, ranges)
        target = () if inserted else _target(prompt, tokens, ranges)
        if target is None:
            raise ImagesMisplaced()
        if not target and not begins:
            raise InvalidRequest(
                f"The model '{self._name}' takes images only at the beginning of a context, and this one "
                "continues a handoff.",
            )
        return tokens, [
            PlacedImage(image, span.offset, span.length, target)
            for image, span in zip(images, ranges, strict=True)
        ]

    def _inserted(self, prompt: list[int], tokens: list[int], ranges: Sequence[Any]) -> bool:
        """Return whether the processor inserted all images before a prompt, and left its text alone.

        The text's first and last tokens may differ: PaliGemma ends a prompt with a newline, Fuyu drops the
        beginning-of-sequence token and adds the one that begins an answer.
        """
        text = _without(tokens, ranges)
        first = self._client.renderer.get_tokenizer().bos_token_id
        begun, given = ([*ids[1:]] if ids[:1] == [first] else ids for ids in (text, prompt))
        leading = ranges[-1].offset + ranges[-1].length <= len(tokens) - len(begun)
        return leading and begun[: len(given)] == given and len(begun) - len(given) <= ADDED

    async def add(self, prompt: Any, placed: Sequence[PlacedImage]) -> Any:
        """Add images to a prompt of token ids that holds their placeholders already.

        Args:
            prompt: vLLM's `TokensInput`.
            placed: every image that the prompt holds, in order.

        Returns:
            vLLM's multimodal input.

        Raises:
            HandoffIncompatible: this engine's processor makes other tokens of an image than the prompt holds.
        """
        tokens = list(prompt["prompt_token_ids"])
        rendered = await self._processed_once(_outline(tokens, placed), placed)
        ranges = _ranges(rendered, [each.image for each in placed])
        for each, span in zip(placed, ranges, strict=True):
            made = rendered["prompt_token_ids"][span.offset : span.offset + span.length]
            if list(made) != tokens[each.offset : each.offset + each.length]:
                raise _unfit("another run of tokens")
        spans = [replace(span, offset=each.offset) for each, span in zip(placed, ranges, strict=True)]
        whole: Any = mm_input(tokens, rendered["mm_kwargs"], rendered["mm_hashes"], {IMAGE: spans})
        return {name: prompt[name] for name in KEPT if name in prompt} | whole

    async def _processed_once(self, prompt: list[int], placed: Sequence[PlacedImage]) -> Any:
        """Process a prompt and its images; those in vLLM's cache are not decoded again."""
        images = [each.image for each in placed]
        cache = self._client.renderer.mm_processor_cache
        new = [cache is None or not cache.is_cached_item(image.digest) for image in images]
        if not all(new):
            parts = await in_own_thread(_parts, images, new)
            with contextlib.suppress(ValueError):  # an image was evicted just now
                return await self._processed(prompt, parts, cached=True)
        parts = await in_own_thread(_parts, images)
        return await self._processed(prompt, parts, cached=True)

    async def _processed(self, prompt: list[int], parts: list[Any], *, cached: bool) -> Any:
        """Process a prompt and its images as vLLM does.

        Args:
            prompt: token ids without the images' placeholders.
            parts: the images, in order, from `_parts`.
            cached: whether vLLM's caches of images may be used. Only where the prompt is sent to the engine
                next: the caches of the two processes agree only as long as both see the same images.
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


def _parts(images: Sequence[ClientImage], wanted: Sequence[bool] | None = None) -> list[Any]:
    """Write images as parts of a chat's message, which is how vLLM takes them. Too slow for the event loop.

    Args:
        wanted: for each image whether its data is needed, else only its digest is given. None: all are.
    """
    return [
        {"type": "image_url", "image_url": {"url": image.url} if needed else None, "uuid": image.digest}
        for image, needed in zip(images, wanted or [True] * len(images), strict=True)
    ]


def _ranges(rendered: Any, images: Sequence[ClientImage]) -> list[Any]:
    """Find the range of each image's tokens, in order.

    Raises:
        HandoffIncompatible: the engine identifies an image by another digest, or takes it for no image.
    """
    if rendered.get("type") != "multimodal" or set(rendered["mm_placeholders"]) != {IMAGE}:
        raise _unfit("no image")
    ranges = list(rendered["mm_placeholders"][IMAGE])
    if rendered["mm_hashes"][IMAGE] != [image.digest for image in images]:
        raise _unfit("another name")  # the engine's image settings are part of its hash
    reached = 0
    for span in ranges:
        if span.offset < reached:
            raise _unfit("another order")
        reached = span.offset + span.length
    return ranges


def _target(prompt: list[int], tokens: list[int], ranges: Sequence[Any]) -> tuple[int, ...] | None:
    """Find the tokens that each image's placeholders replaced.

    Args:
        ranges: where the images stand in `tokens`.

    Returns:
        The replaced tokens, the same for each image; None: they cannot be found, or the text holds them where
        no image replaced them.
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
    """Return a prompt without the tokens of its images."""
    images = {index for span in ranges for index in range(span.offset, span.offset + span.length)}
    return [token for index, token in enumerate(tokens) if index not in images]


def _holds(tokens: list[int], run: tuple[int, ...]) -> bool:
    """Return whether a run of tokens is part of `tokens`."""
    starts = range(len(tokens) - len(run) + 1) if run else ()
    return any(tuple(tokens[start : start + len(run)]) == run for start in starts)


def _outline(tokens: list[int], placed: Sequence[PlacedImage]) -> list[int]:
    """Return a short prompt in which the model's processor finds a place for each image, in order."""
    targets = [token for each in placed for token in each.target]
    behind = placed[-1].offset + placed[-1].length
    return targets or [*tokens[: placed[0].offset], *tokens[behind : behind + 1]]


def _unfit(what: str) -> HandoffIncompatible:
    """Log what differs, and return the error for the client."""
    log.error("relay_image_not_placed", found=what)
    return HandoffIncompatible(
        "This engine processes the context's images into other tokens than a handoff of it would hold; "
        "send the images without 'handoff'.",
        param="handoff",
    )
