"""Every store keeps the same promises; what a folder adds to them comes after."""

from __future__ import annotations

import errno
import os
import random
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.memory_store import MemoryStore

from baton_kv.contract import EXPENDABLE, new_key
from baton_kv.stores import file
from baton_kv.stores.base import EntryMissing, Store, StoreError, StoreFull
from baton_kv.stores.factory import open_store
from baton_kv.stores.file import ABANDONED_AFTER_S, LARGE_PAGE_BYTES, FileStore


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return MemoryStore(1000) if request.param == "memory" else FileStore(tmp_path / "store", budget=1000)


def test_what_was_put_comes_back_whole(store: Store) -> None:
    key = new_key("local")
    assert store.put(key, [b"one ", memoryview(b"two"), bytearray(b" three")]) == 13
    assert store.exists(key)
    with store.open(key) as data:
        assert data.read(0, len(data)) == b"one two three"
    assert list(store.keys()) == [key]


def test_what_is_not_there_is_missing(store: Store) -> None:
    with pytest.raises(EntryMissing), store.open(new_key("local")):
        pass
    assert not store.exists(new_key("local"))
    assert not store.delete(new_key("local"))


def test_a_scope_never_sees_another_s_entry(store: Store) -> None:
    key = new_key("acme")
    store.put(key, [b"x"])
    assert not store.exists(key.replace("acme", "globex"))


def test_a_deleted_entry_can_be_read_by_who_has_it_open(store: Store) -> None:
    key = new_key("local")
    store.put(key, [b"still here"])
    with store.open(key) as data:
        assert store.delete(key)
        assert data.read(0, len(data)) == b"still here"
    assert not store.exists(key)


def test_the_least_recently_used_go_when_the_budget_is_reached(store: Store) -> None:
    keys = [new_key("local") for _ in range(3)]
    for key in keys[:2]:
        store.put(key, [b"x" * 400])
    with store.open(keys[0]):
        pass  # the first is now the last one used
    store.put(keys[2], [b"x" * 400])
    assert [store.exists(key) for key in keys] == [True, False, True]


def test_what_nobody_asked_for_evicts_its_like_and_no_named_entry(store: Store) -> None:
    named, first, second = "a/" + "n" * 32, f"b/{EXPENDABLE}{'f' * 32}", f"b/{EXPENDABLE}{'s' * 32}"
    store.put(named, [b"x" * 450])
    store.put(first, [b"x" * 450])
    store.put(second, [b"x" * 450])
    assert [store.exists(key) for key in (named, first, second)] == [True, False, True]
    with pytest.raises(StoreFull):
        store.put(first, [b"x" * 600])
    store.put("b/" + "n" * 32, [b"x" * 600])
    assert not store.exists(second), "those that were asked for go last"


def test_what_a_killed_writer_left_goes_with_a_sweep_and_a_full_device_evicts_nothing_for_automatic_ones(
    folder: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = folder.root / "writing" / ("a" * 32)
    left.write_bytes(b"x")
    os.utime(left, (0, 0))
    named = new_key("local")
    folder.put(named, [b"x"])
    folder.sweep(wanted=lambda _key: True, older_than_s=600)
    assert not left.exists()

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(StoreFull):
        folder.put(f"local/{EXPENDABLE}{'s' * 32}", [b"x"])
    assert folder.exists(named)


def test_a_thread_of_low_priority_has_another_one_place_what_it_wrote(folder: FileStore) -> None:
    key, seen = new_key("local"), list[bool]()

    def commit(place: Callable[[], None]) -> None:
        seen.append(folder.exists(key))
        place()
        seen.append(folder.exists(key))

    folder.put(key, [b"x"], commit=commit)
    assert seen == [False, True]


def test_an_entry_above_the_whole_budget_is_refused_and_costs_nobody_anything(store: Store) -> None:
    key = new_key("local")
    store.put(key, [b"x" * 400])
    with pytest.raises(StoreFull):
        store.put(new_key("local"), [b"x" * 1001])
    assert list(store.keys()) == [key]


def test_room_is_made_for_what_lies_beside_the_entries_and_no_more_than_is_needed(store: Store) -> None:
    keys = [new_key("local") for _ in range(2)]
    for key in keys:
        store.put(key, [b"x" * 400])
    store.make_room(200)
    assert [store.exists(key) for key in keys] == [True, True]
    store.make_room(201)
    assert [store.exists(key) for key in keys] == [False, True]
    store.pin(keys[1], True)
    with pytest.raises(StoreFull):
        store.make_room(601)
    assert store.exists(keys[1])


def test_a_quarantined_entry_is_found_by_nobody(store: Store) -> None:
    key = new_key("local")
    store.put(key, [b"wrong"])
    store.quarantine(key)
    assert not store.exists(key)
    assert list(store.keys()) == []
    store.quarantine(key)  # twice does no harm


def test_an_entry_whose_parts_fail_midway_never_appears(store: Store) -> None:
    def parts() -> Iterator[bytes]:
        yield b"half"
        raise RuntimeError("the source is gone")

    with pytest.raises(RuntimeError):
        store.put(new_key("local"), parts())
    assert list(store.keys()) == []


def test_many_writers_and_readers_meet_only_whole_entries(store: Store) -> None:
    keys = [new_key("local") for _ in range(4)]
    wrong: list[bytes] = []

    def write(number: int) -> None:
        for _ in range(30):
            store.put(keys[number % 4], [bytes([65 + number]) * 50] * 2)

    def read() -> None:
        for number in range(120):
            try:
                with store.open(keys[number % 4]) as data:
                    read = data.read(0, len(data))
                    if len(read) != 100 or len(set(read)) != 1:
                        wrong.append(read)
            except EntryMissing:
                continue

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    threads += [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.fixture
def folder(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "store")


@pytest.mark.fault("B12")
def test_a_scope_that_fills_the_store_loses_its_own_entries_first(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store", budget=1000)
    quiet = [new_key("quiet") for _ in range(4)]
    for key in quiet:
        store.put(key, [b"x" * 100])
    loud = [new_key("loud") for _ in range(50)]
    for key in loud:
        store.put(key, [b"x" * 100])
    kept = sum(store.exists(key) for key in quiet)
    print(
        f"\nB12: {kept} of 4 entries of the quiet tenant stay, {sum(map(store.exists, loud))} of 50 of the loud one"
    )
    assert kept == 4
    assert [key for key in loud if store.exists(key)] == loud[-6:]


def test_only_its_owner_may_look_into_the_folder(folder: FileStore) -> None:
    key = new_key("local")
    folder.put(key, [b"x"])
    for path in [folder.root, *folder.root.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_a_folder_that_others_may_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(StoreError, match="0700"):
        FileStore(tmp_path / "open")


def test_a_link_in_an_entry_s_place_is_not_followed(folder: FileStore, tmp_path: Path) -> None:
    key = new_key("local")
    folder.put(key, [b"x"])
    path = next((folder.root / "entries").rglob("*.kv"))
    path.unlink()
    (tmp_path / "elsewhere").write_bytes(b"secret")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError), folder.open(key):
        pass


@pytest.mark.parametrize(
    "key", ["../../etc/passwd", "local/../x", "local/short", "/abs/" + "a" * 32, "a/b/c", ""]
)
def test_a_key_is_never_a_path(folder: FileStore, key: str) -> None:
    for act in (folder.exists, folder.delete, lambda key: folder.put(key, [b"x"])):
        with pytest.raises(StoreError, match="not a valid key"):
            act(key)


def test_what_a_killed_writer_left_is_swept_and_a_living_one_s_is_not(folder: FileStore) -> None:
    old, new = (folder.root / "writing" / (letter * 32) for letter in "ab")
    for path in (old, new):
        path.write_bytes(b"half")
    past = old.stat().st_mtime - ABANDONED_AFTER_S - 1
    os.utime(old, (past, past))
    FileStore(folder.root)
    assert (old.exists(), new.exists()) == (False, True)


def test_a_store_s_address_says_what_is_wrong_with_it() -> None:
    for address, reason in (
        ("memory:", "three"),
        ("redis://x", "not the address"),
        ("file:relative", "not the address"),
    ):
        with pytest.raises(StoreError, match=reason):
            open_store(address)


def test_images_count_and_do_not_go(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store", budget=1000)
    (tmp_path / "store" / "images").mkdir()
    image = tmp_path / "store" / "images" / "one.digest"
    image.write_bytes(b"i" * 500)
    os.link(image, image.with_name("two.digest"))
    assert store.size() == 500, "of two names the bytes are there once"
    first, second = new_key("local"), new_key("local")
    store.put(first, [b"x" * 400])
    store.put(second, [b"x" * 400])
    assert (store.exists(first), store.exists(second), image.exists()) == (False, True, True)
    with pytest.raises(StoreFull):
        store.put(first, [b"x" * 501])


@pytest.mark.parametrize(
    "expected", [0, 100, LARGE_PAGE_BYTES, 2 * LARGE_PAGE_BYTES + 5, 9 * LARGE_PAGE_BYTES]
)
@pytest.mark.parametrize("size", [1, LARGE_PAGE_BYTES - 1, LARGE_PAGE_BYTES, 3 * LARGE_PAGE_BYTES + 4097])
def test_a_file_in_memory_is_what_was_written_and_takes_no_more_room(
    memory: Path, size: int, expected: int
) -> None:
    """Whatever was expected: large pages are zeros until they are written, and whole."""
    store, key = FileStore(memory / "store"), new_key("acme")
    data = random.Random(size).randbytes(size)
    store.put(key, [data[:4000], [memoryview(data)[4000:]]], size=expected)
    with store.open(key) as reader:
        assert reader.read(0, 2 * size) == data
        assert len(reader) == size
    taken = 512 * (memory / "store" / "entries" / f"{key}.kv").stat().st_blocks
    assert taken <= size + 4096, "no page is behind its end"


def test_large_pages_are_asked_for_in_memory_alone(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(file, "_collapse", lambda _, size: asked.append(size))
    monkeypatch.setattr(file, "file_system_of", lambda root: ["tmpfs" if memory in root.parents else "ext4"])
    for root in (tmp_path, memory):
        store = FileStore(root / "store")
        store.put(new_key("acme"), [bytes(LARGE_PAGE_BYTES + 1)], size=LARGE_PAGE_BYTES + 1)
        store.put(new_key("acme"), [bytes(100)], size=100)
    assert asked == [LARGE_PAGE_BYTES]


def test_what_a_rank_has_written_stays_when_the_draft_gets_large_pages(memory: Path) -> None:
    store, key, name = FileStore(memory / "store"), new_key("acme"), "0" * 32
    size = 3 * LARGE_PAGE_BYTES + 100
    data = random.Random(1).randbytes(size)
    halves = [range(0, size, 2 * 4096), range(4096, size, 2 * 4096)]
    for rank in (1, 0):  # the one that asks for them comes last
        with store.draft(key, name, size=size, rank=rank, ranks=2) as draft:
            for start in halves[rank]:
                draft.write_at(start, [data[start : start + 4096]])
            if draft.finish():
                draft.place()
    with store.open(key) as reader:
        assert reader.read(0, 2 * size) == data
