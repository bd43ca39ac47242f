"""What vLLM knows of an engine's images, and what of that we do not leave to it.

vLLM keeps two caches of processed images: this process remembers what the engine process was sent, and sends
it once. But it remembers when it has processed an image, not when that was sent: a request that is refused or
cancelled in between leaves a memory of what never arrived, and the next request with the same image fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.multimodal.cache import BaseMultiModalProcessorCache, LruKeyReplicatedSenderCache

from baton.engines.port import ImageInput
from baton.errors import EngineUnavailable

IMAGE = "image"
TOKEN_NAMES = ("image_token_id", "image_token_index")
"""What models' configurations call the token that stands for an image."""


def image_input(client: Any) -> ImageInput:
    """What images are to an engine's model.

    Args:
        client: its `AsyncLLM`.
    """
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
    return ImageInput(limit, tokens, texts, named=_named(config.multimodal_config))


def _named(config: Any) -> bool:
    """Whether a name that an image is given is its name, and no settings of the engine are part of it."""
    return not (config.mm_processor_kwargs or config.media_io_kwargs)


def _placeholder(config: Any) -> str | None:
    """What stands for an image in a chat, where the model's template leaves that to vLLM."""
    from vllm.model_executor.model_loader import get_model_cls  # takes seconds, and vLLM has done it by now

    try:
        text = get_model_cls(config).get_placeholder_str(IMAGE, 1)
    except ValueError:  # how a model says that it has none
        return None
    return text if isinstance(text, str) else None


def hashes_of(prompt: Any) -> list[str]:
    """What the multimodal items of a rendered prompt are called in vLLM's caches."""
    hashes = prompt.get("mm_hashes") if isinstance(prompt, Mapping) else None
    return [name for names in (hashes or {}).values() for name in names]


def strays(prompt: Any, tokens: frozenset[int]) -> int:
    """How many tokens of a rendered prompt stand for an image without belonging to one."""
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None
    if not ids or not any(token in ids for token in tokens):
        return 0
    ranges = [item for items in (prompt.get("mm_placeholders") or {}).values() for item in items]
    theirs = [ids[item.offset : item.offset + item.length] for item in ranges]
    return sum(ids.count(token) - sum(part.count(token) for part in theirs) for token in tokens)


class ConfirmedSenderCache(LruKeyReplicatedSenderCache):
    """vLLM's memory of what the engine process has, which only counts what that has shown to have.

    An item that was processed but not confirmed is processed and sent again.

    Args:
        known: what vLLM made; it shares its entries.
    """

    def __init__(self, known: LruKeyReplicatedSenderCache) -> None:
        self._cache = known._cache
        self._confirmed: set[str] = set()

    def confirm(self, hashes: Iterable[str]) -> None:
        """The engine process has worked on these, and so has them."""
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
    """Give an engine's client a `ConfirmedSenderCache`, where it keeps a memory that can go wrong.

    Args:
        client: its `AsyncLLM`, before its first request.
    """
    renderer = client.renderer
    if type(renderer._mm_processor_cache) is LruKeyReplicatedSenderCache:
        renderer._mm_processor_cache = ConfirmedSenderCache(renderer._mm_processor_cache)


@dataclass(frozen=True)
class Sent:
    """The images of one request on its way to the engine process.

    Attributes:
        cache: vLLM's memory of what that has.
        hashes: what the images are called there.
    """

    cache: BaseMultiModalProcessorCache | None = None
    hashes: Sequence[str] = ()

    def settle(self, *, failed: bool) -> None:
        """Note what the first output tells: they are there, or the request failed.

        Raises:
            EngineUnavailable: it failed because one was not there after all. vLLM has forgotten that by now.
        """
        if not isinstance(self.cache, ConfirmedSenderCache) or not self.hashes:
            return
        if not failed:
            self.cache.confirm(self.hashes)
        elif not all(self.cache.is_cached(list(self.hashes))):
            raise EngineUnavailable("The engine has to be sent an image of this request anew; try again.")
