"""How a store keeps within its budget: exactly, whoever writes, and without a look at every entry for each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton_kv.contract import new_key
from baton_kv.stores import room
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
