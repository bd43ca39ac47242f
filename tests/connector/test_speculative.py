"""Engines that guess tokens ahead, from the prompt or with a draft model, hand over what engines that do not would."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.offline_engines import OWN, Answer, OfflineEngine, prompt, same

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
    draft = str(models / "llama-4-heads-draft")
    return {"method": "draft_model", "model": draft, "num_speculative_tokens": 3}


@dataclass
class Case:
    """A prompt, what the model says to it by itself, and what it says when that goes on."""

    asked: list[int]
    said: Answer
    then: Answer

    @property
    def context(self) -> list[int]:
        return self.asked + list(self.said["tokens"])


def goes_on(engine: OfflineEngine, case: Case, params: dict[str, Any]) -> None:
    (relayed,) = engine.ask(([*case.context, *OWN], SAID, params))
    same(relayed, case.then)
    assert relayed["cached"] == len(case.context) - 1


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_guessed_tokens_change_nothing_that_is_handed_over(models: Path, tmp_path: Path, method: str) -> None:
    """An engine that guesses hands over to itself; with n-grams also to one that does not, and back."""
    store = tmp_path / "store"
    # SmolLM2 goes on with what repeats, which a random model does not: it takes guesses from the prompt.
    model = None if method == "ngram" else str(models / "llama-4-heads")
    usual: dict[str, Any] = {"model": model, "enable_prefix_caching": False, "max_model_len": 512}
    with OfflineEngine(store, **usual) as plain:
        cases, of_plain = [], []
        for length in LENGTHS:
            asked = repeating(length, seed=length)
            (said,) = plain.ask((asked, SAID, params_to_save()))
            (then,) = plain.ask(([*asked, *said["tokens"], *OWN], SAID, None))
            plain.saved(said["params"])
            cases.append(Case(asked, said, then))
            of_plain.append(said["params"])
    with OfflineEngine(store, speculative_config=guesses(models, method), **usual) as guessing:
        of_guessing = []
        for case in cases:
            (left,) = guessing.ask((case.asked, SAID, params_to_save()))
            same(left, case.said)
            guessing.saved(left["params"])
            goes_on(guessing, case, left["params"])
            of_guessing.append(left["params"])
        assert guessing.accepted > 0, "no guess was ever taken"
        for case, params in zip(cases, of_plain, strict=True):
            if method == "ngram":
                goes_on(guessing, case, params)
            else:  # without the draft model's layers it is another model's KV
                (anew,) = guessing.ask(([*case.context, *OWN], SAID, params))
                same(anew, case.then)
                assert anew["cached"] == 0
    if method == "ngram":
        with OfflineEngine(store, **usual) as plain:
            for case, params in zip(cases, of_guessing, strict=True):
                goes_on(plain, case, params)
