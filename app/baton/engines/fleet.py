"""Own the engines: start and stop them, pick one for a request, restart one that hangs or has died."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from contextvars import Context
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import structlog
from prometheus_client import CollectorRegistry

from baton.config.groups import EngineSettings, SupervisionSettings
from baton.config.settings import Settings
from baton.engines.adapters import Adapter
from baton.engines.backend import EngineState
from baton.engines.engine import Engine, LocalEngine, adapted
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
}
"""What everybody may know of why an engine takes no requests."""


class Act(StrEnum):
    """Acts that an operator may ask of an engine."""

    START = "start"
    STOP = "stop"
    RESTART = "restart"


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
        self._act: Act | None = None
        self._working: asyncio.Task[None] | None = None
        self._past: set[asyncio.Task[None]] = set()
        self._next: Engine | None = None
        self._tokens: deque[tuple[float, float]] = deque(maxlen=SAMPLES)
        self._tell, self._lost = tell, lost
        self._log = structlog.get_logger("baton.fleet").bind(engine=engine.name)
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

    def replace(self, engine: Engine, drain_s: float, busy: Callable[[], bool]) -> None:
        """Put another engine in the place of this one, once its requests have ended.

        One that an operator stopped stays stopped. Arguments as for `operate`.
        """
        self._next = engine
        stopped = self._operated in (EngineState.STOPPING, EngineState.STOPPED) and self._act is Act.STOP
        self._begin(Act.STOP if stopped else Act.RESTART, drain_s, busy)

    def _begin(self, act: Act, drain_s: float, busy: Callable[[], bool]) -> asyncio.Task[None]:
        if self._working is not None:
            self._working.cancel()
            self._past.add(self._working)
        self._act = act
        # In a context of its own: what the engine does from now on is not this request's, nor in the log.
        self._working = asyncio.create_task(
            self._operate(act, drain_s, busy), name=f"{act}-{self.engine.name}", context=Context()
        )
        return self._working

    async def _operate(self, act: Act, drain_s: float, busy: Callable[[], bool]) -> None:
        past = set(self._past)  # without this act, which another one may put there
        await _ended(past)
        self._past -= past
        try:
            if act is not Act.START or self._next is not None:
                self._now(EngineState.STOPPING)
                await self._drained(drain_s, busy)
                await self._stop()
                if self._next is not None:
                    self.engine, self._next = self._next, None
                    self._tokens.clear()
                self._now(EngineState.STOPPED)
            if act is Act.STOP:
                return
            if self.engine.state not in RUNNING:
                self._now(EngineState.STARTING)
                await self._stop()  # what is left of one that failed
                await self.start()
        except Exception as error:  # noqa: BLE001  # the border of a background task: the engine stays down
            cause = error.message if isinstance(error, BatonError) else None
            self._log.error("operator_act_failed", act=act, cause=cause, exc_info=None if cause else error)
            self._now(EngineState.FAILED)
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
            StartError: the engine cannot run.
        """
        async with self._turn:
            began = self._clock()
            await self.engine.start(report)
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
            await asyncio.sleep(POLL_S)
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


class Fleet:
    """The engines of one gateway, by name.

    Args:
        metrics: the gateway's metrics, which show the engines' states and restarts.
        supervision: when an engine counts as hung, and how often it is restarted.
        shared_registries: registries of metrics that belong to no single engine.
        at_once: how many engines may start at the same time.
        build: builds further engines; None: the fleet stays as it is.
        settle: called with the supervisors of all engines when these have changed.

    Attributes:
        metrics: the gateway's metrics.
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
    ) -> None:
        self.metrics = metrics or GatewayMetrics()
        self.build, self._settle = build, settle
        self._supervision = supervision or SupervisionSettings()
        self._turn = asyncio.Semaphore(at_once)
        self.events = Events(self.metrics.events)
        self._supervisors = {engine.name: self._supervised(engine) for engine in engines}
        self._leaving: dict[Supervisor, asyncio.Task[None]] = {}
        self._ends = False
        self._take_names()
        self._loading: set[str] = set()  # names of adapters
        self._shared_registries = shared_registries
        self._watching: asyncio.Task[None] | None = None
        self._started = False
        self.lost = asyncio.Event()

    def _supervised(self, engine: Engine) -> Supervisor:
        return Supervisor(
            engine,
            self._supervision,
            self._turn,
            self.metrics,
            tell=partial(self._tell, engine.name),
            lost=self._one_lost,
        )

    def _take_names(self) -> None:
        engines = [supervisor.latest for supervisor in self._supervisors.values()]
        aliases = {alias: engine.name for engine in engines for alias in engine.aliases}
        self._aliases = {alias: name for alias, name in aliases.items() if "*" not in alias}
        self._patterns = {alias: name for alias, name in aliases.items() if "*" in alias}
        self._settle([*self._supervisors.values()])

    def change(
        self,
        settings: Sequence[EngineSettings],
        built: Sequence[Engine],
        drain_s: float,
        busy: Callable[[Supervisor], bool],
        gone: Callable[[str], None],
    ) -> None:
        """Have these engines from now on; those whose settings are the same notice nothing.

        What is removed or replaced takes no further requests, and ends once those that run have ended.

        Args:
            settings: of all engines, in their order.
            built: those that are new, and those that take another one's place.
            drain_s: seconds that running requests get.
            busy: returns whether there are requests for an engine that have not ended.
            gone: called with the name of an engine that was removed, once it has ended.
        """
        before, self._supervisors = self._supervisors, {}
        new = {engine.name: engine for engine in built}
        for each in settings:
            known = before.pop(each.name, None)
            supervisor = known or self._supervised(new[each.name])
            self._supervisors[each.name] = supervisor
            if known is None:
                self._launch(each.name, supervisor)
            elif each.name in new:
                known.replace(new[each.name], drain_s, partial(busy, known))
            for engine in {id(one): one for one in (supervisor.engine, supervisor.latest)}.values():
                engine.rename(each.aliases, default=each.default)
        for name, supervisor in before.items():
            ended = supervisor.retire(drain_s, partial(busy, supervisor))
            left = self._left(name, supervisor, ended, gone)
            self._leaving[supervisor] = asyncio.create_task(left, name=f"remove-{name}")
        self._take_names()

    def _launch(self, name: str, supervisor: Supervisor) -> None:
        """Start an engine that was added, after those of its name that have not ended yet."""
        if former := self._leaving_as(name):
            former[0].add_done_callback(lambda _: self._launch(name, supervisor))
        elif self._supervisors.get(name) is supervisor and not self._ends:  # it was not removed meanwhile
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
            *(name for each in self.engines for name in each.adapters),
        ]

    def named(self, model: str) -> Engine | None:
        """Return the engine whose name, alias or pattern fits `model`."""
        supervisor = self._named(model)
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
        """True if every engine has been started once and at least one is ready; others may be restarting."""
        return self._started and EngineState.READY in self.states.values()

    @property
    def whole(self) -> bool:
        """True if every engine is ready."""
        return all(state is EngineState.READY for state in self.states.values())

    def count_states(self) -> dict[str, int]:
        """Count the engines in each state, e.g. `{"ready": 2}`; states without engines are left out."""
        return dict(Counter(state.value for state in self.states.values()))

    async def start(self, report: FleetReport) -> None:
        """Start every engine, `at_once` at a time in their order, then supervise them all.

        Raises:
            StartError: an engine cannot run; those that have not started yet are not started.
        """
        self._watching = asyncio.create_task(self._watch(), name="fleet-watch")
        starts = [
            asyncio.create_task(supervisor.begin(partial(report, name)))
            for name, supervisor in self._supervisors.items()
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
        for supervisor in self._supervisors.values():
            supervisor.keep()

    async def _watch(self) -> None:
        while True:
            for name, supervisor in list(self._supervisors.items()):
                try:
                    supervisor.look()
                except Exception as error:  # the border of a background task, which goes on
                    log.error("engine_look_failed", engine=name, exc_info=error)
            await asyncio.sleep(POLL_S)

    def _tell(self, name: str, state: EngineState, why: str | None) -> None:
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
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        supervisors = [*self._supervisors.values(), *self._leaving]
        await asyncio.gather(*(supervisor.close() for supervisor in supervisors))
        await asyncio.gather(*self._leaving.values())
        await asyncio.gather(*(supervisor.engine.stop() for supervisor in supervisors))

    def pick(self, model: object, *, pools: bool = False) -> Engine:
        """Return the ready engine whose name, alias or pattern fits `model`, or that has this adapter.

        Args:
            model: the request's `model`; None picks the only engine of its kind, or the default one.
            pools: whether the request is for an engine that pools; others are for one that generates.

        Raises:
            InvalidRequest: `model` is missing while several engines could answer, empty, or no string.
            ModelNotFound: no engine has that name or alias.
            EngineUnavailable: the engine is not ready.
        """
        if model is None:
            of_the_kind = [engine for engine in self.engines if engine.generates is not pools]
            default = [engine.name for engine in of_the_kind if engine.default]
            names = default or [engine.name for engine in of_the_kind] or self.names
            model = names[0] if len(names) == 1 else None
        if not isinstance(model, str) or not model:
            raise InvalidRequest(f"'model' must name one of: {', '.join(self.served)}.", param="model")
        supervisor = self._named(model)
        if supervisor is None:
            raise ModelNotFound.among(model, self.served)
        if supervisor.state is not EngineState.READY:
            raise supervisor.refusal()
        engine, adapter = supervisor.engine, supervisor.engine.adapters.get(model)
        return engine if adapter is None or engine.forwarding is not None else adapted(engine, adapter)

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
            self.metrics.engines.up.labels(name).set(current is EngineState.READY)
            for state in EngineState:
                self.metrics.engines.state.labels(name, state.value).set(state is current)
        registries = (self.metrics.registry, *self._shared_registries)
        return MergedRegistry((*registries, *(engine.registry for engine in self.engines)))
