"""The gateway as tools of the Model Context Protocol, asked by the SDK's own client."""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp import MCPError
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client
from support.gateways import FakeGateway, run_fake
from support.sample_plugins import plugin

from baton.admission.api_keys import create_key
from baton.engines.fake.engine import FakeBehaviour, FakeEngine
from baton.http.routes import mcp as mcp_route
from baton.http.routes.mcp import MAX_BODY_BYTES

MODES = ("auto", "legacy")
"""With the protocol of 2026, and with the handshake of those before."""
PING = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
HEADERS = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}


class Maps:
    """An IO processor that answers as the map plugin does, with what it was asked."""

    async def pre_process_async(self, prompt: Any, request_id: str | None = None, **_: Any) -> Any:
        self.asked = prompt
        return [0.0]

    async def post_process_async(self, model_output: Any, **_: Any) -> Any:
        async for _ in model_output:
            pass
        return self.asked

    def parse_data(self, data: Any) -> Any:
        return data

    def output_to_response(self, output: Any) -> Any:
        return {"data": base64.b64encode(b"png").decode(), "format": "png", "files": [], "classes": [output]}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    return {"file": str(file)} | {tenant: create_key(file, tenant) for tenant in ("acme", "globex")}


@pytest.fixture(scope="module")
def gateway(keys: dict[str, str]) -> Iterator[FakeGateway]:
    engines = (
        FakeEngine("a", supports_handoffs=True),
        FakeEngine("b"),
        FakeEngine("map", pooling=True, plugin=plugin(Maps())),
    )
    with run_fake(*engines, auth={"keys_file": keys["file"]}) as gateway:
        yield gateway


@asynccontextmanager
async def client(gateway: FakeGateway, key: str = "", mode: str = "auto") -> AsyncIterator[Client]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=30) as http,
        Client(streamable_http_client(f"{gateway.url}/mcp", http_client=http), mode=mode) as found,
    ):
        yield found


async def call(gateway: FakeGateway, key: str, tool: str, mode: str = "auto", **arguments: Any) -> Any:
    async with client(gateway, key, mode) as tools:
        return await tools.call_tool(tool, arguments)


@pytest.mark.parametrize("mode", MODES)
async def test_the_tools_are_what_this_gateway_can_do(
    gateway: FakeGateway, keys: dict[str, str], mode: str
) -> None:
    async with client(gateway, keys["acme"], mode) as tools:
        found = {tool.name: tool for tool in (await tools.list_tools()).tools}
    assert set(found) == {"ask", "map_scene", "handoff_save", "handoff_list"}
    assert set(found["ask"].input_schema["properties"]) >= {"prompt", "model", "from", "save"}
    assert all(tool.description and tool.input_schema["type"] == "object" for tool in found.values())
    assert [found[name].annotations.read_only_hint for name in ("ask", "handoff_list")] == [False, True]
    with run_fake(FakeEngine("b")) as plain:
        async with client(plain, mode=mode) as tools:
            assert [tool.name for tool in (await tools.list_tools()).tools] == ["ask"]


async def test_the_models_that_are_named_are_those_that_the_key_may_use(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    some, every = create_key(file, "acme", models=("a",)), create_key(file, "globex")
    engines = FakeEngine("a", aliases=("nick",)), FakeEngine("secret")
    with run_fake(*engines, auth={"keys_file": file}) as gateway:
        async with client(gateway, some) as tools:
            told = tools.instructions
        async with client(gateway, every) as tools:
            told_all = tools.instructions
    assert told == "Models served here: a, nick."
    assert told_all == "Models served here: a, nick, secret."


@pytest.mark.parametrize("mode", MODES)
async def test_a_question_is_a_chat_of_its_tenant(
    gateway: FakeGateway, keys: dict[str, str], mode: str
) -> None:
    engine = gateway.engine("a")
    before = len(engine.bodies)
    result = await call(
        gateway, keys["acme"], "ask", mode, model="a", prompt="one two", system="be brief", max_tokens=2
    )
    assert not result.is_error
    body = engine.bodies[before]
    assert (body["model"], body["max_tokens"]) == ("a", 2)
    assert [each["role"] for each in body["messages"]] == ["system", "user"]
    assert result.content[0].text == result.structured_content["text"] != ""
    assert result.structured_content["usage"]["completion_tokens"] == 2


async def test_a_saved_context_is_continued_by_its_tenant_alone(
    gateway: FakeGateway, keys: dict[str, str]
) -> None:
    saved = await call(gateway, keys["acme"], "handoff_save", model="a", prompt="11 " * 50, label="book")
    left = saved.structured_content["id"]
    listed = await call(gateway, keys["acme"], "handoff_list")
    assert [(each["id"], each["label"]) for each in listed.structured_content["data"]] == [(left, "book")]
    other = await call(gateway, keys["globex"], "handoff_list")
    assert other.structured_content["data"] == []
    question = {"model": "a", "prompt": "22", "from": left, "save": True}
    answer = await call(gateway, keys["acme"], "ask", **question)
    assert answer.structured_content["handoff"]["source"]["id"] == left
    assert answer.structured_content["handoff"]["id"] in answer.content[0].text
    stranger = await call(gateway, keys["globex"], "ask", **question)
    assert (stranger.is_error, stranger.structured_content["error"]["code"]) == (True, "handoff_not_found")
    page = await call(gateway, keys["acme"], "handoff_list", limit=1)
    assert page.structured_content["has_more"]
    rest = await call(gateway, keys["acme"], "handoff_list", after=page.structured_content["last_id"])
    assert [each["id"] for each in rest.structured_content["data"]] == [left]


async def test_a_map_is_its_areas_and_a_picture(gateway: FakeGateway, keys: dict[str, str]) -> None:
    scene = base64.b64encode(b"tiff").decode()
    result = await call(gateway, keys["acme"], "map_scene", data=scene, indices=[2, 1, 0])
    text, picture = result.content
    assert (picture.mime_type, base64.b64decode(picture.data)) == ("image/png", b"png")
    (asked,) = json.loads(text.text)["classes"]
    assert asked == {
        "data_format": "b64_json",
        "data": scene,
        "out_data_format": "b64_json",
        "outputs": ["preview"],
        "indices": [2, 1, 0],
    }
    assert "data" not in result.structured_content


@pytest.mark.parametrize(
    ("tool", "arguments", "code", "told"),
    [
        ("ask", {}, "invalid_request", "prompt"),
        ("ask", {"prompt": "x"}, "invalid_request", "'model' must name one of: a, b"),
        ("ask", {"prompt": "x", "model": "gpt"}, "model_not_found", "'gpt' is not served here"),
        ("ask", {"prompt": "x", "model": "map"}, "operation_unsupported", "map"),
        ("ask", {"prompt": "", "model": "a"}, "invalid_request", "prompt"),
        ("ask", {"prompt": 7, "model": "a"}, "invalid_request", "prompt"),
        ("ask", {"prompt": "x", "model": "a", "max_tokens": 0}, "invalid_request", "max_tokens"),
        ("ask", {"prompt": "x", "model": "a", "max_tokens": 10**9}, "invalid_request", "limits.max_tokens"),
        ("ask", {"prompt": "x", "model": "a", "from": [1]}, "invalid_request", "from"),
        ("ask", {"prompt": "x", "model": "b", "save": True}, "operation_unsupported", "handoff = true"),
        ("ask", {"prompt": "x", "model": "a", "tools": []}, "invalid_request", "'tools'"),
        ("handoff_save", {"model": "a"}, "invalid_request", "prompt"),
        ("handoff_save", {"model": "b", "prompt": "x"}, "operation_unsupported", "handoff = true"),
        ("handoff_save", {"model": "a", "prompt": "x", "messages": []}, "invalid_request", "either"),
        ("handoff_list", {"limit": 101}, "invalid_request", "limit"),
        ("handoff_list", {"after": "x" * 65}, "invalid_request", "after"),
        ("map_scene", {"url": 7}, "invalid_request", "url"),
        ("map_scene", {}, "invalid_request", "either 'url' or 'data'"),
        ("map_scene", {"url": "https://example.org/a.tif", "data": "aa"}, "invalid_request", "either"),
        ("map_scene", {"model": "a", "url": "https://example.org/a.tif"}, "invalid_request", "data"),
    ],
)
async def test_wrong_arguments_are_named_to_the_model_that_sent_them(
    gateway: FakeGateway, keys: dict[str, str], tool: str, arguments: dict[str, Any], code: str, told: str
) -> None:
    result = await call(gateway, keys["acme"], tool, **arguments)
    assert result.is_error
    assert (result.structured_content["error"]["code"], told in result.content[0].text) == (code, True), (
        result
    )


async def test_an_unknown_tool_is_none_of_ours(gateway: FakeGateway, keys: dict[str, str]) -> None:
    async with client(gateway, keys["acme"]) as tools:
        with pytest.raises(MCPError, match="there are: ask, map_scene, handoff_save, handoff_list"):
            await tools.call_tool("shell", {"command": "ls"})


@pytest.mark.parametrize("key", ["", "bt_wrong"])
def test_without_a_valid_key_nothing_is_answered(gateway: FakeGateway, key: str) -> None:
    with gateway.client(headers=HEADERS | ({"Authorization": f"Bearer {key}"} if key else {})) as http:
        answer = http.post("/mcp", json=PING)
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"{", 400),
        (b"[]", 400),
        (b'[{"jsonrpc": "2.0", "id": 1, "method": "ping"}]', 400),
        (b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}", 400),
        (json.dumps({"x": "y" * MAX_BODY_BYTES}).encode(), 413),
        (b'{"jsonrpc": "2.0", "id": 1}', 400),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}', 200),
    ],
)
def test_a_body_is_held_to_the_gateway_s_limits(
    gateway: FakeGateway, keys: dict[str, str], content: bytes, status: int
) -> None:
    with gateway.client(headers=HEADERS | {"Authorization": f"Bearer {keys['acme']}"}) as http:
        assert http.post("/mcp", content=content).status_code == status
        assert http.get("/mcp").status_code == 405
        assert http.post("/mcp", content=content, headers={"Content-Type": "text/plain"}).status_code in (
            413,
            415,
        )


async def test_a_tenant_s_limits_hold_for_its_tools(keys: dict[str, str]) -> None:
    limits = {"tenant_rate": 60.0, "tenant_burst": 4}
    headers = HEADERS | {"Authorization": f"Bearer {keys['acme']}"}
    with (
        run_fake(FakeEngine("a"), auth={"keys_file": keys["file"]}, admission=limits) as gateway,
        gateway.client(headers=headers) as http,
    ):
        answers = [http.post("/mcp", json=PING) for _ in range(6)]
    assert [each.status_code for each in answers] == [200] * 4 + [429] * 2
    assert "retry-after" in answers[-1].headers


async def test_an_engine_s_queue_and_its_failures_are_told(keys: dict[str, str]) -> None:
    held = FakeEngine("a", behaviour=FakeBehaviour(call_error=RuntimeError("secret")))
    with run_fake(held) as gateway:
        result = await call(gateway, "", "ask", prompt="x")
    assert (result.is_error, result.structured_content["error"]["code"]) == (True, "internal_error")
    assert "secret" not in str(result)


async def test_who_leaves_ends_what_was_asked() -> None:
    began = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def wait(seconds: float) -> None:
        if seconds:
            loop.call_soon_threadsafe(began.set)
            await asyncio.Event().wait()

    engine = FakeEngine("a", behaviour=FakeBehaviour(wait=wait, token_seconds=1.0))
    with run_fake(engine) as gateway:
        asking = asyncio.ensure_future(call(gateway, "", "ask", prompt="x"))
        await began.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        for _ in range(500):
            if not engine.active:
                break
            await asyncio.sleep(0.01)
        assert (engine.active, engine.aborted) == (0, 1)


def test_it_is_switched_off_by_a_setting() -> None:
    with run_fake(FakeEngine("a"), edge={"mcp": False}) as gateway, gateway.client(headers=HEADERS) as http:
        answer = http.post("/mcp", json=PING)
    assert (answer.status_code, "edge.mcp" in answer.json()["error"]["message"]) == (404, True)


def test_without_the_sdk_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_route, "SDK", "mcp.server.no_such_module")
    with run_fake(FakeEngine("a")) as gateway, gateway.client(headers=HEADERS) as http:
        answer = http.post("/mcp", json=PING)
    assert (answer.status_code, "pip install 'mcp>=2.3,<3'" in answer.json()["error"]["message"]) == (
        404,
        True,
    )


def test_the_sdk_is_imported_by_the_first_who_asks() -> None:
    """It takes a second, and a gateway without a user of it needs it never."""
    code = "import sys, baton.server; sys.exit(any(name.split('.')[0] == 'mcp' for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_is_no_message_is_told_in_our_words(fake_gateway: FakeGateway) -> None:
    with fake_gateway.client(headers={"Accept": "application/json, text/event-stream"}) as client:
        answer = client.post("/mcp", json={"model": "alpha", "prompt": "0"})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == -32602
    assert "pydantic" not in answer.text
    assert "send a JSON-RPC 2.0 object" in answer.json()["error"]["message"]
