"""The engines of one gateway: started in order, picked by name, stopped together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial

import structlog
from prometheus_client import CollectorRegistry

from baton.engines.port import Engine, EngineState
from baton.errors import EngineUnavailable, InvalidRequest, ModelNotFound
from baton.telemetry.metrics import GatewayMetrics, MergedRegistry

FleetReport = Callable[[str, str], None]
"""Told an engine's name and the phase its start is in."""


class Fleet:
    """Named engines with one owner.

    Engines start one after the other: vLLM's start changes process-wide state while it runs.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        shared_registries: tuple[CollectorRegistry, ...] = (),
    ) -> None:
        self._engines = {engine.name: engine for engine in engines}
        self._shared_registries = shared_registries
        self._log = structlog.get_logger("baton.fleet")

    @property
    def engines(self) -> tuple[Engine, ...]:
        return tuple(self._engines.values())

    @property
    def names(self) -> list[str]:
        return list(self._engines)

    @property
    def ready(self) -> bool:
        return all(engine.state is EngineState.READY for engine in self.engines)

    async def start(self, report: FleetReport, metrics: GatewayMetrics) -> None:
        """Start every engine.

        Raises:
            StartError: the first engine that cannot run.
        """
        for engine in self.engines:
            began = time.monotonic()
            await engine.start(partial(report, engine.name))
            seconds = time.monotonic() - began
            metrics.engine_start.labels(engine.name).set(seconds)
            self._log.info("engine_ready", engine=engine.name, seconds=round(seconds, 1))

    async def stop(self) -> None:
        await asyncio.gather(*(engine.stop() for engine in self.engines))

    def pick(self, model: object) -> Engine:
        """The ready engine that `model` names; one engine alone needs no name.

        Raises:
            InvalidRequest: no model given and several are served, or it is not a string.
            ModelNotFound: nothing of that name is served.
            EngineUnavailable: it is served, but not ready.
        """
        served = ", ".join(self._engines)
        if model is None and len(self._engines) == 1:
            model = self.names[0]
        if not isinstance(model, str) or not model:
            raise InvalidRequest(f"'model' must name one of: {served}.", param="model")
        engine = self._engines.get(model)
        if engine is None:
            raise ModelNotFound(
                f"The model '{model[:128]}' is not served here. Served are: {served}.", param="model"
            )
        if engine.state is not EngineState.READY:
            raise _not_ready(engine)
        return engine

    def metrics_page(self, metrics: GatewayMetrics) -> bytes:
        """The `/metrics` page: the gateway's series and every engine's."""
        for engine in self.engines:
            metrics.engine_up.labels(engine.name).set(engine.state is EngineState.READY)
        registries = (metrics.registry, *self._shared_registries)
        return MergedRegistry((*registries, *(engine.registry for engine in self.engines))).page()


def _not_ready(engine: Engine) -> EngineUnavailable:
    if engine.state is EngineState.STARTING:
        return EngineUnavailable(
            f"The engine for '{engine.name}' is still starting; try again shortly.", retry_after_s=5
        )
    return EngineUnavailable(
        f"The engine for '{engine.name}' is not running; try again later.", retry_after_s=30
    )
