"""The file of stored responses: conversations, tenants, budget, lifetimes, damage."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.small_devices import fill, mounted

from baton.responses import store as responses_store
from baton.responses.response import NewResponse, conversation_json, input_items, listed_items, replayed_items
from baton.responses.store import FILE, PAGE, ResponseStore

HOUR = 3600.0


class Clock:
    """Seconds since the epoch, which a test sets."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[ResponseStore]:
    opened = ResponseStore(tmp_path / "responses", 64 * PAGE, wall=clock)
    yield opened
    opened.close()


def response(name: str, previous: str | None = None, tenant: str = "a", text: str = "x") -> NewResponse:
    output = [{"id": f"out-{name}", "type": "message", "content": text}]
    return new(name, input_items(f"in {name}"), output, previous, tenant)


def new(
    name: str, given: list[Any], output: list[Any], previous: str | None = None, tenant: str = "a"
) -> NewResponse:
    body = {"id": name, "output": output}
    return NewResponse(name, tenant, previous, 1.0, json.dumps(given), json.dumps(output), json.dumps(body))


def save(store: ResponseStore, *names: str, tenant: str = "a", text: str = "x") -> None:
    """Save a conversation, each response after the one before."""
    for previous, name in zip((None, *names), names, strict=False):
        assert store.save(response(name, previous, tenant, text), HOUR)


def items(store: ResponseStore, name: str, tenant: str = "a") -> list[Any]:
    found: list[Any] = json.loads(conversation_json(store.conversation(name, tenant)))
    return found


def test_a_conversation_comes_back_in_order(store: ResponseStore) -> None:
    save(store, "one", "two", "three")
    contents = [item["content"] for item in items(store, "three")]
    assert contents == ["in one", "x", "in two", "x", "in three", "x"]
    assert [item["content"] for item in items(store, "two")] == contents[:4]
    assert json.loads(store.body("two", "a") or "")["id"] == "two"
    assert store.size("three", "a") > store.size("one", "a") > 0


def test_another_tenant_finds_nothing(store: ResponseStore) -> None:
    save(store, "one")
    assert store.body("one", "b") is None
    assert store.size("one", "b") == 0
    assert store.conversation("one", "b") == []
    assert not store.delete("one", "b")
    assert not store.save(response("two", "one", "b"), HOUR), "it continues another tenant's"
    assert store.body("one", "a") is not None


def test_a_deleted_one_is_gone_and_later_ones_go_on(store: ResponseStore) -> None:
    save(store, "one", "two")
    assert store.delete("one", "a")
    assert store.body("one", "a") is None
    assert store.conversation("one", "a") == []
    assert not store.delete("one", "a")
    assert len(items(store, "two")) == 4
    assert store.delete("two", "a")
    assert store.usage() == (0, 0), "nothing continues the first one any more"


def test_one_that_was_deleted_while_it_was_continued_is_not_stored(store: ResponseStore) -> None:
    save(store, "one")
    store.delete("one", "a")
    assert not store.save(response("two", "one"), HOUR)
    assert store.usage() == (0, 0)


def test_it_expires_and_what_continues_it_does_not(store: ResponseStore, clock: Clock) -> None:
    save(store, "one")
    clock.now += HOUR - 10
    assert store.save(response("two", "one"), HOUR)
    clock.now += 20
    assert store.body("one", "a") is None
    assert len(items(store, "two")) == 4
    clock.now += HOUR
    assert store.conversation("two", "a") == []
    save(store, "other")
    assert store.usage() == (1, PAGE)


def test_a_long_conversation_goes_at_once_when_its_last_response_goes(store: ResponseStore) -> None:
    names = [f"r{number}" for number in range(60)]
    save(store, *names)
    for name in names[:-1]:
        assert store.delete(name, "a")
    assert store.usage() == (60, 60 * PAGE), "the last one goes on from all"
    assert store.delete(names[-1], "a")
    assert store.usage() == (0, 0)


@pytest.mark.parametrize(
    "query",
    [
        "SELECT id FROM responses WHERE deleted = 0 AND expires_at <= 1 ORDER BY expires_at LIMIT 9",
        "SELECT 1 FROM responses AS later WHERE later.previous = 'a'",
        "SELECT id FROM responses WHERE used_at < 1 AND tenant = 'a' ORDER BY used_at, created_at DESC LIMIT 1",
    ],
)
def test_no_change_reads_all_responses(store: ResponseStore, tmp_path: Path, query: str) -> None:
    with sqlite3.connect(tmp_path / "responses" / FILE) as database:
        plan = " ".join(row[3] for row in database.execute(f"EXPLAIN QUERY PLAN {query}"))
    assert "SEARCH" in plan
    assert "SCAN" not in plan
    assert "TEMP B-TREE" not in plan


def test_the_least_recently_used_make_room(store: ResponseStore) -> None:
    for number in range(64):
        save(store, f"r{number}")
    store.note_use("r0", "a")
    save(store, "new")
    assert store.usage() == (64, 64 * PAGE)
    assert store.body("r0", "a") is not None
    assert store.body("r1", "a") is None


def test_a_flood_takes_no_room_from_another_tenant(store: ResponseStore) -> None:
    save(store, "mine", "mine-2", tenant="b")
    for number in range(200):
        save(store, f"r{number}")
    assert len(items(store, "mine-2", "b")) == 4
    assert store.usage()[1] <= 64 * PAGE


def test_what_does_not_fit_is_not_stored_and_its_conversation_stays(store: ResponseStore) -> None:
    save(store, "one")
    assert not store.save(response("large", "one", text="x" * 65 * PAGE), HOUR)
    assert store.body("large", "a") is None
    assert len(items(store, "one")) == 2
    assert store.usage() == (1, PAGE)


def test_it_outlives_its_process_and_is_private(tmp_path: Path, clock: Clock, store: ResponseStore) -> None:
    save(store, "one", "two")
    assert stat.S_IMODE((tmp_path / "responses").stat().st_mode) == 0o700
    other = ResponseStore(tmp_path / "responses", 64 * PAGE, wall=clock)  # as a second gateway
    assert len(items(other, "two")) == 4
    assert other.delete("two", "a")
    assert store.conversation("two", "a") == []
    other.close()


def test_two_gateways_write_at_the_same_time(tmp_path: Path, clock: Clock) -> None:
    stores = [ResponseStore(tmp_path / "responses", 4096 * PAGE, wall=clock) for _ in range(2)]

    def write(number: int) -> None:
        for turn in range(50):
            save(stores[number], f"{number}-{turn}", f"{number}-{turn}-b", tenant=f"t{number}")

    threads = [threading.Thread(target=write, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stores[0].usage() == stores[1].usage() == (200, 200 * PAGE)
    for each in stores:
        each.close()


@pytest.mark.parametrize("damage", [b"not a database at all" * 400, b""])
def test_a_damaged_file_is_put_aside(tmp_path: Path, damage: bytes) -> None:
    folder = tmp_path / "responses"
    folder.mkdir(mode=0o700)
    (folder / FILE).write_bytes(damage)
    store = ResponseStore(folder, 64 * PAGE)
    save(store, "one")
    assert store.body("one", "a") is not None
    assert (folder / FILE).with_suffix(".damaged").exists() is bool(damage)
    store.close()


def test_pages_that_were_overwritten_are_noticed_at_the_start(tmp_path: Path) -> None:
    folder = tmp_path / "responses"
    store = ResponseStore(folder, 64 * PAGE)
    for number in range(40):
        save(store, f"r{number}", text="y" * 3000)
    store.close()
    whole = bytearray((folder / FILE).read_bytes())
    whole[8 * PAGE : 20 * PAGE] = bytes(12 * PAGE)
    (folder / FILE).write_bytes(whole)
    again = ResponseStore(folder, 64 * PAGE)
    assert again.usage() == (0, 0)
    again.close()


def test_a_link_in_the_folders_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "responses").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="is a link"):
        ResponseStore(tmp_path / "responses", PAGE)


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path / "responses", PAGE)
    store.close()
    with pytest.raises(sqlite3.Error):
        store.body("one", "a")


def test_texts_of_any_kind_come_back(store: ResponseStore) -> None:
    odd = 'a "quoted" \\ line\n\U0001f600 é \x00 ]},{['
    assert store.save(new("one", input_items(odd), [{"t": odd}]), HOUR)
    assert [item.get("content") or item["t"] for item in items(store, "one")] == [odd, odd]


def test_a_later_request_gets_no_empty_messages_and_no_log_probabilities() -> None:
    said = {"type": "output_text", "text": "a", "logprobs": [{"token": "a"}]}
    body = {
        "output": [
            {"id": "1", "type": "message", "content": []},
            {"id": "2", "type": "message", "content": [said]},
            {"id": "3", "type": "function_call", "arguments": "{}"},
        ]
    }
    assert replayed_items(body) == [
        {"id": "2", "type": "message", "content": [said | {"logprobs": None}]},
        {"id": "3", "type": "function_call", "arguments": "{}"},
    ]


def test_listed_items_have_ids_and_parts(store: ResponseStore) -> None:
    first = [
        {"role": "user", "content": "hello"},
        {"type": "function_call_output", "call_id": "c", "output": "5"},
        {"id": "mine", "type": "message", "role": "user", "content": [{"type": "input_text", "text": "y"}]},
    ]
    assert store.save(new("one", first, [{"id": "out"}]), HOUR)
    assert store.save(response("two", "one"), HOUR)
    listed = listed_items(store.conversation("two", "a"))
    assert [item["id"] for item in listed] == ["item_one_0", "item_one_1", "mine", "out", "item_two_0"]
    assert listed[0]["content"] == [{"type": "input_text", "text": "hello"}]
    assert listed[0]["type"] == "message"


@pytest.mark.fault("H7")
def test_a_clock_that_is_set_back_keeps_nobody_from_storing(store: ResponseStore, clock: Clock) -> None:
    """All that was stored had been used in the future, and nothing could give way."""
    for number in range(64):
        save(store, f"r{number}")
    clock.now -= 3600
    for number in range(64, 100):
        save(store, f"r{number}", tenant="b" if number % 2 else "a")
    assert store.body("r99", "b") is not None
    assert store.body("r0", "a") is None
    assert store.usage() == (64, 64 * PAGE)


@pytest.fixture
def small_device(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "small", 2) as folder:
        yield folder


@pytest.mark.fault("H7")
def test_on_a_full_device_the_oldest_give_way_and_deleting_works(small_device: Path, clock: Clock) -> None:
    store = ResponseStore(small_device / "responses", 1024 * 1024 * 1024, wall=clock)
    text = "x" * 40_000
    stored = [
        store.save(response(f"r{number}", tenant="ab"[number % 2], text=text), HOUR) for number in range(60)
    ]
    assert stored == [True] * 60
    assert store.body("r59", "b") is not None
    assert store.body("r0", "a") is None
    kept = [
        (f"r{number}", tenant) for number in range(60) if store.body(f"r{number}", tenant := "ab"[number % 2])
    ]
    assert len(kept) == store.usage()[0] > 10
    fill(small_device)
    assert all(store.delete(name, tenant) for name, tenant in kept)
    assert store.usage() == (0, 0)
    store.close()
    again = ResponseStore(small_device / "responses", 1024 * 1024, wall=clock)
    assert again.usage() == (0, 0)
    again.close()


@pytest.mark.fault("H7")
def test_others_have_a_turn_while_many_give_way_to_one(
    store: ResponseStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large response that evicts ten thousand small ones held the file for seconds."""
    monkeypatch.setattr(responses_store, "EVICTED_AT_ONCE", 4)
    for number in range(64):
        save(store, f"r{number}")
    freed: list[int] = []
    change = ResponseStore._change

    @contextlib.contextmanager
    def counted(self: ResponseStore, *, full: bool = False) -> Iterator[Any]:
        with change(self, full=full) as made:
            before = self._total()
            yield made
            freed.append((before - self._total()) // PAGE)

    monkeypatch.setattr(ResponseStore, "_change", counted)
    save(store, "large", text="x" * 10 * PAGE)
    assert max(freed) == 4
    assert sum(each == 4 for each in freed) >= 5
    assert store.body("large", "a") is not None
