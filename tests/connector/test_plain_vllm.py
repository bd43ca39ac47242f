"""The connector under plain vLLM, on real weights: B answers exactly as if it had prefilled everything."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from offline_engines import OWN, OfflineEngine, prompt, same

from baton_kv.contract import PARAMS_KEY, new_key, params_to_load, params_to_save

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
LENGTHS = (1, 2, 31, 32, 33, 127, 128, 129, 200, 319)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("relay") / "store"


@pytest.fixture(scope="module")
def first(store: Path) -> Iterator[OfflineEngine]:
    """Without prefix caching, so that nothing but the connector can bring KV."""
    with OfflineEngine(store, enable_prefix_caching=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def second(store: Path) -> Iterator[OfflineEngine]:
    """Another engine, with prefix caching and small chunks of prefill."""
    with OfflineEngine(store, enable_prefix_caching=True, max_num_batched_tokens=64) as engine:
        yield engine


def handed_over(
    engine: OfflineEngine, length: int, seed: int, said: int = 5
) -> tuple[list[int], dict[str, Any]]:
    """A's whole context, and what B sends to start from it."""
    asked = prompt(length, seed)
    (answer,) = engine.ask((asked, said, params_to_save()))
    assert answer["params"][PARAMS_KEY]["load"]
    return asked + answer["tokens"], answer["params"]


def wait_for_entry(engine: OfflineEngine) -> None:
    """A step later a save is in the store: ask for something unrelated."""
    engine.ask((prompt(4, seed=99), 3, None))


@pytest.mark.parametrize("length", LENGTHS)
def test_b_continues_exactly_where_a_ended(first: OfflineEngine, length: int) -> None:
    context, params = handed_over(first, length, seed=length)
    wait_for_entry(first)
    (plain,) = first.ask(([*context, *OWN], 8, None))
    (relayed,) = first.ask(([*context, *OWN], 8, params))
    same(relayed, plain)
    assert (plain["cached"], relayed["cached"]) == (0, len(context) - 1)


def test_another_engine_starts_from_it_without_prefilling_it(
    first: OfflineEngine, second: OfflineEngine
) -> None:
    contexts = [handed_over(first, length, seed=1000 + length) for length in LENGTHS]
    wait_for_entry(first)
    plain = first.ask(*[([*context, *OWN], 8, None) for context, _ in contexts])
    relayed = second.ask(*[([*context, *OWN], 8, params) for context, params in contexts])
    for one, other, (context, _) in zip(relayed, plain, contexts, strict=True):
        same(one, other)
        assert one["cached"] == len(context) - 1


def test_many_start_from_one_at_once_and_a_chain_goes_on(first: OfflineEngine, second: OfflineEngine) -> None:
    context, params = handed_over(first, 200, seed=5)
    wait_for_entry(first)
    own = [prompt(length, seed=700 + length) for length in range(3, 19)]
    plain = first.ask(*[(context + mine, 6, None) for mine in own])
    relayed = second.ask(*[(context + mine, 6, params) for mine in own])
    for one, other in zip(relayed, plain, strict=True):
        same(one, other)
    key = params[PARAMS_KEY]["load"]
    (middle,) = second.ask((context + own[0], 6, params_to_save(load=key)))
    wait_for_entry(second)
    longer = context + own[0] + middle["tokens"]
    (chained,) = first.ask(([*longer, *OWN], 8, middle["params"]))
    (whole,) = first.ask(([*longer, *OWN], 8, None))
    same(chained, whole)
    assert chained["cached"] == len(longer) - 1


def test_a_wrong_prefix_is_never_used(first: OfflineEngine) -> None:
    context, params = handed_over(first, 100, seed=6)
    wait_for_entry(first)
    other = [*context[:50], 7, *context[51:], *OWN]
    (plain,) = first.ask((other, 8, None))
    (relayed,) = first.ask((other, 8, params))
    same(relayed, plain)
    assert relayed["cached"] == 50
    (elsewhere,) = first.ask(([8, *context, *OWN], 4, params))
    assert elsewhere["cached"] == 0


@pytest.mark.parametrize(
    "params", [{PARAMS_KEY: {"load": "x"}}, {PARAMS_KEY: 7}, params_to_load(new_key("local"))]
)
def test_what_cannot_be_loaded_is_computed(first: OfflineEngine, params: dict[str, Any]) -> None:
    (plain, relayed) = first.ask((prompt(60, 8), 6, None), (prompt(60, 8), 6, params))
    same(relayed, plain)


def test_a_corrupt_entry_is_computed_anew(first: OfflineEngine, second: OfflineEngine, store: Path) -> None:
    context, params = handed_over(first, 300, seed=9)
    wait_for_entry(first)
    path = store / "entries" / f"{params[PARAMS_KEY]['load']}.kv"
    data = bytearray(path.read_bytes())
    data[-1000] ^= 4
    path.write_bytes(data)
    (plain,) = first.ask(([*context, *OWN], 8, None))
    for engine in (second, second, first):
        (relayed,) = engine.ask(([*context, *OWN], 8, params))
        same(relayed, plain)
    assert not path.exists()
    assert len(list((store / "quarantine").iterdir())) == 1


def test_a_wrong_block_would_be_noticed_here(first: OfflineEngine, store: Path) -> None:
    """The test of the tests: KV of another prompt under this one's key must change the answer."""
    from baton_kv.entry import Description, Entry, write
    from baton_kv.secret import store_secret
    from baton_kv.stores.file import FileStore

    context, params = handed_over(first, 200, seed=11)
    other, others = handed_over(first, 200, seed=12)
    wait_for_entry(first)
    secret, files = store_secret(store), FileStore(store)
    key, wrong = params[PARAMS_KEY]["load"], others[PARAMS_KEY]["load"]
    with files.open(wrong) as data:
        entry = Entry(data, wrong, secret)
        size = entry.description.blocks * entry.description.block_bytes
        layers = [
            bytearray(b"".join(bytes(entry.chunk(layer, index)) for index in range(entry.description.chunks)))
            for layer in range(entry.description.layers)
        ]
    assert all(len(layer) == size for layer in layers)
    described = Description(**(vars(entry.description) | {"key": key}))
    planted = write(described, context, lambda layer: memoryview(layers[layer]), secret)
    files.put(key, planted)
    (plain,) = first.ask(([*context, *OWN], 8, None))
    (relayed,) = first.ask(([*context, *OWN], 8, params))
    assert len(other) == len(context)
    assert relayed["cached"] == len(context) - 1
    assert relayed["logprobs"] != pytest.approx(plain["logprobs"], abs=2e-3)
