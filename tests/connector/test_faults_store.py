"""Whatever breaks beneath the store, a wrong block is never used and nothing is raised into the engine."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import pickle
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from baton_kv import entry
from baton_kv.blocks import KVBlocks
from baton_kv.contract import new_key, params_to_load
from baton_kv.entry import FORMAT, Entry, EntryInvalid
from baton_kv.fingerprint import fingerprint
from baton_kv.messages import LoadJob, SaveJob, StepJobs
from baton_kv.scheduler_role import SchedulerRole
from baton_kv.secret import store_secret
from baton_kv.stores import reader as entry_reader
from baton_kv.stores.base import BytesReader, Reader, Store, StoreError, StoreFull
from baton_kv.stores.file import FileStore
from baton_kv.worker_role import WorkerRole

SECRET = b"s" * 32
BLOCK, LAYERS = 16, 3
BLOCK_BYTES = 2 * BLOCK * 8 * 4  # heads, tokens, values, float32
TOKENS = tuple(range(100, 150))
SAVED, LOADED = (3, 7, 1, 9), (8, 2, 5, 4)
FLIPS = 10_000
MIB = 1024 * 1024
NOBODY = 65534
FACTS = {"vllm": "0.32.0", "weights": "a", "dtype": "bfloat16", "kv_dtype": "auto", "spec": "block_size=32"}
FACTS |= {"packing": "amx", "platform": "cpu", "revision": "main", "quantization": "none", "layers": "30"}


class Engine:
    """A pool and both roles, as one engine has them."""

    def __init__(self, store: Store, model: str = "one", *, secret: bytes = SECRET, seed: int = 0) -> None:
        pool = torch.rand((12, LAYERS, 2, BLOCK, 8), generator=torch.Generator().manual_seed(seed))
        self.blocks = KVBlocks([pool[:, layer] for layer in range(LAYERS)])
        self.scheduler = SchedulerRole(store, secret, model, BLOCK)
        self.worker = WorkerRole(store, secret, model, self.blocks)
        self._requests = itertools.count()

    def run(self, jobs: StepJobs) -> str | None:
        """Why a job failed; its request is released, and only if it failed are a load's blocks told."""
        self.worker.start(jobs)
        deadline = time.monotonic() + 30
        while not (finished := self.worker.poll()).outcomes:
            assert time.monotonic() < deadline, "the job did not end"
            time.sleep(0.0005)
        failure = finished.outcomes[0].failure
        assert finished.saved | finished.loaded == {"r"}
        assert finished.failed_blocks == (set(LOADED) if failure and jobs.loads else set())
        return failure

    def save(self, key: str) -> str | None:
        return self.run(StepJobs(saves=[SaveJob("r", key, TOKENS, 49, SAVED)]))

    def load(self, key: str) -> str | None:
        return self.run(StepJobs(loads=[LoadJob("r", key, 0, LOADED, 49)]))

    def offered(self, key: str) -> int:
        return self.scheduler.matched(f"{next(self._requests)}", params_to_load(key), [*TOKENS, 1], 0)

    def held(self, block_ids: tuple[int, ...]) -> list[bytes]:
        return [b"".join(self.blocks.gather(layer, block_ids)) for layer in range(LAYERS)]


class Relay:
    """A store, an engine that saved an entry in it, and one that may load that."""

    def __init__(self, root: Path, budget: int | None = None) -> None:
        self.store = FileStore(root, budget=budget)
        self.saver, self.loader = Engine(self.store), Engine(self.store, seed=1)
        self.key = new_key("acme")
        assert self.saver.save(self.key) is None
        self.sound = self.path(self.key).read_bytes()

    def path(self, key: str) -> Path:
        return self.store.root / "entries" / f"{key}.kv"

    def being_written(self) -> list[Path]:
        return list((self.store.root / "writing").iterdir())

    def hits(self, data: bytes, key: str) -> int:
        """Of a look and a load, each of a file with these bytes, how many would use it."""
        self.path(key).parent.mkdir(mode=0o700, exist_ok=True)
        self.path(key).write_bytes(data)
        offered = self.loader.offered(key)
        self.path(key).write_bytes(data)
        return (offered > 0) + (self.loader.load(key) is None)

    def refused(self, data: bytes) -> bool:
        """Whether a load of a file with these bytes fails, and puts it into quarantine."""
        self.path(self.key).write_bytes(data)
        refused = self.loader.load(self.key) == "corrupt" and not self.store.exists(self.key)
        return refused and data in [path.read_bytes() for path in (self.store.root / "quarantine").iterdir()]

    def works(self) -> bool:
        """Whether all is as if nothing had ever happened."""
        key = new_key("acme")
        return (self.saver.save(key), self.loader.offered(key), self.loader.load(key)) == (None, 49, None)


@pytest.fixture
def relay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Relay:
    monkeypatch.setattr(entry, "CHUNK_BYTES", 2 * BLOCK_BYTES)  # two chunks a layer
    return Relay(tmp_path / "store")


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount a small device")
    command = ["mount", "-t", "tmpfs", "-o", "size=8m,mode=0700", "tmpfs", str(tmp_path)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no small device can be mounted here: {mounted.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def used(reader: Reader, key: str, secret: bytes) -> object:
    """All that would be used of an entry; None: nothing."""
    try:
        found = Entry(reader, key, secret)
        told = found.description
        places = itertools.product(range(told.layers), range(told.chunks))
        return told, found.tokens.tolist(), [bytes(found.chunk(layer, chunk)) for layer, chunk in places]
    except EntryInvalid:
        return None


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
    store.put(new_key("local"), [b"goes on"])
    return len(keys), torn, len(left)


@pytest.mark.fault("B1")
@pytest.mark.parametrize("when", ["calls", "moments"])
def test_a_killed_save_leaves_whole_entries_or_none(when: str, tmp_path: Path) -> None:
    script = Path(__file__).with_name("killed_save.py")
    command = [sys.executable, str(script), when, str(tmp_path)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert answer.returncode == 0, answer.stderr
    kills = [line.split() for line in answer.stdout.splitlines()]
    found = [after_a_kill(tmp_path / number) for number, _ in kills]
    entries, torn, swept = (sum(column) for column in zip(*found, strict=True))
    if when == "calls":
        assert kills.pop()[1] == "survived"
        assert {call for _, call in kills} >= {"open", "write", "utime", "fsync", "flock", "rename", "unlink"}
    print(f"\nB1 {when}: {len(kills)} kills, {entries} entries, {torn} torn, {swept} leftovers swept")
    assert len(kills) >= {"calls": 40, "moments": 100}[when]
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


def offset_classes(data: bytes) -> list[int]:
    """One byte at least of everything an entry consists of."""
    header, size = 8 + int.from_bytes(data[:8], "little"), len(SAVED) * BLOCK_BYTES
    digests, layers = header + 4 * len(TOKENS), len(data) - LAYERS * size
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
    found = [0, 7, 8, *(data.index(name) + 1 for name in named), data.index(b'"digest": "') + 11]
    found += [header - 1, header, digests - 1, digests, layers - 1]
    for start in range(layers, len(data), size):
        found += [start, start + 2 * BLOCK_BYTES - 1, start + 2 * BLOCK_BYTES, start + size - 1]
    return found


@pytest.mark.fault("B3")
def test_every_flipped_bit_is_detected(relay: Relay) -> None:
    rng, classes = random.Random(7), offset_classes(relay.sound)
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
    bits = [8 * offset + bit for offset in offset_classes(relay.sound) for bit in range(8)]
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


@pytest.mark.fault("B5")
def test_a_full_device_evicts_the_least_recently_used_and_goes_on(device: Path) -> None:
    store = FileStore(device / "store")
    pinned, busy, *others = keys = [new_key("acme") for _ in range(40)]
    store.pin(pinned, True)
    for number, key in enumerate(keys):
        assert store.put(key, [bytes([number]) * MIB]) == MIB
        if number:
            with store.open(busy) as reader:
                assert reader.read(0, 2 * MIB) == b"\1" * MIB
    left = set(store.keys())
    print(f"\nB5: {len(keys)} of {len(keys)} puts of 1 MiB on 8 MiB, {len(left)} entries stay")
    assert left == {pinned, busy, *others[2 - len(left) :]}
    assert list((store.root / "writing").iterdir()) == []


@pytest.mark.fault("B5")
def test_a_device_filled_by_others_costs_saves_only(device: Path) -> None:
    relay = Relay(device / "store")
    relay.store.pin(relay.key, True)
    with (device / "foreign").open("wb", buffering=0) as foreign, contextlib.suppress(OSError):
        while True:
            foreign.write(bytes(4096))
    with pytest.raises(StoreFull):
        relay.store.put(new_key("globex"), [b"x" * MIB])
    failure, left = relay.saver.save(new_key("acme")), relay.being_written()
    assert (failure, left, list(relay.store.keys())) == ("full", [], [relay.key])
    assert (relay.loader.offered(relay.key), relay.loader.load(relay.key)) == (49, None)
    (device / "foreign").unlink()
    began = time.monotonic()
    assert relay.works()
    print(f"\nB5: a full device costs saves, no reads; recovered in {time.monotonic() - began:.3f} s")


@pytest.mark.fault("B5")
def test_a_read_only_device_costs_saves_only(device: Path) -> None:
    relay = Relay(device / "store")
    subprocess.run(["mount", "-o", "remount,ro", str(device)], check=True)
    assert (relay.loader.offered(relay.key), relay.loader.load(relay.key)) == (49, None)
    failure = relay.saver.save(new_key("acme"))
    subprocess.run(["mount", "-o", "remount,rw", str(device)], check=True)
    print(f"\nB5: a device gone read-only: save {failure}, reads go on")
    assert failure == "device"
    assert relay.works()


def broken_os(name: str, works: int) -> SimpleNamespace:
    """`os`, one of whose functions works so often, then fails with EIO."""
    calls = itertools.count()

    def broken(*args: Any, **named: Any) -> Any:
        if next(calls) >= works:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return getattr(os, name)(*args, **named)

    return SimpleNamespace(**vars(os) | {name: broken})


@pytest.mark.fault("B6")
@pytest.mark.parametrize("call", ["open", "fstat", "pread", "preadv"])
def test_a_read_error_is_a_miss(call: str, relay: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
    for works in range(100):
        monkeypatch.setattr(entry_reader, "os", broken_os(call, works))
        failure = relay.loader.load(relay.key)
        monkeypatch.setattr(entry_reader, "os", broken_os(call, works))
        offered = relay.loader.offered(relay.key)
        if failure is None:
            break
        assert failure == "device"
        assert offered == (49 if call == "preadv" else 0)  # looking reads no blocks
    print(f"\nB6: {works} loads with EIO at each {call} in turn: all missed")
    assert works > 0
    assert relay.loader.held(LOADED) == relay.saver.held(SAVED)


@pytest.mark.fault("B6")
def test_an_entry_that_shrinks_or_vanishes_is_a_miss(relay: Relay) -> None:
    with relay.store.open(relay.key) as reader:
        found = Entry(reader, relay.key, SECRET)
        os.truncate(relay.path(relay.key), len(relay.sound) - 1)
        with pytest.raises(EntryInvalid):
            found.read_blocks(LAYERS - 1, len(SAVED) - 1, [memoryview(bytearray(BLOCK_BYTES))])
    relay.path(relay.key).write_bytes(relay.sound)
    assert relay.loader.offered(relay.key) == 49
    relay.path(relay.key).unlink()
    failure = relay.loader.load(relay.key)
    print(f"\nB6: gone between look and load: {failure}; shrunk while open: EntryInvalid")
    assert failure == "missing"
    assert relay.works()


@contextlib.contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    limits, taken = resource.getrlimit(resource.RLIMIT_NOFILE), []
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, limits[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(count):
            os.close(taken.pop())
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.fault("B7")
@pytest.mark.parametrize("left", range(4))
def test_without_descriptors_the_store_misses_and_then_works_again(left: int, tmp_path: Path) -> None:
    relay = Relay(tmp_path / "store", budget=20_000)  # of one entry: each save evicts
    store, key = relay.store, new_key("acme")
    with descriptors_left(left):
        seen = relay.loader.offered(relay.key), relay.loader.load(relay.key), relay.saver.save(key)
    print(f"\nB7: {left} descriptors left: offered, load, save: {seen}")
    assert seen[:2] == ((49, None) if left else (0, "device"))
    assert seen[2] == "device" or (left and seen[2] is None)
    assert relay.being_written() == []
    assert relay.works()
    assert store.size() <= 20_000
    for look in (store.size, lambda: [*store.keys()], lambda: store.sweep(wanted=bool, older_than_s=0)):
        with descriptors_left(left), contextlib.suppress(StoreError):
            look()


PLANTS: dict[str, Callable[[Path, Path], None]] = {
    "link": lambda path, sound: path.symlink_to(sound),
    "folder": lambda path, sound: path.mkdir(),
    "fifo": lambda path, sound: os.mkfifo(path),
}


@pytest.mark.fault("B8")
@pytest.mark.parametrize("kind", PLANTS)
def test_a_link_pipe_or_folder_in_place_of_an_entry_is_refused(
    kind: str, relay: Relay, tmp_path: Path
) -> None:
    path, sound = relay.path(relay.key), tmp_path / "sound"
    path.rename(sound)
    PLANTS[kind](path, sound)
    with ThreadPoolExecutor(1) as aside:
        looked = aside.submit(relay.loader.offered, relay.key)
        if not wait([looked], timeout=5).done:
            os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))  # lets go of who waits for a writer
            pytest.fail(f"a {kind} in an entry's place held the look up")
    failure = relay.loader.load(relay.key)
    print(f"\nB8: a {kind} in an entry's place: offered {looked.result()}, load {failure}")
    assert (looked.result(), failure) == (0, "device")
    small = FileStore(relay.store.root, budget=2000)
    for _ in range(3):
        small.put(new_key("acme"), [b"x" * 1500])  # evicts
    small.sweep(wanted=lambda _: False, older_than_s=-1)
    assert sound.read_bytes() == relay.sound


@contextlib.contextmanager
def unprivileged(folder: Path) -> Iterator[None]:
    """Be the folder's owner, and not root, whom no permission binds."""
    root = os.geteuid() == 0
    if root:
        os.chown(folder, NOBODY, NOBODY)
        os.seteuid(NOBODY)
    try:
        if not os.access(folder, os.W_OK, effective_ids=True):
            pytest.skip("the folder for temporary files is closed to others than root")
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.mark.fault("B8")
@pytest.mark.parametrize("locked", ["writing", "entries", "entries/acme", "."])
def test_a_folder_that_may_not_be_written_costs_saves_only(locked: str) -> None:
    with tempfile.TemporaryDirectory() as made, unprivileged(Path(made)):
        relay = Relay(Path(made) / "store")
        (relay.store.root / "lock").unlink()
        (relay.store.root / locked).chmod(0o555)
        failure = relay.saver.save(new_key("globex" if locked == "entries" else "acme"))
        loaded = relay.loader.offered(relay.key), relay.loader.load(relay.key)
        left = relay.being_written()
        (relay.store.root / locked).chmod(0o700)
        print(f"\nB8: {locked} at 0555: save {failure}, offered and loaded {loaded}, {len(left)} left")
        assert (failure, loaded, left) == ("device", (49, None), [])
        assert relay.works()


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
@pytest.mark.parametrize("number", [0, 1, 17])
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
    hostile += [relay.sound[:header] + forged[header:], forged[:header] + relay.sound[header:]]
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
