"""Own the engines: start and stop them, pick one for a request, restart one that hangs or has died."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial

import structlog
from prometheus_client import CollectorRegistry

from baton.config.groups import SupervisionSettings
from baton.engines.adapters import Adapter
from baton.engines.backend import EngineState
from baton.engines.engine import Engine, LocalEngine, adapted
from baton.errors import (
    LONGEST_WORD,
    EngineRestarting,
    EngineUnavailable,
    InvalidRequest,
    ModelNotFound,
    StartError,
    did_you_mean,
)
from baton.telemetry.metrics import GatewayMetrics
from baton.telemetry.page import MergedRegistry

POLL_S = 0.2
REASONS = ("died", "hung", "start")
"""Why an engine is restarted: it ended, it made no progress, or the restart before failed."""
STEPS_OF_PATIENCE = 4
"""An engine counts as hung no sooner than after this many times its longest step so far."""


class Supervisor:
    """The supervision of one engine, from its first start to its end.

    Args:
        settings: when it counts as hung, and how often it is restarted.
        turn: held while it starts: as many engines start at once as memory allows.
        clock: seconds on a monotonic clock.

    Attributes:
        given_up: True once the engine has failed too often and stays down.
    """

    def __init__(
        self,
        engine: Engine,
        settings: SupervisionSettings,
        turn: AbstractAsyncContextManager[object],
        metrics: GatewayMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self._settings = settings
        self._turn = turn
        self._metrics = metrics
        self._clock = clock
        self._restarts: deque[float] = deque()
        self._start_s = 0.0
        self._down_since = 0.0
        self._log = structlog.get_logger("baton.fleet").bind(engine=engine.name)
        self.given_up = False
        metrics.engines.stalled.labels(engine.name).set(0)
        for reason in REASONS:
            metrics.engines.restarts.labels(engine.name, reason)

    @property
    def state(self) -> EngineState:
        """The engine's state, but `restarting` while it is down and will be restarted."""
        state = self.engine.state
        if self.given_up or state in (EngineState.READY, EngineState.UNREACHABLE) or not self._start_s:
            return EngineState.FAILED if self.given_up else state
        return EngineState.RESTARTING

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
        return EngineUnavailable(
            f"The engine for '{name}' is not running; try again later.", retry_after_s=30
        )

    async def start(self, report: Callable[[str], None] = lambda _phase: None) -> None:
        """Start the engine, once it is its turn.

        Raises:
            StartError: the engine cannot run.
        """
        async with self._turn:
            began = self._clock()
            await self.engine.start(report)
        self._start_s = max(self._clock() - began, 1e-3)
        self._metrics.engines.start.labels(self.engine.name).set(self._start_s)
        self._log.info("engine_ready", seconds=round(self._start_s, 1))

    async def keep_alive(self) -> None:
        """Restart the engine whenever it died or hangs; return once it has been given up."""
        while not self.given_up:
            reason = await self._trouble()
            self._down_since = self._clock()
            self._log.error("engine_lost", reason=reason)
            while not await self._restarted(reason):
                reason = "start"
            self._down_since = 0.0

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
        await self.engine.stop()
        if self._too_often():
            self.given_up = True
            self._log.error("engine_given_up", restarts=len(self._restarts), within_s=self._settings.window_s)
            return True
        delay = self._delay()
        self._restarts.append(self._clock() + delay)
        await asyncio.sleep(delay)
        self._metrics.engines.restarts.labels(self.engine.name, reason).inc()
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

    Attributes:
        metrics: the gateway's metrics.
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
    ) -> None:
        self.metrics = metrics or GatewayMetrics()
        supervision = supervision or SupervisionSettings()
        turn = asyncio.Semaphore(at_once)
        self._supervisors = {
            engine.name: Supervisor(engine, supervision, turn, self.metrics) for engine in engines
        }
        self._aliases = {alias: engine.name for engine in engines for alias in engine.aliases}
        self._loading: set[str] = set()  # names of adapters
        self._shared_registries = shared_registries
        self._supervisions: list[asyncio.Task[None]] = []
        self._started = False
        self.lost = asyncio.Event()

    @property
    def engines(self) -> tuple[Engine, ...]:
        return tuple(supervisor.engine for supervisor in self._supervisors.values())

    @property
    def here(self) -> tuple[LocalEngine, ...]:
        """The engines that run here."""
        return tuple(engine for engine in self.engines if engine.forwarding is None)

    @property
    def names(self) -> list[str]:
        return list(self._supervisors)

    @property
    def served(self) -> list[str]:
        """All names and aliases that `pick` accepts, those of adapters too."""
        return [
            *self._supervisors,
            *self._aliases,
            *(name for each in self.engines for name in each.adapters),
        ]

    @property
    def states(self) -> dict[str, EngineState]:
        return {name: supervisor.state for name, supervisor in self._supervisors.items()}

    @property
    def ready(self) -> bool:
        """Whether every engine has been started once and at least one is ready; others may be restarting."""
        return self._started and EngineState.READY in self.states.values()

    @property
    def whole(self) -> bool:
        """Whether every engine is ready."""
        return all(state is EngineState.READY for state in self.states.values())

    def count_states(self) -> dict[str, int]:
        """Count the engines in each state, e.g. `{"ready": 2}`; states without engines are left out."""
        return dict(Counter(state.value for state in self.states.values()))

    async def start(self, report: FleetReport) -> None:
        """Start every engine, `at_once` at a time in their order, then supervise them all.

        Raises:
            StartError: an engine cannot run; those that have not started yet are not started.
        """
        starts = [
            asyncio.create_task(self._start(name, supervisor, report), name=f"start-{name}")
            for name, supervisor in self._supervisors.items()
        ]
        try:
            await asyncio.gather(*starts)
        finally:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
        self._started = True
        self._supervisions = [
            asyncio.create_task(self._supervise(supervisor), name=f"supervise-{name}")
            for name, supervisor in self._supervisors.items()
        ]

    async def _start(self, name: str, supervisor: Supervisor, report: FleetReport) -> None:
        await supervisor.start(partial(report, name))
        report(name, UP)

    async def _supervise(self, supervisor: Supervisor) -> None:
        while not supervisor.given_up:
            try:
                await supervisor.keep_alive()
            except Exception as error:  # the border of a background task: it must not end silently
                log.error("supervision_failed", engine=supervisor.engine.name, exc_info=error)
                await asyncio.sleep(1)
        if all(other.given_up for other in self._supervisors.values()):
            self.lost.set()

    async def stop(self) -> None:
        """End the supervision, then stop every engine."""
        supervisions, self._supervisions = self._supervisions, []
        for supervision in supervisions:
            supervision.cancel()
        await asyncio.gather(*supervisions, return_exceptions=True)
        await asyncio.gather(*(engine.stop() for engine in self.engines))

    def pick(self, model: object, *, pools: bool = False) -> Engine:
        """Return the ready engine whose name or alias is `model`, or the one with the adapter of this name.

        Args:
            model: the request's `model`; None picks the only engine of its kind, where there is one only.
            pools: whether the request is for an engine that pools; others are for one that generates.

        Raises:
            InvalidRequest: `model` is missing while several engines could answer, empty, or no string.
            ModelNotFound: no engine has that name or alias.
            EngineUnavailable: the engine is not ready.
        """
        if model is None:
            of_the_kind = [engine.name for engine in self.engines if engine.generates is not pools]
            names = of_the_kind or self.names
            model = names[0] if len(names) == 1 else None
        if not isinstance(model, str) or not model:
            raise InvalidRequest(f"'model' must name one of: {', '.join(self.served)}.", param="model")
        supervisor = self._supervisors.get(self._aliases.get(model, model)) or self._with_adapter(model)
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
