"""The two roles on tensors, with a running state beside attention: it is loaded after exactly the tokens it has seen."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy
import pytest
import torch
from connector.role_engines import SECRET, Engine
from support.memory_store import MemoryStore

from baton_kv.blocks import CacheGroup, KVBlocks
from baton_kv.contract import PARAMS_KEY, TransferFailure, transfer_params
from baton_kv.entry import Entry, write
from baton_kv.format import EntryDescription, EntryInvalid, LayerShape
from baton_kv.scheduler_role import SchedulerRole
from baton_kv.worker_role import WorkerRole

KV_TOKENS, STATE_TOKENS, POOL = 8, 16, 64
GROUPS = (CacheGroup(None, STATE_TOKENS, state=True), CacheGroup(None, KV_TOKENS))
ONE_STATE = (CacheGroup(None, 1024, state=True), CacheGroup(None, KV_TOKENS))
"""The groups of an engine without a prefix cache: one block of state a request."""


def rows_of(tokens: Sequence[int]) -> torch.Tensor:
    """The KV of each token behind those before it: eight bytes that say all of them."""
    seen, rows = 0, []
    for token in tokens:
        seen = (seen * 1_000_003 + token + 1) % 2**62
        rows.append(seen)
    return torch.tensor(rows or [0], dtype=torch.int64)


class StateEngine(Engine):
    """A pool that two groups share, as vLLM lays it out; `states` is what a running state would be."""

    dropped = 0.0
    """Share of the boundaries whose states vLLM does not offer."""

    def __init__(self, store: MemoryStore, groups: tuple[CacheGroup, ...] = GROUPS) -> None:
        self.groups = groups
        self.pool = torch.zeros((POOL, KV_TOKENS * 8), dtype=torch.uint8)
        state = self.pool[:, None, None, :16]
        kv = self.pool.view(torch.int64)[:, None, :, None]
        self.pinned: Counter[int] = Counter()
        self.scheduler = SchedulerRole(store, SECRET, "one", KV_TOKENS, groups=groups, pins=self)
        blocks = KVBlocks([state, kv], POOL, None, groups, [0, 1])
        self.worker = WorkerRole(store, SECRET, blocks, resident=4096)

    def pin(self, block: int) -> None:
        self.pinned[block] += 1

    def unpin(self, block: int) -> None:
        assert self.pinned[block] > 0
        self.pinned[block] -= 1

    def write_state(self, block: int, tokens: Sequence[int]) -> None:
        self.pool[block, :16] = rows_of(tokens)[-1:].view(torch.uint8).repeat(2)

    def is_state(self, block: int, tokens: Sequence[int]) -> bool:
        return bool((self.pool[block, :16] == rows_of(tokens)[-1:].view(torch.uint8).repeat(2)).all())

    def context(self, tokens: Sequence[int], blocks: Sequence[int]) -> None:
        """Compute the KV of a context."""
        rows = rows_of(tokens).view(torch.uint8).view(-1, 8)
        for number, block in enumerate(blocks):
            part = rows[number * KV_TOKENS : (number + 1) * KV_TOKENS]
            self.pool[block].zero_()
            self.pool[block, : part.numel()] = part.flatten()

    def said(self, tokens: list[int], prompt: int, params: dict[str, object], name: str = "a") -> str | None:
        """Run a request to its end, as vLLM does in `align` mode; return the key under which it is saved."""
        free = iter(random.sample(range(1, POOL), POOL - 1))
        state, kv = self.groups
        computed = len(tokens) - 1
        table = [next(free) for _ in range(kv.count(computed))]
        self.context(tokens[:computed], table)
        assert self.scheduler.matched(name, params, tokens[:prompt], 0) == 0
        columns = [0] * state.count(computed)
        for end in range(state.tokens, computed, state.tokens):
            if random.random() < self.dropped:  # vLLM keeps those that it expects prompts to begin with
                continue
            block = next(free)
            self.write_state(block, tokens[:end])
            self.scheduler.offered(name, [(0, block, end)])
        columns[-1] = next(free)
        self.write_state(columns[-1], tokens[:computed])
        held, answer = self.scheduler.finished(
            name,
            params,
            tokens=tokens,
            prompt=prompt,
            computed=computed,
            block_ids=(columns, table),
            whole=True,
        )
        if not held:
            return None
        assert self.run(1).saved == {name}
        assert answer is not None
        key: str = answer[PARAMS_KEY]["load"]
        return key

    def loaded(self, key: str, prompt: list[int], name: str = "b") -> int:
        """Load what there is for a prompt; check all of it, and return for how many tokens."""
        matched = self.scheduler.matched(name, transfer_params(load=key), prompt, 0)
        if not matched:
            return 0
        free = iter(random.sample(range(1, POOL), POOL - 1))
        state, kv = self.groups
        table = [next(free) for _ in range(kv.count(matched))]
        columns = [0] * state.count(matched)
        columns[-1] = next(free)
        self.pool[[*table, columns[-1]]] = 0xEE
        self.scheduler.allocated(name, (columns, table), matched)
        finished = self.run(1)
        assert [outcome.failure for outcome in finished.outcomes] == [None]
        assert self.is_state(columns[-1], prompt[:matched]), "the state of another length"
        rows = self.pool[table].view(torch.int64).flatten()[:matched]
        assert torch.equal(rows, rows_of(prompt[:matched]))
        self.scheduler.finished(
            name,
            None,
            tokens=prompt,
            prompt=len(prompt),
            computed=matched,
            block_ids=(columns, table),
            whole=True,
        )
        return matched


def said(length: int, chance: random.Random) -> list[int]:
    return [chance.randrange(5) for _ in range(length)]


@pytest.mark.fault("B22")
@pytest.mark.parametrize("groups", [GROUPS, ONE_STATE], ids=["align", "none"])
def test_a_state_is_loaded_after_exactly_the_tokens_it_has_seen(groups: tuple[CacheGroup, ...]) -> None:
    """300 contexts of any length, continued, left early, cut; what cannot be used is computed."""
    chance = random.Random(5)
    random.seed(6)
    whole = behind = nothing = unsaved = 0
    engine = StateEngine(MemoryStore(), groups)
    engine.dropped = 0.3
    for number in range(300):
        tokens = said(chance.randrange(2, 120), chance)
        prompt = chance.randrange(1, len(tokens))
        scope = chance.choice(["context", "prompt"])
        key = engine.said(tokens, prompt, transfer_params(save=True, scope=scope), f"a{number}")
        if key is None:
            unsaved += 1
            assert scope == "prompt"
            continue
        kept = prompt if scope == "prompt" else len(tokens)
        stays = chance.choice([kept, chance.randrange(kept + 1)])
        asked = [*tokens[:stays], *(9 for _ in range(chance.randrange(1, 20)))]
        matched = engine.loaded(key, asked, f"b{number}")
        whole += matched == min(stays, len(tokens) - 1) and matched > 0
        behind += 0 < matched < min(stays, len(tokens) - 1)
        nothing += matched == 0
        assert matched <= stays
    assert whole > 50
    assert nothing > 20
    assert unsaved > 20
    assert (behind > 20) == (groups is GROUPS)
    assert not +engine.pinned, "blocks that nobody gives back"


@pytest.mark.fault("B26")
@pytest.mark.parametrize("groups", [GROUPS, ONE_STATE], ids=["a state a boundary", "one state"])
def test_what_has_states_is_brought_into_memory_and_loaded_from_there(groups: tuple[CacheGroup, ...]) -> None:
    chance = random.Random(7)
    random.seed(8)
    store = MemoryStore()
    engine = StateEngine(store, groups)
    for number in range(20):
        tokens = said(chance.randrange(20, 60), chance)
        key = engine.said(tokens, 10, transfer_params(save=True), f"a{number}")
        assert key is not None
        while (found := engine.worker.warm(key, KV_TOKENS)) is None:
            time.sleep(0.0005)
        assert found.failure is None
        assert store.exists(key)
        assert engine.loaded(key, [*tokens, 9, 9], f"b{number}") == len(tokens) - 1


@pytest.mark.fault("B22")
def test_a_prompt_of_the_context_alone_continues_from_the_last_boundary() -> None:
    """Its last token is always computed, and the state behind it is no use for that."""
    engine = StateEngine(MemoryStore())
    tokens = list(range(50))
    key = engine.said(tokens, 40, transfer_params(save=True))
    assert key is not None
    assert engine.loaded(key, [*tokens, 7], "b") == 49
    assert engine.loaded(key, tokens[:49], "c") == 48
    assert engine.loaded(key, tokens[:48], "d") == 0, "the state before that one was not kept"
    assert engine.loaded(key, [*tokens[:40], 99, 98], "e") == 0


@pytest.mark.fault("B22")
def test_states_of_requests_that_save_nothing_are_given_back() -> None:
    engine = StateEngine(MemoryStore())
    tokens = list(range(60))
    for params, whole in ((transfer_params(save=True), False), (transfer_params(save=False), True)):
        engine.scheduler.matched("a", params, tokens, 0)
        engine.scheduler.offered("a", [(0, 5, 16)])
        engine.scheduler.offered("a", [(0, 6, 32), (0, 7, 40)])
        assert +engine.pinned == (Counter([6]) if whole is False else Counter())
        engine.scheduler.finished(
            "a", params, tokens=tokens, prompt=60, computed=59, block_ids=([0, 0, 0, 9], [1] * 8), whole=whole
        )
        assert not +engine.pinned


@pytest.mark.fault("B22")
def test_a_state_that_has_seen_another_token_is_not_saved() -> None:
    """With asynchronous scheduling a step may be under way when a request ends."""
    engine = StateEngine(MemoryStore())
    params, tokens = transfer_params(save=True), list(range(12))
    engine.scheduler.matched("a", params, tokens, 0)
    held, _ = engine.scheduler.finished(
        "a", params, tokens=tokens, prompt=10, computed=12, block_ids=([3], [1, 2]), whole=True
    )
    assert not held
    assert [outcome.failure for outcome in engine.scheduler.take_outcomes()] == [TransferFailure.NOT_WHOLE]


@pytest.mark.fault("B23")
def test_a_flipped_bit_of_a_state_is_found_before_it_is_used() -> None:
    store = MemoryStore()
    key = StateEngine(store).said(list(range(40)), 20, transfer_params(save=True))
    assert key is not None
    with store.open(key) as reader:
        whole = reader.read(0, len(reader))
        layout = Entry(reader, key, SECRET).told.layout
    state = range(layout.slab(0, 0, 0, layout.description.first(0)), layout.slab(1, 0, 0, 0))
    assert len(state) == 32, "of 16 bytes, those after 32 and 39 tokens"
    prompt = [*range(40), 7]
    for place in state:
        store.put(key, [whole[:place], bytes([whole[place] ^ 1]), whole[place + 1 :]])
        engine = StateEngine(store)
        assert engine.scheduler.matched("b", transfer_params(load=key), prompt, 0) == 39
        engine.scheduler.allocated("b", ([0, 0, 1], [2, 3, 4, 5, 6]), 39)
        finished = engine.run(1)
        loaded = range(state.start + 16, state.stop)
        if place in loaded or finished.failed:  # both states are one chunk
            assert finished.failed == {"b"}
            assert finished.outcomes[0].failure is TransferFailure.CORRUPT
            assert not engine.is_state(1, prompt[:39])
    print(f"\n{len(state)} flipped bytes of states, 0 used")


def test_an_index_beside_latent_vectors_is_moved_as_any_layer() -> None:
    """The worker's part of sparse attention, on tensors in DeepSeek V3.2's shapes: vLLM runs none on CPUs."""
    random_bytes = torch.Generator().manual_seed(3)
    latents, index = (
        torch.randint(0, 256, (12, 1, 64, width), generator=random_bytes, dtype=torch.uint8)
        for width in (656, 132)
    )
    store, kept = MemoryStore(), [latents[2:5].clone(), index[2:5].clone()]
    one, other = (Engine(store) for _ in range(2))
    for engine, layers in (
        (one, [latents, index]),
        (other, [latents.clone().zero_(), index.clone().zero_()]),
    ):
        engine.scheduler = SchedulerRole(store, SECRET, "one", 64)
        engine.worker = WorkerRole(store, SECRET, KVBlocks(layers))
        engine.layers = layers
    tokens = list(range(180))
    key = one.save(transfer_params(save=True), [2, 3, 4], tokens)
    prompt = [*tokens, 7]
    assert other.scheduler.matched("b", transfer_params(load=key), prompt, 0) == 179
    other.scheduler.allocated("b", ([7, 5, 9],), 179)
    assert other.run(1).loaded == {"b"}
    for layer, expected in zip(other.layers, kept, strict=True):
        assert torch.equal(layer[[7, 5, 9]], expected)


def described(**changes: object) -> EntryDescription:
    plain = EntryDescription(
        key="local/abcdefghijklmnop",
        fingerprint="one",
        tokens=40,
        computed=39,
        layers=(LayerShape(1, 16, 0), LayerShape(1, 64, 1)),
        blocks=5,
        firsts=(0, 0),
        stops=(2, 5),
        states=(32, 39),
    )
    return replace(plain, **changes)  # type: ignore[arg-type]  # of a test


def file_of(description: EntryDescription, text: str | None = None) -> MemoryStore:
    """An entry's file with this description, or with another text in its place, both with valid digests."""
    if text is not None:
        description.__dict__["canonical"] = lambda: text

    def slabs(layer: int, heads: range, blocks: range) -> list[memoryview]:
        size = description.layers[layer].slab_bytes
        return [memoryview(bytes(size)) for _ in heads for _ in blocks]

    store = MemoryStore()
    pieces = write(description, [1] * 40, slabs, SECRET)
    store.put(description.key, [b"".join(each) if isinstance(each, list) else bytes(each) for each in pieces])
    return store


@pytest.mark.fault("B25")
def test_entries_of_groups_alike_are_written_and_read_as_before() -> None:
    """Without `stops`, as earlier versions write and read them."""
    alike = described(firsts=(1, 0), stops=(), states=())
    assert not {"stops", "states"} & json.loads(alike.canonical()).keys()
    assert {"stops", "states"} < json.loads(described().canonical()).keys()
    for description in (alike, described()):
        store = file_of(description)
        with store.open(description.key) as reader:
            assert Entry(reader, description.key, SECRET).description == description


@pytest.mark.fault("B25")
@pytest.mark.parametrize(
    "changes",
    [
        {"stops": (3,)},
        {"stops": (3, 5, 5)},
        {"stops": (0, 5)},
        {"stops": (2, 2**60)},
        {"stops": (2.0, 5)},
        {"stops": (True, 5)},
        {"stops": ("2", 5)},
        {"firsts": (2, 0)},
        {"firsts": (-1, 0)},
        {"states": (39, 32)},
        {"states": (32, 32)},
        {"states": (0, 39)},
        {"states": (32, 40)},
        {"states": (32.0, 39)},
        {"states": ("32", 39)},
        {"stops": (2**40, 2**40)},
    ],
)
def test_impossible_numbers_of_blocks_are_refused(changes: dict[str, object]) -> None:
    """Even with valid digests, before anything of that size is made."""
    text = json.dumps(asdict(described()) | changes, sort_keys=True)
    store = file_of(described(), text)
    with store.open(described().key) as reader, pytest.raises(EntryInvalid):
        Entry(reader, described().key, SECRET)


@pytest.mark.fault("B23")
def test_an_entry_of_other_shapes_is_refused_at_the_load() -> None:
    """Should fingerprints ever be equal where caches are not."""
    store = MemoryStore()
    key = StateEngine(store).said(list(range(40)), 20, transfer_params(save=True))
    assert key is not None
    engine = StateEngine(store)
    engine.worker._blocks.shapes = (LayerShape(1, 16, 0), LayerShape(2, 32, 1))
    assert engine.scheduler.matched("b", transfer_params(load=key), [*range(40), 7], 0) == 39
    engine.scheduler.allocated("b", ([0, 0, 1], [2, 3, 4, 5, 6]), 39)
    assert engine.run(1).failed == {"b"}
    assert not numpy.any(engine.pool.numpy())
