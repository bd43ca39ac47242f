"""Own the engines: start and stop them, pick one for a request, restart one that hangs or has died."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from contextvars import Context
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import structlog
from prometheus_client import CollectorRegistry

from baton.admission.tenants import Ticket
from baton.config.groups import EngineSettings, OnDemandSettings, SupervisionSettings
from baton.config.settings import Settings
from baton.engines.adapters import Adapter
from baton.engines.backend import EngineState, Json
from baton.engines.engine import Engine, LocalEngine, adapted
from baton.engines.on_demand import NO_PROCESS, OnDemand
from baton.errors import (
    LONGEST_WORD,
    BatonError,
    EngineRestarting,
    EngineUnavailable,
    InvalidRequest,
    ModelNotFound,
    StartError,
    did_you_mean,
)
from baton.telemetry.events import Events
from baton.telemetry.lag import until_beat
from baton.telemetry.metrics import GatewayMetrics
from baton.telemetry.page import MergedRegistry

POLL_S = 0.2
DRAIN_LOOK_S = 0.05
RUNNING = (EngineState.READY, EngineState.UNREACHABLE)
"""States of an engine that was started, and has neither failed nor been stopped."""
REASONS = ("died", "hung", "start")
"""Why an engine is restarted: it ended, it made no progress, or the restart before failed."""
PATTERNED = re.compile(r"[!-~]{1,128}")
"""What a model's name may be for a pattern to fit it: answers repeat it."""
STEPS_OF_PATIENCE = 4
"""An engine counts as hung no sooner than after this many times its longest step so far."""
SAMPLE_S, SAMPLES = 1.0, 11
"""The tokens of an engine are counted every second; its rate is that of the last ten."""
LOST = {
    "died": "It ended unexpectedly, and is being restarted.",
    "hung": "It made no progress, and is being restarted.",
    "start": "It could not be restarted, which is tried again.",
}
WHY = {
    EngineState.STARTING: "It is being started.",
    EngineState.UNREACHABLE: "The server that answers for it cannot be reached.",
    EngineState.FAILED: "It failed too often, or could not be started; the gateway's log says why.",
    EngineState.STOPPING: "An operator stops it; requests that run may end.",
    EngineState.STOPPED: "An operator stopped it.",
    EngineState.UNLOADED: "It runs on demand: a request loads it.",
    EngineState.UNLOADING: "It makes room for another.",
}
"""What everybody may know of why an engine takes no requests."""


class Act(StrEnum):
    """Acts that an operator may ask of an engine."""

    START = "start"
    STOP = "stop"
    RESTART = "restart"


LOAD, UNLOAD = "load", "unload"
"""Acts of the gateway itself, on engines on demand."""


class Supervisor:
    """The supervision of one engine, from its first start to its end.

    Operators may take its place: their last act holds. One task works on the engine at a time: the first
    start, the supervision, or an act; another one waits until it has ended.

    Args:
        settings: when it counts as hung, and how often it is restarted.
        turn: held while it starts: as many engines start at once as memory allows.
        clock: seconds on a monotonic clock.
        tell: called with the engine's state, and why it is in it, when that has changed.
        lost: called when it is given up.

    Attributes:
        note: why an engine on demand is not loaded, or is unloaded; None: nothing beyond its state.
        given_up: True once the engine has failed too often and stays down.
        restarts: attempts to restart it, because it was lost.
    """

    def __init__(
        self,
        engine: Engine,
        settings: SupervisionSettings,
        turn: AbstractAsyncContextManager[object],
        metrics: GatewayMetrics,
        clock: Callable[[], float] = time.monotonic,
        tell: Callable[[EngineState, str | None], None] = lambda _state, _why: None,
        lost: Callable[[], None] = lambda: None,
    ) -> None:
        self.engine = engine
        self._settings = settings
        self._turn = turn
        self._metrics = metrics
        self._clock = clock
        self._restarts: deque[float] = deque()
        self._start_s = 0.0
        self._down_since = 0.0
        self._started_at = 0.0
        self._reason = "died"
        self._operated: EngineState | None = None
        self._within_s: float | None = None  # of a start; there is a limit for engines on demand alone
        self._act: str | None = None
        self._working: asyncio.Task[None] | None = None
        self._past: set[asyncio.Task[None]] = set()
        self._next: Engine | None = None
        self._tokens: deque[tuple[float, float]] = deque(maxlen=SAMPLES)
        self._tell, self._lost = tell, lost
        self._log = structlog.get_logger("baton.fleet").bind(engine=engine.name)
        self.note: str | None = None
        self.given_up = False
        self.restarts = 0
        self._seen = self.state
        metrics.engines.stalled.labels(engine.name).set(0)
        for reason in REASONS:
            metrics.engines.restarts.labels(engine.name, reason)

    @property
    def state(self) -> EngineState:
        """The engine's state; `restarting` while it is down and will be restarted; or what operators did."""
        if self._operated is not None:
            return self._operated
        state = self.engine.state
        if self.given_up or state in RUNNING or not self._start_s:
            return EngineState.FAILED if self.given_up else state
        return EngineState.RESTARTING

    @property
    def why(self) -> str | None:
        """Why the engine takes no requests, in a sentence for everybody; None: it does."""
        state = self.state
        if self.note is not None and state in (EngineState.UNLOADED, EngineState.UNLOADING):
            return self.note
        return LOST[self._reason] if state is EngineState.RESTARTING else WHY.get(state)

    @property
    def started_at(self) -> int | None:
        """When it became ready, in seconds since the epoch; None: it does not run."""
        return int(self._started_at) if self.state in RUNNING else None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens that it generated a second lately; None: not known."""
        if not self._tokens:
            return None
        (began, before), (now, tokens) = self._tokens[0], self._tokens[-1]
        return (tokens - before) / (now - began) if now > began else 0.0

    def figures(self, name: str) -> list[float]:
        """Return the values of one of the engine's series, which may have labels of vLLM's own."""
        families = self.engine.registry.restricted_registry([name]).collect()
        return [sample.value for family in families for sample in family.samples]

    def look(self) -> None:
        """Report a change of state, and count tokens. To be called every so often."""
        if (state := self.state) is not self._seen:
            self._seen = state
            self._tell(state, self.why)
        now = self._clock()
        due = not self._tokens or now - self._tokens[-1][0] >= SAMPLE_S
        if due and (counted := self.figures("vllm:generation_tokens_total")):
            self._tokens.append((now, sum(counted)))

    def returns(self) -> bool:
        """Whether the engine runs, or will without an operator's act."""
        return self._act is Act.RESTART or self.state in (
            *RUNNING,
            EngineState.STARTING,
            EngineState.RESTARTING,
        )

    def refusal(self) -> EngineUnavailable:
        """Make the error that says why the engine takes no request now, and when to retry."""
        name, state = self.engine.name, self.state
        if state is EngineState.STARTING:
            return EngineUnavailable(
                f"The engine for '{name}' is still starting; try again shortly.", retry_after_s=5
            )
        if state is EngineState.UNREACHABLE:
            return EngineUnavailable(
                f"The server that answers for '{name}' cannot be reached; try again shortly.", retry_after_s=5
            )
        if state is EngineState.RESTARTING:
            left = self._start_s - (self._clock() - self._down_since) if self._down_since else self._start_s
            return EngineRestarting(
                f"The engine for '{name}' is being restarted; try again shortly.",
                retry_after_s=max(1, round(left)),
            )
        if state in (EngineState.UNLOADED, EngineState.UNLOADING):
            return EngineUnavailable(
                f"The engine for '{name}' is not loaded; try again shortly.", retry_after_s=5
            )
        if state in (EngineState.STOPPING, EngineState.STOPPED):
            return EngineUnavailable(
                f"The engine for '{name}' was stopped by an operator; try again when it was started.",
                retry_after_s=30,
            )
        return EngineUnavailable(
            f"The engine for '{name}' is not running; try again later.", retry_after_s=30
        )

    async def begin(self, report: Callable[[str], None]) -> None:
        """Start the engine for the first time, unless an operator's act comes in between.

        Raises:
            StartError: the engine cannot run.
        """
        if self._working is not None:
            return
        self._working = first = asyncio.create_task(self._first(report), name=f"start-{self.engine.name}")
        try:
            await first
        except asyncio.CancelledError:
            this = asyncio.current_task()
            if self._working is first or (this is not None and this.cancelling()):
                raise

    async def _first(self, report: Callable[[str], None]) -> None:
        await self.start(report)
        report(UP)

    def keep(self) -> None:
        """Restart the engine from now on whenever it is lost, unless an operator's act has begun."""
        if self._working is None or (self._working.done() and self._operated is None):
            self._supervise()

    def _supervise(self) -> None:
        self._act = None
        self._working = asyncio.create_task(self._keep(), name=f"supervise-{self.engine.name}")

    async def _keep(self) -> None:
        while not self.given_up:
            try:
                await self.keep_alive()
            except Exception as error:  # noqa: BLE001  # the border of a background task, which goes on
                self._log.error("supervision_failed", exc_info=error)
                await asyncio.sleep(1)
        self._lost()

    def operate(self, act: Act, drain_s: float, busy: Callable[[], bool]) -> None:
        """Begin an operator's act, and give up another that is under way; they never work at the same time.

        Args:
            drain_s: seconds that running requests get to end before the engine is stopped.
            busy: returns whether there are requests for it that have not ended.
        """
        nothing_to_do = {Act.START: (*RUNNING, EngineState.STARTING), Act.STOP: (EngineState.STOPPED,)}
        under_way = self._working is not None and not self._working.done()
        idle = self.state in nothing_to_do.get(act, ()) or (under_way and self._act is act)
        if not idle or self._next is not None:
            self._begin(act, drain_s, busy)

    def launch(self) -> asyncio.Task[None]:
        """Start an engine that was added, and supervise it; returns the task, which never fails."""
        return self._begin(Act.START, 0, lambda: False)

    def retire(self, drain_s: float, busy: Callable[[], bool]) -> asyncio.Task[None]:
        """Stop an engine that was removed; returns the task, which never fails."""
        self._next = None
        return self._begin(Act.STOP, drain_s, busy)

    @property
    def latest(self) -> Engine:
        """The engine, or the one that takes its place once its requests have ended."""
        return self._next or self.engine

    def replace(self, engine: Engine, drain_s: float, busy: Callable[[], bool], *, on_demand: bool) -> None:
        """Put another engine in the place of this one, once its requests have ended.

        One that an operator stopped stays stopped, and one on demand is loaded by the next request. Arguments
        as for `operate`.
        """
        self._next = engine
        stopped = self._operated in (EngineState.STOPPING, EngineState.STOPPED) and self._act is Act.STOP
        if on_demand and not stopped:
            self.unload(drain_s, busy)
        else:
            self._begin(Act.STOP if stopped else Act.RESTART, drain_s, busy)

    def on_demand(self, start_s: float) -> None:
        """Leave the engine down until `load`, as one on demand begins; one that failed or was stopped too.

        Args:
            start_s: seconds that a start may take from now on. It is down again where one fails.
        """
        self.given_up, self.note = False, None
        self.start_within(start_s)
        self._now(EngineState.UNLOADED)

    def follow(self) -> None:
        """Leave an engine on demand down until the former one of its name has ended, as if it unloaded."""
        self.note = "One of its name was removed, and ends its requests first."
        self._now(EngineState.UNLOADING)

    def start_within(self, seconds: float | None) -> None:
        """Limit the time that a start may take from now on; None: however long."""
        self._within_s = seconds

    def load(self) -> None:
        """Begin to start an engine on demand that is down."""
        self._begin(LOAD, 0, lambda: False)
        self._now(EngineState.STARTING)

    def stopped(self) -> None:
        """Leave an engine without a process down until an operator starts it."""
        self._act = Act.STOP
        self._now(EngineState.STOPPED)

    def unload(self, drain_s: float, busy: Callable[[], bool]) -> None:
        """Begin to stop the engine once its requests have ended, until `load`."""
        self._begin(UNLOAD, drain_s, busy)
        self._now(EngineState.UNLOADING)

    def take_back(self) -> None:
        """Take an `unload` back: the engine runs on, or is started again where it has stopped."""
        self.operate(Act.START, 0, lambda: False)

    def give_up(self) -> None:
        """Leave the engine down until an operator starts it."""
        self.given_up = True
        self._log.error("engine_given_up", within_s=self._settings.window_s)
        self._now(EngineState.FAILED)

    @property
    def start_s(self) -> float:
        """Seconds that its last start took; 0: it was never started."""
        return self._start_s

    @property
    def working(self) -> bool:
        """True if its engine works on a request, or saves KV."""
        return bool(self.engine.active) or (self.engine.forwarding is None and self.engine.saving)

    @property
    def memory_bytes(self) -> int | None:
        return self.engine.memory_bytes

    def _begin(self, act: str, drain_s: float, busy: Callable[[], bool]) -> asyncio.Task[None]:
        if self._working is not None:
            self._working.cancel()
            self._past.add(self._working)
        self._act = act
        # In a context of its own: what the engine does from now on is not this request's, nor in the log.
        self._working = asyncio.create_task(
            self._operate(act, drain_s, busy), name=f"{act}-{self.engine.name}", context=Context()
        )
        return self._working

    async def _operate(self, act: str, drain_s: float, busy: Callable[[], bool]) -> None:
        past = set(self._past)  # without this act, which another one may put there
        await _ended(past)
        self._past -= past
        try:
            if act not in (Act.START, LOAD) or self._next is not None:
                self._now(EngineState.UNLOADING if act == UNLOAD else EngineState.STOPPING)
                await self._drained(drain_s, busy)
                await self._stop()
                if self._next is not None:
                    self.engine, self._next = self._next, None
                    self._tokens.clear()
                self._now(EngineState.UNLOADED if act == UNLOAD else EngineState.STOPPED)
            if act in (Act.STOP, UNLOAD):
                return
            if self.engine.state not in RUNNING:
                self._now(EngineState.STARTING)
                await self._stop()  # what is left of one that failed
                await self.start()
        except Exception as error:  # noqa: BLE001  # the border of a background task: the engine stays down
            cause = error.message if isinstance(error, BatonError) else None
            event = "engine_load_failed" if act == LOAD else "operator_act_failed"
            self._log.error(event, act=act, cause=cause, exc_info=None if cause else error)
            self._now(EngineState.FAILED if self._within_s is None else EngineState.UNLOADED)
            return
        self.given_up = False
        self._restarts.clear()
        self._now(None)
        self._supervise()

    def _now(self, state: EngineState | None) -> None:
        self._operated = state
        self.look()

    async def _drained(self, seconds: float, busy: Callable[[], bool]) -> None:
        """Wait until no request is left, at most some seconds, or until the engine has died."""
        until = self._clock() + seconds
        while self.engine.state in RUNNING and busy() and self._clock() < until:  # noqa: ASYNC110  # without an event
            await asyncio.sleep(DRAIN_LOOK_S)

    async def _stop(self) -> None:
        """Stop the engine, to the end also where this is cancelled: half a stop would leave processes."""
        stopping = asyncio.ensure_future(self.engine.stop())
        await _ended([stopping])
        stopping.result()

    async def close(self) -> None:
        """End what works on the engine, which itself is left as it is."""
        work, self._working = self._working, None
        if work is not None:
            work.cancel()
            self._past.add(work)
        await _ended(set(self._past))

    async def start(self, report: Callable[[str], None] = lambda _phase: None) -> None:
        """Start the engine, once it is its turn.

        Raises:
            StartError: the engine cannot run, or was not ready in time.
        """
        async with self._turn:
            began = self._clock()
            try:
                async with asyncio.timeout(self._within_s):
                    await self.engine.start(report)
            except TimeoutError:
                await self._stop()
                raise StartError(
                    f"The engine '{self.engine.name}' was not ready within {self._within_s:g} s "
                    "(setting on_demand.start_s)."
                ) from None
        self._start_s, self._started_at = max(self._clock() - began, 1e-3), time.time()
        self._metrics.engines.start.labels(self.engine.name).set(self._start_s)
        self._log.info("engine_ready", seconds=round(self._start_s, 1))
        self.look()

    async def keep_alive(self) -> None:
        """Restart the engine whenever it died or hangs; return once it has been given up."""
        while not self.given_up:
            reason = self._reason = await self._trouble()
            self._down_since = self._clock()
            self._log.error("engine_lost", reason=reason)
            self.look()
            while not await self._restarted(reason):
                reason = self._reason = "start"
            self._down_since = 0.0
            self.look()

    async def _trouble(self) -> str:
        """Wait until the engine died or hangs, and return which."""
        suspected = False
        while True:
            await asyncio.sleep(until_beat(POLL_S))
            if self.engine.state is EngineState.FAILED:
                return "died"
            if self.engine.forwarding is not None:
                continue  # a server elsewhere has no step that could hang here
            hangs = self._hangs(self.engine)
            if hangs and suspected:  # seen twice, since the event loop itself may have been blocked
                await self.engine.kill()
                return "hung"
            suspected = hangs

    def _hangs(self, engine: LocalEngine) -> bool:
        stalled = engine.stalled_s()
        self._metrics.engines.stalled.labels(engine.name).set(stalled)
        limit = max(self._settings.hang_s, STEPS_OF_PATIENCE * engine.longest_step_s)
        return bool(self._settings.hang_s) and stalled > limit

    async def _restarted(self, reason: str) -> bool:
        """Restart the engine once. Return whether no attempt must follow: it runs, or it was given up."""
        await self._stop()
        if self._too_often():
            self.given_up = True
            self._log.error("engine_given_up", restarts=len(self._restarts), within_s=self._settings.window_s)
            return True
        delay = self._delay()
        self._restarts.append(self._clock() + delay)
        await asyncio.sleep(delay)
        self._metrics.engines.restarts.labels(self.engine.name, reason).inc()
        self.restarts += 1
        self._log.warning("engine_restarting", reason=reason, attempt=len(self._restarts))
        try:
            await self.start()
        except StartError as error:
            self._log.error("engine_restart_failed", cause=error.message)
            return False
        return True

    def _too_often(self) -> bool:
        while self._restarts and self._restarts[0] <= self._clock() - self._settings.window_s:
            self._restarts.popleft()
        return len(self._restarts) >= self._settings.restarts

    def _delay(self) -> float:
        """Return the seconds to wait: 0 before the first restart, then `backoff_s`, doubled each time."""
        if not self._restarts:
            return 0.0
        doubled: float = self._settings.backoff_s * 2 ** (len(self._restarts) - 1)
        return min(doubled, self._settings.backoff_max_s)


log = structlog.get_logger("baton.fleet")


async def _ended(work: Collection[asyncio.Future[Any]]) -> None:
    """Wait until all of these have ended, in whatever way, also where this task is cancelled meanwhile."""
    cancelled: asyncio.CancelledError | None = None
    while running := [each for each in work if not each.done()]:
        try:
            await asyncio.wait(running)
        except asyncio.CancelledError as error:
            cancelled = error
    for each in work:
        if not each.cancelled():
            each.exception()  # else an error that nobody waits for any more is logged
    if cancelled is not None:
        raise cancelled


Build = Callable[[Settings, Collection[str]], list[Engine]]
"""Builds engines of other settings, by name, without starting them; it blocks. Raises `OperatorError`."""
FleetReport = Callable[[str, str], None]
"""Called with an engine's name and the phase its start is in; the last phase is `UP`."""
UP = "ready"


COMING = frozenset({EngineState.UNLOADED, EngineState.UNLOADING, EngineState.STARTING})
"""States of an engine on demand that will answer requests by itself."""
Choice = tuple[Supervisor, str]
"""An engine that may answer a request, and the word by which the request is to name it."""


@dataclass(frozen=True)
class Maker:
    """The engine that made the handoff which a request continues.

    Attributes:
        name: the engine's name, or its adapter's.
        weights: identity of its weights, without which its KV is of no use.
    """

    name: str
    weights: str


class Fleet:
    """The engines of one gateway, by name.

    Args:
        metrics: the gateway's metrics, which show the engines' states and restarts.
        supervision: when an engine counts as hung, and how often it is restarted.
        shared_registries: registries of metrics that belong to no single engine.
        at_once: how many engines may start at the same time.
        build: builds further engines; None: the fleet stays as it is.
        settle: called with the supervisors of all engines when these have changed.
        on_demand: loads and unloads some of them; None: all run always.
        budget: makes what shares the budget of the engines of other settings; it blocks.
        settings: the engines', of which groups and fallbacks are read.

    Attributes:
        metrics: the gateway's metrics.
        on_demand: loads and unloads engines.
        events: what is told to clients who listen.
        lost: set when every engine has failed too often to be restarted.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        metrics: GatewayMetrics | None = None,
        supervision: SupervisionSettings | None = None,
        shared_registries: tuple[CollectorRegistry, ...] = (),
        at_once: int = 1,
        build: Build | None = None,
        settle: Callable[[Sequence[Supervisor]], None] = lambda _supervisors: None,
        on_demand: OnDemand | None = None,
        budget: Callable[[Settings], OnDemand | None] = lambda _settings: None,
        settings: Sequence[EngineSettings] = (),
    ) -> None:
        self.metrics = metrics or GatewayMetrics()
        self.build, self.budget, self._settle = build, budget, settle
        self._supervision = supervision or SupervisionSettings()
        self._turn = asyncio.Semaphore(at_once)
        self.events = Events(self.metrics.events)
        self._supervisors = {engine.name: self._supervised(engine) for engine in engines}
        self._leaving: dict[Supervisor, asyncio.Task[None]] = {}
        self._ends = False
        self._loading: set[str] = set()  # names of adapters
        self._shared_registries = shared_registries
        self._watching: asyncio.Task[None] | None = None
        self._coming: asyncio.Task[None] | None = None
        self._started = False
        self.lost = asyncio.Event()
        self.on_demand = on_demand or OnDemand(OnDemandSettings(), self._supervision, {}, {})
        self.on_demand.bind(self._supervisors, self.metrics.on_demand)
        for name, supervisor in self._supervisors.items():
            if name in self.on_demand.names:
                supervisor.on_demand(self.on_demand.start_s)
        self._take_names(settings)

    def _supervised(self, engine: Engine) -> Supervisor:
        return Supervisor(
            engine,
            self._supervision,
            self._turn,
            self.metrics,
            tell=partial(self._tell, engine.name),
            lost=self._one_lost,
        )

    def _take_names(self, settings: Sequence[EngineSettings]) -> None:
        """Take the words that requests may use for engines, and where requests go on."""
        self._groups: dict[str, list[str]] = {}
        for each in settings:
            if each.group is not None:
                self._groups.setdefault(each.group, []).append(each.name)
        self._fallbacks = {each.name: each.fallback for each in settings if each.fallback}
        engines = [supervisor.latest for supervisor in self._supervisors.values()]
        aliases = {alias: engine.name for engine in engines for alias in engine.aliases}
        self._aliases = {alias: name for alias, name in aliases.items() if "*" not in alias}
        self._patterns = {alias: name for alias, name in aliases.items() if "*" in alias}
        self._settle([*self._supervisors.values()])

    def change(
        self,
        settings: Sequence[EngineSettings],
        built: Sequence[Engine],
        on_demand: OnDemand | None,
        drain_s: float,
        busy: Callable[[Supervisor], bool],
        gone: Callable[[str], None],
    ) -> None:
        """Have these engines from now on; those whose settings are the same notice nothing.

        What is removed or replaced takes no further requests, and ends once those that run have ended.

        Args:
            settings: of all engines, in their order.
            built: those that are new, and those that take another one's place.
            on_demand: made of these settings: what it says of each engine's memory is in force from now on.
            drain_s: seconds that running requests get.
            busy: returns whether there are requests for an engine that have not ended.
            gone: called with the name of an engine that was removed, once it has ended.
        """
        before = self._supervisors
        came = {name for name in before if name in self.on_demand.names}
        new = {engine.name: engine for engine in built}
        self._supervisors = {
            each.name: before.get(each.name) or self._supervised(new[each.name]) for each in settings
        }
        self._change_budget(on_demand)
        for each in settings:
            supervisor = self._supervisors[each.name]
            comes = each.name in self.on_demand.names
            supervisor.start_within(self.on_demand.start_s if comes else None)
            if each.name not in before:
                self._launch(each.name, supervisor)
            elif each.name in new:
                supervisor.replace(new[each.name], drain_s, partial(busy, supervisor), on_demand=comes)
            elif each.name in came and not comes and supervisor.state not in (*RUNNING, EngineState.STOPPED):
                supervisor.launch()
            for engine in {id(one): one for one in (supervisor.engine, supervisor.latest)}.values():
                engine.rename(each.aliases, default=each.default)
        for name in before.keys() - self._supervisors.keys():
            supervisor = before[name]
            ended = supervisor.retire(drain_s, partial(busy, supervisor))
            left = self._left(name, supervisor, ended, gone)
            self._leaving[supervisor] = asyncio.create_task(left, name=f"remove-{name}")
        self._take_names(settings)

    def _change_budget(self, on_demand: OnDemand | None) -> None:
        """Share the budget by other terms, and begin to where nothing was on demand before."""
        self.on_demand.change(on_demand, self._supervisors)
        if self.on_demand.names and self._coming is None:
            self._coming = asyncio.create_task(self.on_demand.run(), name="fleet-on-demand")

    def _launch(self, name: str, supervisor: Supervisor) -> None:
        """Start an engine that was added, after those of its name that have not ended yet."""
        if former := self._leaving_as(name):
            if name in self.on_demand.names:
                supervisor.follow()
            former[0].add_done_callback(lambda _: self._launch(name, supervisor))
        elif self._supervisors.get(name) is supervisor and not self._ends:  # it was not removed meanwhile
            if name in self.on_demand.names:
                supervisor.on_demand(self.on_demand.start_s)
            else:
                supervisor.launch()

    def _leaving_as(self, name: str) -> list[asyncio.Task[None]]:
        return [left for supervisor, left in self._leaving.items() if supervisor.engine.name == name]

    async def _left(
        self, name: str, supervisor: Supervisor, ended: asyncio.Task[None], gone: Callable[[str], None]
    ) -> None:
        """Forget an engine that was removed, once it has ended."""
        await asyncio.wait([ended])
        del self._leaving[supervisor]
        if name not in self._supervisors and not self._leaving_as(name):
            self.metrics.engines.forget(name)
            gone(name)

    @property
    def engines(self) -> tuple[Engine, ...]:
        return tuple(supervisor.engine for supervisor in self._supervisors.values())

    @property
    def here(self) -> tuple[LocalEngine, ...]:
        """The engines that run here."""
        return tuple(engine for engine in self.engines if engine.forwarding is None)

    @property
    def latest_here(self) -> list[LocalEngine]:
        """The engines that run here, or will once they have taken another one's place."""
        latest = (supervisor.latest for supervisor in self._supervisors.values())
        return [engine for engine in latest if engine.forwarding is None]

    @property
    def names(self) -> list[str]:
        return list(self._supervisors)

    @property
    def served(self) -> list[str]:
        """All names and aliases that `pick` accepts, those of adapters too, without those that only a pattern
        fits."""
        return [
            *self._supervisors,
            *self._aliases,
            *self._groups,
            *(name for each in self.engines for name in each.adapters),
        ]

    def named(self, model: str) -> Engine | None:
        """Return the engine whose name, alias or pattern fits `model`, or the first of this group."""
        supervisor = self._named(self._groups.get(model, [model])[0])
        return supervisor.engine if supervisor is not None else None

    def _named(self, model: str) -> Supervisor | None:
        found = self._supervisors.get(self._aliases.get(model, model)) or self._with_adapter(model)
        if found is None and self._patterns and PATTERNED.fullmatch(model):
            fitting = (name for pattern, name in self._patterns.items() if fnmatchcase(model, pattern))
            found = self._supervisors.get(next(fitting, ""))
        return found

    @property
    def states(self) -> dict[str, EngineState]:
        return {name: supervisor.state for name, supervisor in self._supervisors.items()}

    @property
    def ready(self) -> bool:
        """True if every engine has been started once and at least one answers; others may be restarting."""
        return self._started and any(self._answers(name) for name in self._supervisors)

    @property
    def whole(self) -> bool:
        """True if every engine answers."""
        return all(self._answers(name) for name in self._supervisors)

    def _answers(self, name: str) -> bool:
        state = self._supervisors[name].state
        return state is EngineState.READY or (state in COMING and name in self.on_demand.names)

    def count_states(self) -> dict[str, int]:
        """Count the engines in each state, e.g. `{"ready": 2}`; states without engines are left out."""
        return dict(Counter(state.value for state in self.states.values()))

    async def start(self, report: FleetReport) -> None:
        """Start every engine but those on demand, `at_once` at a time in their order, then supervise them.

        Raises:
            StartError: an engine cannot run; those that have not started yet are not started.
        """
        self._watching = asyncio.create_task(self._watch(), name="fleet-watch")
        starts = [
            asyncio.create_task(supervisor.begin(partial(report, name)))
            for name, supervisor in self._supervisors.items()
            if name not in self.on_demand.names
        ]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            self._watching.cancel()
            raise
        finally:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
        self._started = True
        for name, supervisor in self._supervisors.items():
            if name not in self.on_demand.names:
                supervisor.keep()
        if self.on_demand.names and self._coming is None:
            self._coming = asyncio.create_task(self.on_demand.run(), name="fleet-on-demand")

    async def _watch(self) -> None:
        while True:
            for name, supervisor in list(self._supervisors.items()):
                try:
                    supervisor.look()
                except Exception as error:  # the border of a background task, which goes on
                    log.error("engine_look_failed", engine=name, exc_info=error)
            await asyncio.sleep(until_beat(POLL_S))

    def _tell(self, name: str, state: EngineState, why: str | None) -> None:
        self.on_demand.changed(name)
        if state in (EngineState.UNLOADED, EngineState.UNLOADING):  # why is known now
            supervisor = self._supervisors.get(name)
            why = supervisor.why if supervisor is not None else why
        self.events.tell_all("engine.state", {"engine": name, "state": state.value, "why": why})

    def _one_lost(self) -> None:
        if all(supervisor.given_up for supervisor in self._supervisors.values()):
            self.lost.set()

    def supervisor(self, name: str) -> Supervisor:
        """Return the supervisor of an engine, which is named by its name alone.

        Raises:
            ModelNotFound: no engine has that name.
        """
        if (found := self._supervisors.get(name)) is None:
            near, names = did_you_mean(name, self.names), ", ".join(self.names)
            raise ModelNotFound(
                f"There is no engine '{name[:LONGEST_WORD]}'.{near} Engines are: {names}.", param="name"
            )
        return found

    async def stop(self) -> None:
        """End the supervision, then stop every engine."""
        self._ends = True
        watches = [each for each in (self._watching, self._coming) if each is not None]
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
        supervisors = [*self._supervisors.values(), *self._leaving]
        await asyncio.gather(*(supervisor.close() for supervisor in supervisors))
        await asyncio.gather(*self._leaving.values())
        await asyncio.gather(*(supervisor.engine.stop() for supervisor in supervisors))

    def operate(self, name: str, act: Act, drain_s: float, busy: Callable[[], bool]) -> Supervisor:
        """Begin an operator's act; an engine on demand is started in its turn, once there is room.

        Raises:
            ModelNotFound: no engine has that name.
        """
        supervisor = self.supervisor(name)
        if name in self.on_demand.names:
            if act is Act.STOP:
                self.on_demand.forget(name)
            if supervisor.state in NO_PROCESS and act is Act.STOP:
                supervisor.stopped()
                return supervisor
            if supervisor.state in NO_PROCESS:
                supervisor.on_demand(self.on_demand.start_s)
                self.on_demand.want(name)
                return supervisor
        supervisor.operate(act, drain_s, busy)
        return supervisor

    def choices(
        self,
        model: object,
        *,
        pools: bool = False,
        load: Callable[[str], int] = lambda _name: 0,
        maker: Maker | None = None,
    ) -> list[Choice]:
        """List the engines that may answer a request, in the order in which they are to be tried.

        First the engine whose name, alias or pattern fits `model`, or that has this adapter, or those of this
        group: of the handoff's weights, ready, the one that made it, with the fewest requests. Then their
        fallbacks.

        Args:
            model: the request's `model`; None picks the only engine of its kind, or the default one.
            pools: whether the request is for an engine that pools; others are for one that generates.
            load: counts the requests of an engine.
            maker: made the handoff that the request continues; None: it continues none that is known.

        Raises:
            InvalidRequest: `model` is missing while several engines could answer, empty, or no string.
            ModelNotFound: no engine has that name or alias.
        """

        def rank(name: str) -> tuple[object, ...]:
            engine, state = self._supervisors[name].engine, self._supervisors[name].state
            weights = engine.weights if engine.forwarding is None else None
            apart = maker is not None and weights is not None and weights != maker.weights
            down = 0 if state is EngineState.READY else 1 if state in COMING else 2
            return apart, down, maker is None or maker.name != name, load(name)

        model = self._require_name(model, pools=pools)
        supervisor = None if model in self._groups else self._named(model)
        if supervisor is None and model not in self._groups:
            raise ModelNotFound.among(model, self.served)
        first = model if supervisor is None else supervisor.engine.name
        found = [self._supervisors[name] for name in dict.fromkeys(self._ways(first, rank))]
        return [(each, model if each is supervisor else each.engine.name) for each in found]

    def comes(self, choices: Sequence[Choice]) -> bool:
        """Whether one of these engines may have to be loaded first."""
        return any(
            each.engine.name in self.on_demand.names and each.state is not EngineState.READY
            for each, _ in choices
        )

    def is_group(self, model: object) -> bool:
        """Whether this word names a group of engines."""
        return isinstance(model, str) and model in self._groups

    def in_group(self, model: object, supervisor: Supervisor) -> bool:
        """Whether an engine is of the group that a request asked for."""
        return isinstance(model, str) and supervisor.engine.name in self._groups.get(model, ())

    def _ways(self, name: str, rank: Callable[[str], tuple[Any, ...]]) -> Iterator[str]:
        members = sorted(self._groups.get(name, (name,)), key=rank)
        yield from members
        for member in members:
            for other in self._fallbacks.get(member, ()):
                yield from self._ways(other, rank)

    async def engage(
        self, choice: Choice, tenant: str, ticket: Ticket, give_way: Callable[[], None] | None = None
    ) -> Engine:
        """Return an engine that is ready; one on demand is loaded, and stays until the ticket is given back.

        Args:
            give_way: ends the request where clients need the room; None: it is a client's.

        Raises:
            EngineUnavailable: the engine is not ready, or cannot be loaded in time.
            EngineOverloaded: too many requests wait for it to be loaded.
        """
        supervisor, word = choice
        name = supervisor.engine.name
        if name in self.on_demand.names and not ticket.holds(name):
            ticket.hold(name, await self.on_demand.use(name, tenant, give_way))
        elif supervisor.engine.state is not EngineState.READY or (
            supervisor.state is not EngineState.READY and not ticket.holds(name)
        ):
            raise supervisor.refusal()
        engine, adapter = supervisor.engine, supervisor.engine.adapters.get(word)
        return engine if adapter is None or engine.forwarding is not None else adapted(engine, adapter)

    def pick(self, model: object, *, pools: bool = False) -> Engine:
        """Return the ready engine that is the first to answer for `model`, for a look that needs no place.

        Raises:
            InvalidRequest: `model` is missing while several engines could answer, empty, or no string.
            ModelNotFound: no engine has that name or alias.
            EngineUnavailable: the engine is not ready.
        """
        supervisor, word = self.choices(model, pools=pools)[0]
        if supervisor.state is not EngineState.READY:
            raise supervisor.refusal()
        engine, adapter = supervisor.engine, supervisor.engine.adapters.get(word)
        return engine if adapter is None or engine.forwarding is not None else adapted(engine, adapter)

    def _require_name(self, model: object, *, pools: bool) -> str:
        if model is None:
            of_the_kind = [engine for engine in self.engines if engine.generates is not pools]
            default = [engine.name for engine in of_the_kind if engine.default]
            names = default or [engine.name for engine in of_the_kind] or self.names
            model = names[0] if len(names) == 1 else None
        if not isinstance(model, str) or not model:
            raise InvalidRequest(f"'model' must name one of: {', '.join(self.served)}.", param="model")
        return model

    def cards(
        self, may: Callable[[Engine, str], bool] = lambda _engine, _model: True, *, pools: bool = True
    ) -> list[Json]:
        """List the models of all engines as `/v1/models` does, and the groups; of engines on demand say so.

        Args:
            may: returns whether a model of an engine is listed.
            pools: whether those that pool are listed too.
        """
        found = []
        for name, supervisor in self._supervisors.items():
            more: Json = {}
            if name in self.on_demand.names:
                more = {"start": "on_demand", "loaded": supervisor.state is EngineState.READY}
            engine = supervisor.engine
            if pools or engine.generates:
                found += [card | more for card in engine.cards() if may(engine, str(card["id"]))]
        for group, members in self._groups.items():
            cards = [card for name in members for card in found if card["id"] == name]
            if cards:
                can = [
                    word
                    for word in cards[0].get("capabilities", ())
                    if all(word in card.get("capabilities", ()) for card in cards)
                ]
                found.append(cards[0] | {"id": group, "capabilities": can, "engines": members})
        return found

    def _with_adapter(self, name: str) -> Supervisor | None:
        """Return the supervisor of the engine that has an adapter."""
        return next((each for each in self._supervisors.values() if name in each.engine.adapters), None)

    async def load_adapter(self, adapter: Adapter, engine: str | None, *, replace: bool) -> str:
        """Load an adapter on an engine; return the engine's name.

        Args:
            engine: name of the engine; None: the only one that runs here and generates.
            replace: whether it may take the place of one of its name on that engine.

        Raises:
            BatonError: the name is taken, or the engine cannot load it.
        """
        here = [each for each in self.here if each.generates and engine in (None, each.name, *each.aliases)]
        if len(here) != 1:
            names = ", ".join(each.name for each in self.here if each.generates)
            raise InvalidRequest(
                f"'model' must name the engine that loads it, one of: {names}.", param="model"
            )
        (target,) = here
        taken = adapter.name in self.served and not (replace and adapter.name in target.adapters)
        if taken or adapter.name in self._loading:
            raise InvalidRequest(
                f"'lora_name': '{adapter.name}' is served already: choose another name, unload the adapter "
                "first, or send 'load_inplace' to put this one in its place.",
                param="lora_name",
            )
        self._loading.add(adapter.name)
        try:
            await target.load_adapter(adapter)
        finally:
            self._loading.discard(adapter.name)
        return target.name

    async def unload_adapter(self, name: str) -> str:
        """Unload an adapter; return the name of its engine.

        Raises:
            ModelNotFound: no engine has an adapter of this name.
        """
        found = next((each for each in self.here if name in each.adapters), None)
        if found is None:
            known = [each for engine in self.here for each in engine.adapters]
            raise ModelNotFound(
                f"There is no adapter '{name[:LONGEST_WORD]}' here.{did_you_mean(name, known)}",
                param="lora_name",
            )
        await found.unload_adapter(name)
        return found.name

    def metrics_page(self) -> bytes:
        """Return the `/metrics` page: the gateway's series and every engine's."""
        return self.merged_metrics().page()

    def merged_metrics(self) -> MergedRegistry:
        """Return the gateway's series and every engine's as one registry."""
        for name, current in self.states.items():
            self.metrics.engines.up.labels(name).set(self._answers(name))
            for state in EngineState:
                self.metrics.engines.state.labels(name, state.value).set(state is current)
        registries = (self.metrics.registry, *self._shared_registries)
        return MergedRegistry((*registries, *(engine.registry for engine in self.engines)))
