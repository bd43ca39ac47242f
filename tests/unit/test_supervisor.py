"""When an engine counts as lost, how often it is started anew, and what its clients are told meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from baton.config.groups import SupervisionSettings
from baton.engines import fleet as supervisor_module
from baton.engines.backend import EngineState
from baton.engines.fake.engine import FakeBehaviour, FakeEngine
from baton.engines.fleet import POLL_S, Fleet, Supervisor
from baton.engines.vllm.engine import Progress
from baton.errors import EngineRestarting, EngineUnavailable, StartError
from baton.telemetry.metrics import GatewayMetrics

QUICK = SupervisionSettings(hang_s=0.5, restarts=3, window_s=60, backoff_s=0.05, backoff_max_s=0.2)


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines are looked at ten times as often as they are."""
    monkeypatch.setattr(supervisor_module, "POLL_S", POLL_S / 10)


async def until(condition: Callable[[], object], within_s: float = 30) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def running(*engines: FakeEngine, supervision: SupervisionSettings = QUICK) -> Any:
    fleet = Fleet(engines, supervision=supervision)
    await fleet.start(lambda _name, _phase: None)
    try:
        yield fleet
    finally:
        await fleet.stop()


def sample(fleet: Fleet, name: str, **labels: str) -> float | None:
    fleet.metrics_page()
    return fleet.metrics.registry.get_sample_value(name, labels)


async def test_an_engine_that_died_is_back_and_the_other_was_never_away() -> None:
    alpha, beta = FakeEngine("alpha", behaviour=FakeBehaviour(start_seconds=0.3)), FakeEngine("beta")
    async with running(alpha, beta) as fleet:
        alpha.die()
        assert (fleet.ready, fleet.whole) == (True, False)
        with pytest.raises(EngineRestarting) as refused:
            fleet.pick("alpha")
        assert refused.value.retry_after_s == 1
        assert fleet.pick("beta") is beta
        await until(lambda: fleet.states["alpha"] is EngineState.READY)
        assert (alpha.starts, beta.starts) == (2, 1)
        assert sample(fleet, "baton_engine_restarts_total", engine="alpha", reason="died") == 1
        assert sample(fleet, "baton_engine_state", engine="alpha", state="ready") == 1
        assert sample(fleet, "baton_engine_state", engine="alpha", state="restarting") == 0


async def test_an_engine_that_hangs_is_ended_and_started_anew() -> None:
    alpha = FakeEngine("alpha")
    async with running(alpha) as fleet:
        alpha.behaviour.stalled_seconds = 0.4
        await asyncio.sleep(POLL_S)
        assert (alpha.kills, alpha.starts) == (0, 1), "it was given less time than it has"
        alpha.behaviour.stalled_seconds = 0.6
        await until(lambda: alpha.starts == 2)
        assert alpha.kills == 1
        assert sample(fleet, "baton_engine_restarts_total", engine="alpha", reason="hung") == 1


async def test_an_engine_known_for_long_steps_has_more_patience() -> None:
    alpha = FakeEngine("alpha", longest_step_s=1.0)
    alpha.behaviour.stalled_seconds = 3.9
    async with running(alpha):
        await asyncio.sleep(POLL_S)
        assert alpha.kills == 0
        alpha.behaviour.stalled_seconds = 4.1
        await until(lambda: alpha.kills == 1)


async def test_no_patience_set_means_never() -> None:
    alpha = FakeEngine("alpha")
    alpha.behaviour.stalled_seconds = 1e6
    async with running(alpha, supervision=SupervisionSettings(hang_s=0)):
        await asyncio.sleep(POLL_S)
        assert alpha.kills == 0


@pytest.mark.fault("A4")
async def test_a_crash_loop_opens_the_breaker_and_the_others_serve() -> None:
    """Attempts are spread out, bounded, and the state is there to see."""
    alpha, beta = FakeEngine("alpha"), FakeEngine("beta")
    async with running(alpha, beta) as fleet:
        alpha.behaviour.start_error = StartError("the weights are gone")
        alpha.die()
        await until(lambda: fleet.states["alpha"] is EngineState.FAILED)
        attempts = alpha.starts - 1
        await asyncio.sleep(0.5)
        assert alpha.starts - 1 == attempts == QUICK.restarts
        assert sample(fleet, "baton_engine_state", engine="alpha", state="failed") == 1
        with pytest.raises(EngineUnavailable) as refused:
            fleet.pick("alpha")
        assert (refused.value.code, refused.value.retry_after_s) == ("engine_unavailable", 30)
        assert fleet.pick("beta") is beta
        assert fleet.ready
        assert not fleet.lost.is_set()


class Time:
    """Seconds that pass only while someone sleeps.

    Attributes:
        slept: how long each sleep was.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slept: list[float] = []
        patched = SimpleNamespace(**{**vars(asyncio), "sleep": self.sleep})
        monkeypatch.setattr(supervisor_module, "asyncio", patched)

    def now(self) -> float:
        return sum(self.slept)

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(0)

    def supervisor(self, engine: FakeEngine, **settings: Any) -> Supervisor:
        limits = SupervisionSettings(**settings)
        return Supervisor(engine, limits, asyncio.Lock(), GatewayMetrics(), clock=self.now)


@pytest.mark.fault("A4")
async def test_the_wait_before_each_restart_doubles_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first comes at once."""
    time, alpha = Time(monkeypatch), FakeEngine("alpha")
    alpha.behaviour.start_error = StartError("the weights are gone")
    alpha.die()
    supervisor = time.supervisor(alpha, restarts=6, window_s=600, backoff_s=3, backoff_max_s=20)
    await supervisor.keep_alive()
    look, *waits = time.slept
    assert 0 < look < 2 * POLL_S / 10
    assert waits == [0, 3, 6, 12, 20, 20]
    assert (alpha.starts, supervisor.given_up) == (6, True)


@pytest.mark.fault("A3")
async def test_one_look_at_which_an_engine_seems_stalled_does_not_end_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gateway's own loop may have been away; only two in a row count."""
    looks = [0, 9, 0, 9, 9]
    killed_after: list[int] = []

    class Engine(FakeEngine):
        def stalled_s(self) -> float:
            looked.append(1)
            return looks[len(looked) - 1] if len(looked) <= len(looks) else 0

        async def kill(self) -> None:
            killed_after.append(len(looked))
            await super().kill()

    looked: list[int] = []
    alpha = Engine("alpha")
    await alpha.start(lambda _phase: None)
    supervisor = Time(monkeypatch).supervisor(alpha, hang_s=8)
    watching = asyncio.create_task(supervisor.keep_alive())
    await until(lambda: alpha.starts == 2)
    watching.cancel()
    assert killed_after == [5]


async def test_restarts_long_ago_are_forgotten() -> None:
    alpha = FakeEngine("alpha")
    patient = QUICK.model_copy(update={"restarts": 1, "window_s": 0.3})
    async with running(alpha, supervision=patient) as fleet:
        for starts in (2, 3):
            alpha.die()
            await until(lambda starts=starts: alpha.starts == starts and fleet.ready)
            await asyncio.sleep(0.35)
        alpha.die()
        await until(lambda: alpha.starts == 4 and fleet.ready)
        assert fleet.states["alpha"] is EngineState.READY, "given up for what was long ago"


async def test_a_fleet_that_lost_every_engine_says_so() -> None:
    engines = [FakeEngine("alpha"), FakeEngine("beta")]
    async with running(*engines) as fleet:
        for engine in engines:
            engine.behaviour.start_error = StartError("gone")
            engine.die()
        await asyncio.wait_for(fleet.lost.wait(), 30)
        assert not fleet.ready


async def test_what_goes_wrong_in_supervision_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    alpha = FakeEngine("alpha")
    failures = iter([RuntimeError("unforeseen")])
    whole = FakeEngine.stop

    async def stop(self: FakeEngine) -> None:
        for failure in failures:
            raise failure
        await whole(self)

    monkeypatch.setattr(FakeEngine, "stop", stop)
    async with running(alpha) as fleet:
        alpha.die()
        await until(lambda: fleet.ready and alpha.starts == 2)
    assert next(failures, None) is None, "nothing went wrong"


async def test_a_stop_ends_a_restart_under_way() -> None:
    async with asyncio.timeout(30):
        alpha = FakeEngine("alpha")
        async with running(alpha):
            alpha.behaviour.start_seconds = 60
            alpha.die()
            await until(lambda: alpha.starts == 2)
        assert alpha.state is EngineState.STOPPED


def test_progress_knows_its_longest_step() -> None:
    times = iter([0.0, 5.0, 6.5, 6.5, 7.0, 7.0, 9.0, 10.0, 10.0])
    progress = Progress(lambda: next(times))
    progress.rest()
    progress.made()
    progress.made()
    assert (progress.longest_s, progress.since()) == (1.5, 2.0)
    progress.begin()
    assert (progress.longest_s, progress.since()) == (0.0, 0.0)


async def test_each_engine_is_told_as_ready_when_it_is_and_not_when_all_are() -> None:
    told: list[tuple[str, str]] = []
    fleet = Fleet([FakeEngine("alpha"), FakeEngine("beta")])
    await fleet.start(lambda name, phase: told.append((name, phase)))
    await fleet.stop()
    loads = "pretending to load"
    assert told == [("alpha", loads), ("alpha", "ready"), ("beta", loads), ("beta", "ready")]
