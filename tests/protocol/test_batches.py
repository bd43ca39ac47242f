"""Files and batches through the unmodified SDK: shapes, order behind clients, restarts, limits, other tenants."""

from __future__ import annotations

import asyncio
import io
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch
from support.batches import CHAT, answered, begin, chat, chats, counts, errors, line, rows, sdk, until
from support.event_streams import Following
from support.gateways import FakeGateway, FakeProcess, Held, run_fake
from support.hostile import ROUTES, VALUES
from support.raw_requests import wait_for as wait_within
from support.small_devices import fill, mounted
from support.table_tests import each

from baton.admission.api_keys import create_key, digest, read_keys, revoke_key
from baton.batches.lines import Reader, written_answer
from baton.batches.store import BatchStore, Usage, Wanted
from baton.config.groups import BatchSettings, EngineSettings, LimitSettings
from baton.config.settings import Settings, load_settings
from baton.engines.fake.engine import FakeBehaviour, FakeEngine
from baton.errors import EngineOverloaded, EngineRestarting, GenerationFailed, InvalidRequest
from baton.http.routes.batches import LINES


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until it holds; on a busy machine that may take a while."""
    wait_within(condition, "it never came to that", 60)


JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeGateway]:
    folder = tmp_path_factory.mktemp("batches")
    with run_fake(
        FakeEngine("a", aliases=("text",)),
        FakeEngine("embed", pooling=True),
        batches={"folder": folder, "file_bytes": "1MiB", "file_lines": 100, "quiet_s": 0.02},
    ) as running:
        yield running


@pytest.fixture
def client(gateway: FakeGateway) -> openai.OpenAI:
    return sdk(gateway.url)


def shown(gateway: FakeGateway, series: str) -> float:
    """The value of a series in the metrics; 0 before its first."""
    page = httpx.get(f"{gateway.metrics_url}/metrics").text
    return next((float(row.split()[-1]) for row in page.splitlines() if row.startswith(f"{series} ")), 0.0)


def test_a_batch_goes_from_upload_to_output_with_the_unmodified_sdk(client: openai.OpenAI) -> None:
    file = client.files.create(file=("C:\\mine\\in.jsonl", chats(20)), purpose="batch")
    assert (file.object, file.filename, file.purpose, file.status) == (
        "file",
        "in.jsonl",
        "batch",
        "processed",
    )
    assert client.files.content(file.id).content == chats(20)
    batch = client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"mine": "yes"}
    )
    assert (batch.status, batch.expires_at) == ("validating", batch.created_at + 86400)
    done = until(client, batch)
    assert (done.status, done.model, done.metadata, done.errors) == ("completed", "a", {"mine": "yes"}, None)
    assert counts(client, done) == (20, 20, 0)
    assert done.in_progress_at is not None
    assert done.in_progress_at <= (done.finalizing_at or 0) <= (done.completed_at or 0)
    assert done.usage is not None
    assert (done.usage.input_tokens, done.usage.output_tokens, done.usage.total_tokens) == (40, 40, 80)
    assert done.error_file_id is None
    written = rows(client, done.output_file_id)
    assert [row["custom_id"] for row in written] == [f"c{number}" for number in range(20)]
    assert {row["response"]["status_code"] for row in written} == {200}
    assert written[3]["response"]["body"]["choices"][0]["message"]["content"] == "n3 m"
    assert written[3]["error"] is None
    assert (
        len({row["response"]["request_id"] for row in written}) == len({row["id"] for row in written}) == 20
    )
    output = client.files.retrieve(done.output_file_id or "")
    assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError, match="There is no file"):
        client.files.content(file.id)


def test_a_refused_line_is_in_the_error_file_and_fails_no_other(client: openai.OpenAI) -> None:
    content = (
        line("good", chat("x y")) + line("bad", chat("x", max_tokens=-1)) + line("too", chat("x", n=9999))
    )
    done = until(client, begin(client, content))
    assert done.status == "completed"
    assert counts(client, done) == (3, 1, 2)
    assert [row["custom_id"] for row in rows(client, done.output_file_id)] == ["good"]
    bad, too = rows(client, done.error_file_id)
    assert (bad["custom_id"], bad["response"]["status_code"], bad["error"]) == ("bad", 400, None)
    assert too["response"]["body"]["error"]["param"] == "n"


@each("path", LINES)
def test_every_route_of_an_engine_may_be_asked_by_lines(
    gateway: FakeGateway, client: openai.OpenAI, path: str
) -> None:
    """A line gets what a client gets."""
    batch = until(client, begin(client, line("x", ROUTES[path], path), path))
    assert batch.status == "completed", batch
    (row,) = answered(client, batch).values()
    with gateway.client() as direct:
        expected = direct.post(path, json=ROUTES[path]).json()
    body = row["response"]["body"]
    assert row["response"]["status_code"] == 200, row
    changing = {"id", "created", "created_at", "output", "store"}
    assert {key: value for key, value in body.items() if key not in changing} == {
        key: value for key, value in expected.items() if key not in changing
    }


def test_a_response_of_a_line_is_stored_as_one_of_a_client_is(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "responses": {"folder": tmp_path / "kept"},
        "batches": {"folder": tmp_path / "b"},
    }
    with run_fake(FakeEngine("a"), **settings) as gateway:
        client = sdk(gateway.url)
        batch = until(
            client, begin(client, line("x", {"model": "a", "input": "1 2"}, "/v1/responses"), "/v1/responses")
        )
        (row,) = answered(client, batch).values()
        assert client.responses.retrieve(row["response"]["body"]["id"]).output_text


def test_lists_have_pages(client: openai.OpenAI) -> None:
    for each_file in client.files.list(purpose="batch_output"):
        client.files.delete(each_file.id)
    for name in [file.id for file in client.files.list()]:
        client.files.delete(name)
    names = [client.files.create(file=(f"{n}.jsonl", b"{}\n"), purpose="batch").id for n in range(5)]
    assert [file.id for file in client.files.list(limit=2)] == names[::-1]  # the SDK reads all pages
    assert [file.id for file in client.files.list(limit=2, order="asc")] == names
    assert list(client.files.list(purpose="batch_output")) == []
    page = client.files.list(limit=2, after=names[3])
    assert ([file.id for file in page.data], page.has_more) == ([names[2], names[1]], True)
    batches = [
        client.batches.create(input_file_id=names[0], endpoint=CHAT, completion_window="1h").id
        for _ in range(3)
    ]
    assert [batch.id for batch in client.batches.list(limit=2)][:3] == batches[::-1]
    for call in (lambda: client.files.list(after="no"), lambda: client.batches.list(after="no")):
        with pytest.raises(openai.BadRequestError) as refused:
            call()
        assert refused.value.param == "after"


WRONG_LINES: dict[str, tuple[bytes, str, str | None]] = {
    "no JSON": (b"{nope\n", "invalid_json_line", None),
    "no object": (b"[1]\n", "invalid_json_line", None),
    "NUL": (b"\x00\n", "invalid_json_line", None),
    "no UTF-8": (b'{"custom_id": "\xff"}\n', "invalid_json_line", None),
    "UTF-16": ('{"custom_id": "x"}\n'.encode("utf-16"), "invalid_json_line", None),
    "half a surrogate": (b'{"custom_id": "\\ud800"}\n', "invalid_json_line", None),
    "deep": (b'{"body": ' + b"[" * 500 + b"]" * 500 + b"}\n", "invalid_json_line", None),
    "a key twice": (b'{"custom_id": "x", "custom_id": "y"}\n', "invalid_json_line", None),
    "no id": (line(None, {}), "missing_required_parameter", "custom_id"),
    "a number as id": (line(5, {}), "invalid_custom_id", "custom_id"),
    "a long id": (line("x" * 600, {}), "invalid_custom_id", "custom_id"),
    "an empty id": (line("", {}), "invalid_custom_id", "custom_id"),
    "GET": (line("x", {}, method="GET"), "invalid_method", "method"),
    "another route": (line("x", {}, "/v1/completions"), "mismatched_url", "url"),
    "no body": (line("x", None), "invalid_body", "body"),
    "a text as body": (line("x", "y"), "invalid_body", "body"),
    "a stream": (line("x", chat("y", stream=True)), "invalid_body", "body.stream"),
    "a number as model": (line("x", chat("y", model=5)), "invalid_body", "body.model"),
    "another field": (line("x", chat("y"), more=1), "unknown_parameter", "more"),
    "no such model": (line("x", chat("y", model="gone")), "model_not_found", "body.model"),
    "a model of another kind": (line("x", {"model": "a", "input": "y"}, "/v1/embeddings"), "", None),
}


@pytest.mark.fault("H12")
@each("name", WRONG_LINES)
def test_what_is_wrong_with_an_input_is_told_by_line(client: openai.OpenAI, name: str) -> None:
    content, code, param = WRONG_LINES[name]
    url = json.loads(content)["url"] if name == "a model of another kind" else CHAT
    batch = until(
        client, begin(client, line("fine", chat("y"), url) + b"\n" + content if code else content, url)
    )
    if not code:  # an engine says so, of that line alone
        (row,) = rows(client, batch.error_file_id)
        assert row["response"]["body"]["error"]["code"] == "operation_unsupported"
        return
    assert (batch.status, batch.output_file_id) == ("failed", None)
    assert batch.failed_at is not None
    assert errors(batch)[0] == (code, 3, param), batch.errors


@pytest.mark.fault("H12")
def test_hostile_inputs_are_bounded(client: openai.OpenAI) -> None:
    twice = until(client, begin(client, line("same", chat("1")) + line("same", chat("2"))))
    assert errors(twice) == [("duplicate_custom_id", 2, "custom_id")]
    for content, code in (
        (b"\n\r\n \n", "empty_file"),
        (chats(101), "too_many_requests"),
    ):
        assert [error[0] for error in errors(until(client, begin(client, content)))] == [code]
    many = until(client, begin(client, b"x\n" * 5000))
    assert len(errors(many)) == 100
    crlf = until(client, begin(client, chats(2).replace(b"\n", b"\r\n").removesuffix(b"\r\n")))
    assert crlf.status == "completed"
    with pytest.raises(openai.APIStatusError) as large:
        client.files.create(file=("in.jsonl", b"x" * (1024 * 1024 + 70_000)), purpose="batch")
    assert large.value.status_code == 413


@pytest.mark.fault("H12")
def test_a_line_longer_than_a_body_may_be_ends_the_reading(tmp_path: Path) -> None:
    with run_fake(FakeEngine("a"), batches={"folder": tmp_path}, limits={"body_bytes": 2048}) as gateway:
        client = sdk(gateway.url)
        file = client.files.create(
            file=("in.jsonl", chats(1) + b"y" * 100_000 + b"\n" + chats(1)), purpose="batch"
        )
        batch = until(
            client, client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        )
        assert errors(batch) == [("line_too_long", 2, None)]


def test_a_reload_says_how_long_a_line_may_be(tmp_path: Path) -> None:
    def read() -> Settings:
        return load_settings(limits={"body_bytes": 65536}, engines=[EngineSettings(name="a", model="fake")])

    few = {"body_bytes": 2048}
    with run_fake(FakeEngine("a"), batches={"folder": tmp_path}, limits=few, reread=read) as gateway:
        client = sdk(gateway.url)
        content = line("long", chat("m " * 5000))
        assert errors(until(client, begin(client, content))) == [("line_too_long", 1, None)]
        with gateway.client() as direct:
            assert direct.post("/v1/settings/reload").status_code == 200
        done = until(client, begin(client, content))
        assert (done.status, counts(client, done)) == ("completed", (1, 1, 0))


WRONG_BATCHES: dict[str, dict[str, Any]] = {
    "input_file_id": {"input_file_id": 5},
    "endpoint": {"endpoint": "/v1/models"},
    "completion_window": {"completion_window": "1s"},
    "metadata": {"metadata": {"x": 5}},
    "output_expires_after.seconds": {"output_expires_after": {"anchor": "created_at", "seconds": 5}},
    "output_expires_after.anchor": {"output_expires_after": {"anchor": "x", "seconds": 3600}},
}


@pytest.mark.fault("H12")
@each("field", WRONG_BATCHES)
def test_a_batch_that_is_asked_for_wrongly_is_refused(
    gateway: FakeGateway, client: openai.OpenAI, field: str
) -> None:
    file = client.files.create(file=("in.jsonl", chats(1)), purpose="batch").id
    right = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
    with gateway.client() as direct:
        refused = direct.post("/v1/batches", json=right | WRONG_BATCHES[field])
        assert refused.status_code == 400, refused.text
        assert str(refused.json()["error"]["param"]).startswith(field), refused.text
        assert direct.post("/v1/batches", json=right | {"more": 1}).status_code == 400
        gone = direct.post("/v1/batches", json=right | {"input_file_id": "file-gone"})
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "file_not_found")


@pytest.mark.fault("H12")
@each("name", VALUES)
def test_a_body_that_is_no_json_begins_no_batch(gateway: FakeGateway, name: str) -> None:
    with gateway.client(headers=JSON) as direct:
        refused = direct.post("/v1/batches", content=b'{"x": %b}' % VALUES[name][0])
    assert refused.status_code == 400


def form(*parts: tuple[str, bytes], boundary: str = "b") -> bytes:
    """A form as its bytes; each part is its header's parameters and its content."""
    pieces = [
        f"--{boundary}\r\nContent-Disposition: form-data; {head}\r\n\r\n".encode() + content + b"\r\n"
        for head, content in parts
    ]
    return b"".join(pieces) + f"--{boundary}--\r\n".encode()


PURPOSE = ('name="purpose"', b"batch")
FILE = ('name="file"; filename="in.jsonl"', b"{}\n")
WRONG_FORMS: dict[str, tuple[bytes, str | None]] = {
    "no file": (form(PURPOSE), "file"),
    "no purpose": (form(FILE), "purpose"),
    "another purpose": (form(('name="purpose"', b"assistants"), FILE), "purpose"),
    "two files": (form(PURPOSE, FILE, FILE), "file"),
    "a field twice": (form(PURPOSE, PURPOSE, FILE), "purpose"),
    "another field": (form(PURPOSE, ('name="x"', b""), FILE), "x"),
    "half a life": (form(PURPOSE, FILE, ('name="expires_after[seconds]"', b"3600")), "expires_after"),
    "too short a life": (
        form(
            PURPOSE,
            FILE,
            ('name="expires_after[anchor]"', b"created_at"),
            ('name="expires_after[seconds]"', b"1"),
        ),
        "expires_after",
    ),
    "cut off": (form(PURPOSE, FILE)[:-8], None),
    "cut off in a head": (form(PURPOSE, FILE)[:20], None),
    "nothing": (b"", None),
    "text before": (b"hello\r\n" + form(PURPOSE, FILE), None),
    "no name": (form(("x=1", b"y"), FILE), None),
    "a long head": (form(('name="' + "x" * 20_000 + '"', b""), FILE), None),
    "a long field": (form(('name="purpose"', b"x" * 20_000), FILE), None),
    "many fields": (form(*((f'name="f{n}"', b"") for n in range(20)), FILE), None),
    "another boundary": (form(PURPOSE, FILE, boundary="other"), None),
}


@pytest.mark.fault("H12")
@each("name", WRONG_FORMS)
def test_a_form_that_is_wrong_is_refused_and_leaves_nothing(gateway: FakeGateway, name: str) -> None:
    content, param = WRONG_FORMS[name]
    with gateway.client() as direct:
        headers = {"content-type": "multipart/form-data; boundary=b"}
        refused = direct.post("/v1/files", content=content, headers=headers)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (400, "invalid_request", param), error
        unnamed = direct.post("/v1/files", content=content, headers={"content-type": "multipart/form-data"})
        assert unnamed.status_code == 400
        assert direct.post("/v1/files", content=content, headers=JSON).status_code == 415
    assert not list(gateway.settings.batches_folder.glob("files/baton-file-*"))


def test_a_file_lives_as_long_as_its_upload_asks(client: openai.OpenAI) -> None:
    short = client.files.create(
        file=("x", b"{}"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert short.expires_at == short.created_at + 3600
    other = client.files.create(file=("x", b"{}"), purpose="batch")
    assert other.expires_at == other.created_at + 30 * 86400


def test_output_lives_as_long_as_its_batch_asks(client: openai.OpenAI) -> None:
    batch = until(
        client, begin(client, chats(1), output_expires_after={"anchor": "created_at", "seconds": 7200})
    )
    output = client.files.retrieve(batch.output_file_id or "")
    assert output.expires_at is not None
    assert 7199 <= output.expires_at - output.created_at <= 7201


# Behind clients


def slow(held: Held, **fields: Any) -> FakeBehaviour:
    """Of an engine whose tokens take until they are released."""
    return FakeBehaviour(wait=held, token_seconds=1.0, **fields)


@pytest.mark.fault("H14")
def test_lines_give_way_to_a_client_at_once_and_are_done_later(tmp_path: Path) -> None:
    """Eight lines hold all that the engine has; the client's request is answered before any of them."""
    held = Held()
    engine = FakeEngine("a", behaviour=slow(held))
    with run_fake(engine, batches={"folder": tmp_path, "lines": 8, "quiet_s": 0.1}) as gateway:
        client = sdk(gateway.url)
        batch = begin(client, chats(12))
        wait_for(lambda: engine.active == 8)
        answers: list[Any] = []
        asking = threading.Thread(
            target=lambda: answers.append(
                client.chat.completions.create(model="a", messages=[{"role": "user", "content": "me"}])
            )
        )
        asking.start()
        wait_for(lambda: engine.aborted == 8 and engine.active == 1)
        assert engine.bodies[-1]["messages"][0]["content"] == "me"
        assert client.batches.retrieve(batch.id).status == "in_progress"
        held.release()
        asking.join(30)
        assert answers
        done = until(client, batch)
        assert len(answered(client, done)) == 12
        assert counts(client, done) == (12, 12, 0)
        assert shown(gateway, 'baton_batch_lines_total{result="gave_way"}') >= 8
        assert shown(gateway, 'baton_batch_lines_total{result="completed"}') == 12


class Swallowing(FakeEngine):
    """Answers a request that is cancelled, as vLLM's handlers do: as if its client had gone."""

    async def call(self, *args: Any, **named: Any) -> Any:
        try:
            return await super().call(*args, **named)
        except asyncio.CancelledError:
            raise InvalidRequest("Client disconnected") from None


@pytest.mark.fault("H14")
def test_what_an_engine_says_of_a_line_that_gave_way_or_was_ended_is_no_answer(tmp_path: Path) -> None:
    held = Held()
    engine = Swallowing("a", behaviour=slow(held))
    settings: dict[str, Any] = {"batches": {"folder": tmp_path, "lines": 2, "quiet_s": 0.0}}
    with run_fake(engine, **settings) as gateway:
        client = sdk(gateway.url)
        batch = begin(client, chats(5))
        wait_for(lambda: engine.active == 2)
        with gateway.client() as direct:
            assert direct.post("/tokenize", json={"model": "a", "prompt": "1"}).status_code == 200
        wait_for(lambda: shown(gateway, 'baton_batch_lines_total{result="gave_way"}') == 2)
        wait_for(lambda: engine.active == 2)  # again
    again = FakeEngine("a")  # the first gateway ended in the middle
    with run_fake(again, **settings) as gateway:
        client = sdk(gateway.url)
        done = until(client, batch)
        assert counts(client, done) == (5, 5, 0)


@pytest.mark.fault("H14")
def test_no_line_begins_while_a_client_is_answered(tmp_path: Path) -> None:
    held = Held()
    engine = FakeEngine("a", behaviour=slow(held))
    with run_fake(engine, batches={"folder": tmp_path, "quiet_s": 0.0}) as gateway:
        client = sdk(gateway.url)
        asking = threading.Thread(
            target=lambda: client.chat.completions.create(
                model="a", messages=[{"role": "user", "content": "me"}]
            )
        )
        asking.start()
        wait_for(lambda: engine.active == 1)
        batch = begin(client, chats(3))
        until(client, batch, ["in_progress"])
        wait_for(lambda: shown(gateway, "baton_batches_running") == 1)
        assert len(engine.bodies) == 1
        held.release()
        asking.join(30)
        assert len(answered(client, until(client, batch))) == 3
        contents = [body["messages"][0]["content"] for body in engine.bodies]
        assert contents[0] == "me"


@pytest.mark.fault("H14")
def test_batches_of_two_tenants_take_turns(tmp_path: Path) -> None:
    """A thousand lines of one do not hold up two of another."""
    keys = {tenant: create_key(tmp_path / "keys.json", tenant) for tenant in ("greedy", "modest")}
    held = Held()
    engine = FakeEngine("a", behaviour=slow(held))
    settings: dict[str, Any] = {
        "auth": {"keys_file": tmp_path / "keys.json"},
        "batches": {"folder": tmp_path / "b", "lines": 4},
    }
    with run_fake(engine, **settings) as gateway:
        greedy, modest = (sdk(gateway.url, key) for key in keys.values())
        first = begin(greedy, chats(1000))
        wait_for(lambda: engine.active == 4)
        second = begin(modest, chats(2))
        until(modest, second, ["in_progress"])
        held.release()
        assert len(answered(modest, until(modest, second))) == 2
        assert counts(greedy, first)[1] < 500
        greedy.batches.cancel(first.id)
        until(greedy, first)


@pytest.mark.fault("H16")
def test_a_tenant_sees_nothing_of_another(tmp_path: Path) -> None:
    keys = {tenant: create_key(tmp_path / "keys.json", tenant) for tenant in ("one", "two")}
    settings: dict[str, Any] = {
        "auth": {"keys_file": tmp_path / "keys.json"},
        "batches": {"folder": tmp_path / "b"},
    }
    with run_fake(FakeEngine("a"), **settings) as gateway:
        one, two = (sdk(gateway.url, key) for key in keys.values())
        batch = until(one, begin(one, chats(1)))
        calls: list[Callable[[], Any]] = [
            lambda: two.files.retrieve(batch.input_file_id),
            lambda: two.files.content(batch.output_file_id or ""),
            lambda: two.files.delete(batch.input_file_id),
            lambda: two.batches.retrieve(batch.id),
            lambda: two.batches.cancel(batch.id),
            lambda: two.batches.create(
                input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"
            ),
        ]
        for call in calls:
            with pytest.raises(openai.NotFoundError):
                call()
        assert list(two.files.list()) == list(two.batches.list()) == []
        with pytest.raises(openai.BadRequestError):
            two.files.list(after=batch.input_file_id)
        assert one.files.retrieve(batch.input_file_id)
        assert gateway.engine("a").bodies


@pytest.mark.fault("H16")
def test_a_tenant_has_so_many_files_bytes_and_open_batches(tmp_path: Path) -> None:
    held = Held()
    limits = {"folder": tmp_path, "tenant_files": 3, "tenant_bytes": "2KiB", "tenant_batches": 2}
    with run_fake(FakeEngine("a", behaviour=slow(held)), batches=limits) as gateway:
        client = sdk(gateway.url)
        first = begin(client, chats(1))
        second = client.batches.create(
            input_file_id=first.input_file_id, endpoint=CHAT, completion_window="24h"
        )
        refusals = [
            lambda: client.batches.create(
                input_file_id=first.input_file_id, endpoint=CHAT, completion_window="24h"
            ),
            lambda: client.files.create(file=("x", b"x" * 3000), purpose="batch"),
        ]
        for call in refusals:
            with pytest.raises(openai.PermissionDeniedError) as refused:
                call()
            assert refused.value.code == "quota_reached"
        held.release()
        for batch in (first, second):
            assert until(client, batch).status == "completed"
        assert len(list(client.files.list())) == 3
        with pytest.raises(openai.PermissionDeniedError, match="tenant_files"):
            client.files.create(file=("x", b"x"), purpose="batch")
        for file in list(client.files.list()):
            client.files.delete(file.id)
        assert client.files.create(file=("x", b"x"), purpose="batch")


@pytest.mark.fault("H16")
def test_a_batch_whose_tenant_has_no_room_waits_and_says_so(tmp_path: Path) -> None:
    with run_fake(FakeEngine("a"), batches={"folder": tmp_path, "tenant_bytes": "50KiB"}) as gateway:
        client = sdk(gateway.url)
        filler = client.files.create(file=("x", b"x" * 15_000), purpose="batch")
        batch = begin(client, chats(70))  # 11 KiB, and the answers to the first 64 lines 20 more
        wait_for(lambda: errors(client.batches.retrieve(batch.id)))
        waiting = client.batches.retrieve(batch.id)
        assert waiting.status == "in_progress"
        assert errors(waiting) == [("quota_reached", None, None)]
        client.files.delete(filler.id)
        done = until(client, batch)
        assert (counts(client, done), errors(done)) == ((70, 70, 0), [])


@pytest.mark.fault("H11")
def test_a_batch_whose_window_is_over_writes_what_it_has_and_names_the_rest(tmp_path: Path) -> None:
    """Half a second is left of it when the gateway is started again."""
    earlier = BatchStore(tmp_path, BatchSettings(), lambda: time.time() - 3599.5)
    upload = earlier.arriving("local")
    upload.append(chats(5))
    file = earlier.add_file(upload, "local", "batch", "in.jsonl", 86400)
    upload.remove()
    name = earlier.add_batch(Wanted(file["id"], CHAT, "1h", 3600, 86400, None), "local", "")["id"]
    found = Reader(lambda text, _: json.loads(text), LimitSettings(), 9).read(io.BytesIO(chats(5)), CHAT)
    earlier.begin(earlier.batch(name), found.lines, "a")
    earlier.record(earlier.batch(name), found.lines[0], '{"custom_id": "c0"}', Usage(), good=True)
    earlier.close()
    engine = FakeEngine("a", behaviour=slow(Held()))
    with run_fake(engine, batches={"folder": tmp_path, "lines": 2}) as gateway:
        client = sdk(gateway.url)
        done = until(client, client.batches.retrieve(name))
        assert (done.status, counts(client, done)) == ("expired", (5, 1, 0))
        assert done.expired_at is not None
        assert rows(client, done.output_file_id) == [{"custom_id": "c0"}]
        left = rows(client, done.error_file_id)
        assert [(row["custom_id"], row["error"]["code"]) for row in left] == [
            (f"c{number}", "batch_expired") for number in range(1, 5)
        ]
        wait_for(lambda: engine.active == 0)


@pytest.mark.fault("H16")
def test_a_cancelled_batch_writes_what_it_has_and_names_the_rest(tmp_path: Path) -> None:
    held = Held()
    engine = FakeEngine("a", behaviour=FakeBehaviour(wait=held))
    with run_fake(engine, batches={"folder": tmp_path, "lines": 2}) as gateway:
        client = sdk(gateway.url)
        quick = b"".join(line(f"q{n}", chat(f"q{n}")) for n in range(3))
        file = client.files.create(file=("in", quick + chats(6)), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        done = until(client, batch)
        assert done.status == "completed"
        engine.behaviour.token_seconds = 1.0
        batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        wait_for(lambda: engine.active == 2)
        with pytest.raises(openai.ConflictError) as used:
            client.files.delete(file.id)
        assert used.value.code == "file_in_use"
        assert client.batches.cancel(batch.id).status == "cancelling"
        done = until(client, batch)
        assert (done.status, done.output_file_id) == ("cancelled", None)
        assert done.cancelling_at is not None
        assert done.cancelled_at is not None
        left = rows(client, done.error_file_id)
        assert {(row["error"]["code"], row["response"]) for row in left} == {("batch_cancelled", None)}
        assert [row["custom_id"] for row in left] == ["q0", "q1", "q2", *(f"c{n}" for n in range(6))]
        wait_for(lambda: engine.active == 0)
        with pytest.raises(openai.BadRequestError, match="ended already: it is cancelled"):
            client.batches.cancel(batch.id)
        assert client.files.delete(file.id).deleted


@pytest.mark.fault("H16")
def test_a_batch_whose_key_was_revoked_has_no_further_line_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tenant, by another key, is told so of each line."""
    monkeypatch.setattr("baton.admission.api_keys.LOOK_EVERY_S", 0.0)
    file = tmp_path / "keys.json"
    mine, other = create_key(file, "one"), create_key(file, "one")
    held = Held()
    engine = FakeEngine("a", behaviour=slow(held))
    settings: dict[str, Any] = {
        "auth": {"keys_file": file},
        "batches": {"folder": tmp_path / "b", "lines": 2},
    }
    with run_fake(engine, **settings) as gateway:
        batch = begin(sdk(gateway.url, mine), chats(9))
        wait_for(lambda: engine.active == 2)
        (of_batch,) = [key.id for key in read_keys(file) if key.sha256 == digest(mine)]
        revoke_key(file, of_batch)
        held.release()
        client = sdk(gateway.url, other)
        done = until(client, batch)
        assert len(rows(client, done.output_file_id)) == len(engine.bodies) == 2
        refused = rows(client, done.error_file_id)
        assert [row["response"]["status_code"] for row in refused] == [401] * 7
        assert "was revoked" in refused[0]["response"]["body"]["error"]["message"]


# Faults of engines


@pytest.mark.fault("H13")
def test_lines_that_an_engine_refuses_for_now_are_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.batches.service.LONGEST_PAUSE_S", 0.01)
    engine = FakeEngine("a", behaviour=FakeBehaviour(call_error=EngineOverloaded(retry_after_s=5)))
    with run_fake(engine, batches={"folder": tmp_path}) as gateway:
        client = sdk(gateway.url)
        batch = begin(client, chats(3))
        wait_for(lambda: shown(gateway, 'baton_batch_lines_total{result="put_off"}') > 10)
        assert client.batches.retrieve(batch.id).status == "in_progress"
        engine.behaviour.call_error = None
        done = until(client, batch)
        assert {row["response"]["status_code"] for row in answered(client, done).values()} == {200}


def test_a_model_that_refuses_for_now_holds_up_no_line_of_another(tmp_path: Path) -> None:
    with run_fake(FakeEngine("a"), FakeEngine("b"), batches={"folder": tmp_path, "lines": 2}) as gateway:
        with gateway.client() as direct:
            direct.post("/v1/engines/a/stop")
            wait_for(lambda: direct.get("/v1/engines").json()["data"][0]["state"] == "stopped")
        client = sdk(gateway.url)
        batch = begin(client, b"".join(line(f"{m}{n}", chat("x", model=m)) for m in "ab" for n in range(5)))
        wait_for(lambda: counts(client, client.batches.retrieve(batch.id)) == (10, 5, 0))
        waits = client.batches.retrieve(batch.id)
        assert waits.status == "in_progress"
        assert errors(waits) == [("engine_unavailable", None, None)]
        client.batches.cancel(batch.id)
        assert counts(client, until(client, batch)) == (10, 5, 0)


@pytest.mark.parametrize("wrong", [b'{"broken', b"\xff", b"[" * 100_000])
def test_an_answer_that_is_no_json_fails_its_line_alone(tmp_path: Path, wrong: bytes) -> None:
    class Broken(FakeEngine):
        async def call(self, operation: Any, body: Any, *rest: Any, **more: Any) -> Any:
            reply = await super().call(operation, body, *rest, **more)
            return replace(reply, body=wrong) if "n1 " in str(body) else reply

    with run_fake(Broken("a"), batches={"folder": tmp_path}) as gateway:
        client = sdk(gateway.url)
        done = until(client, begin(client, chats(3)))
        assert (done.status, counts(client, done)) == ("completed", (3, 2, 1))
        (failed,) = rows(client, done.error_file_id)
        assert failed["custom_id"] == "c1"
        assert failed["response"]["body"]["error"]["code"] == "generation_failed"


def test_a_batch_that_fails_in_the_middle_names_every_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def written(batch: Any, line: Any, answer: Any) -> Any:
        if line.number == 2:
            raise LookupError
        return written_answer(batch, line, answer)

    monkeypatch.setattr("baton.batches.service.written_answer", written)
    with run_fake(FakeEngine("a"), batches={"folder": tmp_path, "lines": 1}) as gateway:
        client = sdk(gateway.url)
        done = until(client, begin(client, chats(4)))
        assert done.status == "failed"
        ids = {row["custom_id"] for row in rows(client, done.error_file_id)}
        answers = {row["custom_id"] for row in rows(client, done.output_file_id)}
        assert ids | answers == {"c0", "c1", "c2", "c3"}
        assert {row["error"]["code"] for row in rows(client, done.error_file_id)} == {"batch_failed"}


@pytest.mark.fault("H13")
def test_a_line_that_costs_the_engine_again_and_again_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.batches.service.LONGEST_PAUSE_S", 0.01)

    class Fragile(FakeEngine):
        async def call(self, operation: Any, body: Any, *rest: Any, **more: Any) -> Any:
            if body["messages"][0]["content"] == "poison":
                self.deaths += 1
                raise EngineRestarting()
            if body["messages"][0]["content"] == "broken":
                raise GenerationFailed()
            return await super().call(operation, body, *rest, **more)

    engine = Fragile("a")
    with run_fake(engine, batches={"folder": tmp_path}) as gateway:
        client = sdk(gateway.url)
        done = until(client, begin(client, chats(2) + line("p", chat("poison")) + line("b", chat("broken"))))
        statuses = {name: row["response"]["status_code"] for name, row in answered(client, done).items()}
        assert statuses == {"c0": 200, "c1": 200, "p": 503, "b": 500}
        assert engine.deaths == 4


@pytest.mark.fault("H10")
def test_a_disk_that_is_full_in_the_middle_costs_no_answer_and_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.batches.service.FULL_RETRY_S", 0.05)
    held = Held()
    engine = FakeEngine("a", behaviour=slow(held))
    words = " ".join(f"w{number}" for number in range(500))
    content = b"".join(line(f"c{n}", chat(f"{n} {words}", max_tokens=400)) for n in range(40))
    with (
        mounted(tmp_path / "small", 4) as device,
        run_fake(engine, batches={"folder": device / "b", "lines": 4, "quiet_s": 0.0}) as gateway,
    ):
        client = sdk(gateway.url)
        batch = begin(client, content)
        wait_for(lambda: engine.active == 4)
        filler = fill(device)
        held.release()
        wait_for(lambda: errors(client.batches.retrieve(batch.id)))
        waiting = client.batches.retrieve(batch.id)
        assert (waiting.status, errors(waiting)) == ("in_progress", [("storage_full", None, None)])
        with pytest.raises(openai.InternalServerError) as full:
            client.files.create(file=("x", b"x" * 100_000), purpose="batch")
        assert (full.value.status_code, full.value.code) == (503, "storage_full")
        said = client.chat.completions.create(model="a", messages=[{"role": "user", "content": "1 2"}])
        assert said.choices[0].message.content
        assert len(engine.bodies) == 5  # no line began meanwhile
        filler.unlink()
        done = until(client, batch)
        assert (done.status, counts(client, done), errors(done)) == ("completed", (40, 40, 0), [])
        assert len(answered(client, done)) == 40
        assert len(engine.bodies) == 41  # and none was asked twice


# Restarts


@pytest.mark.fault("H15")
def test_a_gateway_that_drains_begins_no_line_and_the_next_goes_on(tmp_path: Path) -> None:
    held = Held()
    engine = FakeEngine("a", behaviour=slow(held))
    settings: dict[str, Any] = {"batches": {"folder": tmp_path, "lines": 2}}
    with run_fake(engine, **settings) as gateway:
        client = sdk(gateway.url)
        batch = begin(client, chats(6))
        wait_for(lambda: engine.active == 2)
        gateway.app.state.gateway.drain.begin()
        held.release()
        wait_for(lambda: counts(client, batch) == (6, 2, 0))
        assert len(engine.bodies) == 2
    again = FakeEngine("a")
    with run_fake(again, **settings) as gateway:
        client = sdk(gateway.url)
        done = until(client, batch)
        assert len(answered(client, done)) == 6
        assert len(again.bodies) == 4


@pytest.mark.fault("H15")
def test_of_two_gateways_over_a_folder_one_runs_the_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.batches.service.LOOK_EVERY_S", 0.05)
    settings: dict[str, Any] = {"batches": {"folder": tmp_path}}
    first, second = FakeEngine("a"), FakeEngine("a")
    with run_fake(second, **settings) as later, run_fake(first, **settings) as earlier:
        runs, waits = (later, earlier)  # whoever came first has the lock
        client = sdk(waits.url)
        batch = until(client, begin(client, chats(5)))
        assert len(answered(sdk(runs.url), batch)) == 5
        assert (len(first.bodies), len(second.bodies)) == (0, 5)
    with run_fake(first, **settings) as alone:
        client = sdk(alone.url)
        assert until(client, begin(client, chats(2))).status == "completed"
        assert len(first.bodies) == 2


@pytest.mark.fault("H9")
def test_a_gateway_that_is_killed_loses_no_line_and_does_none_twice(tmp_path: Path) -> None:
    """Two kills in the middle; `make chaos` has many."""
    settings = {"batches": {"folder": str(tmp_path / "b"), "lines": 4}, "responses": {"budget": 0}}
    batch, kills = None, 0
    for _ in range(3):
        with FakeProcess(tmp_path, {"token_seconds": 0.005}, **settings) as process:
            client = sdk(process.url)
            wait_for(lambda: httpx.get(f"{process.url}/readyz").status_code == 200)
            if batch is None:
                batch = begin(client, chats(200, model="alpha"))
            if kills == 2:
                done = until(client, batch)
                assert counts(client, done) == (200, 200, 0)
                assert len(answered(client, done)) == 200
                return
            wait_until_more(client, batch)
            process.process.kill()
            kills += 1


def wait_until_more(client: openai.OpenAI, batch: Batch) -> None:
    """Wait until some ten lines more have been answered."""
    until(client, batch, ["in_progress"])
    enough = counts(client, batch)[1] + 10
    wait_for(lambda: counts(client, batch)[1] >= enough)


# What is told


def test_events_tell_how_a_batch_goes(gateway: FakeGateway, client: openai.OpenAI) -> None:
    with Following(gateway.url) as events:
        batch = until(client, begin(client, chats(1)))
        seen = [events.wait_for(kind).data["batch"] for kind in ("batch.in_progress", "batch.completed")]
    assert seen == [{"id": batch.id, "status": "in_progress"}, {"id": batch.id, "status": "completed"}]


def test_where_batches_are_switched_off_nothing_is_stored(tmp_path: Path) -> None:
    with (
        run_fake(FakeEngine("a"), batches={"enabled": False, "folder": tmp_path / "b"}) as gateway,
        gateway.client() as direct,
    ):
        for path in ("/v1/files", "/v1/batches", "/v1/files/x", "/v1/batches/x"):
            answer = direct.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
            assert "batches.enabled" in answer.json()["error"]["message"]
    assert not (tmp_path / "b").exists()


def test_the_folder_is_made_with_the_first_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    with run_fake(FakeEngine("a")) as gateway:
        client = sdk(gateway.url)
        assert list(client.files.list()) == list(client.batches.list()) == []
        for call in (lambda: client.files.retrieve("x"), lambda: client.batches.retrieve("x")):
            with pytest.raises(openai.NotFoundError):
                call()
        assert not (tmp_path / "data").exists()
        batch = until(client, begin(client, chats(1)))
        assert batch.status == "completed"
        assert (tmp_path / "data/baton/batches").stat().st_mode & 0o777 == 0o700
