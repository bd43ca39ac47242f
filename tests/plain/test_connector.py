"""The connector under plain vLLM's own server: what an answer carries is what the next request sends, verbatim."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from support.offline_engines import OWN, Answer, prompt, same
from support.plain_servers import PlainServer

from baton_kv.contract import PARAMS_KEY, new_key, params_to_load, params_to_save

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(300),
    pytest.mark.parametrize("plain", ["connector"], indirect=True),
]


class RelayServer:
    """What A and B do with the server, which has no prefix caching: nothing but the connector can bring KV.

    Attributes:
        store: where its entries are.
    """

    def __init__(self, plain: PlainServer) -> None:
        self._plain = plain
        self.store = plain.folder / "store"

    def ask(self, *asked: tuple[list[int], int, dict[str, Any] | None]) -> list[Answer]:
        """Prompts, tokens to generate, transfer parameters."""
        return [self._ask(*one) for one in asked]

    def _ask(self, tokens: list[int], count: int, params: dict[str, Any] | None) -> Answer:
        body: dict[str, Any] = {"model": "m", "prompt": tokens, "max_tokens": count, "temperature": 0}
        body |= {"ignore_eos": True, "logprobs": 1, "return_token_ids": True}
        if params is not None:
            body["kv_transfer_params"] = params
        answer = self._plain.post("/v1/completions", body)
        (choice,) = answer["choices"]
        return {
            "tokens": choice["token_ids"],
            "logprobs": choice["logprobs"]["token_logprobs"],
            "cached": (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0,
            "params": answer["kv_transfer_params"],
        }

    def saved(self, params: dict[str, Any]) -> Path:
        path = self.store / "entries" / f"{params[PARAMS_KEY]['load']}.kv"
        deadline = time.monotonic() + 20
        while not path.exists():
            assert time.monotonic() < deadline, "not saved"
            time.sleep(0.005)
        return path


@pytest.fixture
def first(plain: PlainServer) -> RelayServer:
    return RelayServer(plain)


@pytest.fixture
def store(first: RelayServer) -> Path:
    return first.store


def handed_over(server: RelayServer, length: int, seed: int) -> tuple[list[int], dict[str, Any]]:
    """A's whole context, and what B sends to start from it."""
    asked = prompt(length, seed)
    (answer,) = server.ask((asked, 5, params_to_save()))
    server.saved(answer["params"])
    return asked + answer["tokens"], answer["params"]


@pytest.mark.parametrize("length", [1, 27, 128, 319])
def test_b_sends_back_what_a_s_answer_carried(first: RelayServer, length: int) -> None:
    context, params = handed_over(first, length, seed=length)
    (plain,) = first.ask(([*context, *OWN], 8, None))
    (relayed,) = first.ask(([*context, *OWN], 8, params))
    same(relayed, plain)
    assert (plain["cached"], relayed["cached"]) == (0, len(context) - 1)


def test_a_wrong_prefix_is_never_used(first: RelayServer) -> None:
    context, params = handed_over(first, 100, seed=6)
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
def test_what_cannot_be_loaded_is_computed(first: RelayServer, params: dict[str, Any]) -> None:
    (plain, relayed) = first.ask((prompt(60, 8), 6, None), (prompt(60, 8), 6, params))
    same(relayed, plain)
    assert relayed["cached"] == 0


def test_a_corrupt_entry_is_computed_anew(first: RelayServer, store: Path) -> None:
    context, params = handed_over(first, 300, seed=9)
    path = store / "entries" / f"{params[PARAMS_KEY]['load']}.kv"
    data = bytearray(path.read_bytes())
    data[-1000] ^= 4
    path.write_bytes(data)
    (plain,) = first.ask(([*context, *OWN], 8, None))
    for _ in range(3):
        (relayed,) = first.ask(([*context, *OWN], 8, params))
        same(relayed, plain)
    assert not path.exists()
    assert len(list((store / "quarantine").iterdir())) == 1


def test_a_wrong_block_would_be_noticed_here(first: RelayServer, store: Path) -> None:
    """The test of the tests: KV of another prompt under this one's key must change the answer."""
    from baton_kv.entry import Entry, write
    from baton_kv.folders import store_secret
    from baton_kv.format import EntryDescription
    from baton_kv.stores.file import FileStore

    context, params = handed_over(first, 200, seed=11)
    other, others = handed_over(first, 200, seed=12)
    secret, files = store_secret(store), FileStore(store)
    key, wrong = params[PARAMS_KEY]["load"], others[PARAMS_KEY]["load"]
    with files.open(wrong) as data:
        entry = Entry(data, wrong, secret)
        described = EntryDescription(**(vars(entry.description) | {"key": key}))
        runs = {
            (layer, described.run(layer, index)): bytes(entry.run(layer, index))
            for layer in range(len(described.layers))
            for index in range(described.runs(layer))
        }

    def slabs(layer: int, heads: range, blocks: range) -> list[memoryview]:
        size, run = described.layers[layer].slab_bytes, memoryview(runs[layer, blocks])
        return [run[at : at + size] for at in range(0, len(run), size)]

    planted = write(described, context, slabs, secret)
    files.put(key, planted)
    (plain,) = first.ask(([*context, *OWN], 8, None))
    (relayed,) = first.ask(([*context, *OWN], 8, params))
    assert len(other) == len(context)
    assert relayed["cached"] == len(context) - 1
    assert relayed["logprobs"] != pytest.approx(plain["logprobs"], abs=2e-3)
