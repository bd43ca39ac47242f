"""Engines that die, hang, run out of memory and fail again, beside one that goes on: rows A1 to A5, A8 and A10."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.gateways import RealGateway
from support.stats_page import assert_counted_once
from support.watched_streams import cores, family, shared_memory, streaming, wait_for

pytestmark = [pytest.mark.chaos, pytest.mark.alone, pytest.mark.timeout(600)]
CONFIG = Path(__file__).parent / "engines.toml"
TOLD_WITHIN_S = 1.0
BACK_WITHIN_S = 120


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealGateway]:
    """Two engines; a test that breaks one waits until it is back."""
    folder = tmp_path_factory.mktemp("chaos")
    store = {"BATON_HANDOFFS__STORE": f"file:{folder / 'handoffs'}"}
    with RealGateway(["--config", str(CONFIG)], folder, store) as running:
        running.wait_until_ready()
        yield running


@pytest.fixture(scope="module")
def spared(gateway: RealGateway) -> int:
    """The core of the second engine, which nothing is done to."""
    return cores(gateway.process.pid)[1].pid


def core_of_the_first(gateway: RealGateway, spared: int) -> psutil.Process:
    (core,) = [core for core in cores(gateway.process.pid) if core.pid != spared]
    return core


def states(gateway: RealGateway) -> dict[str, int]:
    counted: dict[str, int] = httpx.get(f"{gateway.url}/readyz").json()["engines"]
    return counted


def total(gateway: RealGateway, name: str, **labels: str) -> float:
    page = httpx.get(f"{gateway.url}/metrics").text
    return sum(
        sample.value
        for metric in text_string_to_metric_families(page)
        for sample in metric.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def says_something(gateway: RealGateway, model: str) -> bool:
    body = {"model": model, "prompt": "x", "max_tokens": 2}
    return httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=60).status_code == 200


def assert_lost_and_back(gateway: RealGateway, row: str, kill: Callable[[], float]) -> None:
    """`kill` a process of the first engine, and say when it ended; its streams are told, the second's go on."""
    front = psutil.Process(gateway.process.pid)
    segments = shared_memory(front.pid)
    before = (front.memory_info().rss, total(gateway, "vllm:generation_tokens_total"))
    with streaming(gateway.url, {"first": 8, "second": 8}) as streams:
        time.sleep(3)
        killed = kill()
        dying, living = streams["first"], streams["second"]
        wait_for(lambda: all(stream.ended for stream in dying), 60)
        told = max(stream.ended for stream in dying if stream.ended) - killed
        assert httpx.get(f"{gateway.url}/readyz").status_code == 200
        refused = httpx.post(f"{gateway.url}/v1/completions", json={"model": "first", "prompt": "x"})
        wait_for(lambda: states(gateway) == {"ready": 2}, BACK_WITHIN_S)
        back = time.monotonic() - killed
        now = time.monotonic()
        gaps = [
            max(stream.longest_gap(*span) for stream in living)
            for span in ((killed - 3, killed), (killed - 0.1, killed + 2), (killed + 2, now))
        ]
        codes = {stream.error for stream in dying}
        lost = [stream.lines for stream in living if stream.error or stream.lines[-1].startswith("cut")]
    assert says_something(gateway, "first")
    leaked = {segment for segment in segments - shared_memory(front.pid) if segment.exists()}
    after = (front.memory_info().rss, total(gateway, "vllm:generation_tokens_total"))
    print(
        f"{row}: told within {told * 1000:.0f} ms, back after {back:.1f} s; the other engine lost {len(lost)} "
        f"of {len(living)} streams, longest gap {gaps[0] * 1000:.0f} ms before, {gaps[1] * 1000:.0f} ms at the "
        f"loss, {gaps[2] * 1000:.0f} ms during the restart; gateway {(after[0] - before[0]) / 2**20:+.0f} MiB, "
        f"shared memory left behind: {len(leaked)} of {len(segments)} files"
    )
    assert codes == {"engine_restarting"}
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_restarting")
    assert int(refused.headers["retry-after"]) >= 1
    assert lost == []
    assert told < TOLD_WITHIN_S
    assert leaked == set()
    assert after[1] > before[1], "a series began anew"
    assert_counted_once(httpx.get(f"{gateway.url}/metrics").text, "first")
    assert "Traceback" not in gateway.log


@pytest.mark.fault("A1")
def test_an_engine_core_that_is_killed(gateway: RealGateway, spared: int) -> None:
    core = core_of_the_first(gateway, spared)
    assert_lost_and_back(gateway, "A1", lambda: killed_at_once(core))


@contextmanager
def started(folder: Path, forked: str, *words: str) -> Iterator[RealGateway]:
    """The two engines, forked or spawned, with a store of their own."""
    own = {"BATON_HANDOFFS__STORE": f"file:{folder / 'handoffs'}", "BATON_SUPERVISION__FORK_SERVER": forked}
    with RealGateway(["--config", str(CONFIG), *words], folder, own) as gateway:
        gateway.wait_until_ready()
        yield gateway


@pytest.mark.fault("A2")
@pytest.mark.fault("A8")
def test_a_worker_that_is_killed_and_then_the_gateway(tmp_path: Path) -> None:
    """Engines that are spawned have a worker; forked ones of one rank run the model in their core."""
    with started(tmp_path, "false") as gateway:
        core = cores(gateway.process.pid)[0]
        worker = next(child for child in core.children(recursive=True) if "Worker" in child.name())
        assert_lost_and_back(gateway, "A2", lambda: killed_at_once(worker))
        assert_leaves_no_engine_and_starts_again(gateway, tmp_path, "false")


@pytest.mark.fault("A12")
def test_a_fork_server_that_is_killed_is_replaced_and_its_engines_go_on(tmp_path: Path) -> None:
    """Its engines are nobody's children then; the one that dies comes back as the new one's."""
    own = {"BATON_HANDOFFS__STORE": f"file:{tmp_path / 'handoffs'}"}
    with RealGateway(["--config", str(CONFIG)], tmp_path, own) as gateway:
        gateway.wait_until_ready()
        first, second = cores(gateway.process.pid)
        server = first.parent()
        assert server is not None
        assert "fork_server" in " ".join(server.cmdline())
        with streaming(gateway.url, {"first": 4, "second": 4}) as streams:
            time.sleep(2)
            server.kill()
            time.sleep(3)
            ended = [stream for one in streams.values() for stream in one if stream.error]
        assert ended == []
        assert states(gateway) == {"ready": 2}
        assert_lost_and_back(gateway, "A12", lambda: killed_at_once(first))
        (new,) = cores(gateway.process.pid)
        parent = new.parent()
        assert parent is not None
        assert "fork_server" in " ".join(parent.cmdline())
        assert parent.pid != server.pid
        assert second.is_running()
    assert not psutil.pid_exists(second.pid) or second.status() == psutil.STATUS_ZOMBIE


def killed_at_once(process: psutil.Process) -> float:
    process.kill()
    return time.monotonic()


@pytest.mark.fault("A5")
def test_an_engine_that_the_kernel_kills_for_its_memory(gateway: RealGateway, spared: int) -> None:
    """It may take little more than it has, and is asked for the log-probabilities of a long prompt.

    Not too long a one: a step of `hang_s` would be found hung before memory is out.
    """
    core = core_of_the_first(gateway, spared)
    body = {"model": "first", "prompt": "many words " * 300, "max_tokens": 1, "prompt_logprobs": 5}
    with (
        memory_group([core, *core.children(recursive=True)]) as group,
        ThreadPoolExecutor(1) as pool,
    ):

        def kill() -> float:
            pool.submit(httpx.post, f"{gateway.url}/v1/completions", json=body, timeout=60)
            wait_for(lambda: killed_for_memory(group), 60)
            return time.monotonic()

        assert_lost_and_back(gateway, "A5", kill)


@contextmanager
def memory_group(processes: list[psutil.Process]) -> Iterator[Path]:
    """A control group that limits what processes take from now on (cgroup v1, the kernel's memory.rst)."""
    group = Path("/sys/fs/cgroup/memory") / f"baton-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group of version 1 for memory can be made here: {error}")
    (group / "memory.limit_in_bytes").write_text(str(64 * 2**20))
    for process in processes:
        (group / "cgroup.procs").write_text(str(process.pid))
    try:
        yield group
    finally:
        wait_for(lambda: not (group / "cgroup.procs").read_text(), 60)
        group.rmdir()


def killed_for_memory(group: Path) -> bool:
    return "oom_kill 0" not in (group / "memory.oom_control").read_text()


@pytest.mark.fault("A3")
def test_an_engine_that_hangs_is_found_and_replaced(gateway: RealGateway, spared: int) -> None:
    """Stopped by a signal, it looks alive to everyone who does not look for progress."""
    core = core_of_the_first(gateway, spared)
    old = [process for process in (core, *core.children(recursive=True)) if "VLLM" in process.name()]
    before = total(gateway, "baton_engine_restarts_total", engine="first", reason="hung")
    with streaming(gateway.url, {"first": 4, "second": 4}) as streams:
        stopped = time.monotonic()
        for process in old:
            process.suspend()
        wait_for(lambda: all(stream.ended for stream in streams["first"]), 120)
        found = max(stream.ended for stream in streams["first"] if stream.ended) - stopped
        wait_for(lambda: states(gateway) == {"ready": 2}, BACK_WITHIN_S)
        back = time.monotonic() - stopped
        lost = [stream for stream in streams["second"] if stream.error]
    print(f"A3: found after {found:.1f} s (hang_s = 4), back after {back:.1f} s")
    assert {stream.error for stream in streams["first"]} == {"engine_restarting"}
    assert lost == []
    assert total(gateway, "baton_engine_restarts_total", engine="first", reason="hung") == before + 1
    assert not any(process.is_running() for process in old)
    assert says_something(gateway, "first")


@pytest.mark.fault("A8")
def test_a_gateway_that_is_killed_leaves_no_engine_and_starts_again(tmp_path: Path) -> None:
    with started(tmp_path, "true") as gateway:
        assert_leaves_no_engine_and_starts_again(gateway, tmp_path, "true")


def assert_leaves_no_engine_and_starts_again(gateway: RealGateway, folder: Path, forked: str) -> None:
    """Kill a gateway, and start another like it on its port."""
    port = gateway.url.rsplit(":", 1)[1]
    running, segments = family(gateway.process.pid), shared_memory(gateway.process.pid)
    with streaming(gateway.url, {"first": 2}):
        gateway.process.kill()
        gateway.process.wait(10)
        killed = time.monotonic()
        _gone, left = psutil.wait_procs(running, timeout=20)
        ended = time.monotonic() - killed
    assert left == []
    assert bool(segments) == (forked == "false"), "engines with a worker share memory with it"
    wait_for(lambda: not any(segment.exists() for segment in segments), 20)
    began = time.monotonic()
    with started(folder, forked, "--port", port) as again:
        print(
            f"A8: {len(running)} processes, the last one ended {ended:.1f} s after the gateway; 0 of "
            f"{len(segments)} files of shared memory left; ready again on the same port after "
            f"{time.monotonic() - began:.1f} s"
        )
        assert says_something(again, "first")


@pytest.mark.fault("A10")
def test_a_fleet_that_is_lost_for_good_ends_with_a_code(tmp_path: Path) -> None:
    """A4 with real engines on the way: restarts are bounded, and `failed` is there to see."""
    environment = {"BATON_SUPERVISION__RESTARTS": "1", "BATON_SUPERVISION__HANG_S": "4"}
    environment["BATON_HANDOFFS__STORE"] = f"file:{tmp_path / 'handoffs'}"
    with RealGateway(["--config", str(CONFIG)], tmp_path, environment) as gateway:
        gateway.wait_until_ready()
        began = time.monotonic()
        for attempt in range(2):
            wait_for(lambda: states(gateway) == {"ready": 2}, BACK_WITHIN_S)
            cores(gateway.process.pid)[-1 if attempt else 0].kill()
            wait_for(lambda: states(gateway).get("ready") == 1, 10)
        wait_for(lambda: states(gateway) == {"ready": 1, "failed": 1}, 30)
        assert httpx.get(f"{gateway.url}/readyz").json()["status"] == "degraded"
        assert total(gateway, "baton_engine_state", engine="first", state="failed") == 1
        assert says_something(gateway, "second")
        for _ in range(2):
            wait_for(lambda: states(gateway).get("ready") == 1, BACK_WITHIN_S)
            cores(gateway.process.pid)[0].kill()
            if gateway.process.poll() is None:
                time.sleep(1)
        code = gateway.process.wait(60)
        print(f"A10: exit {code} after {time.monotonic() - began:.0f} s, one restart an engine")
    assert code == 1
    assert "Every engine has failed too often" in gateway.log
    assert "Traceback" not in gateway.log
