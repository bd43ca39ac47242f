"""Whatever breaks beneath the store, a wrong block is never used and nothing is raised into the engine."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from connector.store_relays import (
    HEADS,
    LAYERS,
    LOADED,
    MIB,
    SAVED,
    SECRET,
    SLAB_BYTES,
    Engine,
    Relay,
    used,
)
from support.memory_store import BytesReader

from baton_kv.contract import new_key
from baton_kv.entry import Entry
from baton_kv.fingerprint import fingerprint
from baton_kv.folders import store_secret
from baton_kv.format import FORMAT, EntryLayout
from baton_kv.stores.file import FileStore

FLIPS = 10_000
FACTS = {"vllm": "0.32.0", "weights": "a", "dtype": "bfloat16", "kv_dtype": "auto", "spec": "block_size=32"}
FACTS |= {"packing": "amx", "platform": "cpu", "revision": "main", "quantization": "none", "layers": "30"}


def after_a_kill(root: Path) -> tuple[int, int, int]:
    """How many entries there are, how many of them are torn, and how many files a later start swept."""
    left = list((root / "writing").iterdir()) if (root / "writing").is_dir() else []
    for path in left:
        os.utime(path, (0, 0))
    store, torn = FileStore(root, budget=MIB), 0
    assert list((root / "writing").iterdir()) == []
    secret, keys = store_secret(root), list(store.keys())
    for key in keys:
        with store.open(key) as reader:
            torn += used(reader, key, secret) is None
            parts = Entry(reader, key, secret).description.parts
        for index, part in enumerate(parts):
            with store.open(key, index) as reader:
                torn += used(reader, part.key, secret) is None
    store.put(new_key("local"), [b"goes on"])
    for key in list(store.keys()):
        store.delete(key)
    store.sweep(wanted=lambda _: True, older_than_s=0)
    assert store.size() == 0, "something holds bytes that no entry needs"
    return len(keys), torn, len(left)


@pytest.mark.fault("B1")
@pytest.mark.parametrize("when", ["calls", "pages", "chain", "ranks", "ranks-pages", "moments"])
def test_a_killed_save_leaves_whole_entries_or_none(when: str, tmp_path: Path, memory: Path) -> None:
    script, root = Path(__file__).with_name("killed_save.py"), memory if "pages" in when else tmp_path
    command = [sys.executable, str(script), when, str(root)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert answer.returncode == 0, answer.stderr
    kills = [line.split() for line in answer.stdout.splitlines()]
    found = [after_a_kill(root / number) for number, _ in kills]
    entries, torn, swept = (sum(column) for column in zip(*found, strict=True))
    if when != "moments":
        assert kills.pop()[1] == "survived"
        seen = {call for _, call in kills}
        assert seen >= {"open", "utime", "fsync", "flock", "rename", "unlink"}
        usual = {"calls": "writev", "chain": "link", "ranks": "pwrite"}
        assert usual.get(when, "posix_fallocate") in seen
    print(f"\nB1 {when}: {len(kills)} kills, {entries} entries, {torn} torn, {swept} leftovers swept")
    assert len(kills) >= {"chain": 60, "moments": 100}.get(when, 40)
    assert min(entries, swept) > 0, "no kill was in the middle of a save"
    assert torn == 0


@pytest.mark.fault("B2")
def test_entries_with_lost_writes_are_refused(relay: Relay) -> None:
    sound, size = relay.sound, len(relay.sound)
    lengths = sorted({*range(0, size, 37), *range(12), *range(size - 40, size)})
    damaged = [sound[:length] for length in lengths]
    damaged += [sound[:length].ljust(size, b"\0") for length in lengths]
    damaged += [sound[:at] + bytes(512) + sound[at + 512 :] for at in range(0, size - 512, 512)]
    damaged = [data for data in damaged if data != sound]
    accepted = sum(used(BytesReader(data), relay.key, SECRET) is not None for data in damaged)
    loaded = sum(not relay.refused(data) for data in damaged)
    print(f"\nB2: {accepted} of {len(damaged)} cut or zeroed files accepted, {loaded} by the worker")
    assert (accepted, loaded) == (0, 0)
    assert len(damaged) > 700


def flip(data: bytes, bit: int) -> bytes:
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    return bytes(flipped)


def offset_classes(data: bytes, key: str) -> list[int]:
    """One byte at least of everything an entry consists of."""
    layout = EntryLayout(Entry(BytesReader(data), key, SECRET).description)
    named = (
        b'"digest"',
        b'"tokens"',
        b"key",
        b"fingerprint",
        b"computed",
        FORMAT.encode(),
        b"dtype",
        b"shape",
    )
    found = [0, 7, 8, *(data.index(name) + 1 for name in named)]
    found += [layout.tokens - 1, layout.tokens, layout.slab(0, 0, 0, 0) - 1]
    found += [layout.tags, layout.digest - 1, layout.digest, layout.size - 1]
    for layer, run, head in itertools.product(range(LAYERS), range(2), range(HEADS)):
        start = layout.slab(layer, run, head, 2 * run)
        found += [start, start + 2 * SLAB_BYTES - 1]
    return found


@pytest.mark.fault("B3")
def test_every_flipped_bit_is_detected(relay: Relay) -> None:
    rng, classes = random.Random(7), offset_classes(relay.sound, relay.key)
    bits = [rng.randrange(8 * len(relay.sound)) for _ in range(FLIPS)]
    bits += [8 * offset + bit for offset in classes for bit in range(8)]
    original = used(BytesReader(relay.sound), relay.key, SECRET)
    results = [used(BytesReader(flip(relay.sound, bit)), relay.key, SECRET) for bit in bits]
    detected, harmless = results.count(None), results.count(original)
    wrong = len(results) - detected - harmless
    print(f"\nB3: {detected} of {len(bits)} flips detected, {harmless} harmless, {wrong} wrong")
    assert original is not None
    assert (wrong, detected + harmless) == (0, len(bits))


@pytest.mark.fault("B3")
def test_a_worker_reports_the_blocks_of_every_flipped_entry_and_quarantines_it(relay: Relay) -> None:
    rng = random.Random(8)
    bits = [8 * offset + bit for offset in offset_classes(relay.sound, relay.key) for bit in range(8)]
    bits += [rng.randrange(8 * len(relay.sound)) for _ in range(400)]
    refused = sum(relay.refused(flip(relay.sound, bit)) for bit in bits)
    print(f"\nB3: {refused} of {len(bits)} flipped entries refused and quarantined by the worker")
    assert refused == len(bits)
    assert relay.hits(relay.sound, relay.key) == 2
    assert relay.loader.held(LOADED) == relay.saver.held(SAVED)


@pytest.mark.fault("B4")
def test_an_entry_in_another_s_place_is_refused(relay: Relay) -> None:
    tried = hits = 0
    for scope in ("acme", "globex"):
        other = new_key(scope)
        assert relay.saver.save(other) is None
        hits += relay.hits(relay.path(other).read_bytes(), relay.key) + relay.hits(relay.sound, other)
        hits += relay.hits(relay.sound, new_key(scope))  # renamed
        tried += 6
    print(f"\nB4: {hits} of {tried} looks and loads used an entry in another's place")
    assert hits == 0
    assert [told.failure for told in relay.loader.scheduler.take_outcomes()] == ["corrupt"] * (tried // 2)
    assert relay.hits(relay.sound, relay.key) == 2


@pytest.mark.fault("B9")
def test_entries_of_other_weights_layouts_and_versions_are_never_loaded(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    facts = [FACTS, *(FACTS | {name: "other"} for name in FACTS)]
    engines = {new_key("acme"): Engine(store, fingerprint(fact)) for fact in facts}
    assert [engine.save(key) for key, engine in engines.items()] == [None] * len(facts)
    hits = {True: 0, False: 0}
    for (own, engine), key in itertools.product(engines.items(), engines):
        hits[own == key] += (engine.offered(key) > 0) + (engine.load(key) is None)
    for engine in engines.values():
        engine.worker.shutdown()
    print(f"\nB9: {hits[False]} cross hits among {len(facts)} engines, {hits[True]} own hits")
    assert hits == {True: 2 * len(facts), False: 0}
    assert set(store.keys()) == set(engines), "they are sound, only not of that engine"


@pytest.mark.fault("H6")
@pytest.mark.parametrize("number", [0, 1, 3, 17])
def test_an_entry_of_another_version_s_format_is_a_miss_and_stays(relay: Relay, number: int) -> None:
    """Two versions may share a store while one replaces the other; neither may destroy what the other left."""
    header = int.from_bytes(relay.sound[:8], "little")
    told = json.loads(relay.sound[8 : 8 + header])
    said = json.loads(told["__metadata__"]["baton_kv"])
    said = said | {"format": f"baton-kv/{number}", "a_later_field": True}
    told["__metadata__"]["baton_kv"] = json.dumps(said)
    written = json.dumps(told).encode()
    data = len(written).to_bytes(8, "little") + written + relay.sound[8 + header :]
    hits, failure = relay.hits(data, relay.key), relay.loader.load(relay.key)
    print(
        f"\nH6: format {number}: {hits} of 2 hits, load {failure}, left in place: {relay.store.exists(relay.key)}"
    )
    assert (hits, failure) == (0, "incompatible")
    assert relay.path(relay.key).read_bytes() == data
    assert relay.works()


class Payload:
    """Whose unpickling makes a folder."""

    def __init__(self, made: Path) -> None:
        self._made = made

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._made),)


@pytest.mark.fault("B11")
def test_forged_entries_and_pickles_are_refused_and_nothing_runs(relay: Relay, tmp_path: Path) -> None:
    made = tmp_path / "made"
    payload = pickle.dumps(Payload(made))
    pickle.loads(payload)
    made.rmdir()  # it does work
    forger = Engine(relay.store, secret=b"f" * 32)
    assert forger.save(relay.key) is None
    forger.worker.shutdown()
    forged = relay.path(relay.key).read_bytes()
    header = 8 + int.from_bytes(forged[:8], "little")
    hostile = [forged, payload, payload.ljust(len(forged), b"\0"), forged[:header] + payload]
    hostile += [len(payload).to_bytes(8, "little") + payload + forged[header:]]
    layout = EntryLayout(Entry(BytesReader(relay.sound), relay.key, SECRET).description)
    hostile += [relay.sound[: layout.digest] + forged[layout.digest :]]
    hostile += [forged[: layout.digest] + relay.sound[layout.digest :]]
    hostile += [relay.sound[: layout.tags] + forged[layout.tags :]]
    refused, hits = sum(map(relay.refused, hostile)), sum(relay.hits(data, relay.key) for data in hostile)
    print(f"\nB11: {refused} of {len(hostile)} forgeries refused, {hits} used, executed: {made.exists()}")
    assert (refused, hits, made.exists()) == (len(hostile), 0, False)


@pytest.mark.fault("H4")
def test_many_starts_leave_nothing_behind(tmp_path: Path) -> None:
    process, relays = psutil.Process(), []

    def run() -> tuple[int, int, int]:
        relay = Relay(tmp_path / "store")
        relays.append(relay)  # so that only its shutdown ends its threads
        assert relay.works()
        relay.saver.worker.shutdown()
        relay.loader.worker.shutdown()
        assert relay.store.sweep(wanted=lambda _: False, older_than_s=-1) == 2
        return process.num_fds(), process.num_threads(), len(list(relay.store.root.rglob("*")))

    run()
    before = run()
    after = [run() for _ in range(100)][-1]
    print(f"\nH4: descriptors, threads, files: {before} after 2 starts, {after} after 102")
    assert after[0] <= before[0]
    assert after[2] == before[2]
    assert after[1] < before[1] + 10, "the system counts a thread a little longer than Python"
