"""A device that fails, fills up or is closed costs a handoff its reuse, never more."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import resource
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from connector.store_relays import HEADS, LAYERS, LOADED, MIB, SAVED, SECRET, SLAB_BYTES, Relay

from baton_kv.contract import new_key
from baton_kv.entry import Entry
from baton_kv.format import EntryInvalid, EntryLayout
from baton_kv.stores import file as store_file
from baton_kv.stores.base import StoreError, StoreFull
from baton_kv.stores.file import FileStore

NOBODY = 65534


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
        monkeypatch.setattr(store_file, "os", broken_os(call, works))
        failure = relay.loader.load(relay.key)
        monkeypatch.setattr(store_file, "os", broken_os(call, works))
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
        os.truncate(relay.path(relay.key), EntryLayout(found.description).tags - 1)
        with pytest.raises(EntryInvalid):
            found.read_slabs(LAYERS - 1, 1, HEADS - 1, len(SAVED) - 1, [memoryview(bytearray(SLAB_BYTES))])
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
        if not wait([looked], timeout=60).done:
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
