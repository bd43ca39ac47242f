"""The engine's logits are HuggingFace's, whatever comes together in a batch and however it is cut."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vision.engines import Answer, Ask, VisionEngine
from vision.reference import Reference
from vision.tiny_vision import make_blip2, make_fuyu, make_llava, picture

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
CLOSE = 2e-4
"""Logprobs in fp32; what another order of sums makes."""
SIZES = [(30, 30), (64, 48), (7, 90), (1, 1), (200, 31)]
CHUNKS = {"max_num_batched_tokens": 48, "mm_processor_cache_gb": 1}
"""Smaller than most prompts."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VisionEngine]:
    with VisionEngine(tmp_path_factory.mktemp("engine")) as engine:
        yield engine


def require(reference: Reference, asked: Ask, answer: Answer, inputs: dict | None = None) -> None:
    """Token ids, and the logprobs after each, are those of HuggingFace's processor and model."""
    assert answer.error is None, answer.error
    assert isinstance(asked.prompt, str) or inputs is not None
    inputs = inputs or reference.inputs(asked.prompt, asked.images)
    assert answer.ids == inputs["input_ids"][0].tolist()
    expected = reference.logprobs(inputs, answer.said).numpy()[-len(answer.logprobs) :]
    assert np.abs(answer.logprobs - expected).max() < CLOSE


def llava_asks() -> list[Ask]:
    """Several sizes, none to three images a prompt, twice the same one, text before, between and after."""
    one, two, three, four, five = (picture(*size, seed) for seed, size in enumerate(SIZES))
    return [
        Ask("user: <image>\nwhat is where? assistant:", [one]),
        Ask("no image at all: a red square?"),
        Ask("<image><image> left of <image>", [two, three, four]),
        Ask("user: <image>", [five]),
        Ask("<image> twice <image>", [one, one]),
    ]


def as_tokens(reference: Reference, asked: Ask) -> Ask:
    """Return the same prompt as token ids."""
    assert isinstance(asked.prompt, str)
    return replace(asked, prompt=reference.processor.tokenizer(asked.prompt)["input_ids"])


def check(engine: VisionEngine, reference: Reference, asks: list[Ask]) -> None:
    """As text, all at once; as token ids; expanded as the engine itself had them."""
    answers = engine.ask(*asks)
    for asked, answer in zip(asks, answers, strict=True):
        require(reference, asked, answer)
    tokens = [as_tokens(reference, asked) for asked in asks]
    expanded = [replace(asked, prompt=answer.ids) for asked, answer in zip(asks, answers, strict=True)]
    for again in (tokens, expanded):
        for first, answer in zip(answers, engine.ask(*again), strict=True):
            assert answer.error is None, answer.error
            assert answer.ids == first.ids
            assert answer.said == first.said
            assert np.abs(answer.logprobs - first.logprobs).max() < CLOSE


def refused(engine: VisionEngine, known: Ask, *asked: Ask) -> None:
    """Each is an error of its own, and the engine goes on as before."""
    (before,) = engine.ask(known)
    for one in asked:
        (answer,) = engine.ask(one)
        assert answer.error is not None, one.prompt
    (after,) = engine.ask(known)
    assert (after.error, after.said) == (None, before.said)
    assert np.abs(after.logprobs - before.logprobs).max() < CLOSE


def other_image(engine: VisionEngine, prompt: str) -> None:
    """Check that the same image under its name is reused, encoder, KV and all; another one in its place never is."""
    prompt += " Are there roads and clouds on a green field, and water left of the two blue circles?"
    mine, other = (Ask(prompt, [picture(33, 44, seed)], [f"name-{seed}"], whole=False) for seed in (8, 9))
    (first,), (again,), (swapped,) = engine.ask(mine), engine.ask(mine), engine.ask(other)
    assert (first.cached, swapped.cached) == (0, 0)
    assert again.cached >= 32
    assert again.ids == swapped.ids
    assert np.abs(again.logprobs - first.logprobs).max() < CLOSE
    assert np.abs(swapped.logprobs - first.logprobs).max() > 0.1


@pytest.mark.chaos
def test_llava(engine: VisionEngine, tmp_path_factory: pytest.TempPathFactory) -> None:
    """CLIP, `default`, the second last layer; official names of weights; processor cache; chunks."""
    model = make_llava(tmp_path_factory.mktemp("llava"), layout="official")
    engine.start(model, limit_mm_per_prompt={"image": 3}, **CHUNKS)
    asks = llava_asks()
    check(engine, Reference(model), asks)
    other_image(engine, "user: <image> what is where?")
    one, odd = asks[0].images, {"crop_size": {"height": 20, "width": 20}}
    bad = [Ask("none", one), Ask("<image><image>", one), Ask("<image>", one, options=odd)]
    refused(engine, asks[0], *bad, Ask("<image>", [picture(1, 400)]), Ask("<image>" * 4, one * 4))


def fuyu_asks() -> list[Ask]:
    """Several sizes, some larger than the canvas, and prompts without an image between them."""
    asks = [Ask(f"what is where? {seed}", [picture(*size, seed)]) for seed, size in enumerate(SIZES)]
    return [*asks, Ask("no image at all: a red square?"), Ask("a", [picture(48, 30)])]


@pytest.mark.chaos
def test_fuyu(engine: VisionEngine, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Official names of weights; processor cache; chunks."""
    model = make_fuyu(tmp_path_factory.mktemp("fuyu"), layout="official")
    engine.start(model, **CHUNKS)
    asks = fuyu_asks()
    check(engine, Reference(model), asks)
    other_image(engine, "what is where?")
    image, odd = asks[0].images, {"patch_size": {"height": 3, "width": 3}}
    bad = [Ask("a |SPEAKER| b", image), Ask("", image * 2), Ask("", image, options=odd)]
    refused(engine, asks[0], *bad, Ask("", [picture(99, 1)]))


LLAVAS: dict[str, dict[str, Any]] = {
    "siglip": {"tower": "siglip", "vision_feature_select_strategy": "full", "vision_feature_layer": -1},
    "layers": {"vision_feature_layer": [0, -3, 3], "multimodal_projector_bias": False, "layout": "prefixed"},
    "tied": {"projector_hidden_act": "relu", "tie_word_embeddings": True, "vision_feature_layer": 1},
}


@pytest.mark.chaos
@pytest.mark.parametrize("kind", LLAVAS)
def test_other_llavas(engine: VisionEngine, tmp_path_factory: pytest.TempPathFactory, kind: str) -> None:
    """Other towers, layers, projectors and names of weights; no cache of any kind; no chunks."""
    model = make_llava(tmp_path_factory.mktemp(kind), **LLAVAS[kind])
    engine.start(
        model, limit_mm_per_prompt={"image": 3}, mm_processor_cache_gb=0, enable_prefix_caching=False
    )
    check(engine, Reference(model), llava_asks())


@pytest.mark.chaos
@pytest.mark.parametrize("layout", ["saved", "prefixed"])
def test_other_fuyus(engine: VisionEngine, tmp_path_factory: pytest.TempPathFactory, layout: str) -> None:
    """Other names of weights; no cache of any kind; no chunks."""
    model = make_fuyu(tmp_path_factory.mktemp("fuyu"), layout=layout)
    engine.start(model, mm_processor_cache_gb=0, enable_prefix_caching=False)
    check(engine, Reference(model), fuyu_asks())


@pytest.mark.chaos
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two processes need a core each")
@pytest.mark.parametrize("make", [make_llava, make_fuyu])
def test_a_model_in_two_processes(
    engine: VisionEngine, tmp_path_factory: pytest.TempPathFactory, make: Callable[..., Path]
) -> None:
    """Tensor parallelism: heads, projector and vocabulary are shared out."""
    model = make(tmp_path_factory.mktemp("halves"))
    engine.start(model, limit_mm_per_prompt={"image": 3}, tensor_parallel_size=2)
    check(engine, Reference(model), llava_asks() if make is make_llava else fuyu_asks())


@pytest.mark.chaos
@pytest.mark.timeout(600)  # what compiles is a C++ compiler
@pytest.mark.parametrize("make", [make_llava, make_fuyu])
def test_a_compiled_model(tmp_path: Path, make: Callable[..., Path]) -> None:
    """As vLLM serves it unless told not to."""
    (tmp_path / "model").mkdir()
    model = make(tmp_path / "model")
    with VisionEngine(tmp_path, "compiled") as engine:
        engine.start(model, limit_mm_per_prompt={"image": 3})
        check(engine, Reference(model), llava_asks() if make is make_llava else fuyu_asks())


@pytest.mark.chaos
def test_a_model_of_vllm_s_own_with_inserted_tokens(
    engine: VisionEngine, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """BLIP-2, whose prompts have no placeholder either: what holds for Baton's two holds for it, beside them."""
    model = make_blip2(tmp_path_factory.mktemp("blip2"))
    engine.start(model, **CHUNKS)
    reference = Reference(model)
    asks = [Ask(f"what is where? {seed}", [picture(*size, seed)]) for seed, size in enumerate(SIZES)]
    answers = engine.ask(*asks, *(as_tokens(reference, asked) for asked in asks))
    for asked, answer in zip([*asks, *asks], answers, strict=True):
        require(reference, asked, answer)
    other_image(engine, "what is where?")


@pytest.mark.chaos
def test_an_image_token_without_a_row(tmp_path: Path) -> None:
    """Such a model does not start; started, one request for the logprobs of a prompt would end it."""
    (tmp_path / "model").mkdir()
    short = make_llava(tmp_path / "model", spare=-1)
    with VisionEngine(tmp_path) as engine, pytest.raises(AssertionError, match="beyond the vocabulary"):
        engine.start(short)
