"""Keep vLLM's cache of images that its process has correct.

vLLM caches processed images twice: this process records which images the engine process was sent, and sends
each once. But it records an image when it is processed, not when it is sent: a request that is refused or
cancelled in between leaves a record of an image that never arrived, and the next request with that image
fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.multimodal.cache import BaseMultiModalProcessorCache, LruKeyReplicatedSenderCache

from baton.errors import EngineUnavailable


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
