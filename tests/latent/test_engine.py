"""Models think in plain vLLM as HuggingFace's do in a loop, in fp32, whatever the engine does with them.

What a model thinks feeds on itself, so that after some prompts the last bit of the arithmetic decides: there
HuggingFace's own fp32 and fp64 are apart by 10 % after ten steps. The prompts here were looked for: on them the two
are the same within 1e-5, and what differs by more is a mistake.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from latent.reference import Reference
from latent.thinkers import SAID, Thinker
from support.offline_engines import OfflineEngine, prompt

from baton.config.settings import load_settings
from baton.models.store import ModelStore
from baton_kv.contract import params_to_save, transfer_params
from baton_latent import latent_overrides
from baton_latent.contract import PLACEHOLDER_KEY

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
LONGER = ("smollm2", "qwen2", "mistral", "gemma")
"""With `make chaos`; every time the one that is neither tied nor, as SmolLM2 is, behind the gateway in test_gateway.py."""


@pytest.fixture(
    scope="module", params=["llama", *(pytest.param(name, marks=pytest.mark.chaos) for name in LONGER)]
)
def thinker(
    request: pytest.FixtureRequest, tiny_models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Thinker]:
    """Chunks of 16 tokens, blocks of 32, a prefix cache, and too little KV memory for eight at once."""
    folder = tmp_path_factory.mktemp("thinker")
    model = str(tiny_models / request.param)
    if request.param == "smollm2":
        model = ModelStore(load_settings().models_folder).resolve("smollm2")
    overrides = latent_overrides(model)
    with OfflineEngine(
        folder / "store",
        model=model,
        hf_overrides=overrides,
        enable_prefix_caching=True,
        max_num_batched_tokens=16,
        max_num_seqs=8,
        max_model_len=512,
        num_gpu_blocks_override=33,
        worker_extension_cls="latent.latent_probe.Probe",
    ) as engine:
        engine.call("watch")
        placeholder = overrides[PLACEHOLDER_KEY]
        yield Thinker(engine, Reference(model, placeholder), placeholder, folder)


def test_one_batch_with_different_numbers_of_steps_and_none(thinker: Thinker) -> None:
    prompts = [
        [*prompt(length, seed=seed), *thinker.steps(steps), *prompt(tail, seed=seed + 1)]
        for length, steps, tail, seed in ((37, 8, 5, 4), (70, 0, 0, 1), (5, 20, 4, 10), (50, 3, 30, 7))
    ]
    answers = thinker.engine.ask(*((asked, SAID, None) for asked in prompts))
    for answer, asked in zip(answers, prompts, strict=True):
        thinker.require(answer, asked)


def test_thinking_changes_what_is_said(thinker: Thinker) -> None:
    asked = prompt(40, seed=3)
    (plain,) = thinker.engine.ask((asked, SAID, None))
    (thought,) = thinker.engine.ask(([*asked, *thinker.steps(6)], SAID, None))
    assert plain["logprobs"] != pytest.approx(thought["logprobs"], abs=1e-2)
    assert thinker.placeholder not in thought["tokens"]


@pytest.mark.parametrize(("length", "seed"), [(60, 8), (63, 11), (64, 21)])
def test_a_cached_prefix_may_end_within_a_run_and_right_before_it(
    thinker: Thinker, length: int, seed: int
) -> None:
    said = prompt(length, seed=seed)
    thinker.engine.ask((said, 2, None))  # an ordinary request computes the prefix
    asked = [*said, *thinker.steps(12), *prompt(3, seed=1)]
    (first,) = thinker.engine.ask((asked, SAID, None))
    assert first["cached"] == length // 32 * 32
    thinker.require(first, asked)
    (again,) = thinker.engine.ask((asked, SAID, None))
    assert again["cached"] == 64
    thinker.require(again, asked)


def test_words_after_a_thought_are_words(thinker: Thinker) -> None:
    """Who says the same up to a thought, and then speaks, has the words' KV from the cache, and no thought's."""
    said = prompt(64, seed=21)
    thinker.engine.ask(([*said, *thinker.steps(32), *prompt(3, seed=1)], 2, None))
    asked = [*said, *prompt(35, seed=2)]
    (answer,) = thinker.engine.ask((asked, SAID, None))
    assert answer["cached"] == 64
    thinker.require(answer, asked)


def test_chains_of_runs(thinker: Thinker) -> None:
    first, second = prompt(20, seed=7), prompt(9, seed=8)
    asked = [*first, *thinker.steps(4), *second, *thinker.steps(6), *thinker.steps(3)]
    (answer,) = thinker.engine.ask((asked, SAID, None))
    thinker.require(answer, asked)


def test_preempted_requests_think_again(thinker: Thinker) -> None:
    prompts = [[*prompt(90, seed=200 + number), *thinker.steps(10)] for number in range(8)]
    answers = thinker.engine.ask(*((asked, 64, None) for asked in prompts))
    assert thinker.engine.preempted > 0
    resumed = [
        (answer, asked)
        for answer, asked in zip(answers, prompts, strict=True)
        if thinker.dump(answer)["resumed"]
    ]
    assert resumed
    for answer, asked in resumed:
        thinker.require(answer, asked)


def test_what_was_thought_is_handed_over_with_what_it_goes_on_from(thinker: Thinker) -> None:
    asked = [*prompt(45, seed=7), *thinker.steps(12)]
    (answer,) = thinker.engine.ask((asked, 4, params_to_save()))
    thinker.engine.saved(answer["params"])
    key = answer["params"]["baton_kv"]["load"]
    context = asked + answer["tokens"]
    for own, limit, cached in (
        (prompt(6, seed=82), None, len(context) - 1),  # loaded after the run
        ([*thinker.steps(2), *prompt(4, seed=83)], None, len(context) - 1),  # a chain
        (prompt(6, seed=84), 50, 50),  # within the run
        (prompt(6, seed=85), 45, 45),  # right before it
    ):
        thinker.engine.forget_prefixes()
        (relayed,) = thinker.engine.ask(([*context, *own], SAID, transfer_params(load=key, limit=limit)))
        assert relayed["cached"] == cached
        thinker.require(relayed, [*context, *own], written=False)


def test_what_was_loaded_is_cached_with_what_it_goes_on_from(thinker: Thinker) -> None:
    """A later request hits loaded blocks in the prefix cache, and goes on in the midst of the run."""
    asked = [*prompt(58, seed=6), *thinker.steps(12)]
    (answer,) = thinker.engine.ask((asked, 2, params_to_save()))
    thinker.engine.saved(answer["params"])
    thinker.engine.forget_prefixes()
    for number in range(8):  # other seeds lie in the blocks by now
        thinker.engine.ask((prompt(100, seed=300 + number), 2, None))
    thinker.engine.forget_prefixes()
    (loaded,) = thinker.engine.ask((asked, SAID, answer["params"]))
    assert loaded["cached"] == len(asked) - 1, "the last step is computed, from a seed that was loaded"
    thinker.require(loaded, asked, written=False)
    longer = [*asked, *thinker.steps(7)]
    (hit,) = thinker.engine.ask((longer, SAID, None))
    assert hit["cached"] == 64
    thinker.require(hit, longer, written=False)
