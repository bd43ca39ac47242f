"""What was proved once is used again from the worker's own memory, and nothing else ever is."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from connector.rank_engines import LOADED as RANKS_LOADED
from connector.rank_engines import SAVED as RANKS_SAVED
from connector.rank_engines import RankedEngine
from connector.store_relays import (
    BLOCK,
    HEADS,
    LAYERS,
    LOADED,
    MIB,
    SAVED,
    SECRET,
    SLAB_BYTES,
    TOKENS,
    Engine,
    used,
)
from support.memory_store import BytesReader, MemoryStore

from baton_kv import format as entry_format
from baton_kv.blocks import GroupBlocks
from baton_kv.contract import EXPENDABLE, TransferFailure, Warmed, new_key
from baton_kv.copies import private_memory
from baton_kv.entry import Entry, Kept, Resident
from baton_kv.format import PAGE_BYTES, EntryDescription, LayerShape, Part
from baton_kv.messages import LoadJob, SaveJob, StepJobs
from baton_kv.stores.file import FileStore
from baton_kv.worker_role import MOST_WARMING

SIZE = LAYERS * HEADS * len(SAVED) * SLAB_BYTES
FLIPS = 600


class Relay:
    """A store, an engine that has saved an entry in it, and one that keeps what it proves."""

    def __init__(self, root: Path) -> None:
        self.store = FileStore(root)
        self.saver, self.loader = Engine(self.store), Engine(self.store, seed=1, resident=MIB)
        self.key = new_key("acme")
        assert self.saver.save(self.key) is None
        self.path = root / "entries" / f"{self.key}.kv"
        self.sound = self.path.read_bytes()

    def clear(self) -> None:
        """Empty the blocks that are loaded into, so that nothing is there from before."""
        for layer in range(LAYERS):
            self.loader.blocks.pool(layer, range(HEADS)).zero_()

    def loads(self) -> int | None:
        """Load the entry; the bytes of it that were resident, None if it failed. It must be what was saved."""
        self.clear()
        if self.loader.load(self.key) is not None:
            assert self.loader.resident == 0
            return None
        assert self.loader.held(LOADED) == self.saver.held(SAVED)
        return self.loader.resident


@pytest.fixture
def relay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Relay:
    monkeypatch.setattr(entry_format, "RUN_BYTES", 2 * HEADS * SLAB_BYTES)  # two runs a layer
    return Relay(tmp_path / "store")


def test_what_was_loaded_once_is_in_memory(relay: Relay) -> None:
    assert [relay.loads() for _ in range(3)] == [0, SIZE, SIZE]


def test_what_was_saved_here_is_in_memory_and_equals_the_file(relay: Relay) -> None:
    saver = Engine(relay.store, seed=3, resident=MIB)
    key = new_key("acme")
    assert saver.save(key) is None
    saved = saver.held(SAVED)
    assert (saver.load(key), saver.resident, saver.held(LOADED)) == (None, SIZE, saved)
    assert (relay.loader.load(key), relay.loader.resident, relay.loader.held(LOADED)) == (None, 0, saved)


def test_a_save_that_fails_leaves_nothing_in_memory(relay: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    saver, key = Engine(relay.store, seed=3, resident=SIZE), new_key("acme")
    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", refuse)
        assert saver.save(key) == "full"
    assert saver.worker._resident._kept == {}
    assert saver.save(key) is None
    assert (saver.load(key), saver.resident) == (None, SIZE), "all of the memory is free again"


@pytest.mark.fault("B18")
def test_a_changed_file_is_refused_or_what_was_proved_is_used(relay: Relay) -> None:
    """Every byte of the header and of the ends, and bits everywhere: whatever is used is what was saved."""
    chance = random.Random(5)
    header = int.from_bytes(relay.sound[:8], "little") + 8
    bits = [8 * place for place in (*range(0, header, 7), *range(len(relay.sound) - 40, len(relay.sound)))]
    bits += [chance.randrange(8 * len(relay.sound)) for _ in range(FLIPS)]
    seen: Counter[str] = Counter()
    for bit in bits:
        relay.path.write_bytes(relay.sound)
        assert relay.loads() in (0, SIZE)
        changed = bytearray(relay.sound)
        changed[bit // 8] ^= 1 << bit % 8
        relay.path.write_bytes(changed)
        seen["refused" if relay.loads() is None else "as saved"] += 1
        assert used(BytesReader(changed), relay.key, SECRET) is None, "nobody else may use it"
    print(f"\nB18: {len(bits)} changed files: {dict(seen)}, 0 wrong")
    assert min(seen["refused"], seen["as saved"]) > 0


@pytest.mark.fault("B18")
def test_a_file_that_is_gone_or_cut_is_a_miss_though_its_kv_is_in_memory(relay: Relay) -> None:
    assert relay.loads() == 0
    for length in (0, 1, 31, 32, 33, len(relay.sound) // 2, len(relay.sound) - 1):
        relay.path.write_bytes(relay.sound[:length])
        assert relay.loads() is None
    relay.path.write_bytes(relay.sound + relay.sound[-32:])  # ends with the right digest
    assert relay.loads() is None
    relay.path.unlink(missing_ok=True)
    assert relay.loads() is None
    relay.path.write_bytes(relay.sound)
    assert relay.loads() == SIZE
    assert relay.store.delete(relay.key)
    assert relay.loads() is None


@pytest.mark.fault("B18")
def test_an_entry_saved_anew_under_its_key_is_another_one(relay: Relay) -> None:
    assert [relay.loads(), relay.loads()] == [0, SIZE]
    other = Engine(relay.store, seed=9)
    assert other.save(relay.key) is None
    for resident in (0, SIZE):
        assert (relay.loader.load(relay.key), relay.loader.resident) == (None, resident)
        assert relay.loader.held(LOADED) == other.held(SAVED)
    assert len(relay.loader.worker._resident._kept) == 1, "the one from before has gone"


@pytest.mark.fault("B18")
def test_what_one_tenant_s_load_proved_is_never_another_s(relay: Relay) -> None:
    """The same KV of the same tokens; and the very file, under the other one's name."""
    assert [relay.loads(), relay.loads()] == [0, SIZE]
    theirs = new_key("globex")
    assert relay.saver.save(theirs) is None
    assert (relay.loader.load(theirs), relay.loader.resident) == (None, 0)
    (relay.path.parents[1] / f"{theirs}.kv").write_bytes(relay.sound)
    assert (relay.loader.load(theirs), relay.loader.resident) == ("corrupt", 0)
    assert relay.loads() == SIZE


@pytest.mark.fault("B18")
def test_another_model_s_entry_is_refused_though_it_is_in_memory(relay: Relay) -> None:
    assert [relay.loads(), relay.loads()] == [0, SIZE]
    job = LoadJob("r", relay.key, (GroupBlocks(0, LOADED),), 49, "another model")
    assert relay.loader.run(StepJobs(loads=[job])) == "incompatible"
    assert relay.loader.run(StepJobs(loads=[replace(job, fingerprint="one", digest="0" * 64)])) == (
        "incompatible"
    )


@pytest.mark.fault("B18")
def test_a_load_that_finds_a_wrong_byte_adds_nothing(relay: Relay) -> None:
    changed = bytearray(relay.sound)
    changed[len(relay.sound) // 2] ^= 1
    relay.path.write_bytes(changed)
    assert relay.loads() is None
    relay.path.write_bytes(relay.sound)
    assert [relay.loads(), relay.loads()] == [0, SIZE]


def test_what_only_part_of_was_loaded_is_completed(relay: Relay) -> None:
    """Half of an entry and more is kept, with what it lacks; of less nothing is."""
    for count, before, after in ((1, 0, 0), (2, 0, 0), (4, SIZE // 2, SIZE)):
        for resident in (before, after if count == 4 else SIZE * count // 4 * (count == 2)):
            job = LoadJob("r", relay.key, (GroupBlocks(0, LOADED[:count]),), 16 * count, "one")
            assert relay.loader.run(StepJobs(loads=[job])) is None
            assert relay.loader.resident == resident
            held = [each[: len(each) // 4 * count] for each in relay.loader.held(LOADED)]
            assert held[0][: SLAB_BYTES * count] == relay.saver.held(SAVED)[0][: SLAB_BYTES * count]


def test_an_engine_that_does_not_verify_keeps_nothing(relay: Relay) -> None:
    engine = Engine(relay.store, seed=4, resident=MIB, verify=False)
    for _ in range(2):
        assert (engine.load(relay.key), engine.resident) == (None, 0)
    assert engine.held(LOADED) == relay.saver.held(SAVED)


def warmed(engine: Engine, key: str) -> Warmed:
    """Ask until the engine says what is in memory."""
    deadline = time.monotonic() + 30
    while (found := engine.worker.warm(key, BLOCK)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.0005)
    return found


def test_what_was_brought_into_memory_is_loaded_from_there(relay: Relay) -> None:
    """The first load of an engine that has never seen the entry; asking again changes nothing."""
    for _ in range(2):
        assert warmed(relay.loader, relay.key) == Warmed(SIZE, 49, whole=True, memory=MIB)
    assert relay.loads() == SIZE
    assert len(relay.loader.worker._resident._kept) == 1


def continued(relay: Relay) -> str:
    """Save a context that goes on after the relay's, whose file it shares."""
    key = new_key("acme")
    parts = (Part(relay.key, Entry(BytesReader(relay.sound), relay.key, SECRET).digest, 2),)
    tokens = (*TOKENS[:48], *range(48))
    job = SaveJob(
        "r", key, tokens, 64, (GroupBlocks(0, SAVED),), "one", "0" * 32, parts=parts, source=relay.key
    )
    assert relay.saver.run(StepJobs(saves=[job])) is None
    return key


def test_the_files_that_an_entry_shares_are_brought_too(relay: Relay) -> None:
    key = continued(relay)
    own = SIZE // 2
    assert warmed(relay.loader, key) == Warmed(SIZE + own, 64, whole=True, memory=MIB)
    job = LoadJob("r", key, (GroupBlocks(0, LOADED),), 64, "one")
    assert relay.loader.run(StepJobs(loads=[job])) is None
    assert relay.loader.resident == SIZE
    assert relay.loader.held(LOADED) == relay.saver.held(SAVED)


@pytest.mark.fault("B26")
def test_a_changed_file_is_never_brought_into_memory(relay: Relay) -> None:
    """Wherever a bit is changed: nothing is there, the file is put away, and nothing is loaded."""
    chance = random.Random(7)
    for bit in (3, 8 * len(relay.sound) - 1, *(chance.randrange(8 * len(relay.sound)) for _ in range(200))):
        changed = bytearray(relay.sound)
        changed[bit // 8] ^= 1 << bit % 8
        relay.path.write_bytes(changed)
        found = warmed(relay.loader, relay.key)
        if found.whole:  # padding that nothing reads
            assert relay.loads() == SIZE
            relay.loader.worker._resident.sweep(lambda *_: False)
            continue
        assert found in (
            Warmed(failure=TransferFailure.CORRUPT),
            Warmed(failure=TransferFailure.INCOMPATIBLE),
        )
        assert relay.loader.worker._resident._kept == {}
    relay.path.write_bytes(relay.sound)
    assert warmed(relay.loader, relay.key).whole


@pytest.mark.fault("B26")
def test_what_is_gone_foreign_or_does_not_fit_is_told_and_drives_nothing_out(relay: Relay) -> None:
    assert warmed(relay.loader, new_key("acme")).failure == "missing"
    theirs = new_key("globex")
    (relay.path.parents[1] / "globex").mkdir(mode=0o700)
    (relay.path.parents[1] / f"{theirs}.kv").write_bytes(relay.sound)  # under another tenant's key
    assert warmed(relay.loader, theirs).failure == "corrupt"
    small = Engine(relay.store, seed=5, resident=SIZE)
    assert warmed(small, relay.key).whole
    larger = continued(relay)
    assert warmed(small, larger).bytes <= SIZE
    assert not warmed(small, larger).whole
    off = Engine(relay.store, seed=6)
    assert warmed(off, relay.key) == Warmed()


@pytest.mark.fault("B26")
def test_what_nobody_asks_for_again_does_not_grow(relay: Relay) -> None:
    worker = relay.loader.worker
    for _ in range(3 * MOST_WARMING):
        told = worker.warm(new_key("acme"), BLOCK)
        assert told is None or told.failure is TransferFailure.BUSY
    assert len(worker._warming) == MOST_WARMING


@pytest.mark.fault("B26")
def test_many_that_are_asked_for_all_the_time_all_end(relay: Relay) -> None:
    """None is begun anew because another one came."""
    worker = relay.loader.worker
    left, told = [new_key("acme") for _ in range(2 * MOST_WARMING)], []
    for _ in range(10_000):
        for key in list(left):
            found = worker.warm(key, BLOCK)
            if found is not None and found.failure is not TransferFailure.BUSY:
                told.append(found.failure)
                left.remove(key)
        if not left:
            break
        time.sleep(0.001)
    assert told == [TransferFailure.MISSING] * (2 * MOST_WARMING)


@pytest.mark.fault("B26")
def test_an_entry_of_another_engines_shapes_stays(tmp_path: Path) -> None:
    """Engines of the same weights may have other blocks or another dtype."""
    relay = Relay(tmp_path)
    other = Engine(relay.store, seed=2, resident=MIB, values=16)
    assert warmed(other, relay.key).failure is TransferFailure.INCOMPATIBLE
    assert relay.store.exists(relay.key)
    assert warmed(relay.loader, relay.key).whole


@pytest.mark.fault("B27")
def test_what_the_store_has_no_more_leaves_memory(relay: Relay) -> None:
    """Deleted, expired, evicted or put away, by whomever; a file that another entry shares stays."""
    key = continued(relay)
    assert warmed(relay.loader, relay.key).whole
    assert warmed(relay.loader, key).whole
    kept = relay.loader.worker._resident._kept
    relay.loader.worker.sweep()
    assert len(kept) == 2
    assert relay.store.delete(relay.key)
    relay.loader.worker.sweep()
    assert len(kept) == 2, "the other entry needs it"
    job = LoadJob("r", key, (GroupBlocks(0, LOADED),), 64, "one")
    assert relay.loader.run(StepJobs(loads=[job])) is None
    assert relay.loader.resident == SIZE
    assert relay.store.delete(key)
    relay.loader.worker.sweep()
    assert kept == {}


@pytest.mark.fault("B27")
def test_what_a_saved_context_shares_stays_in_memory_though_its_own_entry_goes(relay: Relay) -> None:
    """An agent's turns: each shares the files of the one before, which is deleted before anything is loaded."""
    saver = relay.saver = Engine(relay.store, seed=3, resident=MIB)
    assert saver.save(relay.key) is None
    relay.sound = relay.path.read_bytes()
    key = continued(relay)
    assert relay.store.delete(relay.key)
    saver.worker.sweep()
    job = LoadJob("r", key, (GroupBlocks(0, LOADED),), 64, "one")
    assert saver.run(StepJobs(loads=[job])) is None
    assert saver.resident == SIZE


@pytest.mark.fault("B27")
def test_nothing_leaves_memory_while_it_is_used(relay: Relay) -> None:
    assert warmed(relay.loader, relay.key).whole
    resident = relay.loader.worker._resident
    (kept,) = resident._kept.values()
    kept.users += 1
    resident.sweep(lambda *_: False)
    assert list(resident._kept.values()) == [kept]
    resident.release(kept)
    resident.sweep(lambda *_: False)
    assert resident._kept == {}


def test_memory_is_looked_through_by_itself(relay: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton_kv.worker_role.SWEPT_EVERY_S", 0.001)
    engine = Engine(relay.store, seed=8, resident=MIB)
    assert warmed(engine, relay.key).whole
    assert relay.store.delete(relay.key)
    deadline = time.monotonic() + 30
    while engine.worker._resident._kept:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    engine.worker.shutdown()


def test_every_rank_keeps_its_heads() -> None:
    store = MemoryStore()
    writer, reader = RankedEngine(store, 4, 2, resident=MIB), RankedEngine(store, 4, 2, seed=1, resident=MIB)
    key, _, _ = writer.save()
    found = [reader.load(key)[1] for _ in range(3)]
    assert [each.failure for each in found] == [None] * 3
    assert [each.resident for each in found] == [0, found[0].bytes, found[0].bytes]
    expected = reader.expected(writer.kv[:, RANKS_SAVED], [0, 1, 2, 3])
    assert all(torch.equal(*pair) for pair in zip(reader.held(RANKS_LOADED), expected, strict=True))
    writer.shutdown()
    reader.shutdown()


def test_the_memory_is_this_process_s_alone_and_what_is_read_of_it_cannot_be_written() -> None:
    memory = private_memory(PAGE_BYTES)
    memory[:4] = b"mine"
    child = os.fork()
    if child == 0:
        memory[:4] = b"else"
        os._exit(0)
    os.waitpid(child, 0)
    assert bytes(memory[:4]) == b"mine"
    resident = Resident(memory, [1])
    with resident.room(described("acme/" + "k" * 32, 100)) as kept:
        assert kept is not None
        kept.room(0, 0)[:] = bytes(100)
        assert kept.run(0, 0) is None
        kept.added(0, 0)
        run = kept.run(0, 0)
    assert run is not None
    with pytest.raises(TypeError):
        run[0] = 1


def described(key: str, size: int) -> EntryDescription:
    return EntryDescription(key, "f" * 64, 1, 1, (LayerShape(1, size),), 1)


class Tier:
    """A `Resident` of so many pages, with entries whose bytes say whose they are."""

    def __init__(self, pages: int) -> None:
        self.resident = Resident(private_memory(pages * PAGE_BYTES), [1])
        self._count = 0

    def add(self, scope: str, size: int, name: str = "") -> tuple[str, BytesReader] | None:
        """Keep an entry; its key and what its file ends with, None if there was no room."""
        self._count += 1
        key, digest = f"{scope}/{name}{self._count:032}", f"{self._count:064x}"
        with self.resident.room(described(key, size)) as kept:
            if kept is None:
                return None
            kept.room(0, 0)[:] = self._bytes(digest, size)
            kept.added(0, 0)
            self.resident.keep(kept, digest, size + 32, (key, None))
        return key, BytesReader(bytes(size) + bytes.fromhex(digest))

    def find(self, key: str, reader: BytesReader) -> Kept | None:
        """Find an entry, whose bytes must be its own."""
        kept = self.resident.find(reader, key, (key, None))
        if kept is not None:
            assert bytes(kept.run(0, 0) or b"") == self._bytes(kept.digest, len(reader) - 32)
        return kept

    def holds(self, key: str, reader: BytesReader) -> bool:
        kept = self.find(key, reader)
        if kept is not None:
            self.resident.release(kept)
        return kept is not None

    @staticmethod
    def _bytes(digest: str, size: int) -> bytes:
        return (bytes.fromhex(digest) * (size // 32 + 1))[:size]


def test_a_tenant_that_loads_much_does_not_drive_out_others() -> None:
    tier = Tier(16)
    first = tier.add("globex", 4 * PAGE_BYTES)
    assert first is not None
    flood = [tier.add("acme", 2 * PAGE_BYTES) for _ in range(50)]
    assert tier.holds(*first), "it has less than half"
    assert [each is not None and tier.holds(*each) for each in flood] == [False] * 44 + [True] * 6


def test_what_nobody_asked_to_save_goes_first_and_then_what_was_not_used_for_longest() -> None:
    tier = Tier(4)
    added = [tier.add("acme", PAGE_BYTES, name) for name in ("", "", EXPENDABLE, "")]
    entries = [each for each in added if each is not None]
    assert len(entries) == 4
    assert tier.holds(*entries[0])
    for gone in (2, 1, 3):
        assert tier.add("acme", PAGE_BYTES) is not None
        held = [number for number, each in enumerate(entries) if each[0] in kept_keys(tier)]
        assert gone not in held


def test_what_nobody_asked_to_save_drives_out_only_its_like() -> None:
    """However much of it there is, and whatever share its tenant has."""
    tier = Tier(4)
    names = (("acme", ""), ("acme", ""), ("acme", EXPENDABLE), ("acme", ""))
    added = [tier.add(scope, PAGE_BYTES, name) for scope, name in names]
    entries = [each for each in added if each is not None]
    assert len(entries) == 4
    for scope in ("acme", "globex"):
        assert tier.add(scope, PAGE_BYTES, EXPENDABLE) is not None
        assert [each[0] in kept_keys(tier) for each in entries] == [True, True, False, True]
        assert len(kept_keys(tier)) == 4
        assert tier.add(scope, 2 * PAGE_BYTES, EXPENDABLE) is None
        assert [tier.holds(*each) for each in entries] == [True, True, False, True]
    assert tier.add("acme", 4 * PAGE_BYTES) is not None, "what was asked for drives out all"


def kept_keys(tier: Tier) -> set[str]:
    return {each.key for each in tier.resident._kept.values()}


def test_nothing_goes_while_it_is_used() -> None:
    tier = Tier(4)
    one = tier.add("acme", 3 * PAGE_BYTES)
    assert one is not None
    kept = tier.find(*one)
    assert kept is not None
    assert tier.add("acme", 2 * PAGE_BYTES) is None
    assert tier.add("acme", PAGE_BYTES) is not None
    tier.resident.release(kept)
    assert tier.add("acme", 4 * PAGE_BYTES) is not None
    assert not tier.holds(*one)


@pytest.mark.parametrize("seed", range(8))
def test_at_random_every_entry_keeps_its_bytes_and_none_more_than_the_budget(seed: int) -> None:
    """Entries come, are used and released at random; those in use stay, and no two ever share memory."""
    chance, pages = random.Random(seed), 24
    tier, known, used = Tier(pages), list[tuple[str, BytesReader]](), list[Kept]()
    with ExitStack() as rooms:
        for _ in range(600):
            act = chance.random()
            if act < 0.5:
                entry = tier.add(
                    chance.choice(("acme", "globex", "initech")), chance.randrange(1, 6 * PAGE_BYTES)
                )
                known += [entry] if entry is not None else []
            elif act < 0.8 and known:
                kept = tier.find(*chance.choice(known))
                used += [kept] if kept is not None else []
            elif act < 0.97 and used:
                tier.resident.release(used.pop(chance.randrange(len(used))))
            else:
                rooms.enter_context(tier.resident.room(described(new_key("acme"), PAGE_BYTES)))
                if chance.random() < 0.7:
                    rooms.close()
            assert kept_keys(tier) >= {each.key for each in used}
            places = sorted(
                [each.place for each in tier.resident._kept.values()]
                + [hole for hole in tier.resident._holes if hole],
                key=lambda place: place.start,
            )
            assert all(one.stop <= other.start for one, other in itertools.pairwise(places))
    while used:
        tier.resident.release(used.pop())
    assert sum(tier.holds(*each) for each in known) == len(tier.resident._kept) > 0
    whole = tier.add("acme", pages * PAGE_BYTES)
    assert whole is not None, "all memory comes back"
    assert tier.holds(*whole)


def test_blocks_that_lie_apart_are_loaded_from_memory_too(relay: Relay) -> None:
    """Stretches of blocks are copied at once, whatever their order in the pool."""
    assert relay.loads() == 0
    for blocks in ((0, 1, 2, 3), (3, 2, 1, 0), (0, 1, 5, 6), (7, 3, 4, 0)):
        relay.clear()
        job = LoadJob("r", relay.key, (GroupBlocks(0, blocks),), len(TOKENS) - 1, "one")
        assert relay.loader.run(StepJobs(loads=[job])) is None
        assert relay.loader.resident == SIZE
        assert relay.loader.held(blocks) == relay.saver.held(SAVED)
    assert BLOCK * len(SAVED) >= len(TOKENS)
