"""The engine's logits are HuggingFace's, whatever comes together in a batch and however it is cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from vision.engines import Answer, Ask, VisionEngine
from vision.reference import Reference
from vision.tiny_vision import make_fuyu, make_llava, picture

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
    """The same prompt as token ids."""
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


def test_llava(engine: VisionEngine, tmp_path_factory: pytest.TempPathFactory) -> None:
    """CLIP, `default`, the second last layer; official names of weights; processor cache; chunks."""
    model = make_llava(tmp_path_factory.mktemp("llava"), layout="official")
    engine.start(model, limit_mm_per_prompt={"image": 3}, **CHUNKS)
    check(engine, Reference(model), llava_asks())
