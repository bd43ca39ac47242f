"""The processors, without an engine: every way to give a prompt leads to the same ids and places, or to an error.

The idea is that of vLLM's own tests of processing correctness (tests/models/multimodal/processing).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from PIL import Image
from vision.reference import Reference
from vision.tiny_vision import FUYU_HEIGHT, FUYU_PATCH, FUYU_WIDTH, make_fuyu, make_llava, picture
from vllm.config import ModelConfig
from vllm.exceptions import VLLMValidationError
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.cache import MultiModalProcessorOnlyCache
from vllm.tokenizers import cached_tokenizer_from_config

from baton_vision import register
from baton_vision.placeholders import Canvas

pytestmark = pytest.mark.engine
texts = st.text(st.characters(codec="ascii", categories=["L", "N", "P", "Zs"]), max_size=12)
sizes = st.tuples(st.integers(1, 90), st.integers(1, 90))
CANVAS = Canvas(FUYU_WIDTH, FUYU_HEIGHT, FUYU_PATCH, FUYU_PATCH)
quickly = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)


class Processor:
    """A model's processor, as an engine would make it, and HuggingFace's beside it."""

    def __init__(self, folder: Path, **args: Any) -> None:
        register()
        config = ModelConfig(str(folder), dtype="float32", max_model_len=512, seed=0, **args)
        self._tokenizer = cached_tokenizer_from_config(config)
        self.processor = MULTIMODAL_REGISTRY.create_processor(config, tokenizer=self._tokenizer)
        self.cache = MultiModalProcessorOnlyCache(config)
        self.reference = Reference(folder)

    def apply(self, prompt: str | list[int], images: list[Any], **args: Any) -> dict[str, Any]:
        """Return what vLLM's renderer gets from it: the text is tokenized as the renderer does."""
        items = self.processor.info.parse_mm_data({"image": images})
        return self.processor(prompt, items, **args)

    def tokens(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def require_same(self, text: str, images: list[Image.Image]) -> None:
        """As text and as ids, without a cache and with one that knows none, some and all of the images; expanded.

        The ids, and what the model gets of the images, are HuggingFace's.
        """
        first = self.apply(text, images)
        self.apply(text.replace("<image>", "", len(images) - 1), images[:1], cache=self.cache)
        for prompt in (text, self.tokens(text), self.tokens(text), first["prompt_token_ids"]):
            for cache in (None, self.cache):
                require_equal(self.apply(prompt, images, cache=cache), first)
        expected = self.reference.inputs(text, images)
        assert first["prompt_token_ids"] == expected.pop("input_ids")[0].tolist()
        ((name, values),) = expected.items()
        ours = [item[name].data for item in first["mm_kwargs"]["image"]]
        assert torch.equal(torch.stack(ours) if name == "pixel_values" else torch.cat(ours), values)


def require_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["prompt_token_ids"] == other["prompt_token_ids"]
    assert one["mm_hashes"] == other["mm_hashes"]
    (places,), (others,) = one["mm_placeholders"].values(), other["mm_placeholders"].values()
    assert [(place.offset, place.length) for place in places] == [
        (place.offset, place.length) for place in others
    ]
    for place, another in zip(places, others, strict=True):
        assert (place.is_embed is None) == (another.is_embed is None)
        assert place.is_embed is None or torch.equal(place.is_embed, another.is_embed)


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Processor:
    folder = make_llava(tmp_path_factory.mktemp("llava"))
    return Processor(folder, limit_mm_per_prompt={"image": 3}, mm_processor_cache_gb=1)


@pytest.fixture(scope="module")
def fuyu(tmp_path_factory: pytest.TempPathFactory) -> Processor:
    return Processor(make_fuyu(tmp_path_factory.mktemp("fuyu")), mm_processor_cache_gb=1)


@quickly
@given(st.lists(st.tuples(texts, sizes), min_size=1, max_size=3), texts)
def test_llava_s_inputs(llava: Processor, parts: list[tuple[str, tuple[int, int]]], end: str) -> None:
    """One to three images of any size, any text around them."""
    images = [picture(*size, seed=number) for number, (_, size) in enumerate(parts)]
    llava.require_same("".join(f"{text}<image>" for text, _ in parts) + end, images)


@quickly
@given(texts.filter(bool), sizes)
def test_fuyu_s_inputs(fuyu: Processor, text: str, size: tuple[int, int]) -> None:
    """One image of any size, larger than the canvas too, before any text.

    But an empty one: HuggingFace begins it with an underscore, vLLM's renderer with nothing.
    """
    assume(0 not in CANVAS.patches(*size))
    fuyu.require_same(text, [picture(*size)])


def test_a_prompt_may_be_expanded_in_part(llava: Processor) -> None:
    """A context that was handed over, and behind it a new turn with an image of its own."""
    images = [picture(20, 20, seed) for seed in (1, 2)]
    whole = llava.apply("<image> what is where?<image> and here?", images)
    context = llava.apply("<image> what is where?", images[:1])["prompt_token_ids"]
    turn = llava.tokens("<image> and here?")[1:]  # without a beginning of its own
    require_equal(llava.apply([*context, *turn], images), whole)


def test_only_the_patches_of_fuyu_are_embeddings(fuyu: Processor) -> None:
    """Newlines and what ends an image keep their own."""
    processed = fuyu.apply("where?", [picture(FUYU_WIDTH, FUYU_HEIGHT)])
    (place,) = processed["mm_placeholders"]["image"]
    assert (place.offset, place.length, place.get_num_embeds()) == (0, 8 * 5 + 5 + 1, 8 * 5)


@pytest.mark.parametrize("model", ["llava", "fuyu"])
def test_a_uuid_is_the_image_s_identity(model: str, request: pytest.FixtureRequest) -> None:
    """Whatever the prompt's form; and a second time the image itself is not needed."""
    processor: Processor = request.getfixturevalue(model)
    text, name = "<image> where?" if model == "llava" else "where?", f"{model}-5f2a"
    given: dict[str, Any] = {"mm_uuid_items": {"image": [name]}, "cache": processor.cache}
    first = processor.apply(text, [picture(40, 20)], **given)
    assert first["mm_hashes"] == {"image": [name]}
    for prompt in (text, processor.tokens(text), first["prompt_token_ids"]):
        require_equal(processor.apply(prompt, [None], **given), first)


def test_the_worst_case_is_what_profiling_gets(llava: Processor, fuyu: Processor) -> None:
    """No image has more embeddings than the dummy's."""
    for processor, embeddings in ((llava, 9), (fuyu, 40)):
        dummy = processor.processor.get_dummy_mm_inputs({"image": 1})
        (place,) = dummy["mm_placeholders"]["image"]
        assert place.get_num_embeds() == embeddings


LINE = picture(1, 101)
REFUSED: dict[str, tuple[str, str | list[int], list[Any], dict[str, Any], str]] = {
    "no placeholder": ("llava", "where?", [picture(9, 9)], {}, "1 images for 0 image tokens"),
    "one too many": ("llava", "<image><image>", [picture(9, 9)], {}, "1 images for 2 image tokens"),
    "half expanded": ("llava", "<image>" * 10, [picture(9, 9)], {}, "1 images for 10 image tokens"),
    "a line": ("llava", "<image>", [LINE], {}, "more than 100 times as long as wide"),
    "embeddings": ("llava", "<image>", [torch.zeros(9, 64)], {}, "not image embeddings"),
    "another size": (
        "llava",
        "<image>",
        [picture(9, 9)],
        {"crop_size": {"height": 20, "width": 20}},
        "do not fit",
    ),
    "no crop": ("llava", "<image>", [picture(9, 20)], {"do_center_crop": False}, "do not fit"),
    "too many": ("llava", "<image>" * 4, [picture(9, 9)] * 4, {}, "At most 3 image"),
    "typed into text": ("fuyu", "a |SPEAKER| b", [picture(9, 9)], {}, "image tokens may only stand"),
    "another grid": ("fuyu", [3, 4, 1, 20, 5], [picture(9, 9)], {}, "not those of its image"),
    "a line for Fuyu": ("fuyu", "where?", [LINE], {}, "more than 100 times"),
    "too narrow": ("fuyu", "where?", [picture(99, 1)], {}, "too narrow"),
    "other patches": (
        "fuyu",
        "where?",
        [picture(9, 9)],
        {"patch_size": {"height": 3, "width": 3}},
        "do not fit|Failed to apply",
    ),
    "two for Fuyu": ("fuyu", "where?", [picture(9, 9)] * 2, {}, "At most 1 image"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_model_could_not_take_is_refused(case: str, request: pytest.FixtureRequest) -> None:
    """Here, where it is one request's error, and not in `forward`, where it would be everybody's."""
    model, text, images, options, reason = REFUSED[case]
    processor: Processor = request.getfixturevalue(model)
    with pytest.raises((VLLMValidationError, ValueError), match=reason):
        processor.apply(text, images, hf_processor_mm_kwargs=options)
