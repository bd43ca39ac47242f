"""Parts of batches without a socket: reading inputs, order, the store on a full device and over clock steps, forms."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import random
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches import CHAT, chat, line

from baton.admission.fair_queue import FairQueue, QueueLimits
from baton.batches.lines import Answer, Input, Reader, body_of, written_answer
from baton.batches.service import Batches, SteadyClock, batch_threads, is_full
from baton.batches.store import Batch, BatchStore, Usage, Wanted
from baton.config.groups import BatchSettings, LimitSettings
from baton.engines.backend import Json
from baton.errors import (
    ClientFileNotFound,
    EngineOverloaded,
    FileInUse,
    InvalidRequest,
    QuotaReached,
    SettingsError,
)
from baton.http.body.form import FormReader
from baton.http.body.json import parse_object
from baton.telemetry.events import Events
from baton.telemetry.metrics import GatewayMetrics

LIMITS = LimitSettings()
DAY = 86400.0


class Clock:
    """Wall time that the test moves."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


def read(content: bytes, most: int = 1000) -> Input:
    return Reader(parse_object, LIMITS, most).read(io.BytesIO(content), CHAT)


# What an input file holds


def test_lines_are_where_they_are_in_the_file() -> None:
    content = line("a", chat("1")) + b"\n  \r\n" + line("b", chat("2 \u00e9")) + line("c", chat("3")).rstrip()
    found = read(content)
    assert found.errors == []
    assert {each.custom_id: each.number for each in found.lines} == {"a": 1, "b": 4, "c": 5}
    for each in found.lines:
        piece = content[each.start : each.start + each.size]
        assert json.loads(piece)["custom_id"] == each.custom_id
        assert json.loads(body_of(piece)) == json.loads(piece)["body"]


def contexts(count: int, questions: int) -> list[tuple[int, bytes]]:
    """Lines that ask so many questions about each of some long contexts, in no order."""
    shared = "Rules for everybody. " * 20
    texts = [shared + f"About {number}. " * 300 for number in range(count)]
    rows = [
        (
            number,
            line(
                f"{number}-{q}",
                {
                    "model": "a",
                    "messages": [{"role": "system", "content": text}, {"role": "user", "content": f"{q}?"}],
                },
            ),
        )
        for number, text in enumerate(texts)
        for q in range(questions)
    ]
    random.Random(7).shuffle(rows)
    return rows


def test_lines_of_one_context_stand_side_by_side() -> None:
    """Whoever asks in that order changes the context as rarely as can be."""
    rows = contexts(6, 9)
    found = read(b"".join(content for _, content in rows))
    order = [each.custom_id.split("-")[0] for each in found.lines]
    assert sum(one != other for one, other in itertools.pairwise(order)) == 5
    assert [each.place for each in found.lines] == list(range(54))
    given_order = [str(number) for number, _ in rows]
    assert sum(one != other for one, other in itertools.pairwise(given_order)) > 30


def test_lines_with_nothing_in_common_keep_what_they_are() -> None:
    found = read(b"".join(line(f"c{number}", chat(f"{number}")) for number in range(50)))
    assert [each.custom_id for each in found.lines] == [f"c{number}" for number in range(50)]


@pytest.mark.fault("H12")
@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 3))
def test_no_bytes_break_the_reading(junk: bytes, before: int) -> None:
    content = b"".join(line(f"g{number}", chat("1")) for number in range(before)) + junk
    found = read(content)
    assert found.errors or len(found.lines) == before or not junk.strip()
    for error in found.errors:
        assert error["code"]
        assert error["message"]
        json.dumps(error).encode()


@pytest.mark.parametrize(
    ("said", "usage"),
    [
        ({"prompt_tokens": 5, "completion_tokens": 3}, Usage(5, 0, 3, 0)),
        ({"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}, Usage(5, 4, 0, 0)),
        (
            {"input_tokens": 5, "output_tokens": 3, "output_tokens_details": {"reasoning_tokens": 2}},
            Usage(5, 0, 3, 2),
        ),
        ({"input_tokens": 5, "cache_read_input_tokens": 7, "output_tokens": 1}, Usage(12, 7, 1, 0)),
        ({"prompt_tokens": "5", "completion_tokens": -3}, Usage()),
        (None, Usage()),
    ],
)
def test_usage_is_read_by_the_names_of_every_api(said: object, usage: Usage) -> None:
    batch = Batch(1, "batch_x", "t", "", "file-x", "in_progress", 0.0, {})
    (one,) = read(line("x", chat("1"))).lines
    text, found = written_answer(batch, one, Answer(200, json.dumps({"usage": said}).encode(), "r"))
    assert found == usage
    assert json.loads(text)["custom_id"] == "x"


# Forms


class Parts:
    """What a form held."""

    def __init__(self, content_type: str = "multipart/form-data; boundary=b") -> None:
        self.written = bytearray()
        self.reader = FormReader(content_type, self._write)

    async def _write(self, data: bytes) -> None:
        self.written += data

    def read(self, content: bytes, pieces: list[int]) -> None:
        async def chunks() -> AsyncIterator[bytes]:
            start = 0
            for size in pieces:
                yield content[start : start + size] or b""
                start += size
                if start >= len(content):
                    break
            if start < len(content):
                yield content[start:]
            yield b""

        asyncio.run(self.reader.read(_without_empty(chunks())))


async def _without_empty(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """As the server's: no piece is empty but the last."""
    async for chunk in chunks:
        if chunk:
            yield chunk
    yield b""


@pytest.mark.fault("H12")
@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200), st.lists(st.integers(1, 40), max_size=60), st.booleans())
def test_a_form_is_read_alike_in_whatever_pieces_it_comes(
    data: bytes, pieces: list[int], tricky: bool
) -> None:
    data += b"\r\n--" * tricky + b"\r\n-" * tricky
    if b"\r\n--b" in b"\r\n" + data:
        return
    head = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    file = b'--b\r\nContent-Disposition: form-data; name="file"; filename="x.jsonl"\r\n\r\n'
    parts = Parts()
    parts.read(head + file + data + b"\r\n--b--\r\n", pieces)
    assert (bytes(parts.written), parts.reader.fields, parts.reader.filename) == (
        data,
        {"purpose": "batch"},
        "x.jsonl",
    )


@pytest.mark.fault("H12")
@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=300), st.lists(st.integers(1, 40), max_size=60))
def test_no_bytes_break_a_form(data: bytes, pieces: list[int]) -> None:
    with pytest.raises(InvalidRequest):
        Parts().read(b"--b\r\n" + data + b"\r\n--bx", pieces)


# The store


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[BatchStore]:
    opened = BatchStore(tmp_path / "store", BatchSettings(), clock)
    yield opened
    opened.close()


def upload(store: BatchStore, content: bytes, tenant: str = "t", ttl_s: float = DAY) -> Json:
    made = store.arriving(tenant)
    made.append(content)
    try:
        return store.add_file(made, tenant, "batch", "in.jsonl", ttl_s)
    finally:
        made.remove()


def wanted(file: Json, window_s: float = DAY) -> Wanted:
    return Wanted(file["id"], CHAT, "24h", window_s, DAY, None)


def started(store: BatchStore, count: int = 3, window_s: float = DAY) -> tuple[Batch, Input]:
    """A batch in progress."""
    content = b"".join(line(f"c{number}", chat(f"{number}")) for number in range(count))
    shown = store.add_batch(wanted(upload(store, content), window_s), "t", "")
    batch, found = store.batch(shown["id"]), read(content)
    store.begin(batch, found.lines, "a")
    return store.batch(batch.id), found


@pytest.mark.fault("H9")
def test_an_answer_and_the_count_of_its_line_are_one_change(store: BatchStore) -> None:
    """An answer that is there is not asked for again, and is counted once, however often it is stored."""
    batch, found = started(store)
    first, *rest = found.lines
    assert store.record(batch, first, '{"x": 1}', Usage(1, 0, 2, 0), good=True)
    assert not store.record(batch, first, '{"x": 2}', Usage(9, 9, 9, 9), good=False)
    assert store.following(batch, 0) == rest
    shown = store.shown(batch.id, "t")
    assert shown["request_counts"] == {"total": 3, "completed": 1, "failed": 0}
    assert shown["usage"]["total_tokens"] == 3


@pytest.mark.fault("H9")
def test_a_batch_that_was_ended_is_ended_once(store: BatchStore, tmp_path: Path) -> None:
    batch, found = started(store)
    store.record(batch, found.lines[0], '{"x": 1}', Usage(), good=True)
    store.finish(batch, "cancelled")
    store.finish(batch, "completed")
    shown = store.shown(batch.id, "t")
    assert (shown["status"], shown["completed_at"]) == ("cancelled", None)
    files = {
        file["purpose"]: file
        for file in store.files("t", limit=9, after=None, newest_first=True, purpose=None)[0]
    }
    assert set(files) == {"batch", "batch_output"}
    assert {path.name for path in (tmp_path / "store/files").iterdir()} == {
        shown["output_file_id"], shown["error_file_id"], shown["input_file_id"]
    }  # fmt: skip


def test_a_file_that_a_batch_reads_stays(store: BatchStore, clock: Clock) -> None:
    batch, _ = started(store, window_s=3 * DAY)
    with pytest.raises(FileInUse):
        store.delete_file(batch.input, "t")
    clock.now += 2 * DAY  # its own life is over
    store.sweep()
    assert store.read(batch, store.following(batch, 0)[0])
    store.finish(batch, "completed")
    store.sweep()
    with pytest.raises(FileNotFoundError):
        store.read(
            batch,
            store.following(batch, 0)[0]
            if store.following(batch, 0)
            else read(line("x", chat("1"))).lines[0],
        )


@pytest.mark.fault("H11")
def test_what_is_stored_lives_no_longer_where_the_clock_was_set_back(tmp_path: Path, clock: Clock) -> None:
    before = BatchStore(tmp_path, BatchSettings(), clock)
    file = upload(before, b"{}\n")
    batch, _ = started(before)
    before.close()
    clock.now -= 10 * DAY
    after = BatchStore(tmp_path, BatchSettings(), clock)
    assert after.file(file["id"], "t")["expires_at"] == int(clock.now + DAY)
    assert after.batch(batch.id).ends_at == clock.now + DAY
    clock.now += DAY + 1
    with pytest.raises(ClientFileNotFound):
        after.file(file["id"], "t")
    after.close()


@pytest.mark.fault("H11")
def test_a_clock_that_is_set_while_the_gateway_runs_changes_no_life() -> None:
    wall, steady = Clock(), Clock()
    now = SteadyClock(wall, steady)
    begun = now()
    for step in (DAY, -3 * DAY, 3600):
        wall.now += step
        steady.now += 1
    assert now() == begun + 3


def full(store: BatchStore) -> None:
    """Let the SQLite file grow no more, as on a full device."""
    pages = store._database.execute("PRAGMA page_count").fetchone()[0]
    store._database.execute(f"PRAGMA max_page_count = {pages}")


def room(store: BatchStore) -> None:
    store._database.execute("PRAGMA max_page_count = 1000000")


@pytest.mark.fault("H10")
def test_a_full_disk_takes_nothing_that_is_stored_and_deleting_works(store: BatchStore) -> None:
    batch, found = started(store)
    spare = upload(store, b"x" * 100)
    full(store)
    with pytest.raises(sqlite3.OperationalError) as error:
        store.record(batch, found.lines[0], "y" * 100_000, Usage(), good=True)
    assert is_full(error.value)
    assert store.shown(batch.id, "t")["request_counts"]["completed"] == 0
    store.delete_file(spare["id"], "t")
    room(store)
    assert store.record(batch, found.lines[0], "y" * 100_000, Usage(), good=True)


@pytest.mark.fault("H9")
def test_what_a_killed_gateway_left_is_removed_and_what_it_stored_is_not(
    tmp_path: Path, clock: Clock
) -> None:
    before = BatchStore(tmp_path, BatchSettings(), clock)
    kept = upload(before, b"{}\n")
    (tmp_path / "files/file-never-stored").write_bytes(b"x")
    left = tmp_path / "files/baton-file-0123456789abcdef"
    left.write_bytes(b"half")
    left.chmod(0o600)
    arriving = before.arriving("t")
    other = BatchStore(tmp_path, BatchSettings(), clock)
    assert other.try_to_run()
    assert not before.try_to_run()
    assert {path.name for path in (tmp_path / "files").iterdir()} == {kept["id"], arriving.path.name}
    arriving.remove()
    other.close()
    assert before.try_to_run()
    before.close()


@pytest.mark.fault("H16")
def test_all_tenants_together_have_so_many_bytes(tmp_path: Path, clock: Clock) -> None:
    store = BatchStore(tmp_path, BatchSettings(total_bytes=2048, tenant_bytes=2000), clock)  # type: ignore[arg-type]
    upload(store, b"x" * 1500, "one")
    with pytest.raises(QuotaReached, match="tenant_bytes"):
        upload(store, b"x" * 600, "one")
    with pytest.raises(QuotaReached, match="total_bytes"):
        upload(store, b"x" * 600, "two")
    upload(store, b"x" * 500, "two")
    assert len(list((tmp_path / "files").iterdir())) == 2
    store.close()


def service(where: Path, **fields: object) -> Batches:
    metrics = GatewayMetrics()
    reader = Reader(parse_object, LIMITS, 9)
    return Batches(
        BatchSettings(**fields),
        where,
        reader,
        batch_threads(metrics.queues, 1.0),
        metrics.batches,
        Events(metrics.events),
        serves=lambda *_: None,  # type: ignore[arg-type]
    )


def test_a_folder_that_cannot_be_used_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match=r"batches\.folder"):
        service(tmp_path / "file", folder=tmp_path / "file")
    service(tmp_path / "file" / "unset")  # of the default folder nobody said that it must be usable


# Places behind those of clients


def queue_of(**limits: float) -> FairQueue:
    return FairQueue(QueueLimits(8, **limits), lambda _: EngineOverloaded())  # type: ignore[arg-type]


class Worker:
    """A piece of work behind clients, which leaves when it is told to."""

    def __init__(self, queue: FairQueue, tenant: str, running: list[Worker]) -> None:
        self.tenant, self.told = tenant, 0
        self._queue, self._running = queue, running
        self._leave: Callable[[], None] | None = None
        self.task = asyncio.create_task(self._enter())

    async def _enter(self) -> None:
        self._leave = await self._queue.enter_behind(self.tenant, self.give_way)
        self._running.append(self)

    def give_way(self) -> None:
        self.told += 1

    def leave(self) -> None:
        assert self._leave is not None
        self._running.remove(self)
        self._leave()


async def settle() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


@pytest.mark.fault("H14")
def test_a_request_has_all_but_some_behind_it_give_way_the_youngest_of_the_greediest_first() -> None:
    async def run() -> None:
        queue, running = queue_of(behind=4, beside=1, quiet_s=0.0), list[Worker]()
        workers = [Worker(queue, tenant, running) for tenant in "aaabcc"]
        await settle()
        assert [worker.tenant for worker in running] == ["a", "a", "a", "b"]
        await queue.enter("client")
        assert [(worker.tenant, worker.told) for worker in running] == [
            ("a", 0),
            ("a", 1),
            ("a", 1),
            ("b", 1),
        ]
        await queue.enter("client")
        assert [worker.told for worker in running] == [0, 1, 1, 1]  # told once
        for worker in [worker for worker in running if worker.told]:
            worker.leave()
        await settle()
        assert len(running) == 1
        queue.leave("client")
        await settle()
        assert len(running) == 1
        queue.leave("client")
        await asyncio.sleep(0.01)
        assert [worker.tenant for worker in running] == ["a", "c", "c"]  # what stayed, and what waited
        for worker in workers:
            worker.task.cancel()

    asyncio.run(run())


@pytest.mark.fault("H14")
@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["come", "go", "work", "done", "cancel"]),
            st.sampled_from("abc"),
            st.integers(0, 9),
        ),
        max_size=60,
    )
)
def test_places_behind_are_neither_lost_nor_given_twice(acts: list[tuple[str, str, int]]) -> None:
    async def run() -> None:
        queue, running = queue_of(behind=3, beside=1, quiet_s=0.0), list[Worker]()
        workers, clients = list[Worker](), Counter[str]()
        for act, tenant, which in acts:
            if act == "come" and clients.total() < 8 and queue._may_take(tenant):
                await queue.enter(tenant)
                clients[tenant] += 1
            elif act == "go" and clients[tenant]:
                queue.leave(tenant)
                clients[tenant] -= 1
            elif act == "work":
                workers.append(Worker(queue, tenant, running))
            elif act == "done" and running:
                running[which % len(running)].leave()
            elif act == "cancel" and workers:
                workers[which % len(workers)].task.cancel()
            for worker in list(running):
                if worker.told:
                    assert worker.told == 1
                    worker.leave()
            await settle()
            assert len(running) <= (1 if clients.total() else 3)
        while clients.total():
            tenant = next(name for name, count in clients.items() if count)
            queue.leave(tenant)
            clients[tenant] -= 1
        for _ in range(1000):
            await asyncio.sleep(0.001)
            for worker in list(running):
                worker.leave()
            if all(worker.task.done() for worker in workers):
                break
        assert all(worker.task.done() for worker in workers)
        assert not running

    asyncio.run(run())
