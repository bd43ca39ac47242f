"""Other model families, and another type of number: what is handed over is what the engine itself would hit."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.offline_engines import OWN, OfflineEngine, prompt, same

from baton_kv.contract import params_to_save

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
FAMILIES = ("gemma", "gemma3", "qwen2", "mistral", "llama")
LENGTHS = (1, 27, 28, 59, 130, 400)


@pytest.mark.chaos
@pytest.mark.parametrize("family", FAMILIES)
def test_another_family_s_kv_is_handed_over_exactly(models: Path, tmp_path: Path, family: str) -> None:
    with OfflineEngine(
        tmp_path / "store", model=str(models / family), enable_prefix_caching=False, max_model_len=512
    ) as engine:
        for length in LENGTHS:
            asked = prompt(length, seed=length)
            (answer,) = engine.ask((asked, 5, params_to_save()))
            context = asked + answer["tokens"]
            engine.saved(answer["params"])
            (plain,) = engine.ask(([*context, *OWN], 8, None))
            (relayed,) = engine.ask(([*context, *OWN], 8, answer["params"]))
            same(relayed, plain)
            assert (relayed["cached"], engine.computed) == (len(context) - 1, len(OWN) + 1)
        (elsewhere,) = engine.ask(([*prompt(len(context), seed=1), *OWN], 8, None))
        assert elsewhere["logprobs"] != pytest.approx(plain["logprobs"], abs=2e-3), "the past must matter"


@pytest.mark.chaos
@pytest.mark.parametrize(("dtype", "kv_dtype"), [("bfloat16", "auto"), ("bfloat16", "fp8")])
def test_an_entry_is_the_engine_s_own_prefix_cache_bit_by_bit(
    tmp_path: Path, dtype: str, kv_dtype: str
) -> None:
    """In types of fewer bits than float32, where what is computed again differs in its last bits."""
    args = {"dtype": dtype, "kv_cache_dtype": kv_dtype, "enable_prefix_caching": True}
    with OfflineEngine(tmp_path / "store", **args) as engine:
        for length in (28, 60, 124, 380):  # with the five tokens A says, 32n + 1: the KV ends with a block
            asked = prompt(length, seed=length)
            (answer,) = engine.ask((asked, 5, params_to_save()))
            context = asked + answer["tokens"]
            engine.saved(answer["params"])
            (hit,) = engine.ask(([*context, *OWN], 8, None))
            assert (hit["cached"], engine.computed) == (length + 4, len(OWN) + 1)
            engine.forget_prefixes()
            (relayed,) = engine.ask(([*context, *OWN], 8, answer["params"]))
            assert (relayed["cached"], engine.computed) == (length + 4, len(OWN) + 1)
            assert relayed["tokens"] == hit["tokens"]
            assert relayed["logprobs"] == hit["logprobs"]
            engine.forget_prefixes()
