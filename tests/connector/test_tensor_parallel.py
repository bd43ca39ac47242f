"""Real engines of one rank and of two hand over to one another, token by token as if nothing had been handed over.

Two ranks on one machine without GPUs are two processes; the connector's code is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.offline_engines import OWN, Answer, OfflineEngine, prompt, same

from baton_kv.contract import PARAMS_KEY, params_to_save

pytestmark = [pytest.mark.engine, pytest.mark.chaos, pytest.mark.timeout(900)]
LENGTHS = (1, 27, 28, 59, 130, 400)
MODELS = {"llama-4-heads": "two heads a rank", "llama": "one head, which both ranks hold"}


@dataclass
class Left:
    """What an engine left behind: its context, how to start from it, and what it says by itself."""

    context: list[int]
    params: dict[str, Any]
    plain: Answer


def leave(engine: OfflineEngine) -> list[Left]:
    found = []
    for length in LENGTHS:
        asked = prompt(length, seed=length)
        (answer,) = engine.ask((asked, 5, params_to_save()))
        context = asked + answer["tokens"]
        engine.saved(answer["params"])
        (plain,) = engine.ask(([*context, *OWN], 8, None))
        found.append(Left(context, answer["params"], plain))
    return found


def go_on(engine: OfflineEngine, left: list[Left]) -> None:
    """Continue each context, one by one and then all at once."""
    asked = [([*each.context, *OWN], 8, each.params) for each in left]
    for each, one in zip(left, asked, strict=True):
        (relayed,) = engine.ask(one)
        same(relayed, each.plain)
        assert (relayed["cached"], engine.computed) == (len(each.context) - 1, len(OWN) + 1)
    for each, relayed in zip(left, engine.ask(*asked), strict=True):
        same(relayed, each.plain)
        assert relayed["cached"] == len(each.context) - 1


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.fault("D7")
def test_engines_of_one_and_two_ranks_hand_over_to_one_another(
    models: Path, tmp_path: Path, model: str
) -> None:
    """There, back, and among themselves; a damaged entry is recomputed by both ranks."""
    store = tmp_path / "store"
    usual = {
        "model": str(models / model),
        "enable_prefix_caching": False,
        "max_model_len": 512,
        "resident": 0,  # so that the damage is read
    }
    with OfflineEngine(store, **usual) as one:
        of_one = leave(one)
    with OfflineEngine(store, tensor_parallel_size=2, **usual) as two:
        go_on(two, of_one)
        of_two = leave(two)
        go_on(two, of_two)
        damaged = of_one[-1]
        path = store / "entries" / f"{damaged.params[PARAMS_KEY]['load']}.kv"
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        (recomputed,) = two.ask(([*damaged.context, *OWN], 8, damaged.params))
        same(recomputed, damaged.plain)
        assert recomputed["cached"] == 0
        (elsewhere,) = two.ask(([*prompt(len(damaged.context), seed=1), *OWN], 8, None))
        assert elsewhere["logprobs"] != pytest.approx(damaged.plain["logprobs"], abs=2e-3), (
            "the past must matter"
        )
    with OfflineEngine(store, **usual) as one:
        go_on(one, of_two)
    assert list((store / "writing").iterdir()) == []
