"""Plugins that misbehave in ways their authors did not think of cost only their own request (row F5)."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.gateways import FakeGateway, Held
from support.plugin_gateways import ask, ask_and_leave, notice_blocked_loops_soon, served, until, upload
from support.raw_requests import connect
from support.sample_plugins import Async, Current, Files

from baton.engines.fake.engine import FakeBehaviour

NUMBERS = [0.03, 0.01, 0.02]
UPLOAD = b"POST /pooling?model=geo%b HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/tiff\r\n"


def code_of(response: httpx.Response) -> tuple[int, str]:
    error = response.json()["error"]
    assert error["request_id"] == response.headers["x-request-id"]
    return response.status_code, error["code"]


@pytest.mark.fault("F5")
def test_stop_iteration_in_a_hook_fails_at_once_and_takes_no_thread() -> None:
    """A `next` without a default; with two threads, the third request is answered."""

    class Stops(Current):
        def pre_process(self, prompt: Any, request_id: str | None = None) -> Any:
            if prompt.get("bad"):
                return next(iter([]))
            return super().pre_process(prompt, request_id)

    with served(Stops(), threads=2) as gateway:
        for _ in range(3):
            assert code_of(ask(gateway, bad=True)) == (500, "plugin_failed")
        assert ask(gateway).status_code == 200


@pytest.mark.fault("F5")
def test_a_blocked_loop_fails_no_other_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request is in the engine, one blocks the loop, a third comes: all three are answered."""
    noticed_s, instance, held = notice_blocked_loops_soon(monkeypatch), Async(), Held()
    with served(instance, FakeBehaviour(wait=held)) as gateway, ThreadPoolExecutor() as pool:
        encoding = pool.submit(ask, gateway, numbers=[60.0, 0.1])
        assert until(lambda: gateway.engine("geo").active > 0)
        blocking = pool.submit(ask, gateway, **{"in": "pre", "do": "block", "seconds": 60.0})
        time.sleep(noticed_s)
        assert ask(gateway).status_code == 200
        instance.release.set()
        assert blocking.result().status_code == 200
        held.release()
        assert encoding.result().status_code == 200


@pytest.mark.fault("F5")
def test_a_plugin_that_stops_its_loop_keeps_working() -> None:
    """`loop.stop()` in a hook."""

    class Stops(Async):
        async def pre_process_async(self, prompt: Any, request_id: str | None = None) -> AsyncIterator[float]:
            asyncio.get_running_loop().stop()
            return await super().pre_process_async(prompt, request_id)

    with served(Stops()) as gateway:
        for _ in range(3):
            assert ask(gateway).status_code == 200


@pytest.mark.parametrize("kind", [asyncio.CancelledError, GeneratorExit])
@pytest.mark.fault("F5")
def test_a_coroutine_that_raises_what_ends_tasks_is_a_plugin_failure(kind: type[BaseException]) -> None:
    """In our shape, and not as a client that went away."""

    class Raises(Async):
        async def pre_process_async(self, prompt: Any, request_id: str | None = None) -> AsyncIterator[float]:
            raise kind

    with served(Raises()) as gateway:
        assert code_of(ask(gateway)) == (500, "plugin_failed")


@pytest.mark.fault("F5")
def test_an_error_while_prompts_are_closed_changes_no_answer() -> None:
    """An exception in a generator's `finally`, and a plugin that takes the first output only."""

    class Careless(Async):
        async def _prompts(self, prompt: Any) -> AsyncGenerator[float, None]:
            try:
                for number in prompt["numbers"]:
                    yield float(number)
            finally:
                raise RuntimeError("in the end")

        async def post_process_async(self, model_output: Any, request_id: str | None = None) -> Any:
            async for _, output in model_output:
                return {"first": output.outputs}
            return None

    with served(Careless()) as gateway:
        response = ask(gateway, numbers=[0.01, *[20] * 20])
        assert response.json()["data"] == {"first": 0.01}
        assert until(lambda: gateway.engine("geo").active == 0)


@pytest.mark.fault("F5")
def test_the_last_hooks_have_the_requests_time_limit_too() -> None:
    """And a hook that never ends is counted as left behind."""

    class Slow(Files):
        def output_to_response(self, output: Any) -> Any:
            self.release.wait(60)

    plugin = Slow(Path("/nowhere"))
    with served(plugin, time_limit_s=0.5) as gateway:
        began = time.monotonic()
        assert code_of(ask(gateway)) == (504, "plugin_timeout")
        assert time.monotonic() - began < 20
        assert 'threads_left_behind{engine="geo"} 1.0' in httpx.get(f"{gateway.url}/metrics").text
        plugin.release.set()


@pytest.mark.fault("F5")
def test_a_plugin_that_forgets_slowly_delays_nobody() -> None:
    """Its request is answered after a moment, and its place is free at once."""

    forgetting = threading.Event()

    class Slow(Current):
        def forget(self, request_id: str) -> None:
            forgetting.set()
            self.release.wait(60)
            super().forget(request_id)

    plugin = Slow()
    with served(plugin, requests=1, waiting=0) as gateway, ThreadPoolExecutor() as pool:
        failing = pool.submit(ask, gateway, **{"in": "pre", "do": "raise"})
        assert forgetting.wait(20)
        began = time.monotonic()
        assert ask(gateway).status_code == 200
        assert failing.result().status_code == 500
        assert time.monotonic() - began < 20
        plugin.release.set()
        assert until(lambda: len(plugin.forgotten) == 2)


@pytest.mark.fault("F5")
def test_a_request_is_forgotten_also_when_no_thread_is_free() -> None:
    """What the plugin keeps for it goes, although the plugin's threads are all stuck."""
    plugin = Current()
    with served(plugin, threads=1, time_limit_s=0.3) as gateway:
        assert ask(gateway, **{"in": "pre", "do": "block", "seconds": 60.0}).status_code == 504
        assert until(lambda: len(plugin.forgotten) == 1)
        plugin.release.set()


@pytest.mark.fault("F5")
def test_generators_of_files_and_prompts_never_run_on_the_gateways_loop(tmp_path: Path) -> None:
    """Neither while they give, nor while they are closed, whether at their end or before it."""
    gave: list[str] = []
    closed: list[str] = []

    class Generates(Files):
        def __init__(self, folder: Path) -> None:
            super().__init__(folder)
            self.kept: list[Iterator[float]] = []  # the garbage collector must not close one

        def pre_process(self, prompt: Any, request_id: str | None = None) -> Iterator[float]:
            self.kept.append(self._prompts(prompt))
            return self.kept[-1]

        def _prompts(self, prompt: Any) -> Iterator[float]:
            try:
                yield from (float(number) for number in prompt["numbers"])
            finally:
                closed.append(threading.current_thread().name)

        def output_to_files(self, output: Any) -> Any:
            gave.append(threading.current_thread().name)
            yield from super().output_to_files(output)

    with served(Generates(tmp_path)) as gateway:
        assert upload(gateway).status_code == 200
        assert (len(gave), len(closed)) == (1, 1)
        ask_and_leave(gateway, [60.0] * 20, lambda: gateway.engine("geo").active)
        assert until(lambda: gateway.engine("geo").active == 0)
        assert until(lambda: len(closed) == 2), "prompts that were not all asked for stayed open"
    assert all(name.startswith("hook-") for name in gave + closed)


@pytest.mark.fault("F5")
def test_a_plain_function_that_returns_a_coroutine_is_called_on_the_plugins_loop() -> None:
    """It may block before it does."""
    where: set[str] = set()

    class Plain(Async):
        def pre_process_async(self, prompt: Any, request_id: str | None = None) -> Any:
            where.add(threading.current_thread().name)
            return super().pre_process_async(prompt, request_id)

    with served(Plain()) as gateway:
        assert ask(gateway).status_code == 200
    assert where == {"hooks-plain"}


def test_an_async_generator_function_may_be_the_hook() -> None:
    """What a person would write first."""

    class Yields(Async):
        async def pre_process_async(self, prompt: Any, request_id: str | None = None) -> Any:
            for number in prompt["numbers"]:
                yield float(number)

    with served(Yields()) as gateway:
        assert ask(gateway).json()["data"]["sum"] == pytest.approx(sum(NUMBERS))


@pytest.mark.parametrize(
    "files",
    [
        [("mask.tif", "image/tiff", Path("/nowhere/mask.tif"))],
        [("../mask.tif", "image/tiff", Path(__file__))],
        [("ma\nsk.tif", "image/tiff", Path(__file__))],
        [("mask.tif", "tiff", Path(__file__))],
        7,
    ],
)
@pytest.mark.fault("F5")
def test_a_result_file_that_is_missing_or_unnamed_is_a_plugin_failure(files: Any) -> None:
    """Asked for as it is and packed."""

    class Wrong(Files):
        def output_to_files(self, output: Any) -> Any:
            return files

    with served(Wrong(Path("/nowhere"))) as gateway:
        for accept in ("image/tiff", "application/zip"):
            assert code_of(upload(gateway, accept)) == (500, "plugin_failed")


def test_a_hook_that_outlives_its_request_cannot_read_anothers_upload(tmp_path: Path) -> None:
    """The path it was given leads to nothing any more."""
    seen: list[object] = []
    begun = threading.Event()

    class Late(Files):
        def parse_upload(self, file: Path, media_type: str, query: Any, accept: Any) -> Any:
            if query.get("late"):
                begun.set()
                self.release.wait(60)
                with contextlib.suppress(FileNotFoundError):
                    seen.append(file.read_bytes())
                seen.append("over")
            return super().parse_upload(file, media_type, query, accept) if file.exists() else {}

    plugin = Late(tmp_path)
    with served(plugin) as gateway:
        with connect(gateway) as line:
            line.sendall(UPLOAD % b"&late=1" + b"Content-Length: 4\r\n\r\nmine")
            assert begun.wait(20)
        for _ in range(8):
            assert upload(gateway, content=b"\1\2\3\0 tenant B's secret").status_code == 200
        plugin.release.set()
        assert until(lambda: seen == ["over"])


def drip(gateway: FakeGateway) -> socket.socket:
    """An upload that has begun and does not go on."""
    line = connect(gateway)
    line.sendall(UPLOAD % b"" + b"Content-Length: 1000\r\n\r\nabc")
    return line


def test_uploads_under_way_are_bounded_in_number_and_time(tmp_path: Path) -> None:
    """As many as may run and wait; then 503. One that does not come in time ends."""
    spool = tmp_path / "spool"
    spool.mkdir()
    with served(Files(tmp_path), requests=1, waiting=1, spool_dir=spool) as gateway:
        lines = [drip(gateway) for _ in range(2)]
        assert until(lambda: len(list(spool.iterdir())) == 2)
        assert code_of(upload(gateway)) == (503, "engine_overloaded")
        for line in lines:
            line.close()
    with served(Files(tmp_path), requests=1, waiting=1, time_limit_s=0.5, spool_dir=spool) as gateway:
        lines = [drip(gateway) for _ in range(2)]
        answers = [line.recv(4096).split()[1] for line in lines]
        assert answers == [b"504", b"504"]
        assert until(lambda: not list(spool.iterdir()))
        for line in lines:
            line.close()
        assert until(lambda: upload(gateway).status_code == 200)


def test_a_reader_that_stalls_does_not_keep_its_files_for_ever(tmp_path: Path) -> None:
    """Sending has a time limit too."""

    class Large(Files):
        def output_to_files(self, output: Any) -> Any:
            path = tmp_path / "large.tif"
            with path.open("wb") as file:
                file.truncate(60_000_000)
            self.files["large"] = path
            return [("large.tif", "image/tiff", path)]

    for limit in (0.5, 6):  # the longer one where the machine is too busy to answer within the other
        plugin = Large(tmp_path)
        with served(plugin, time_limit_s=limit) as gateway, connect(gateway) as line:
            line.sendall(UPLOAD % b"" + b"Content-Length: 3\r\n\r\n\1\2\3")
            begun = line.recv(1000).startswith(b"HTTP/1.1 200")
            assert until(lambda plugin=plugin: len(plugin.forgotten) == 1)
        if begun:
            break
    assert begun


def test_a_plugins_own_codes_grow_no_metric() -> None:
    """The answer has the plugin's code, the label is ours."""
    with served(Current()) as gateway:
        assert code_of(ask(gateway, **{"in": "pre", "do": "refuse"})) == (422, "too_cloudy")
        page = httpx.get(f"{gateway.url}/metrics").text
    assert 'baton_rejections_total{reason="plugin_refusal"} 1.0' in page
    assert "too_cloudy" not in page


@pytest.mark.parametrize("counted", [{"numbers": -1}, {"No word": 1}, 7, {"numbers": "many"}])
def test_amounts_that_are_none_cost_only_the_count(counted: Any) -> None:
    """What a plugin counts wrongly is left out; the answer is given all the same."""

    class Counting(Current):
        def amounts(self, output: Any) -> Any:
            return counted

    with served(Counting()) as gateway:
        assert ask(gateway).status_code == 200
        page = httpx.get(f"{gateway.url}/metrics").text
    assert "baton_pooling_amounts_total{" not in page
