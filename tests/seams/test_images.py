"""What we rely on of vLLM's handling of images: its part types, its caches, its words."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.multimodal.cache import LruKeyReplicatedSenderCache
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.multimodal.processing import BaseMultiModalProcessor
from vllm.multimodal.processing.context import InputProcessingContext
from vllm.renderers.base import BaseRenderer

try:
    from vllm.renderers.chat_utils import MM_PARSER_MAP, TEXT_PART_TYPES
except ImportError:  # vLLM 0.33
    from vllm.renderers.chat_utils.chat_message import MM_PARSER_MAP, TEXT_PART_TYPES

from baton.engines.vllm.errors import MISPLACED_IMAGES, translate
from baton.engines.vllm.images import (
    ConfirmedSenderCache,
    Sent,
    confirm_before_reuse,
    hashes_of,
    stray_placeholders,
)
from baton.errors import EngineUnavailable, ImagesMisplaced, InvalidImage
from baton.images.parts import IMAGES, OTHER_MEDIA

NO_MEDIA = TEXT_PART_TYPES | {"tool_reference"}


def item(size: int = 4) -> Any:
    element = MultiModalFieldElem(data=torch.zeros(size), field=MultiModalBatchedField())
    return MultiModalKwargsItem({"pixels": element})


@pytest.fixture
def known() -> LruKeyReplicatedSenderCache:
    """vLLM's cache with room for 4 KiB."""
    config = SimpleNamespace(mm_processor_cache_gb=4096 / 2**30)
    return LruKeyReplicatedSenderCache(SimpleNamespace(get_multimodal_config=lambda: config))  # type: ignore[arg-type]


def test_every_type_of_part_that_vllm_reads_media_from_is_known() -> None:
    """One that vLLM learns anew must not slip past us: it is read by us, or refused."""
    assert set(MM_PARSER_MAP) <= IMAGES | OTHER_MEDIA | NO_MEDIA


def test_an_item_counts_as_sent_once_that_is_confirmed(known: LruKeyReplicatedSenderCache) -> None:
    """Until then it is processed and sent again, in whole."""
    cache = ConfirmedSenderCache(known)
    sent, updates = item(), ["update"]
    for _ in range(2):
        assert not cache.is_cached_item("a")
        assert cache.get_and_update_item((sent, updates), "a") == (sent, updates)
    cache.confirm(["a"])
    assert cache.is_cached(["a", "b"]) == [True, False]
    assert cache.get_and_update_item(None, "a") == (None, updates)
    counted = cache.make_stats()
    assert (counted.hits, counted.total) == (1, 3)


def test_what_vllm_alone_would_remember_wrongly(known: LruKeyReplicatedSenderCache) -> None:
    """The reason for all this: processed is remembered as sent. If this fails, vLLM has mended it."""
    known.get_and_update_item((item(), []), "a")
    assert known.is_cached_item("a")
    assert known.get_and_update_item((item(), []), "a")[0] is None


@pytest.mark.parametrize("forget", ["invalidated", "sent anew", "evicted", "cleared"])
def test_what_is_confirmed_does_not_stay_so_for_ever(known: LruKeyReplicatedSenderCache, forget: str) -> None:
    """Whatever makes the memory go takes the confirmation with it."""
    cache = ConfirmedSenderCache(known)
    cache.get_and_update_item((item(), []), "a")
    cache.confirm(["a"])
    if forget == "invalidated":
        cache.invalidate("a")
    elif forget == "cleared":
        cache.clear_cache()
    elif forget == "evicted":
        for number in range(8):
            cache.get_and_update_item((item(200), []), f"b{number}")
    assert cache.is_cached_item("a") == (forget == "sent anew")
    cache.get_and_update_item((item(), []), "a")
    assert not cache.is_cached_item("a")


def test_confirmations_of_what_is_gone_do_not_gather(known: LruKeyReplicatedSenderCache) -> None:
    """Ten thousand images through a cache of a few leave a few names."""
    cache = ConfirmedSenderCache(known)
    for number in range(10_000):
        cache.get_and_update_item((item(200), []), str(number))
        cache.confirm([str(number)])
    assert len(cache._confirmed) < 200


@pytest.mark.parametrize("forgotten", [True, False])
def test_an_image_that_did_not_arrive_after_all_is_a_retry(
    known: LruKeyReplicatedSenderCache, forgotten: bool
) -> None:
    """vLLM's engine process says so with an error and has this process forget it; other failures stay theirs."""
    cache = ConfirmedSenderCache(known)
    cache.get_and_update_item((item(), []), "a")
    Sent(cache, ["a"]).settle(failed=False)
    assert cache.is_cached_item("a")
    if forgotten:
        cache.invalidate("a")
        with pytest.raises(EngineUnavailable, match="did not reach the engine"):
            Sent(cache, ["a"]).settle(failed=True)
    else:
        Sent(cache, ["a"]).settle(failed=True)
    Sent(None, ["a"]).settle(failed=True)
    Sent().settle(failed=True)


def test_vllm_s_renderer_keeps_its_cache_where_we_put_ours(known: LruKeyReplicatedSenderCache) -> None:
    """Its processor and its output handler both ask this attribute."""
    renderer = SimpleNamespace(_mm_processor_cache=known)
    confirm_before_reuse(SimpleNamespace(renderer=renderer))
    assert isinstance(renderer._mm_processor_cache, ConfirmedSenderCache)
    assert "self._mm_processor_cache" in inspect.getsource(BaseRenderer._process_multimodal)
    assert BaseRenderer.mm_processor_cache.fget is not None
    assert "self._mm_processor_cache" in inspect.getsource(BaseRenderer.mm_processor_cache.fget)


def test_images_are_processed_beside_the_event_loop() -> None:
    """vLLM does it in a thread of its renderer, one after the other."""
    made = inspect.getsource(BaseRenderer.__init__)
    assert "self._process_multimodal, executor=self._mm_executor" in made
    assert "await self._process_multimodal_async(" in inspect.getsource(BaseRenderer._process_tokens_async)


def test_tokens_within_an_image_are_its_own() -> None:
    """Every other that stands for an image is a stray, whatever stands around it."""
    ranges = {"image": [PlaceholderRange(offset=1, length=2), PlaceholderRange(offset=5, length=1)]}
    prompt = {"prompt_token_ids": [9, 3, 3, 9, 9, 3, 4], "mm_placeholders": ranges}
    assert stray_placeholders(prompt, frozenset({3})) == 0
    assert stray_placeholders(prompt, frozenset({3, 4})) == 1
    assert stray_placeholders({"prompt_token_ids": [3, 3]}, frozenset({3})) == 2
    assert stray_placeholders({"prompt_token_ids": [3, 3]}, frozenset()) == 0
    assert stray_placeholders({"prompt_embeds": None}, frozenset({3})) == 0
    assert hashes_of({"mm_hashes": {"image": ["a", "b"], "video": ["c"]}}) == ["a", "b", "c"]
    assert hashes_of({"prompt_token_ids": [1]}) == []


def test_images_without_a_place_are_the_client_s_to_mend() -> None:
    """vLLM raises these as errors of its own code; the words are still its."""
    source = inspect.getsource(BaseMultiModalProcessor).replace('"\n                    f"', "")
    for words in ("prompt placeholders ", "prompt updates ", "Failed to apply prompt replacement for "):
        assert words in source
    for error in (
        RuntimeError("Expected there to be 1 prompt placeholders corresponding to 1 image items, but ..."),
        RuntimeError("Expected there to be 2 prompt updates corresponding to 2 image items, but instead ..."),
        AssertionError("Failed to apply prompt replacement for mm_items['image'][0]"),
    ):
        assert any(words in str(error) for words in MISPLACED_IMAGES)
        told = translate(error)
        assert (type(told), told.param) == (ImagesMisplaced, "messages")


def test_what_an_image_processor_fails_on_is_said_without_the_image() -> None:
    """vLLM's message holds the data and the class; ours does not."""
    source = inspect.getsource(InputProcessingContext.call_hf_processor)
    assert 'f"Failed to apply {type(hf_processor).__name__} "' in source
    assert 'f"on data={data} with' in source
    told = translate(
        ValueError("Failed to apply LlavaProcessor on data={'images': [<secret>]} with kwargs={}")
    )
    assert isinstance(told, InvalidImage)
    assert "secret" not in told.message
    assert "Processor" not in told.message
