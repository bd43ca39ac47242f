"""Engines that guess tokens ahead, from the prompt or with a draft model, hand over what engines that do not would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.offline_engines import OWN, OfflineEngine, prompt, same

from baton_kv.contract import params_to_save

pytestmark = [pytest.mark.engine, pytest.mark.chaos, pytest.mark.timeout(600)]
LENGTHS = (27, 28, 59, 130)
SAID = 24
"""Tokens of an answer: long enough for guesses to be taken and to be rejected."""


def repeating(length: int, seed: int) -> list[int]:
    """A prompt that says the same nine tokens again and again, so that guesses from it are often right."""
    nine = prompt(9, seed=seed)
    return (nine * length)[:length]


def guesses(models: Path, method: str) -> dict[str, Any]:
    if method == "ngram":
        return {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    return {"method": "draft_model", "model": str(models / "llama"), "num_speculative_tokens": 3}


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_guessed_tokens_change_nothing_that_is_handed_over(models: Path, tmp_path: Path, method: str) -> None:
    """The engine that saves guesses, the one that loads guesses too, and one beside them that never does agrees."""
    store = tmp_path / "store"
    usual = {"model": str(models / "llama-4-heads"), "enable_prefix_caching": False, "max_model_len": 512}
    asked = [repeating(length, seed=length) for length in LENGTHS]
    with OfflineEngine(tmp_path / "other", **usual) as plain:
        said = plain.ask(*((each, SAID, None) for each in asked))
        contexts = [each + answer["tokens"] for each, answer in zip(asked, said, strict=True)]
        truth = plain.ask(*(([*context, *OWN], SAID, None) for context in contexts))
    with OfflineEngine(store, speculative_config=guesses(models, method), **usual) as guessing:
        for each, answer, context, true in zip(asked, said, contexts, truth, strict=True):
            (left,) = guessing.ask((each, SAID, params_to_save()))
            same(left, answer)
            guessing.saved(left["params"])
            (relayed,) = guessing.ask(([*context, *OWN], SAID, left["params"]))
            same(relayed, true)
            assert relayed["cached"] == len(context) - 1
        assert guessing.accepted > 0, "no guess was ever taken"
