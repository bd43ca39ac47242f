"""Engines on demand in one budget: who is loaded, who leaves, who waits how long; without any engine."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from baton.config.gpu_memory import gpu_shares
from baton.config.groups import MIB, EngineSettings, OnDemandSettings, SupervisionSettings
from baton.config.settings import load_settings
from baton.engines import on_demand
from baton.engines.backend import EngineState
from baton.engines.hardware import Gpu
from baton.engines.on_demand import MACHINE, OnDemand, Release, Terms, on_demand_of, require_room
from baton.errors import BatonError, EngineOverloaded, EngineUnavailable, SettingsError
from baton.telemetry.memory import MemoryReader
from baton.telemetry.metrics import GatewayMetrics


class Time:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Served:
    """A supervisor whose engine is ready, unloaded or lost when the test says so."""

    def __init__(self, start_s: float = 0.0) -> None:
        self.note: str | None = None
        self.state = EngineState.UNLOADED
        self.start_s = start_s
        self.working = False
        self.memory_bytes: int | None = None
        self.loads = self.unloads = 0
        self.busy: Callable[[], bool] = lambda: False

    def load(self) -> None:
        assert self.state is EngineState.UNLOADED
        self.loads += 1
        self.state = EngineState.STARTING

    def unload(self, drain_s: float, busy: Callable[[], bool]) -> None:
        assert self.state in (EngineState.READY, EngineState.RESTARTING)
        self.unloads += 1
        self.busy = busy
        self.state = EngineState.UNLOADING

    def take_back(self) -> None:
        assert self.state is EngineState.UNLOADING
        self.state = EngineState.READY

    def give_up(self) -> None:
        self.state = EngineState.FAILED

    def refusal(self) -> EngineUnavailable:
        return EngineUnavailable(f"it is {self.state}", retry_after_s=30)


def other(models: Models, terms: dict[str, Terms]) -> OnDemand:
    """Make what a reload by these terms makes."""
    budget = {MACHINE: 250 * MIB}
    return OnDemand(OnDemandSettings(), SupervisionSettings(), terms, budget, clock=models.time)


class Models:
    """Models of 100 MiB each unless said otherwise, in room for two and a half."""

    def __init__(self, *names: str, settings: dict[str, Any] | None = None, **terms: dict[str, Any]) -> None:
        self.time = Time()
        limits = {"min_loaded_s": 10, "wait_s": 60} | (settings or {})
        self.served = {name: Served() for name in names}
        self.terms = {name: Terms(**({"need": {MACHINE: 100 * MIB}} | terms.get(name, {}))) for name in names}
        self.metrics = GatewayMetrics()
        supervision = SupervisionSettings(restarts=2, backoff_s=4)
        self.all = OnDemand(
            OnDemandSettings(**limits), supervision, self.terms, {MACHINE: 250 * MIB}, clock=self.time
        )
        self.all.bind(self.served, self.metrics.on_demand)

    def __getitem__(self, name: str) -> Served:
        return self.served[name]

    def asked(self, name: str, give_way: Callable[[], None] | None = None) -> asyncio.Task[Release]:
        return asyncio.create_task(self.all.use(name, "local", give_way))

    def step(self, seconds: float = 0.0) -> float | None:
        self.time.now += seconds
        return self.all.step()

    def goes(self, name: str, state: EngineState) -> None:
        self[name].state = state
        self.all.changed(name)
        self.all.step()

    async def loaded(self, name: str) -> Release:
        """Ask for a model and let it be loaded, without time."""
        asked = self.asked(name)
        await asyncio.sleep(0)
        self.step()
        assert self[name].state is EngineState.STARTING
        self.goes(name, EngineState.READY)
        return await asked

    @property
    def running(self) -> set[str]:
        return {name for name, each in self.served.items() if each.state is EngineState.READY}


async def refused(asked: asyncio.Task[Release]) -> BatonError:
    with pytest.raises(BatonError) as caught:
        await asked
    return caught.value


@pytest.mark.fault("A21")
async def test_the_least_recently_used_idle_model_leaves_for_the_one_that_is_asked_for() -> None:
    models = Models("a", "b", "c")
    for name in ("a", "b"):
        (await models.loaded(name))()
    models.time.now += 5
    (await models.asked("a"))()  # used last, though loaded first
    models.time.now += 6
    asked = models.asked("c")
    await asyncio.sleep(0)
    models.step()
    assert (models["b"].state, models["a"].state) == (EngineState.UNLOADING, EngineState.READY)
    assert models["b"].note == "It makes room for 'c'; a request loads it again."
    assert models["c"].loads == 0, "its room is not free yet"
    models.goes("b", EngineState.UNLOADED)
    assert models["b"].note == "It made room for 'c'; a request loads it again."
    models.goes("c", EngineState.READY)
    await asked
    assert models.running == {"a", "c"}


@pytest.mark.fault("A21")
async def test_a_pinned_one_and_one_that_always_runs_never_leave() -> None:
    models = Models("a", "b", "c", a={"pin": True}, b={"on_demand": False})
    models["b"].state = EngineState.READY
    (await models.loaded("a"))()
    models.time.now += 1000
    error = await refused(models.asked("c"))
    assert (error.code, error.retry_after_s) == ("engine_unavailable", 300)
    assert "needs 100 MiB of memory, and engines that stay leave 50 MiB" in error.message
    assert models.running == {"a", "b"}
    assert models.step() is None, "there is nothing to do"


async def test_what_is_idle_leaves_before_what_is_busy_however_lately_it_was_used() -> None:
    models = Models("a", "b", "c")
    await models.loaded("a")  # and not given back
    models.time.now += 50
    (await models.loaded("b"))()
    asked = models.asked("c")
    await asyncio.sleep(0)
    assert models.step() == pytest.approx(1)  # b's stay, and a look at what works by itself
    assert models.running == {"a", "b"}
    models.step(10)
    assert (models["b"].state, models["a"].state) == (EngineState.UNLOADING, EngineState.READY)
    models.goes("b", EngineState.UNLOADED)
    models.goes("c", EngineState.READY)
    await asked


@pytest.mark.fault("A22")
async def test_where_all_are_busy_the_one_used_longest_ago_ends_its_requests_and_leaves() -> None:
    models = Models("a", "b", "c")
    first, _ = await models.loaded("a"), await models.loaded("b")
    asked = models.asked("c")
    await asyncio.sleep(0)
    models.step()
    assert models.running == {"a", "b"}
    models.step(10)
    assert (models["a"].state, models["b"].state) == (EngineState.UNLOADING, EngineState.READY)
    assert models["a"].busy(), "its request has not ended"
    again = models.asked("a")  # which now waits for its turn
    first()
    assert not models["a"].busy()
    models.goes("a", EngineState.UNLOADED)
    assert (models["c"].loads, models["a"].loads) == (1, 1)
    models.goes("c", EngineState.READY)
    (await asked)()
    models.step(10)
    assert models["c"].state is EngineState.UNLOADING, "an idle one leaves for it, not b"
    models.goes("c", EngineState.UNLOADED)
    models.goes("a", EngineState.READY)
    await again


async def test_an_engine_whose_room_nobody_waits_for_any_more_goes_on() -> None:
    """Else its own clients would wait for the end of a drain that is good for nobody."""
    models = Models("a", "b", "c")
    await models.loaded("a")
    await models.loaded("b")
    asked = models.asked("c")
    await asyncio.sleep(0)
    models.step(10)
    assert models["a"].state is EngineState.UNLOADING
    again = models.asked("a")
    await asyncio.sleep(0)
    models.step()
    assert models["a"].state is EngineState.UNLOADING, "c waits for its room"
    asked.cancel()
    with suppress(asyncio.CancelledError):
        await asked
    models.step()
    models.step()
    await again
    assert (models["a"].state, models["a"].loads, models["c"].loads) == (EngineState.READY, 1, 0)


async def test_the_smallest_number_of_engines_leaves() -> None:
    models = Models("a", "b", "big", a={"need": {MACHINE: 30 * MIB}}, big={"need": {MACHINE: 200 * MIB}})
    for name in ("a", "b"):
        (await models.loaded(name))()
    models.time.now += 20
    asked = models.asked("big")
    await asyncio.sleep(0)
    models.step()
    assert (models["a"].state, models["b"].state) == (EngineState.READY, EngineState.UNLOADING)
    models.goes("b", EngineState.UNLOADED)
    models.goes("big", EngineState.READY)
    await asked


async def test_several_leave_where_one_is_not_enough() -> None:
    models = Models("a", "b", "big", big={"need": {MACHINE: 200 * MIB}})
    for name in ("a", "b"):
        (await models.loaded(name))()
    models.time.now += 20
    asked = models.asked("big")
    await asyncio.sleep(0)
    models.step()
    assert models.running == set()
    models.goes("a", EngineState.UNLOADED)
    assert models["big"].loads == 0
    models.goes("b", EngineState.UNLOADED)
    models.goes("big", EngineState.READY)
    await asked


async def test_two_gpus_are_two_rooms() -> None:
    one, both = {"GPU 0": 100}, {"GPU 0": 100, "GPU 1": 100}
    settings, supervision = OnDemandSettings(min_loaded_s=0), SupervisionSettings()
    served = {name: Served() for name in ("a", "b", "wide")}
    terms = {"a": Terms(one), "b": Terms({"GPU 1": 100}), "wide": Terms(both)}
    engines = OnDemand(settings, supervision, terms, {"GPU 0": 100, "GPU 1": 100})
    engines.bind(served, GatewayMetrics().on_demand)
    for name in ("a", "b"):
        engines.want(name)
    engines.step()
    assert {each.state for each in served.values()} == {EngineState.STARTING, EngineState.UNLOADED}
    for name in ("a", "b"):
        served[name].state = EngineState.READY
    engines.want("wide")
    engines.step()
    assert {served["a"].state, served["b"].state} == {EngineState.UNLOADING}


async def test_an_idle_model_is_unloaded_when_its_time_is_over() -> None:
    models = Models("a", "b", a={"idle_s": 7})
    release = await models.loaded("a")
    assert models.step(100) is None, "a request uses it"
    release()
    assert models.step() == pytest.approx(7)
    assert models.all.row("a")["unloads_in_s"] == pytest.approx(7)
    models["a"].working = True
    assert models.step(7) == pytest.approx(1)
    models["a"].working = False
    assert models.step(1) is None
    assert models["a"].state is EngineState.UNLOADING
    assert models["a"].note == "Nobody used it for 7 s; a request loads it."
    assert models.metrics.registry.get_sample_value(
        "baton_engine_unloads_total", {"engine": "a", "reason": "idle"}
    )


@pytest.mark.fault("A23")
async def test_a_wait_that_is_known_to_be_too_long_is_refused_with_the_seconds_it_takes() -> None:
    """The model is loaded all the same: whoever comes back then finds it."""
    models = Models("a", "b", "c", settings={"min_loaded_s": 100})
    for each in models.served.values():
        each.start_s = 20.0
    for name in ("a", "b"):
        (await models.loaded(name))()
    models.time.now += 10
    error = await refused(models.asked("c"))
    assert (error.status, error.retry_after_s) == (503, 110)
    assert models.step() == pytest.approx(90)
    models.step(90)
    models.goes("a", EngineState.UNLOADED)
    assert models["c"].loads == 1
    models.step(19)
    assert models.all.row("c")["ready_in_s"] == 1.0
    models.goes("c", EngineState.READY)
    await models.asked("c")


@pytest.mark.fault("A23")
async def test_who_waited_long_enough_is_told_when_to_come_back() -> None:
    models = Models("a", settings={"wait_s": 0.01})
    models["a"].start_s = 0.005  # or so it was the last time
    asked = models.asked("a")
    await asyncio.sleep(0)
    models.step()
    error = await refused(asked)
    assert "was not loaded within 0.01 s" in error.message
    models.goes("a", EngineState.READY)
    (await models.asked("a"))()


async def test_nobody_is_left_to_wait_for_a_model_that_is_then_not_loaded() -> None:
    models = Models("a", "b", "c")
    for name in ("a", "b"):
        (await models.loaded(name))()
    asked = models.asked("c")
    await asyncio.sleep(0)
    models.step()
    asked.cancel()
    with suppress(asyncio.CancelledError):
        await asked
    models.step(1000)
    assert models.running == {"a", "b"}
    assert models["c"].loads == 0


async def test_who_leaves_in_the_moment_it_is_ready_does_not_keep_it() -> None:
    models = Models("a", "b", a={"idle_s": 1})
    asked = models.asked("a")
    await asyncio.sleep(0)
    models.step()
    models.goes("a", EngineState.READY)  # which lets it go on
    asked.cancel()
    with suppress(asyncio.CancelledError):
        await asked
    models.step(1)
    assert models["a"].state is EngineState.UNLOADING


@pytest.mark.fault("A24")
async def test_a_model_that_never_gets_ready_answers_its_clients_and_costs_the_others_nothing() -> None:
    models = Models("a", "b")
    for delay in (4, 8):
        asked = models.asked("a")
        await asyncio.sleep(0)
        models.step()
        other = await models.loaded("b") if "b" not in models.running else await models.asked("b")
        models.goes("a", EngineState.UNLOADED)
        error = await refused(asked)
        assert error.retry_after_s == delay
        assert (await refused(models.asked("a"))).retry_after_s == delay, "not even tried"
        models.step(delay)
        other()
    asked = models.asked("a")
    await asyncio.sleep(0)
    models.step()
    models.goes("a", EngineState.UNLOADED)
    assert (await refused(asked)).message == "it is failed"
    assert models["a"].loads == 3
    loads = {"engine": "a", "outcome": "failed"}
    assert models.metrics.registry.get_sample_value("baton_engine_loads_total", loads) == 3


@pytest.mark.fault("A25")
async def test_an_engine_larger_than_it_said_holds_what_it_was_measured_to_take() -> None:
    models = Models("a", "b", "c")
    (await models.loaded("a"))()
    models["b"].memory_bytes = 160 * MIB
    release = await models.loaded("b")
    models.step()
    assert models["a"].state is EngineState.UNLOADING, "both do not fit, and it is idle"
    assert models["a"].note == "Engines took more memory than they were said to need."
    models.goes("a", EngineState.UNLOADED)
    assert (models.all.row("b")["memory_needed_bytes"], models.all.row("b")["memory_from"]) == (
        160 * MIB,
        "measured",
    )
    asked = models.asked("a")
    await asyncio.sleep(0)
    models.step(5)
    assert models["a"].loads == 1, "there is no room for it any more"
    release()
    models.step(5)
    assert models["b"].state is EngineState.UNLOADING
    models.goes("b", EngineState.UNLOADED)
    models.goes("a", EngineState.READY)
    await asked


@pytest.mark.fault("A25")
async def test_one_that_is_larger_than_all_there_is_leaves_and_is_refused() -> None:
    models = Models("a", "b")
    models["a"].memory_bytes = 300 * MIB
    release = await models.loaded("a")
    models.step()
    assert models.running == {"a"}, "those who waited for it are answered"
    release()
    models.step()
    assert models["a"].state is EngineState.UNLOADING
    models.goes("a", EngineState.UNLOADED)
    assert "needs 300 MiB" in (await refused(models.asked("a"))).message
    await models.loaded("b")


async def test_too_many_waiting_requests_are_refused() -> None:
    models = Models("a", a={"waiting": 2})
    asked = [models.asked("a") for _ in range(4)]
    await asyncio.sleep(0)
    assert [isinstance(each.exception(), EngineOverloaded) for each in asked if each.done()] == [True, True]
    models.step()
    models.goes("a", EngineState.READY)
    for each in asked[:2]:
        await each


async def test_a_lost_engine_is_waited_for_by_its_supervisor_and_leaves_when_others_wait() -> None:
    models = Models("a", "b", "c")
    for name in ("a", "b"):
        (await models.loaded(name))()
    models.goes("a", EngineState.RESTARTING)
    assert (await refused(models.asked("a"))).message == "it is restarting"
    asked = models.asked("c")
    await asyncio.sleep(0)
    models.step()
    assert models["a"].state is EngineState.UNLOADING, "a crash loop keeps no room"
    models.goes("a", EngineState.UNLOADED)
    models.goes("c", EngineState.READY)
    await asked


async def test_an_operators_stop_answers_those_who_wait_and_a_start_waits_for_room() -> None:
    models = Models("a", "b", "c")
    for name in ("a", "b"):
        (await models.loaded(name))()
    asked = models.asked("c")
    await asyncio.sleep(0)
    models.step()
    models.all.forget("c")
    models.goes("c", EngineState.STOPPED)
    assert (await refused(asked)).message == "it is stopped"
    models["c"].state = EngineState.UNLOADED  # as the fleet does at an operator's start
    models.all.want("c")
    assert models.step() == pytest.approx(10)
    models.step(10)
    models.goes("a", EngineState.UNLOADED)
    assert models["c"].state is EngineState.STARTING


def test_settings_that_leave_a_model_no_room_are_refused() -> None:
    staying, large = Terms({MACHINE: 200 * MIB}, on_demand=False), Terms({MACHINE: 100 * MIB})
    with pytest.raises(SettingsError, match=r"engines 'b': it needs 100 MiB of memory.*leave 50 MiB"):
        require_room({"a": staying, "b": large}, {MACHINE: 250 * MIB})
    require_room({"a": staying, "b": large}, {MACHINE: 300 * MIB})


def engine(name: str, *, always: bool = False, **more: Any) -> EngineSettings:
    return EngineSettings(name=name, model="m", start="always" if always else "on_demand", **more)


def test_the_budget_is_what_the_machine_has_unless_it_is_set() -> None:
    two = [engine("a", memory=600 * MIB, pin=True), engine("b", always=True)]
    settings = load_settings(engines=two, admission={"memory_reserve": 100 * MIB, "engine_waiting": 7})
    found = on_demand_of(settings, {}, lambda _: 300 * MIB, 1000 * MIB)
    assert found is not None
    assert found.names == {"a"}
    with pytest.raises(
        SettingsError, match="needs 600 MiB of memory, and engines that always run leave 599 MiB"
    ):
        on_demand_of(settings, {}, lambda _: 301 * MIB, 1000 * MIB)
    given = settings.model_copy(update={"on_demand": OnDemandSettings(budget=800 * MIB)})
    with pytest.raises(SettingsError, match="leave 500 MiB"):
        on_demand_of(given, {}, lambda _: 300 * MIB, 10**6 * MIB)
    assert on_demand_of(load_settings(engines=[engine("b", always=True)]), {}, lambda _: 0) is None


async def test_what_a_removed_engine_takes_is_free_once_it_has_ended() -> None:
    models = Models("a", "b", "c")
    (await models.loaded("b"))()
    await models.loaded("a")  # and not given back
    waits = models.asked("c")
    await asyncio.sleep(0)
    models.step()
    models.all.change(other(models, {"b": models.terms["b"], "c": models.terms["c"]}), models.served)
    models.step()
    assert (models["c"].loads, models["b"].unloads, models["a"].unloads) == (0, 0, 0)
    models.goes("a", EngineState.STOPPING)
    models.time.now += 1000
    models.step()
    assert (models["c"].loads, models["b"].unloads) == (0, 0), "b need not leave for what comes free"
    models.goes("a", EngineState.STOPPED)
    assert models["c"].loads == 1
    models.goes("c", EngineState.READY)
    (await waits)()
    assert models.all.row("a")["memory_needed_bytes"] is None


async def test_who_waits_for_a_model_that_runs_always_from_now_on_gets_it() -> None:
    models = Models("a", "b")
    asked = models.asked("a")
    await asyncio.sleep(0)
    models.step()
    always = Terms(need={MACHINE: 100 * MIB}, on_demand=False)
    models.all.change(other(models, {"a": always, "b": models.terms["b"]}), models.served)
    models.step()
    models.goes("a", EngineState.READY)
    await asyncio.sleep(0)
    assert asked.done()
    (await asked)()
    (await models.loaded("b"))()


async def test_a_line_has_no_busy_engine_leave_and_gives_way_to_a_client() -> None:
    models = Models("a", "b", "c", settings={"min_loaded_s": 0})
    first, second = await models.loaded("a"), await models.loaded("b")
    ended: list[str] = []
    line = models.asked("c", lambda: ended.append("c"))
    await asyncio.sleep(0)
    models.step(1000)
    assert models.running == {"a", "b"}, "their clients are not ended for a line"
    first()
    models.step()
    assert models["a"].state is EngineState.UNLOADING, "an idle one leaves"
    models.goes("a", EngineState.UNLOADED)
    models.goes("c", EngineState.READY)
    release = await line
    client = models.asked("a")
    await asyncio.sleep(0)
    models.step(1)
    assert (models["c"].state, ended) == (EngineState.UNLOADING, ["c"]), "the line's, though used last"
    again = models.asked("c", lambda: ended.append("again"))
    release()
    models.goes("c", EngineState.UNLOADED)
    models.goes("a", EngineState.READY)
    (await client)()
    assert models.running == {"a", "b"}
    models.step()
    assert models["a"].state is EngineState.UNLOADING
    models.goes("a", EngineState.UNLOADED)
    models.goes("c", EngineState.READY)
    (await again)()
    second()


async def test_a_reload_says_how_many_may_wait() -> None:
    models = Models("a", a={"waiting": 1})
    asked = [models.asked("a") for _ in range(2)]
    await asyncio.sleep(0)
    assert [each.done() for each in asked] == [False, True]
    assert isinstance(asked[1].exception(), EngineOverloaded)
    terms = {"a": Terms(need={MACHINE: 100 * MIB}, waiting=3)}
    models.all.change(other(models, terms), models.served)
    asked += [models.asked("a") for _ in range(3)]
    await asyncio.sleep(0)
    assert [each.done() for each in asked] == [False, True, False, False, True]
    for each in asked:
        each.cancel()
    await asyncio.gather(*asked, return_exceptions=True)


async def test_an_engine_that_comes_back_is_another_one() -> None:
    models = Models("a", "b")
    use = await models.loaded("a")
    kept = {"b": models.terms["b"]}
    models.all.change(other(models, kept), models.served)
    former = models["a"]
    models.served["a"] = Served()
    models.all.change(other(models, models.terms), models.served)
    former.state = EngineState.STOPPED
    use()
    asked = models.asked("a")
    await asyncio.sleep(0)
    models.step()
    assert models["a"].loads == 1
    models.goes("a", EngineState.READY)
    (await asked)()


def test_a_reload_counts_what_is_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory free at the start is the budget: what engines have taken of it since is theirs."""
    build_fleet = pytest.importorskip("baton.engines.vllm.build_fleet")
    free = iter([1000 * MIB, 300 * MIB])
    monkeypatch.setattr(MemoryReader, "available", lambda _: next(free))
    monkeypatch.setattr(on_demand, "is_cpu_build", lambda: True)
    monkeypatch.setattr(build_fleet, "is_cpu_build", lambda: True)
    builder = build_fleet.EngineBuilder(build_fleet.Starts(None), tenants=False, last_words=lambda: None)
    settings = load_settings(engines=[engine("a", memory=600 * MIB)], admission={"memory_reserve": 100 * MIB})
    for _ in range(2):
        assert builder.on_demand(settings).names == {"a"}


def test_a_gpu_whose_memory_nobody_knows_has_no_engine_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_demand, "is_cpu_build", lambda: False)
    monkeypatch.setattr(on_demand, "read_gpus", list)
    with pytest.raises(SettingsError, match="the memory of GPU 0 cannot be read"):
        on_demand_of(load_settings(engines=[engine("a")]), {"a": 0.5}, lambda _: 0)


def test_on_gpus_shares_are_what_engines_take_of_each_of_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that are each more than half of a GPU leave for one another; one on the other GPU stays."""
    cards = [Gpu(str(index), f"GPU-{index}", "H100", 1000 * MIB, 1000 * MIB, "580") for index in (0, 1)]
    monkeypatch.setattr(on_demand, "is_cpu_build", lambda: False)
    monkeypatch.setattr(on_demand, "read_gpus", lambda: cards)
    engines = [engine("a", gpu_share=0.6), engine("b", gpu_share=0.6), engine("c", args={"device_ids": [1]})]
    settings = load_settings(engines=engines, on_demand={"min_loaded_s": 0})
    found = on_demand_of(settings, gpu_shares(engines), lambda _: 0)
    assert found is not None
    served = {each.name: Served() for each in engines}
    found.bind(served, GatewayMetrics().on_demand)
    for name in ("a", "c"):
        found.want(name)
    found.step()
    for name in ("a", "c"):
        served[name].state = EngineState.READY
    assert found.row("a")["memory_needed_bytes"] == 600 * MIB
    assert found.row("c")["memory_needed_bytes"] == 920 * MIB
    found.want("b")
    found.step()
    assert [served[name].state for name in "abc"] == [
        EngineState.UNLOADING,
        EngineState.UNLOADED,
        EngineState.READY,
    ]


def engines_move(models: Models, chance: random.Random) -> Iterator[str]:
    """Some engines whose time has come are started or stopped."""
    for name, each in models.served.items():
        if each.state is EngineState.STARTING and chance.random() < 0.5:
            models.goes(name, EngineState.READY)
            yield name
        if each.state is EngineState.UNLOADING and not each.busy():
            models.goes(name, EngineState.UNLOADED)


@pytest.mark.fault("A22")
@pytest.mark.parametrize("seed", range(5))
async def test_nobody_starves_whoever_asks_and_however_long_requests_run(seed: int) -> None:
    """Two of five models fit, two of them are always asked for; each turn takes 10 s of stay, 8 of requests."""
    chance, names = random.Random(seed), "abcde"
    models = Models(*names, settings={"wait_s": 3600})
    waits: list[float] = []
    work: set[asyncio.Task[None]] = set()

    async def ask(name: str) -> None:
        began = models.time.now
        release = await models.all.use(name, "local")
        waits.append(models.time.now - began)
        until = models.time.now + chance.uniform(0, 8)
        while models.time.now < until:  # noqa: ASYNC110  # the test's own time
            await asyncio.sleep(0)
        release()

    for second in range(2000):
        for name in ("a", "b", *(chance.choice("cde") for _ in range(chance.random() < 0.2))):
            work.add(asyncio.create_task(ask(name)))
        for _ in range(4):
            await asyncio.sleep(0)
        models.step(1)
        list(engines_move(models, chance))
        held = sum(each.state is not EngineState.UNLOADED for each in models.served.values())
        assert held <= 2, f"more than fit at second {second}"
    for _ in range(1000):
        models.step(1)
        list(engines_move(models, chance))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert all(each.done() for each in work)
    assert len(waits) == len(work)
    # Four before it, each at most 10 s of stay, 8 of running requests and some of starting.
    assert max(waits) <= 4 * (10 + 8 + 12) + 12, f"the worst wait was {max(waits)} s"
    swaps = sum(each.loads for each in models.served.values())
    assert swaps <= 2 * 3000 / 10 + 5, f"{swaps} loads in 3000 s: faster than `min_loaded_s`"
