"""How a store keeps within its budget: exactly, whoever writes, and without a look at every entry for each."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from baton_kv.contract import EXPENDABLE, new_key
from baton_kv.stores import room
from baton_kv.stores.base import StoreFull
from baton_kv.stores.file import FileStore
from baton_kv.stores.room import AHEAD_SHARE, MANY_ENTRIES
from baton_kv.stores.tree import Listing, StoreTree


class Looks:
    """Counts how often the entries are listed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        listing = StoreTree.listing

        def counted(tree: StoreTree) -> Listing:
            self.count += 1
            return listing(tree)

        monkeypatch.setattr(StoreTree, "listing", counted)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    return Looks(monkeypatch)


def test_entries_that_fit_are_saved_without_a_look_at_the_others(tmp_path: Path, looks: Looks) -> None:
    store = FileStore(tmp_path / "store", budget=100_000)
    for _ in range(50):
        store.put(new_key("acme"), [b"x" * 1000], size=1000)
    assert looks.count == 1


def test_a_full_store_of_many_entries_is_listed_now_and_then(tmp_path: Path, looks: Looks) -> None:
    store = FileStore(tmp_path / "store", budget=100 * MANY_ENTRIES * 2)
    for _ in range(MANY_ENTRIES * 2):
        store.put(new_key("acme"), [b"x" * 100], size=100)
    before = looks.count
    for _ in range(200):
        store.put(new_key("acme"), [b"x" * 100], size=100)
    assert looks.count - before <= 1 + 200 * AHEAD_SHARE // (MANY_ENTRIES * 2)
    assert store.size() <= 100 * MANY_ENTRIES * 2


def test_a_full_store_of_few_entries_evicts_no_more_than_it_must(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store", budget=1000)
    for _ in range(30):
        store.put(new_key("acme"), [b"x" * 100], size=100)
    assert store.size() == 1000


def test_what_others_write_counts(tmp_path: Path) -> None:
    """Two processes, as an engine's workers are; neither lists the store when the other writes."""
    one, other = (FileStore(tmp_path / "store", budget=10_000) for _ in range(2))
    for number in range(60):
        (one if number % 3 else other).put(new_key("acme"), [b"x" * 700], size=700)
        assert one.size() <= 10_000


def test_a_number_that_is_missing_or_damaged_costs_a_look(tmp_path: Path, looks: Looks) -> None:
    store = FileStore(tmp_path / "store", budget=10_000)
    for damage in (b"", b"not a number", b"-5"):
        store.put(new_key("acme"), [b"x" * 1000], size=1000)
        (store.root / "written").write_bytes(damage)
        before = looks.count
        store.put(new_key("acme"), [b"x" * 1000], size=1000)
        assert looks.count == before + 1
    for _ in range(20):
        store.put(new_key("acme"), [b"x" * 1000], size=1000)
    assert store.size() <= 10_000


def test_what_writes_past_the_count_is_noticed_after_a_while(
    tmp_path: Path, looks: Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version that does not count, or a file put there by hand."""
    store = FileStore(tmp_path / "store", budget=10_000)
    store.put(new_key("acme"), [b"x" * 1000], size=1000)
    (store.root / "entries" / "acme" / f"{'o' * 32}.kv").write_bytes(b"x" * 8500)
    monkeypatch.setattr(room, "LIST_EVERY_S", -1.0)
    store.put(new_key("acme"), [b"x" * 1000], size=1000)
    assert store.size() <= 10_000


@pytest.mark.fault("B30")
def test_what_is_being_written_counts(tmp_path: Path) -> None:
    """Two saves at once into a store near its budget: what the other one has written leaves no room for old ones."""
    store, sizes = FileStore(tmp_path / "store", budget=1000), list[int]()
    old, first, second = [new_key("acme") for _ in range(2)], new_key("acme"), new_key("acme")
    for key in old:
        store.put(key, [b"x" * 300], size=300)

    def parts() -> Iterator[bytes]:
        yield b"y" * 300
        store.put(second, [b"z" * 300], size=300)
        sizes.append(store.size())
        yield b""

    store.put(first, parts(), size=300)
    assert sizes == [900]
    assert (store.size(), [store.exists(key) for key in (*old, first, second)]) == (
        900,
        [False, True, True, True],
    )


@pytest.mark.fault("B30")
def test_an_automatic_save_under_way_takes_no_room_from_a_clients(tmp_path: Path) -> None:
    """It meets the budget at its own end, and is refused then."""
    store = FileStore(tmp_path / "store", budget=100)
    mine, automatic = new_key("acme"), "acme/" + EXPENDABLE + "a" * 32

    def parts() -> Iterator[bytes]:
        yield b"y" * 60
        store.put(mine, [b"z" * 60], size=60)

    with pytest.raises(StoreFull):
        store.put(automatic, parts(), size=60)
    assert store.exists(mine)


@pytest.mark.fault("B30")
def test_of_two_saves_that_do_not_fit_together_one_is_kept(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store", budget=100)
    for _ in range(30):
        keys = [new_key("acme") for _ in range(2)]
        gate = threading.Barrier(2)

        def put(key: str, gate: threading.Barrier = gate) -> None:
            gate.wait()
            with contextlib.suppress(StoreFull):
                store.put(key, [b"x" * 60], size=60)

        with ThreadPoolExecutor(2) as threads:
            list(threads.map(put, keys))
        assert any(map(store.exists, keys))
        for key in keys:
            store.delete(key)
