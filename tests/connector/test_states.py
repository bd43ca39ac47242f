"""Each family: what is said after a load is what is said without one, or nothing is loaded.

The equivalence row of each family: 40 lengths by 5 cases. Where vLLM's CPU backend computes in float32, the tokens are those
of a computation of the whole prompt. Gated delta nets it computes in bfloat16 alone, where chunks of another length
round otherwise: there the tokens, and the log probabilities to the last bit, are those that the engine says which goes on.
Beside others they may differ by a rounding on a processor with AMX, where a batch of another size rounds otherwise, in plain vLLM
as well.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.offline_engines import OWN, Answer, OfflineEngine, prompt, same

from baton.engines.hardware import read_processor
from baton_kv.contract import PARAMS_KEY, params_to_load, params_to_save, transfer_params

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
SAID, THEN = 5, 8
"""Tokens that are said before a context is saved, and after it is loaded."""
LENGTHS = (
    *range(1, 14),
    27,
    28,
    31,
    32,
    33,
    *range(58, 66),
    91,
    92,
    95,
    96,
    97,
    123,
    124,
    127,
    128,
    129,
    130,
    200,
    319,
    400,
)
AT_ONCE = 8
ROUNDING = 0.07
"""A bit more than the step between two logits in bfloat16, of those between 8 and 16."""
BLOCK = 96
"""Tokens in a block of the tiny model with gated delta nets, whose state is as large as the KV of so many."""


@dataclass(frozen=True)
class Kind:
    """A tiny model, and how its engine is started.

    Attributes:
        exact: whether another order of sums gives the same tokens, as in float32.
    """

    name: str
    args: dict[str, Any] = field(default_factory=dict)
    exact: bool = True


KINDS = (
    Kind("granite4", {"enable_prefix_caching": False}),
    Kind("gemma4"),
    Kind("qwen3-next", {"dtype": "bfloat16"}, exact=False),
)
ALIKE = (Kind("llama"), Kind("gemma3"))
"""Families whose layers are alike, of which other tests say more."""


@dataclass(frozen=True)
class Context:
    """A saved context, and what its engine said after it without any load.

    Attributes:
        tokens: token ids that B's prompt begins with.
        key: key of its entry.
        goes_on: answer of the engine that did not stop, from the first token behind the context on.
    """

    tokens: list[int]
    key: str
    goes_on: Answer


def key_of(answer: Answer) -> str:
    key: str = answer["params"][PARAMS_KEY]["load"]
    return key


def saved(engine: OfflineEngine, length: int) -> Context:
    """Save a context with five tokens of an answer; in another run let the answer go on."""
    asked = prompt(length, seed=length)
    engine.forget_prefixes()
    (answer,) = engine.ask((asked, SAID, params_to_save()))
    engine.saved(answer["params"])
    engine.forget_prefixes()
    (whole,) = engine.ask((asked, SAID + THEN, None))
    assert whole["tokens"][:SAID] == answer["tokens"]
    goes_on = {name: whole[name][SAID:] for name in ("tokens", "logprobs")}
    return Context([*asked, *answer["tokens"]], key_of(answer), goes_on)


def own(kind: Kind) -> list[int]:
    """B's own tokens; none where they would be computed in a batch of another shape than A's."""
    return OWN if kind.exact else []


def check(kind: Kind, engine: OfflineEngine, contexts: list[Context], at_once: int = 1) -> None:
    """Continue contexts, so many at once: their KV and states are loaded, and the same is said."""
    for first in range(0, len(contexts), at_once):
        batch = contexts[first : first + at_once]
        engine.forget_prefixes()
        loaded = engine.ask(
            *(([*each.tokens, *own(kind)], THEN, transfer_params(load=each.key)) for each in batch)
        )
        for context, answer in zip(batch, loaded, strict=True):
            assert answer["cached"] == len(context.tokens) - 1, len(context.tokens)
            if kind.exact:
                engine.forget_prefixes()
                (plain,) = engine.ask(([*context.tokens, *OWN], THEN, None))
                same(answer, plain)
            elif at_once == 1 or "amx_bf16" not in read_processor().flags:
                assert answer == answer | context.goes_on, len(context.tokens)
            else:
                near(answer, context.goes_on)


def near(answer: Answer, alone: Answer) -> None:
    """Ensure that the first token that differs, if any does, is as likely as the other one but for a rounding."""
    pairs = zip(answer["tokens"], alone["tokens"], strict=True)
    alike = next((index for index, (one, other) in enumerate(pairs) if one != other), THEN) + 1
    assert answer["logprobs"][:alike] == pytest.approx(alone["logprobs"][:alike], abs=ROUNDING)


@pytest.fixture(params=KINDS, ids=[kind.name for kind in KINDS])
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


def started(kind: Kind, models: Path, store: Path, **args: Any) -> OfflineEngine:
    return OfflineEngine(store, model=str(models / kind.name), **(kind.args | args))


FEW = (5, 60, 130, 200)


@pytest.mark.fault("B21")
@pytest.mark.fault("B23")
def test_a_few_lengths_of_each_family_are_continued_exactly(models: Path, tmp_path: Path, kind: Kind) -> None:
    """And what was changed on the way is computed."""
    with started(kind, models, tmp_path / "store", resident=0) as engine:  # what is in memory is proved
        contexts = [saved(engine, length) for length in FEW]
        check(kind, engine, contexts, len(contexts))
        *_, last = contexts
        file = engine.saved(params_to_load(last.key))
        whole = bytearray(file.read_bytes())
        whole[len(whole) // 2] ^= 1
        file.write_bytes(whole)
        engine.forget_prefixes()
        (answer,) = engine.ask(([*last.tokens, *OWN], THEN, params_to_load(last.key)))
        assert answer["cached"] == 0
        (plain,) = engine.ask(([*last.tokens, *OWN], THEN, None))
        assert answer["tokens"] == plain["tokens"]


@pytest.mark.chaos
@pytest.mark.fault("B22")
def test_a_state_at_the_end_of_a_block_is_the_engine_s_own_prefix_cache_bit_by_bit(
    models: Path, tmp_path: Path
) -> None:
    """Of a prompt saved without its answer, and of a context that was left behind its last whole block."""
    (kind,) = (kind for kind in KINDS if kind.name == "qwen3-next")
    with started(kind, models, tmp_path / "store") as engine:
        for length in (97, 150, 191, 192, 193, 300):
            asked = prompt(length, seed=length)
            for scope, until in (("prompt", length), ("context", length + 3)):
                engine.forget_prefixes()
                (answer,) = engine.ask((asked, 20, transfer_params(save=True, scope=scope)))
                engine.saved(answer["params"])
                then = [*[*asked, *answer["tokens"]][:until], *OWN]
                (hit,) = engine.ask((then, THEN, None))
                engine.forget_prefixes()
                (loaded,) = engine.ask((then, THEN, params_to_load(key_of(answer))))
                assert loaded["cached"] == hit["cached"] == (length - 1) // BLOCK * BLOCK
                assert loaded["tokens"] == hit["tokens"]
                assert loaded["logprobs"] == hit["logprobs"]


@pytest.mark.chaos
@pytest.mark.fault("B21")
@pytest.mark.parametrize("kind", [*KINDS, *ALIKE], ids=lambda kind: kind.name)
def test_each_family_is_continued_exactly(models: Path, tmp_path: Path, kind: Kind) -> None:
    """Aligned or not, beside others, by another engine, after a restart, in chunks."""
    with ExitStack() as engines:
        first = engines.enter_context(started(kind, models, tmp_path / "store"))
        contexts = [saved(first, length) for length in LENGTHS]
        check(kind, first, contexts)
        check(kind, first, contexts, AT_ONCE)
        with started(kind, models, tmp_path / "store") as other:
            check(kind, other, contexts)
        engines.close()
        with started(kind, models, tmp_path / "store") as again:
            check(kind, again, contexts)
        with started(kind, models, tmp_path / "store", max_num_batched_tokens=128, max_num_seqs=8) as chunked:
            check(kind, chunked, contexts)
    print(f"\n{kind.name}: {5 * len(contexts)} continuations, 0 differ")
