"""Entries share files: a file stays as long as somebody needs it, is counted once, and goes with its last user."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.memory_store import MemoryStore

from baton_kv.contract import new_key
from baton_kv.stores.base import EntryMissing, SharedFiles, SharedMissing, Store, StoreError, StoreFull
from baton_kv.stores.file import FileStore

Chain = list[str]


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return MemoryStore(1000) if request.param == "memory" else FileStore(tmp_path / "store", budget=1000)


def chain(store: Store, count: int, size: int = 100, scope: str = "acme") -> Chain:
    """Put entries of which each continues the one before."""
    keys: Chain = []
    for number in range(count):
        key = new_key(scope)
        store.put(key, [bytes([number]) * size], shared=SharedFiles(tuple(keys), keys[-1] if keys else ""))
        keys.append(key)
    return keys


def content(store: Store, key: str, part: int | None = None) -> bytes:
    with store.open(key, part) as data:
        return data.read(0, len(data))


def test_a_shared_file_is_read_through_every_entry_and_counted_once(store: Store) -> None:
    one, two, three = chain(store, 3)
    assert [content(store, three, part)[:1] for part in (0, 1, None)] == [b"\0", b"\1", b"\2"]
    assert [store.bytes_of(key) for key in (one, two, three)] == [100, 200, 300]
    assert store.size() == 300
    assert (store.exists(three, 1), store.exists(three, 2), store.exists(one, 0)) == (True, False, False)
    with pytest.raises(EntryMissing), store.open(one, 0):
        pass


def test_a_deleted_entry_s_file_stays_for_those_who_share_it_and_goes_with_the_last(store: Store) -> None:
    one, two, three = chain(store, 3)
    assert store.delete(one)
    assert store.delete(two)
    assert (store.exists(one), list(store.keys()), store.size()) == (False, [three], 300)
    assert content(store, three, 0) == bytes(100)
    assert store.delete(three)
    assert (store.size(), store.bytes_of(three)) == (0, 0)


def test_what_is_shared_is_found_through_the_holder_when_its_own_entry_is_gone(store: Store) -> None:
    one, two = chain(store, 2)
    store.delete(one)
    three = new_key("acme")
    store.put(three, [b"x"], shared=SharedFiles((one, two), two))
    store.delete(two)
    assert [content(store, three, part)[:1] for part in (0, 1)] == [b"\0", b"\1"]


def test_an_entry_whose_shared_file_is_gone_is_not_saved(store: Store) -> None:
    (one,) = chain(store, 1)
    store.delete(one)
    with pytest.raises(SharedMissing):
        store.put(new_key("acme"), [b"x"], shared=SharedFiles((one,), one))
    assert (list(store.keys()), store.size()) == ([], 0)


def test_another_tenant_s_file_is_never_shared(store: Store) -> None:
    (one,) = chain(store, 1)
    with pytest.raises(SharedMissing):
        store.put(new_key("globex"), [b"x"], shared=SharedFiles((one.replace("acme", "globex"),), one))


def test_what_frees_nothing_is_not_evicted_for_it(store: Store) -> None:
    """The prefix is used at least as recently as what continues it, so that goes first."""
    one, two, three = chain(store, 3, 300)
    other = new_key("acme")
    store.put(other, [b"x" * 200])
    assert [store.exists(key) for key in (one, two, three, other)] == [True, True, False, True]
    store.pin(two, True)
    store.make_room(300)
    assert [store.exists(key) for key in (one, two, other)] == [True, True, False]
    store.make_room(400)
    assert [store.exists(key) for key in (one, two)] == [True, True]
    with pytest.raises(StoreFull):
        store.make_room(500)
    store.pin(two, False)
    store.make_room(500)
    assert [store.exists(key) for key in (one, two)] == [True, False]


def test_an_entry_that_continues_others_does_not_evict_them(store: Store) -> None:
    (one,) = chain(store, 1, 500)
    two = new_key("acme")
    with pytest.raises(StoreFull):
        store.put(two, [b"x" * 501], shared=SharedFiles((one,), one))
    assert list(store.keys()) == [one]
    assert store.bytes_of(two) == 0
    store.delete(one)
    assert store.size() == 0, "the entry that was not saved holds nothing"


def test_pins_count_a_shared_file_once(store: Store) -> None:
    one, two, three = chain(store, 3)
    (other,) = chain(store, 1, 50, "globex")
    store.pin(two, True)
    assert store.pinned() == {"acme": 200}
    assert store.pinned(also=one) == {"acme": 200}
    assert store.pinned(also=three) == {"acme": 300}
    assert store.pinned(also=other) == {"acme": 200, "globex": 50}


def test_a_corrupt_file_is_taken_from_everybody_at_once(store: Store) -> None:
    one, two, three = chain(store, 3)
    store.quarantine(three, 1)
    assert [store.exists(key) for key in (one, two, three)] == [True, False, True]
    assert (store.exists(three, 0), store.exists(three, 1)) == (True, False)
    store.quarantine(one)
    assert [store.exists(key) for key in (one, three)] == [False, True]
    assert not store.exists(three, 0)
    assert store.size() == 100


def test_what_follows_a_corrupt_file_is_of_no_use_and_goes_with_its_entry(store: Store) -> None:
    keys = chain(store, 4)
    store.quarantine(keys[3], 1)
    assert [store.exists(keys[3], part) for part in range(3)] == [True, False, False]
    assert store.bytes_of(keys[3]) == 200
    for key in keys:
        store.delete(key)
    assert store.size() == 0


def test_an_entry_put_again_shares_only_what_it_says_now(store: Store) -> None:
    one, two, three = chain(store, 3)
    store.put(three, [b"new"], shared=SharedFiles((one,), one))
    assert (store.exists(three, 0), store.exists(three, 1)) == (True, False)
    store.delete(two)
    assert store.size() == 103


def test_what_a_killed_writer_linked_is_swept(tmp_path: Path) -> None:
    """It linked what it shares and did not come to name its own file."""
    store = FileStore(tmp_path / "store", budget=1000)
    one, two = chain(store, 2)
    folder = store.root / "entries" / "acme"
    os.unlink(folder / f"{two.partition('/')[2]}.kv")
    store.delete(one)
    assert store.size() == 100, "the name that was left holds the file"
    store.sweep(wanted=lambda _: True, older_than_s=0)
    assert (store.size(), list(folder.iterdir())) == (0, [])


def test_a_planted_link_in_a_shared_file_s_place_is_not_followed(tmp_path: Path) -> None:
    store, elsewhere = FileStore(tmp_path / "store"), tmp_path / "elsewhere"
    one, two = chain(store, 2)
    elsewhere.write_bytes(b"mine")
    place = store.root / "entries" / f"{two}.000"
    place.unlink()
    place.symlink_to(elsewhere)
    assert not store.exists(two, 0)
    with pytest.raises(Exception, match="reading"), store.open(two, 0):
        pass
    store.delete(two)
    store.delete(one)
    assert elsewhere.read_bytes() == b"mine"


def test_where_files_cannot_be_shared_the_entry_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(tmp_path / "store")
    (one,) = chain(store, 1)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(SharedMissing):
        store.put(new_key("acme"), [b"x"], shared=SharedFiles((one,), one))


def test_an_entry_put_again_is_not_taken_for_the_one_that_others_continued(store: Store) -> None:
    """The holder still has the file that it continues; under that one's key there is another now."""
    one, two = chain(store, 2)
    store.put(one, [b"another"])
    three = new_key("acme")
    store.put(three, [b"x"], shared=SharedFiles((one, two), two))
    assert content(store, three, 0) == bytes(100)
    assert content(store, one) == b"another"


def test_an_entry_saved_under_the_key_that_it_continues_counts_both_files(store: Store) -> None:
    (one,) = chain(store, 1, 600)
    store.put(one, [b"x" * 300], shared=SharedFiles((one,), one))
    assert (store.size(), store.bytes_of(one)) == (900, 900)
    with pytest.raises(StoreFull):
        store.put(one, [b"x" * 401], shared=SharedFiles((one,), one))
    assert store.size() <= 1000


def test_a_replacement_that_fails_leaves_the_entry_as_it_was(store: Store) -> None:
    one, two = chain(store, 2, 400)
    store.pin(two, True)
    with pytest.raises(StoreFull):
        store.put(two, [b"x" * 700], shared=SharedFiles((one,), one))
    with pytest.raises(SharedMissing):
        store.put(two, [b"x"], shared=SharedFiles((new_key("acme"),), one))
    assert (content(store, two), content(store, two, 0)) == (b"\1" * 400, bytes(400))
    assert store.size() == 800


def test_sharing_a_file_uses_it(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    (one,) = chain(store, 1)
    path = store.root / "entries" / f"{one}.kv"
    os.utime(path, (1, 1))
    store.put(new_key("acme"), [b"x"], shared=SharedFiles((one,), one))
    assert path.stat().st_mtime > 1


def test_what_killed_processes_left_makes_room_without_a_sweep(tmp_path: Path) -> None:
    """Plain vLLM has nobody who sweeps: the next save finds the names, or whoever deletes the entry again."""
    store = FileStore(tmp_path / "store", budget=1000)
    one, two = chain(store, 2, 400)
    os.unlink(store.root / "entries" / f"{two}.kv")
    store.delete(one)
    assert store.size() == 400
    store.put(new_key("acme"), [b"x" * 900])
    assert store.size() == 900
    one, two = chain(store, 2, 10)
    os.unlink(store.root / "entries" / f"{two}.kv")
    assert not store.delete(two)
    assert not store.exists(two, 0)


def test_a_name_that_is_not_the_store_s_own_stays(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    one, two = chain(store, 2)
    backup = store.root / "entries" / f"{one}.kv.bak"
    os.link(store.root / "entries" / f"{one}.kv", backup)
    store.quarantine(two, 0)
    assert (store.exists(one), store.exists(two, 0), backup.exists()) == (False, False, True)


def test_a_file_system_without_stable_numbers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FileStore(tmp_path / "store")
    real = os.scandir

    class Odd:
        def __init__(self, each: os.DirEntry[str]) -> None:
            self._each = each

        def __getattr__(self, name: str) -> object:
            return (lambda: 1) if name == "inode" else getattr(self._each, name)

    @contextlib.contextmanager
    def listed(folder: int) -> Iterator[list[Odd]]:
        with real(folder) as found:
            yield [Odd(each) for each in found]

    monkeypatch.setattr(os, "scandir", listed)
    with pytest.raises(StoreError, match="no stable numbers"):
        FileStore(tmp_path / "store")


def test_a_thousand_forks_of_one_prefix_share_it_and_leave_nothing_behind(tmp_path: Path) -> None:
    """The prefix is stored once, whatever goes first; no file, name or descriptor stays."""
    store = FileStore(tmp_path / "store", budget=10**6)
    prefix = new_key("acme")
    store.put(prefix, [b"p" * 1000])
    forks = [new_key("acme") for _ in range(1000)]
    opened = len(os.listdir("/proc/self/fd"))
    for fork in forks:
        store.put(fork, [b"f" * 10], shared=SharedFiles((prefix,), prefix))
    assert store.size() == 1000 + 1000 * 10
    assert store.delete(prefix)
    assert store.size() == 1000 + 1000 * 10
    for fork in forks[:-1]:
        assert store.delete(fork)
    assert content(store, forks[-1], 0) == b"p" * 1000
    assert store.delete(forks[-1])
    assert (store.size(), len(os.listdir("/proc/self/fd"))) == (0, opened)
    assert not [path for path in (tmp_path / "store" / "entries").rglob("*") if path.is_file()]
