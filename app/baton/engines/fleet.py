"""The engines of one gateway: started in order, kept alive, picked by name, stopped together."""

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
"""Told an engine's name and the phase its start is in; at last that it is `UP`."""
UP = "ready"


class Fleet:
    """Named engines with one owner.

    Engines start one after the other: vLLM's start changes process-wide state while it runs.

    Args:
        engines: what is served.
        metrics: the gateway's series, where the engines' states and restarts are told.
        supervision: when an engine counts as hung, and how often it is started anew.
        shared_registries: series that belong to no engine of ours alone.

    Attributes:
        lost: set when every engine failed too often to be started anew.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        metrics: GatewayMetrics | None = None,
        supervision: SupervisionSettings | None = None,
        shared_registries: tuple[CollectorRegistry, ...] = (),
    ) -> None:
        self.metrics = metrics or GatewayMetrics()
        supervision = supervision or SupervisionSettings()
        turn = asyncio.Lock()
        self._supervisors = {
            engine.name: Supervisor(engine, supervision, turn, self.metrics) for engine in engines
        }
        self._aliases = {alias: engine.name for engine in engines for alias in engine.aliases}
        self._shared_registries = shared_registries
        self._keepers: list[asyncio.Task[None]] = []
        self._started = False
        self.lost = asyncio.Event()

    @property
    def engines(self) -> tuple[Engine, ...]:
        return tuple(supervisor.engine for supervisor in self._supervisors.values())

    @property
    def names(self) -> list[str]:
        return list(self._supervisors)

    @property
    def served(self) -> str:
        """Every word that `pick` takes, for error messages."""
        return ", ".join((*self._supervisors, *self._aliases))

    @property
    def states(self) -> dict[str, EngineState]:
        return {name: supervisor.state for name, supervisor in self._supervisors.items()}

    @property
    def ready(self) -> bool:
        """Every engine has been started, and one at least answers: what is lost is being started anew."""
        return self._started and EngineState.READY in self.states.values()

    @property
    def whole(self) -> bool:
        return all(state is EngineState.READY for state in self.states.values())

    def count_states(self) -> dict[str, int]:
        return dict(Counter(state.value for state in self.states.values()))

    async def start(self, report: FleetReport) -> None:
        """Start every engine, and keep them alive from then on.

        Raises:
            StartError: the first engine that cannot run.
        """
        for name, supervisor in self._supervisors.items():
            await supervisor.start(partial(report, name))
            report(name, UP)
        self._started = True
        self._keepers = [
            asyncio.create_task(self._keep(supervisor), name=f"supervise-{name}")
            for name, supervisor in self._supervisors.items()
        ]

    async def _keep(self, supervisor: Supervisor) -> None:
        while not supervisor.given_up:
            try:
                await supervisor.keep_alive()
            except Exception as error:  # the border of a background task: it must not end unseen
                log.error("supervision_failed", engine=supervisor.engine.name, exc_info=error)
                await asyncio.sleep(1)
        if all(other.given_up for other in self._supervisors.values()):
            self.lost.set()

    async def stop(self) -> None:
        keepers, self._keepers = self._keepers, []
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)
        await asyncio.gather(*(engine.stop() for engine in self.engines))

    def pick(self, model: object) -> Engine:
        """The ready engine that `model` names; one engine alone needs no name.

        Raises:
            InvalidRequest: no model given and several are served, or it is not a string.
            ModelNotFound: nothing of that name is served.
            EngineUnavailable: it is served, but not ready.
        """
        if model is None and len(self._supervisors) == 1:
            model = self.names[0]
        if not isinstance(model, str) or not model:
            raise InvalidRequest(f"'model' must name one of: {self.served}.", param="model")
        supervisor = self._supervisors.get(self._aliases.get(model, model))
        if supervisor is None:
            raise ModelNotFound(
                f"The model '{model[:128]}' is not served here. Served are: {self.served}.", param="model"
            )
        if supervisor.state is not EngineState.READY:
            raise supervisor.refusal()
        return supervisor.engine

    def metrics_page(self) -> bytes:
        """The `/metrics` page: the gateway's series and every engine's."""
        for name, current in self.states.items():
            self.metrics.engines.up.labels(name).set(current is EngineState.READY)
            for state in EngineState:
                self.metrics.engines.state.labels(name, state.value).set(state is current)
        registries = (self.metrics.registry, *self._shared_registries)
        return MergedRegistry((*registries, *(engine.registry for engine in self.engines))).page()
