"""Contexts that continue others are stored once, and loaded exactly, or not at all."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest
import torch
from connector.role_engines import BLOCK, SECRET, Engine
from support.memory_store import MemoryStore

from baton_kv.contract import TransferFailure, new_key, params_to_load, transfer_params
from baton_kv.entry import Entry
from baton_kv.format import EntryDescription
from baton_kv.scheduler_role import SchedulerRole
from baton_kv.stores.base import MAX_SHARED, Store
from baton_kv.stores.file import FileStore

LAYERS, HEADS, VALUES = 3, 2, 8
TOKEN_BYTES = LAYERS * HEADS * VALUES * 4


def kv_of(tokens: list[int]) -> torch.Tensor:
    """Return `[tokens]`: a number for each token that depends on all tokens up to it, as KV does."""
    numbers, digest = [], b""
    for token in tokens:
        digest = hashlib.blake2b(digest + token.to_bytes(4, "little"), digest_size=8).digest()
        numbers.append(int.from_bytes(digest[:3], "little"))
    return torch.tensor(numbers, dtype=torch.float32)


class Contexts:
    """An engine that computes contexts, saves them, and loads them into an empty pool."""

    def __init__(self, store: Store, scope: str = "acme", resident: int = 0) -> None:
        self.store = store
        self.scope = scope
        self.engine = Engine(store, resident=resident)
        self._next = 0

    def _request(self) -> str:
        self._next += 1
        return f"r{self._next}"

    def compute(self, tokens: list[int], skip: int = 0) -> list[int]:
        """Write the KV of a context into the pool; return its blocks."""
        blocks = list(range(1, 1 + -(-len(tokens) // BLOCK)))
        numbers = kv_of(tokens)
        for position in range(skip, len(tokens)):
            for number, layer in enumerate(self.engine.layers):
                layer[blocks[position // BLOCK], :, position % BLOCK] = numbers[position] + number
        return blocks

    def save(
        self,
        tokens: list[int],
        source: str | None = None,
        limit: int | None = None,
        key: str | None = None,
        least: int | None = None,
    ) -> str:
        """Compute a context, whose last token has no KV yet, and save it; `""` if the engine is too busy."""
        request, key = self._request(), key or new_key(self.scope)
        params = transfer_params(save=key, load=source, limit=limit, least=least)
        self.engine.scheduler.matched(request, params, tokens, 0)
        blocks = self.compute(tokens)
        held, _ = self.engine.scheduler.finished(
            request,
            params,
            tokens=tokens,
            prompt=len(tokens),
            computed=len(tokens),
            block_ids=(blocks,),
            whole=True,
        )
        if not held:
            *_, outcome = self.engine.scheduler.take_outcomes()
            assert (outcome.failure, least is None) == (TransferFailure.BUSY, False)
            return ""
        (outcome,) = self.engine.run(1).outcomes
        assert outcome.failure is None
        self.engine.scheduler.report([outcome])
        return key

    def load(self, key: str, prompt: list[int]) -> int | None:
        """Load what there is for a prompt; return the tokens loaded, None if the load failed."""
        request = self._request()
        count = self.engine.scheduler.matched(request, params_to_load(key), prompt, 0)
        if not count:
            return 0
        for layer in self.engine.layers:
            layer.zero_()
        blocks = list(range(1, 1 + -(-len(prompt) // BLOCK)))
        self.engine.scheduler.allocated(request, (blocks,), count)
        finished = self.engine.run(1)
        if finished.failed:
            return None
        numbers = kv_of(prompt)
        for position in range(count):
            for number, layer in enumerate(self.engine.layers):
                found = layer[blocks[position // BLOCK], :, position % BLOCK]
                assert (found == numbers[position] + number).all(), f"token {position} of {count}"
        return count

    def described(self, key: str) -> EntryDescription:
        with self.store.open(key) as reader:
            return Entry(reader, key, SECRET).description

    def parts(self, key: str) -> int:
        """Return the number of other entries that an entry needs."""
        return len(self.described(key).parts)


@pytest.fixture(params=["memory", "file", "resident"])
def contexts(request: pytest.FixtureRequest, tmp_path: Path) -> Contexts:
    """Contexts in a store; `resident`: the engine also keeps what it proved, in little memory."""
    if request.param == "memory":
        return Contexts(MemoryStore())
    return Contexts(FileStore(tmp_path / "store"), resident=(request.param == "resident") * 64 * 1024)


def turns(count: int, length: int, seed: int = 0) -> list[list[int]]:
    """Return the contexts of a conversation, each longer than the one before."""
    chance = random.Random(seed)
    tokens = [chance.randrange(1000) for _ in range(count * length)]
    return [tokens[: (turn + 1) * length] for turn in range(count)]


@pytest.mark.parametrize("length", [5, BLOCK, 21])
def test_a_chain_stores_what_each_turn_adds(contexts: Contexts, length: int) -> None:
    """A turn stores its own blocks, and the one that it completes."""
    keys: list[str] = []
    told = turns(8, length)
    for tokens in told:
        keys.append(contexts.save(tokens, keys[-1] if keys else None))
    stored = sum(contexts.described(key).kv_bytes for key in keys)
    # Of KV for the first n - 1 tokens, the turn before has the whole blocks.
    before = [max(0, len(tokens) - length - 1) // BLOCK for tokens in told]
    blocks = sum((len(tokens) - 2) // BLOCK + 1 - first for tokens, first in zip(told, before, strict=True))
    whole = sum(((len(tokens) - 2) // BLOCK + 1) * BLOCK * TOKEN_BYTES for tokens in told)
    print(f"\n8 turns of {length} tokens: {stored} bytes of KV; each by itself would take {whole}")
    assert stored == blocks * BLOCK * TOKEN_BYTES < whole
    for key, tokens in zip(keys, told, strict=True):
        assert contexts.load(key, [*tokens, 7]) == len(tokens) - 1


def test_forks_of_one_context_store_its_blocks_once(contexts: Contexts) -> None:
    root = list(range(100, 100 + 5 * BLOCK))
    source = contexts.save(root)
    before = contexts.store.size()
    forks = [[*root[: 4 * BLOCK - number % BLOCK], *range(number, number + 20)] for number in range(20)]
    keys = [contexts.save(tokens, source) for tokens in forks]
    assert contexts.store.size() - before < 20 * (3 * BLOCK * TOKEN_BYTES + 9000)
    contexts.store.delete(source)
    for key, tokens in zip(keys, forks, strict=True):
        assert contexts.parts(key) == 1
        assert contexts.load(key, [*tokens, 1]) == len(tokens) - 1


def test_a_fork_of_a_short_beginning_keeps_nothing_of_a_long_context(contexts: Contexts) -> None:
    """It would keep all of its file, which costs more than it shares."""
    root = list(range(100, 100 + 5 * BLOCK))
    source = contexts.save(root)
    for blocks, shares in ((4, 1), (3, 1), (2, 0), (1, 0)):
        tokens = [*root[: blocks * BLOCK], *range(blocks, blocks + 20)]
        fork = contexts.save(tokens, source)
        assert contexts.parts(fork) == shares
        assert contexts.load(fork, [*tokens, 1]) == len(tokens) - 1


def test_a_prompt_that_leaves_the_chain_is_loaded_up_to_there(contexts: Contexts) -> None:
    first, second, third = turns(3, 40)
    one = contexts.save(first)
    three = contexts.save(third, contexts.save(second, one))
    for shared in (10, 39, 45, 79, 100):
        assert contexts.load(three, [*third[:shared], 5000, 5001]) == shared
    fork = contexts.save([*second[:50], *range(60)], three)
    assert contexts.load(fork, [*second[:50], *range(60), 1]) == 109


def test_the_links_of_a_chain_may_be_deleted_before_it_goes_on(contexts: Contexts) -> None:
    key = None
    for tokens in turns(7, 20):
        before, key = key, contexts.save(tokens, key)
        if before is not None:
            contexts.store.delete(before)
    assert key is not None
    assert list(contexts.store.keys()) == [key]
    assert contexts.load(key, [*tokens, 1]) == len(tokens) - 1
    contexts.store.delete(key)
    assert contexts.store.size() == 0


def test_a_missing_part_costs_only_what_follows_it(contexts: Contexts) -> None:
    told, keys = turns(4, 2 * BLOCK + 3), []
    for tokens in told:
        keys.append(contexts.save(tokens, keys[-1] if keys else None))
    contexts.store.quarantine(keys[-1], 2)
    assert contexts.load(keys[-1], [*told[-1], 1]) == 4 * BLOCK, "the whole blocks of the first two parts"
    again = contexts.save(told[-1], keys[-1])
    assert contexts.load(again, [*told[-1], 1]) == len(told[-1]) - 1


@pytest.mark.parametrize("part", [0, 1, None])
def test_a_corrupt_part_is_noticed_taken_away_and_costs_only_what_follows(
    tmp_path: Path, part: int | None
) -> None:
    store = FileStore(tmp_path / "store")
    contexts = Contexts(store)
    told, keys = turns(3, 2 * BLOCK + 3), []
    for tokens in told:
        keys.append(contexts.save(tokens, keys[-1] if keys else None))
    own = keys[-1] if part is None else keys[part]
    path = store.root / "entries" / f"{own}.kv"
    with path.open("r+b") as file:
        file.seek(-3000, 2)
        byte = file.read(1)
        file.seek(-3000, 2)
        file.write(bytes([byte[0] ^ 1]))
    assert contexts.load(keys[-1], [*told[-1], 1]) is None
    (outcome,) = contexts.engine.scheduler.take_outcomes()[-1:]
    assert outcome.failure == "corrupt"
    assert not path.exists()
    rest = {0: 0, 1: 2 * BLOCK, None: 0}[part]
    assert contexts.load(keys[-1], [*told[-1], 1]) == rest


@pytest.mark.fault("H6")
@pytest.mark.parametrize("part", [0, 1])
def test_a_part_that_claims_another_version_is_corrupt_and_taken_away(tmp_path: Path, part: int) -> None:
    """An entry's own file of another version is left alone; but what it names was once of its own version."""
    store = FileStore(tmp_path / "store")
    contexts = Contexts(store)
    told, keys = turns(3, 2 * BLOCK + 3), []
    for tokens in told:
        keys.append(contexts.save(tokens, keys[-1] if keys else None))
    path = store.root / "entries" / f"{keys[part]}.kv"
    whole = path.read_bytes()
    assert whole.count(b"baton-kv/4") == 1
    with path.open("r+b") as file:
        file.seek(whole.index(b"baton-kv/4"))
        file.write(b"baton-kv/5")
    assert contexts.load(keys[-1], [*told[-1], 1]) is None
    (outcome,) = contexts.engine.scheduler.take_outcomes()[-1:]
    assert outcome.failure == "corrupt"
    assert not path.exists()
    assert contexts.load(keys[-1], [*told[-1], 1]) == {0: 0, 1: 2 * BLOCK}[part], "no load fails twice"


def test_a_part_swapped_for_another_sound_entry_is_refused(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    contexts = Contexts(store)
    first, second = turns(2, 40)
    one = contexts.save(first)
    two = contexts.save(second, one)
    elsewhere = Contexts(FileStore(tmp_path / "elsewhere"))
    elsewhere.save(turns(1, 40, seed=9)[0], key=one)
    theirs = (tmp_path / "elsewhere" / "entries" / f"{one}.kv").read_bytes()
    place = store.root / "entries" / f"{two}.000"
    place.unlink()
    place.write_bytes(theirs)
    assert contexts.load(two, [*second, 1]) is None
    (outcome,) = contexts.engine.scheduler.take_outcomes()[-1:]
    assert outcome.failure == "incompatible"
    assert place.read_bytes() == theirs, "it is sound, only not the one that was continued"


def test_a_source_that_goes_before_the_save_is_written_costs_only_the_sharing(contexts: Contexts) -> None:
    first, second = turns(2, 40)
    one = contexts.save(first)
    key = new_key("acme")
    params = transfer_params(save=key, load=one)
    assert contexts.engine.scheduler.matched("b", params, second, 0) == 39
    blocks = contexts.compute(second)
    ends = {"tokens": second, "prompt": 80, "computed": 80, "block_ids": (blocks,), "whole": True}
    assert contexts.engine.scheduler.finished("b", params, **ends)[0]  # type: ignore[arg-type]  # of such
    contexts.store.delete(one)
    contexts.engine.run(1)
    assert (contexts.parts(key), contexts.load(key, [*second, 1])) == (0, 79)


def test_what_is_recomputed_is_shared_all_the_same(contexts: Contexts) -> None:
    """The planner may find that prefilling is faster; the context is not stored twice for that."""
    first, second = turns(2, 40)
    one = contexts.save(first)
    two = contexts.save(second, one, limit=0)
    assert contexts.parts(two) == 1
    assert contexts.load(two, [*second, 1]) == 79


def test_another_scope_s_entry_may_be_loaded_and_is_not_shared(contexts: Contexts) -> None:
    first, second = turns(2, 40)
    one = contexts.save(first)
    contexts.scope = "globex"
    two = contexts.save(second, one)
    assert contexts.parts(two) == 0


def test_the_same_context_saved_again_stores_its_last_block(contexts: Contexts) -> None:
    (tokens,) = turns(1, 3 * BLOCK)
    one = contexts.save(tokens)
    two = contexts.save(tokens, one)
    assert contexts.parts(two) == 1
    assert contexts.load(two, [*tokens, 1]) == len(tokens) - 1
    short = contexts.save(tokens[:5], one)
    assert (contexts.parts(short), contexts.load(short, tokens[:6])) == (0, 4)


@pytest.mark.parametrize("tokens", [3 * BLOCK, 3 * BLOCK + 1, 3 * BLOCK + 2])
def test_the_last_block_is_never_left_to_another_entry(contexts: Contexts, tokens: int) -> None:
    """Even if the same context was saved before, to its last token."""
    (told,) = turns(1, tokens)
    one = contexts.save(told)
    two = contexts.save(told, one)
    (part,) = contexts.described(two).parts
    assert part.stop == contexts.described(two).blocks - 1
    assert contexts.load(two, [*told, 1]) == tokens - 1


def test_where_what_is_shared_leaves_no_room_the_context_is_stored_whole(tmp_path: Path) -> None:
    """A long context that nobody pinned makes room for a fork of its beginning."""
    store = FileStore(tmp_path / "store", budget=12 * BLOCK * TOKEN_BYTES)
    contexts = Contexts(store)
    (long,) = turns(1, 9 * BLOCK)
    one = contexts.save(long)
    fork = [*long[: 2 * BLOCK], *range(3 * BLOCK)]
    two = contexts.save(fork, one)
    assert (store.exists(one), contexts.parts(two)) == (False, 0)
    assert contexts.load(two, [*fork, 1]) == len(fork) - 1


def test_a_context_of_too_many_parts_is_stored_again_behind_the_first_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MAX_SHARED == 128
    monkeypatch.setattr("baton_kv.scheduler_role.MAX_SHARED", 4)
    contexts = Contexts(FileStore(tmp_path / "store"))
    key, parts = None, []
    for tokens in turns(8, BLOCK + 2):
        key = contexts.save(tokens, key)
        parts.append(contexts.parts(key))
    assert parts == [0, 1, 2, 3, 4, 2, 3, 4]


def test_a_context_that_fills_the_engine_is_saved_behind_what_is_stored_of_it(tmp_path: Path) -> None:
    """A save that nobody waits for holds half of the engine's blocks, or more if it writes few of them."""
    contexts = Contexts(FileStore(tmp_path / "store"))
    contexts.engine.scheduler = SchedulerRole(contexts.store, SECRET, "one", BLOCK, held_blocks=8)
    longer = turns(9, BLOCK)[-1]
    long, short = longer[: 8 * BLOCK], longer[: 5 * BLOCK]
    assert not contexts.save(longer, least=1)
    assert not contexts.save(longer, contexts.save(short, least=1), least=1), "it would write five blocks"
    one = contexts.save(long, least=1)
    two = contexts.save(longer, one, least=1)
    assert contexts.parts(two) == 1
    assert contexts.load(two, [*longer, 1]) == len(longer) - 1


def test_a_context_that_fills_the_engine_is_saved_on_when_it_has_too_many_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many of the first parts stay as the save needs to write few blocks."""
    monkeypatch.setattr("baton_kv.scheduler_role.MAX_SHARED", 4)
    contexts = Contexts(FileStore(tmp_path / "store"))
    contexts.engine.scheduler = SchedulerRole(contexts.store, SECRET, "one", BLOCK, held_blocks=7)
    key, parts = None, []
    for tokens in turns(9, BLOCK + 1):
        key = contexts.save(tokens, key, least=1)
        assert key, f"after {len(parts)} turns"
        parts.append(contexts.parts(key))
    assert parts == [0, 1, 2, 3, 4, 2, 3, 4, 4]
    assert contexts.load(key, [*tokens, 1]) == len(tokens) - 1


@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_saved_forked_deleted_evicted_and_loaded_is_exact_or_a_miss(
    tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    store = FileStore(tmp_path / "store", budget=60 * BLOCK * TOKEN_BYTES)
    contexts, held = Contexts(store), dict[str, list[int]]()
    loads = [0, 0, 0]
    for _ in range(60):
        source = chance.choice([None, *held]) if held else None
        base = held[source] if source else []
        if chance.random() < 0.5 or not held:
            kept = chance.randrange(len(base) + 1) if chance.random() < 0.4 else len(base)
            tokens = [*base[:kept], *(chance.randrange(50) for _ in range(chance.randrange(2, 40)))][:170]
            if len(tokens) > 1:
                held[contexts.save(tokens, source, chance.choice([None, None, 0, 17]))] = tokens
        elif source is not None and chance.random() < 0.2:
            store.delete(source)
            del held[source]
        elif source is not None and chance.random() < 0.1:
            store.pin(source, chance.random() < 0.5)
        elif source is not None:
            cut = chance.randrange(1, len(base) + 1)
            found = contexts.load(source, [*base[:cut], 77])
            loads[0 if found is None else 1 if found else 2] += 1
        assert store.size() <= 60 * BLOCK * TOKEN_BYTES
    for key in list(store.keys()):
        store.delete(key)
    store.sweep(wanted=lambda _: True, older_than_s=0)
    print(f"\nseed {seed}: {loads[1]} loads exact, {loads[2]} misses, {loads[0]} failed")
    assert loads[0] == 0
    assert loads[1] > 0
    assert store.size() == 0
