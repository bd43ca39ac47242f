"""Operators start, stop and restart engines: the last act holds, and nothing works on an engine twice at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import structlog

from baton.config.groups import SupervisionSettings
from baton.engines import fleet as fleet_module
from baton.engines.backend import EngineState, Report
from baton.engines.fake.engine import FakeBehaviour, FakeEngine
from baton.engines.fleet import Act, Fleet, Supervisor
from baton.errors import EngineUnavailable, ModelNotFound, StartError

LONG = 3600.0
"""Seconds for which a drain waits that the test ends itself."""
IDLE: Callable[[], bool] = lambda: False  # noqa: E731


class Gate:
    """Lets the fake engine's seconds pass when the test opens it."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.reached = asyncio.Event()

    async def __call__(self, seconds: float) -> None:
        if seconds:
            self.reached.set()
            await self.open.wait()


class CarefulEngine(FakeEngine):
    """A fake that notices when two start or stop it at once, and whose stop may be held."""

    working = 0
    most = 0
    stop_gate: Gate | None = None
    stops = 0

    @contextlib.contextmanager
    def alone(self) -> Any:
        self.working += 1
        self.most = max(self.most, self.working)
        try:
            yield
        finally:
            self.working -= 1

    async def start(self, report: Report) -> None:
        with self.alone():
            await super().start(report)

    async def stop(self) -> None:
        with self.alone():
            if self.stop_gate is not None:
                await self.stop_gate(1)
            self.stops += 1
            await super().stop()


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "POLL_S", 0.005)
    monkeypatch.setattr(fleet_module, "DRAIN_LOOK_S", 0.001)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110  # an engine sets no event
            await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def running(*engines: FakeEngine, **supervision: Any) -> AsyncIterator[Fleet]:
    fleet = Fleet(engines, supervision=SupervisionSettings(**({"backoff_s": 0.001} | supervision)))
    await fleet.start(lambda _name, _phase: None)
    try:
        yield fleet
    finally:
        await fleet.stop()


async def settled(supervisor: Supervisor, *states: EngineState) -> None:
    await until(lambda: supervisor.state in states)


async def test_a_stop_lets_requests_end_and_takes_no_more() -> None:
    engine, busy = CarefulEngine("a"), [True]
    async with running(engine) as fleet:
        supervisor = fleet.supervisor("a")
        supervisor.operate(Act.STOP, LONG, lambda: bool(busy))
        await settled(supervisor, EngineState.STOPPING)
        with pytest.raises(EngineUnavailable, match="stopped by an operator"):
            fleet.pick("a")
        assert (engine.state, engine.stops) == (EngineState.READY, 0), "its requests may end"
        busy.clear()
        await settled(supervisor, EngineState.STOPPED)
        assert engine.state is EngineState.STOPPED
        assert (supervisor.why, supervisor.started_at) == ("An operator stopped it.", None)
        await asyncio.sleep(0.03)
        assert engine.starts == 1, "nobody starts it but an operator"
        supervisor.operate(Act.START, LONG, IDLE)
        await settled(supervisor, EngineState.READY)
        assert (engine.starts, supervisor.why) == (2, None)
        assert fleet.pick("a") is engine
        engine.die()
        await until(lambda: engine.starts == 3)  # it is supervised again


async def test_requests_that_do_not_end_are_ended_when_the_drain_is_over() -> None:
    engine = CarefulEngine("a")
    async with running(engine) as fleet:
        fleet.supervisor("a").operate(Act.STOP, 0.01, lambda: True)
        await settled(fleet.supervisor("a"), EngineState.STOPPED)
        assert engine.stops == 1


async def test_a_stop_breaks_off_a_start_and_a_start_that_first_one() -> None:
    """Also the very first, of which the gateway is then still ready."""
    gate = Gate()
    held = CarefulEngine("held", behaviour=FakeBehaviour(start_seconds=1, wait=gate))
    other = CarefulEngine("other")
    fleet = Fleet([held, other])
    starting = asyncio.create_task(fleet.start(lambda _name, _phase: None))
    await gate.reached.wait()
    supervisor = fleet.supervisor("held")
    supervisor.operate(Act.START, LONG, IDLE)
    assert supervisor.state is EngineState.STARTING, "it is being started"
    supervisor.operate(Act.STOP, LONG, IDLE)
    await settled(supervisor, EngineState.STOPPED)
    await starting
    assert fleet.ready
    assert (held.starts, held.working) == (1, 0)
    supervisor.operate(Act.START, LONG, IDLE)
    await until(lambda: held.starts == 2)
    supervisor.operate(Act.STOP, LONG, IDLE)
    await settled(supervisor, EngineState.STOPPED)
    gate.open.set()
    supervisor.operate(Act.START, LONG, IDLE)
    await settled(supervisor, EngineState.READY)
    assert (held.starts, held.most) == (3, 1)
    await fleet.stop()


async def test_a_start_takes_back_a_stop_that_waits_and_follows_one_that_does_not() -> None:
    engine = CarefulEngine("a")
    async with running(engine) as fleet:
        supervisor = fleet.supervisor("a")
        supervisor.operate(Act.STOP, LONG, lambda: True)
        await settled(supervisor, EngineState.STOPPING)
        supervisor.operate(Act.START, LONG, IDLE)
        await settled(supervisor, EngineState.READY)
        assert (engine.starts, engine.stops) == (1, 0), "it never stopped"
        engine.stop_gate = Gate()
        supervisor.operate(Act.STOP, LONG, IDLE)
        await engine.stop_gate.reached.wait()
        supervisor.operate(Act.START, LONG, IDLE)
        await asyncio.sleep(0.01)
        assert (engine.starts, engine.working) == (1, 1), "half a stop is brought to its end first"
        engine.stop_gate.open.set()
        await settled(supervisor, EngineState.READY)
        assert (engine.starts, engine.most) == (2, 1)


@pytest.mark.fault("A13")
async def test_operators_who_ask_at_once_never_work_on_an_engine_together() -> None:
    """Two hundred acts within a moment, then a last one, which holds."""
    engine, other = CarefulEngine("a"), CarefulEngine("b")
    async with running(engine, other) as fleet:
        supervisor = fleet.supervisor("a")
        for turn in range(200):
            supervisor.operate(list(Act)[turn * 7 % 3], LONG, lambda turn=turn: turn % 2 == 1)
            for _ in range(turn % 4):
                await asyncio.sleep(0)
        supervisor.operate(Act.RESTART, LONG, IDLE)
        await settled(supervisor, EngineState.READY)
        supervisor.operate(Act.STOP, LONG, IDLE)
        await settled(supervisor, EngineState.STOPPED)
        assert engine.state is EngineState.STOPPED
        assert engine.most == 1
        assert (other.starts, other.stops) == (1, 0)
        left = [task.get_name() for task in asyncio.all_tasks() if "-a" in task.get_name()]
        print(f"A13: 201 acts, {engine.starts} starts, {engine.stops} stops, most at once {engine.most}")
    assert left == []


async def test_the_same_act_twice_is_one_act_and_what_changes_nothing_is_none() -> None:
    engine = CarefulEngine("a")
    async with running(engine) as fleet:
        supervisor = fleet.supervisor("a")
        supervisor.operate(Act.START, LONG, IDLE)
        assert engine.starts == 1
        for _ in range(3):
            supervisor.operate(Act.RESTART, LONG, IDLE)
        await until(lambda: engine.starts == 2)
        await settled(supervisor, EngineState.READY)
        assert engine.stops == 2, "once for the stop, once for what a failed engine may have left"
        supervisor.operate(Act.STOP, LONG, IDLE)
        await settled(supervisor, EngineState.STOPPED)
        stops = engine.stops
        supervisor.operate(Act.STOP, LONG, IDLE)
        await asyncio.sleep(0.01)
        assert engine.stops == stops


@pytest.mark.fault("A14")
async def test_an_operators_start_that_fails_leaves_the_engine_down_and_the_gateway_up() -> None:
    """It is the only one. Another start, once its cause is mended, brings it back, supervised."""
    engine = CarefulEngine("a")
    async with running(engine, restarts=2) as fleet:
        supervisor = fleet.supervisor("a")
        engine.behaviour.start_error = StartError("/secret/path is gone")
        supervisor.operate(Act.RESTART, LONG, IDLE)
        await settled(supervisor, EngineState.FAILED)
        assert not fleet.lost.is_set()
        assert supervisor.why is not None
        assert "secret" not in supervisor.why
        with pytest.raises(EngineUnavailable):
            fleet.pick("a")
        engine.behaviour.start_error = None
        supervisor.operate(Act.START, LONG, IDLE)
        await settled(supervisor, EngineState.READY)
        engine.die()
        await until(lambda: engine.state is EngineState.READY and engine.starts == 4)
        assert supervisor.restarts == 1, "those that operators asked for are not counted"


async def test_an_engine_that_was_given_up_is_started_again_and_has_its_restarts_again() -> None:
    engine, other = CarefulEngine("a"), CarefulEngine("b")
    async with running(engine, other, restarts=1) as fleet:
        supervisor = fleet.supervisor("a")
        engine.die()
        await until(lambda: engine.starts == 2)
        await settled(supervisor, EngineState.READY)
        engine.die()
        await settled(supervisor, EngineState.FAILED)
        supervisor.operate(Act.START, LONG, IDLE)
        await settled(supervisor, EngineState.READY)
        engine.die()
        await until(lambda: engine.starts == 4)
        await settled(supervisor, EngineState.READY)


async def test_an_engine_that_dies_while_it_drains_is_stopped_at_once() -> None:
    engine = CarefulEngine("a")
    async with running(engine) as fleet:
        supervisor = fleet.supervisor("a")
        supervisor.operate(Act.STOP, LONG, lambda: True)
        await settled(supervisor, EngineState.STOPPING)
        engine.die()
        await settled(supervisor, EngineState.STOPPED)
        assert engine.starts == 1


@pytest.mark.parametrize("act", list(Act))
async def test_the_gateway_ends_in_the_middle_of_an_act(act: Act) -> None:
    gate = Gate()
    engine = CarefulEngine("a", behaviour=FakeBehaviour())
    async with running(engine) as fleet:
        supervisor = fleet.supervisor("a")
        if act is Act.START:
            supervisor.operate(Act.STOP, LONG, IDLE)
            await settled(supervisor, EngineState.STOPPED)
        engine.behaviour.wait, engine.behaviour.start_seconds = gate, 1
        supervisor.operate(act, LONG, lambda: act is Act.STOP)
        await settled(supervisor, EngineState.STARTING, EngineState.STOPPING)
    assert (engine.state, engine.working, engine.most) == (EngineState.STOPPED, 0, 1)


async def test_what_an_engine_does_later_is_not_the_operators_request() -> None:
    """Its log lines would have that request's id for ever."""
    engine, seen = CarefulEngine("a"), []
    async with running(engine) as fleet:
        with structlog.contextvars.bound_contextvars(request_id="the operator's"):
            fleet.supervisor("a").operate(Act.RESTART, LONG, IDLE)
        await until(lambda: engine.starts == 2)
        await settled(fleet.supervisor("a"), EngineState.READY)
        start = engine.start

        async def noted(report: Report) -> None:
            seen.append(structlog.contextvars.get_contextvars())
            await start(report)

        engine.start = noted  # type: ignore[method-assign]
        engine.die()
        await until(lambda: seen)
    assert seen == [{}]


async def test_the_states_that_an_engine_passes_through_are_told() -> None:
    engine = CarefulEngine("a")
    async with running(engine) as fleet:
        told: list[str] = []
        supervisor = fleet.supervisor("a")
        events = fleet.events.follow("acme", "", None, most=1)
        assert "event: open" in await anext(events)

        async def listen() -> None:
            async for event in events:
                told.extend(line for line in event.splitlines() if line.startswith("data"))

        listening = asyncio.create_task(listen())
        supervisor.operate(Act.RESTART, LONG, IDLE)
        await until(lambda: len(told) == 4)
        assert [next(state for state in EngineState if f'"{state}"' in line) for line in told] == [
            EngineState.STOPPING,
            EngineState.STOPPED,
            EngineState.STARTING,
            EngineState.READY,
        ]
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)


async def test_only_the_name_of_an_engine_names_it() -> None:
    async with running(CarefulEngine("a", aliases=("alias",))) as fleet:
        for name in ("alias", "A", "", "../a", "a" * 10_000):
            with pytest.raises(ModelNotFound) as refused:
                fleet.supervisor(name)
            assert len(refused.value.message) < 400
