"""Start, supervise, pick and stop the engines of one gateway."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import structlog
from prometheus_client import CollectorRegistry

from baton.config.groups import SupervisionSettings
from baton.engines.port import Engine, EngineState
from baton.engines.supervisor import Supervisor
from baton.errors import InvalidRequest, ModelNotFound
from baton.telemetry.metrics import GatewayMetrics
from baton.telemetry.page import MergedRegistry

log = structlog.get_logger("baton.fleet")

FleetReport = Callable[[str, str], None]
"""Called with an engine's name and the phase its start is in; the last phase is `UP`."""
UP = "ready"


class Fleet:
    """The engines of one gateway, by name.

    Args:
        engines: the engines, not started.
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
        self._shared_registries = shared_registries
        self._supervisions: list[asyncio.Task[None]] = []
        self._started = False
        self.lost = asyncio.Event()

    @property
    def engines(self) -> tuple[Engine, ...]:
        return tuple(supervisor.engine for supervisor in self._supervisors.values())

    @property
    def names(self) -> list[str]:
        return list(self._supervisors)

    @property
    def served(self) -> list[str]:
        """All names and aliases that `pick` accepts."""
        return [*self._supervisors, *self._aliases]

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
        """Return the ready engine whose name or alias is `model`.

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
        supervisor = self._supervisors.get(self._aliases.get(model, model))
        if supervisor is None:
            raise ModelNotFound.among(model, self.served)
        if supervisor.state is not EngineState.READY:
            raise supervisor.refusal()
        return supervisor.engine

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
