"""KV that is moved into a joined context: as a page of torch does it, and never anybody else's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from connector.moved_reference import Piece, Reference
from support.offline_engines import OWN, Answer, OfflineEngine, prompt, same

from baton_kv.contract import PARAMS_KEY, params_to_load, params_to_save, transfer_params

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
SHARED = prompt(20, seed=9)
LENGTHS = (43, 60, 203)
"""Tokens of each part behind the shared ones: the KV of the first ends a block, with what it answers."""
APART = "0123456789abcdef"
MOVES = {"worker_extension_cls": "baton_kv.extension.BatonWorker", "enable_prefix_caching": False}


class Joins:
    """An engine with some contexts saved, to be joined."""

    def __init__(self, engine: OfflineEngine, shared: list[int], lengths: tuple[int, ...] = LENGTHS) -> None:
        self.engine = engine
        self.shared = len(shared)
        self.contexts: list[list[int]] = []
        self.keys: list[str] = []
        for seed, length in enumerate(lengths):
            asked = [*shared, *prompt(length, seed=seed)]
            (answer,) = engine.ask((asked, 5, params_to_save()))
            engine.saved(answer["params"])
            self.contexts.append(asked + answer["tokens"])
            self.keys.append(answer["params"][PARAMS_KEY]["load"])

    def prompt(self) -> list[int]:
        """All contexts one after the other, the shared tokens once, and B's own."""
        first, *others = self.contexts
        return [*first, *(token for context in others for token in context[self.shared :]), *OWN]

    def pieces(self, head: int = 0) -> list[Piece]:
        """What is moved of each part but the first: all but its first `head` tokens, and the last one."""
        found, at = list[Piece](), len(self.contexts[0])
        for context in self.contexts[1:]:
            start, size = self.shared + head, len(context) - self.shared
            found.append(Piece(context, start, size - head - 1, at + head))
            at += size
        return found

    def moved(self, head: int = 0) -> list[dict[str, Any]]:
        """The same, as the connector takes it."""
        return [
            {"key": key, "start": piece.start, "tokens": piece.tokens, "to": piece.to}
            for key, piece in zip(self.keys[1:], self.pieces(head), strict=True)
        ]

    def join(self, moved: list[dict[str, Any]], count: int = 8) -> Answer:
        (answer,) = self.engine.ask(
            (self.prompt(), count, transfer_params(load=self.keys[0], moved=moved, apart=APART))
        )
        return answer

    def plain(self, count: int = 8) -> Answer:
        (answer,) = self.engine.ask((self.prompt(), count, None))
        return answer


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OfflineEngine]:
    with OfflineEngine(tmp_path_factory.mktemp("moves") / "store", **MOVES) as started:
        started.call("baton_enable_moves")
        yield started


@pytest.fixture(scope="module")
def behind_the_same(engine: OfflineEngine) -> Joins:
    return Joins(engine, SHARED)


@pytest.fixture(scope="module")
def reference(engine: OfflineEngine) -> Reference:
    return Reference(engine.model)


@pytest.mark.parametrize(("shared", "head"), [(SHARED, 0), ([], 16)])
def test_the_answer_is_that_of_a_page_of_torch_that_does_the_same(
    engine: OfflineEngine, reference: Reference, shared: list[int], head: int
) -> None:
    joins = Joins(engine, shared)
    moved = joins.join(joins.moved(head))
    gaps = len(OWN) + 1
    assert (moved["cached"], engine.computed) == (len(joins.prompt()) - gaps, gaps)
    expected = reference.log_probs(joins.prompt(), moved["tokens"], joins.pieces(head))
    assert moved["logprobs"] == pytest.approx(expected, abs=1e-3)
    others = reference.log_probs(joins.prompt(), moved["tokens"], [])
    assert others != pytest.approx(expected, abs=1e-2), "it is not what full attention says"


def test_where_everything_is_computed_again_nothing_differs(
    engine: OfflineEngine, behind_the_same: Joins
) -> None:
    """One token is moved, from a context that is the same up to it, to where it was."""
    whole = behind_the_same.prompt()
    (answer,) = engine.ask((whole, 1, params_to_save()))
    engine.saved(answer["params"])
    at = len(whole) - 3
    moved = [{"key": answer["params"][PARAMS_KEY]["load"], "start": at, "tokens": 1, "to": at}]
    computed, plain = behind_the_same.join(moved), behind_the_same.plain()
    assert computed["cached"] == at + 1
    same(computed, plain)
    assert computed["logprobs"] == pytest.approx(plain["logprobs"], abs=1e-4)


def test_a_corrupt_part_is_computed_and_put_aside(engine: OfflineEngine) -> None:
    joins = Joins(engine, SHARED, (43, 60))
    path = engine.saved(params_to_load(joins.keys[1]))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1  # within its KV
    path.write_bytes(data)
    answer = joins.join(joins.moved())
    assert engine.computed == len(joins.prompt()), "it failed while it was loaded, so all is computed"
    same(answer, joins.plain())
    assert not path.exists()
    joins.join(joins.moved())
    assert engine.computed == len(joins.prompt()) - len(joins.contexts[0]) + 1, "the first is loaded alone"


def test_what_the_prompt_does_not_hold_is_not_moved(engine: OfflineEngine, behind_the_same: Joins) -> None:
    """Up to the first token that differs; another part's, another place, nothing of it."""
    first, second = behind_the_same.moved()
    for wrong in (first | {"to": first["to"] - 1}, first | {"key": second["key"]}, first | {"start": 3}):
        same(behind_the_same.join([wrong, second]), behind_the_same.plain())


def test_moved_kv_is_used_and_saved_apart_from_others_alone(
    engine: OfflineEngine, behind_the_same: Joins
) -> None:
    """Without a salt that nobody else has nothing is moved; what holds moved KV is loaded with one only."""
    whole, moved = behind_the_same.prompt(), behind_the_same.moved()
    asked = transfer_params(load=behind_the_same.keys[0], moved=moved)
    (answer,) = engine.ask((whole, 8, asked))
    same(answer, behind_the_same.plain())
    assert answer["cached"] == 0
    saving = transfer_params(load=behind_the_same.keys[0], moved=moved, apart=APART, save=True)
    (blended,) = engine.ask((whole, 8, saving))
    engine.saved(blended["params"])
    key = blended["params"][PARAMS_KEY]["load"]
    (plain,) = engine.ask((whole, 8, params_to_load(key)))
    assert plain["cached"] == 0
    same(plain, behind_the_same.plain())
    (apart,) = engine.ask((whole, 8, transfer_params(load=key, apart=APART)))
    assert apart["cached"] == len(whole) - 1
    assert apart["tokens"] == blended["tokens"]


@pytest.mark.chaos
@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral", "gemma"])
def test_with_one_layer_moved_kv_is_what_the_model_computes(
    one_layer_models: Path, tmp_path: Path, family: str
) -> None:
    """The first layer's KV depends on a token and its place alone, so that moving it loses nothing."""
    with OfflineEngine(tmp_path / "store", model=str(one_layer_models / family), **MOVES) as engine:
        engine.call("baton_enable_moves")
        joins = Joins(engine, [])
        moved = joins.join(joins.moved(1))
        assert engine.computed == len(OWN) + 1
        same(moved, joins.plain())


@pytest.mark.chaos
def test_moved_to_where_it_was_nothing_changes_in_fewer_bits(tmp_path: Path) -> None:
    """bfloat16 is packed otherwise, and rounded: a rotation by nothing must give every bit back."""
    with OfflineEngine(tmp_path / "store", dtype="bfloat16", **MOVES) as engine:
        engine.call("baton_enable_moves")
        whole = prompt(203)
        (answer,) = engine.ask((whole, 1, params_to_save()))
        engine.saved(answer["params"])
        key = answer["params"][PARAMS_KEY]["load"]
        (loaded,) = engine.ask((whole, 8, params_to_load(key)))
        moved = [{"key": key, "start": 37, "tokens": 165, "to": 37}]
        (again,) = engine.ask((whole, 8, transfer_params(load=key, limit=37, moved=moved, apart=APART)))
        assert again["cached"] == loaded["cached"] == 202
        assert (again["tokens"], again["logprobs"]) == (loaded["tokens"], loaded["logprobs"])


@pytest.mark.chaos
def test_after_a_thousand_joins_others_are_answered_as_before(
    engine: OfflineEngine, behind_the_same: Joins
) -> None:
    before, moved = behind_the_same.plain(), behind_the_same.moved()
    for _ in range(125):
        asked = (
            behind_the_same.prompt(),
            1,
            transfer_params(load=behind_the_same.keys[0], moved=moved, apart=APART),
        )
        engine.ask(*[asked] * 8)
    after = behind_the_same.plain()
    assert (after["tokens"], after["logprobs"]) == (before["tokens"], before["logprobs"])
