"""What of `baton.ray` needs no cluster; with a cluster: tests/deploy/test_ray_serve.py."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
import yaml
from prometheus_client import CollectorRegistry, Counter
from starlette.types import Receive, Scope, Send
from support.gateways import free_port
from support.ray_cluster import with_ray

from baton.admission.tenants import Admission, Ticket
from baton.config.groups import AdmissionSettings
from baton.errors import SettingsError, StartError
from baton.http.request import Drain
from baton.telemetry.metrics import GatewayMetrics
from baton.telemetry.page import labelled, page_of

ROOT = Path(__file__).parents[2]
WITHOUT_RAY = """
import sys
class NoRay:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "ray":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, NoRay())
import baton.ray
"""


def test_without_ray_the_import_says_what_to_install() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_RAY], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert 'StartError: baton.ray needs Ray Serve, which is not installed: pip install "vllm-baton[ray]"' in (
        done.stderr
    )


async def test_the_load_is_that_of_the_fullest_engine() -> None:
    settings = AdmissionSettings(engine_requests=2)
    admission = Admission(settings, ["a", "b"], GatewayMetrics().admission)
    assert admission.load() == 0
    tickets = [Ticket() for _ in range(3)]
    for ticket in tickets[:2]:
        await admission.enter(ticket, "me", "a")
    assert admission.load() == 1
    waiting = asyncio.create_task(admission.enter(tickets[2], "me", "a"))
    await asyncio.sleep(0)
    assert admission.load() == 1.5
    tickets[0].leave_engine()
    await waiting
    assert admission.load() == 1


def page(name: str, value: int) -> list[Any]:
    registry = CollectorRegistry()
    Counter("baton_x", "What x is.", ("kind",), registry=registry).labels("k").inc(value)
    return labelled(registry.collect(), replica=name)


def test_pages_of_replicas_become_one_with_a_label() -> None:
    lines = page_of([*page("one", 1), *page("two", 2)]).decode().splitlines()
    assert lines.count("# TYPE baton_x_total counter") == 1
    assert 'baton_x_total{kind="k",replica="one"} 1.0' in lines
    assert 'baton_x_total{kind="k",replica="two"} 2.0' in lines


@with_ray
def test_as_many_replicas_are_wanted_as_bring_the_load_to_its_target() -> None:
    from baton.ray.autoscaling import LOAD, QueuePolicy

    policy: Any = QueuePolicy(0.5)

    def wanted(metrics: object) -> float:
        count, _state = policy(SimpleNamespace(aggregated_metrics=metrics, target_num_replicas=3))
        assert isinstance(count, int | float)
        return count

    assert wanted({LOAD: {"one": 1.5, "two": 0.5}}) == 4
    assert wanted({LOAD: {"one": 0.0, "two": 0.0}}) == 0
    assert [wanted(metrics) for metrics in (None, {}, {LOAD: {}})] == [3, 3, 3], "nothing is known yet"


@with_ray
def test_arguments_are_checked() -> None:
    from baton.ray.application import arguments_of

    assert arguments_of({"replicas": "2", "gpus": "0.5"}).replicas == 2  # as a command line has them
    for wrong, line in (
        ({"replica": 2}, "^replica: Extra inputs"),
        ({"replicas": 0}, "^replicas: Input should be greater than 0$"),
        ({"replicas": 3, "max_replicas": 2}, "max_replicas: must be at least `replicas`, which is 3"),
    ):
        with pytest.raises(SettingsError, match=line):
            arguments_of(wrong)


@with_ray
def test_what_a_gateway_listens_on_is_no_setting_of_a_replica(tmp_path: Path) -> None:
    from baton.ray.replica import settings_of_node

    file = tmp_path / "baton.toml"
    for text in ('uds = "/tmp/x"', '[tls]\ncert_file = "x"'):
        file.write_text(text)
        with pytest.raises(SettingsError, match=r"^uds, tls: leave them out"):
            settings_of_node(file)


@with_ray
def test_the_page_and_the_shipped_file_have_the_arguments() -> None:
    from ray.serve.schema import ServeDeploySchema

    from baton.ray.application import Arguments, arguments_of

    page = (ROOT / "docs/how-to/ray-serve.md").read_text()
    for name, field in Arguments.model_fields.items():
        default = "" if field.default is None else f"{field.default} "
        assert f"| `{name}` | {default}| {field.description} |" in page
    file = yaml.safe_load((ROOT / "deploy/ray/serve.yaml").read_text())
    (application,) = ServeDeploySchema.model_validate(file).applications
    assert application.import_path == "baton.ray:app"
    assert arguments_of(application.args).per_node == 1


def test_the_shipped_environment_is_what_the_page_says() -> None:
    script = f". {ROOT}/deploy/ray/environment.sh; env"
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    done = subprocess.run(
        ["sh", "-c", script], env={"PATH": path}, capture_output=True, text=True, check=True
    )
    found = dict(line.split("=", 1) for line in done.stdout.splitlines())
    assert found["RAY_USAGE_STATS_ENABLED"] == "0"
    assert found["RAY_SERVE_HAPROXY_BINARY_PATH"] == str(Path(sys.executable).parent / "baton-haproxy")
    seconds = found["RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"]
    assert f"drain_delay_s = {seconds}\n" in (ROOT / "docs/how-to/ray-serve.md").read_text()


class Health:
    """A server as Ray Serve's of a replica: its health check says that it drains, once it does."""

    def __init__(self) -> None:
        self.answer = (200, b"success")
        self.seconds = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(self.seconds)
        status, body = self.answer if scope["path"] == "/-/healthz" else (503, b"DRAINING")
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def serving(app: Health) -> AsyncIterator[int]:
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, lifespan="off", log_config=None))
    task = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110  # uvicorn has no event for it
        await asyncio.sleep(0.01)
    yield port
    server.should_exit = True
    await task


async def within(seconds: float, condition: Any) -> bool:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  # of another's making
            await asyncio.sleep(0.01)
    return True


@with_ray
async def test_the_drain_begins_when_the_health_check_says_so_and_cuts_what_is_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from baton.ray import replica as draining

    monkeypatch.setattr(draining, "ASK_EVERY_S", 0.05)
    drain, health = Drain(), Health()
    request = asyncio.create_task(asyncio.sleep(60))
    watch = draining.DrainWatch(drain, cut_after_s=3)
    async with serving(health) as port:
        with drain.watching(request):
            watch.see({"type": "http", "server": None})
            watch.see({"type": "http", "server": ("127.0.0.1", port)})
            for answer in ((200, b"success"), (503, b"UNHEALTHY"), (503, b"This node is being drained.")):
                health.answer = answer
                await asyncio.sleep(0.15)
                assert not drain.begun
            health.answer, health.seconds = (503, b"DRAINING"), 0.5  # it has much to do
            assert await within(20, lambda: drain.begun)
            assert not request.done()
            assert await within(20, request.done)
            assert drain.was_cut(request)
        await watch.close()


@with_ray
async def test_an_app_that_cannot_start_says_why_and_is_closed() -> None:
    from fastapi import FastAPI

    from baton.ray.replica import RunningApp

    closed = []

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async def fail() -> None:
            raise StartError("no such model")

        app.state.started = asyncio.create_task(fail())
        yield
        closed.append(True)

    with pytest.raises(StartError, match="no such model"):
        await RunningApp(FastAPI(lifespan=lifespan)).start()
    assert closed
