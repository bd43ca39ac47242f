"""Windowed layers keep the last tokens' blocks only; a context is continued exactly from those, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.offline_engines import OWN, OfflineEngine, prompt, same
from transformers import AutoModelForCausalLM

from baton_kv.contract import PARAMS_KEY, params_to_save, transfer_params
from baton_kv.entry import Entry
from baton_kv.folders import store_secret
from baton_kv.format import EntryDescription
from baton_kv.stores.file import FileStore

pytestmark = [pytest.mark.engine, pytest.mark.chaos, pytest.mark.timeout(300)]
WINDOW, BLOCK = 64, 32
LENGTHS = (1, 27, 58, 59, 60, 91, 130, 400)


def load_key(params: dict[str, Any]) -> str:
    """Return the key that an answer's parameters name."""
    key: str = params[PARAMS_KEY]["load"]
    return key


class Windowed(OfflineEngine):
    """An engine whose model has windows."""

    def save(
        self, asked: list[int], source: dict[str, Any] | None = None
    ) -> tuple[list[int], dict[str, Any]]:
        """Save a context with five tokens of an answer; return it, and how to start from it."""
        params = params_to_save(load=source[PARAMS_KEY]["load"] if source else None)
        (answer,) = self.ask((asked, 5, params))
        self.saved(answer["params"])
        return asked + answer["tokens"], answer["params"]

    def described(self, params: dict[str, Any]) -> EntryDescription:
        store, key = FileStore(self._store), params[PARAMS_KEY]["load"]
        with store.open(key) as reader:
            return Entry(reader, key, store_secret(self._store)).description


@pytest.fixture(scope="module", params=["gemma3", "windows", "gpt-oss"])
def engine(
    request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Windowed]:
    """Start a model with windows beside full attention, or with windows alone."""
    folder = tmp_path_factory.mktemp("windows")
    with Windowed(
        folder / "store", model=str(models / request.param), enable_prefix_caching=False, max_model_len=768
    ) as started:
        yield started


def test_contexts_of_any_length_are_continued_exactly(engine: Windowed) -> None:
    for length in LENGTHS:
        context, params = engine.save(prompt(length, seed=length))
        (plain,) = engine.ask(([*context, *OWN], 80, None))
        (relayed,) = engine.ask(([*context, *OWN], 80, params))
        same(relayed, plain)
        assert (relayed["cached"], engine.computed) == (len(context) - 1, len(OWN) + 1)


def test_what_is_said_after_a_handoff_is_what_transformers_says(engine: Windowed) -> None:
    """In float32, token by token, past several windows; and it is no babble of one word."""
    context, params = engine.save(prompt(200, seed=12))
    whole = [*context, *OWN]
    (relayed,) = engine.ask((whole, 80, params))
    assert relayed["cached"] == len(context) - 1
    model = AutoModelForCausalLM.from_pretrained(engine.model, dtype=torch.float32).eval()
    with torch.no_grad():  # all places at once: each says what follows the tokens before it
        logits = model(torch.tensor([whole + relayed["tokens"]])).logits[0, len(whole) - 1 : -1]
    print(f"\n{len(set(relayed['tokens']))} different tokens of 80")
    assert relayed["tokens"] == logits.argmax(-1).tolist()
    assert len(set(relayed["tokens"])) > 20


def test_windowed_layers_store_their_window_alone(engine: Windowed) -> None:
    _, params = engine.save(prompt(400, seed=3))
    described = engine.described(params)
    behind = (404 - WINDOW + 1) // BLOCK
    assert behind in described.firsts
    assert set(described.firsts) <= {0, behind}
    whole = sum(shape.heads * shape.slab_bytes for shape in described.layers) * described.blocks
    print(f"\n{described.kv_bytes / whole:.0%} of what whole allocations would take")
    assert described.kv_bytes < 0.65 * whole, "of gpt-oss one layer of two has windows"


def test_a_chain_is_continued_exactly_at_every_turn(engine: Windowed) -> None:
    context, params = engine.save(prompt(100, seed=4))
    for turn in range(5):
        context, params = engine.save([*context, *prompt(45, seed=50 + turn)], params)
        (plain,) = engine.ask(([*context, *OWN], 8, None))
        (relayed,) = engine.ask(([*context, *OWN], 8, params))
        same(relayed, plain)
        assert relayed["cached"] == len(context) - 1


def test_a_prompt_that_leaves_the_context_early_is_computed(engine: Windowed) -> None:
    """Its window lies where blocks were freed, so nothing is loaded rather than something wrong."""
    context, params = engine.save(prompt(300, seed=6))
    fork = [*context[:150], *prompt(20, seed=7)]
    (plain,) = engine.ask((fork, 8, None))
    (relayed,) = engine.ask((fork, 8, params))
    same(relayed, plain)
    assert (relayed["cached"], engine.computed) == (0, len(fork))
    _, forked = engine.save(fork, params)
    (again,) = engine.ask(([*fork, *OWN], 8, forked))
    (plain,) = engine.ask(([*fork, *OWN], 8, None))
    same(again, plain)


def test_a_prompt_is_saved_by_itself_as_long_as_its_window_is_there(engine: Windowed) -> None:
    """An answer moves the window, and vLLM frees what is behind it."""
    asked = prompt(150, seed=9)
    (short,) = engine.ask((asked, 1, transfer_params(save=True, scope="prompt")))
    engine.saved(short["params"])
    (plain,) = engine.ask(([*asked, *OWN], 8, None))
    (relayed,) = engine.ask(([*asked, *OWN], 8, short["params"]))
    same(relayed, plain)
    assert (relayed["cached"], engine.computed) == (len(asked), len(OWN))
    (long,) = engine.ask((asked, 100, transfer_params(save=True, scope="prompt")))
    assert long["params"] is None, "nothing is promised"
    (limited,) = engine.ask(([*asked, *OWN], 8, transfer_params(load=load_key(short["params"]), limit=40)))
    same(limited, plain)
    assert limited["cached"] == 0


def test_what_the_engine_still_has_is_not_loaded(models: Path, tmp_path: Path) -> None:
    """With a prefix cache: loads behind local blocks, of which windowed layers have the last ones only."""
    with Windowed(
        tmp_path / "store", model=str(models / "gemma3"), enable_prefix_caching=True, max_model_len=768
    ) as engine:
        context, params = engine.save(prompt(300, seed=8))
        engine.forget_prefixes()
        (plain,) = engine.ask(([*context, *OWN], 8, None))
        engine.forget_prefixes()
        engine.ask((context[:130], 1, None))
        (relayed,) = engine.ask(([*context, *OWN], 8, params))
        same(relayed, plain)
        assert (relayed["cached"], engine.computed) == (len(context) - 1, len(OWN) + 1)
        (resident,) = engine.ask(([*context, *OWN], 8, params))
        same(resident, plain)
