"""One plugin engine's requests: admitted, prepared, encoded, answered, forgotten."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import structlog

from baton.engines.port import Engine, Json, Plugin
from baton.errors import BatonError, EngineOverloaded, PluginFailed, PluginTimeout
from baton.pooling.encoding import Encoding
from baton.pooling.processor import Processor, ResultFile, Upload
from baton.pooling.refusals import refusal, where
from baton.settings import PoolingSettings
from baton.telemetry.ids import RequestContext
from baton.telemetry.metrics import PoolingMetrics

log = structlog.get_logger("baton.pooling")


@dataclass
class Answer:
    """What a plugin made of one request; kept until it is closed."""

    _processor: Processor
    _output: Any
    _request_id: str

    async def data(self) -> Any:
        """What stands in `data` of a JSON answer.

        Raises:
            BatonError: the plugin failed.
        """
        return await self._step(self._processor.data(self._output))

    async def files(self) -> list[ResultFile]:
        """The answer as files; none: the plugin makes none.

        Raises:
            BatonError: the plugin failed.
        """
        files: list[ResultFile] = await self._step(self._processor.files(self._output))
        return files

    async def _step(self, step: Any) -> Any:
        try:
            return await step
        except Exception as error:  # the border to the plugin
            raise _told(error, self._processor.name, "answer", at_input=False) from error

    async def close(self) -> None:
        await _forget(self._processor, self._request_id)


class Runner:
    """Runs the requests of one plugin.

    Args:
        engine: what encodes; its plugin is there.
        plugin: its plugin.
        settings: what requests may take.
        metrics: where to count.
    """

    def __init__(
        self, engine: Engine, plugin: Plugin, settings: PoolingSettings, metrics: PoolingMetrics
    ) -> None:
        self.plugin = plugin
        self._engine = engine
        self._settings = settings
        self._metrics = metrics
        self._processor = Processor(plugin, settings.threads)
        self._slots = asyncio.Semaphore(settings.requests)
        self._waiting = 0
        metrics.left_behind.labels(engine.name).set_function(lambda: self._processor.threads.left_behind)

    def close(self) -> None:
        self._processor.close()

    def require_uploads(self) -> None:
        """See to it that a file sent as it is has somewhere to go, before it is read.

        Raises:
            OperationUnsupported: the plugin takes JSON only.
            EngineOverloaded: too many requests wait already.
        """
        self._processor.require_uploads()
        self._require_room()

    def _require_room(self) -> None:
        if self._slots.locked() and self._waiting >= self._settings.waiting:
            raise EngineOverloaded(retry_after_s=5)

    @contextlib.asynccontextmanager
    async def _admitted(self) -> AsyncIterator[None]:
        """A place among the requests under way; nothing of a request is looked at before it has one."""
        self._require_room()
        self._waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= 1
        running = self._metrics.running.labels(self._engine.name)
        running.inc()
        try:
            yield
        finally:
            running.dec()
            self._slots.release()

    async def run(self, work: Json | Upload, context: RequestContext, *, priority: int = 0) -> Answer:
        """Do one request.

        Args:
            work: the body of a JSON request, or a file sent as it is.
            context: our ids for it.
            priority: lower is sooner.

        Raises:
            BatonError: whatever went wrong; nothing of the request is left.
        """
        outcome = "failed"
        async with self._admitted():
            try:
                async with asyncio.timeout(self._settings.time_limit_s):
                    answer = await self._run(work, context, priority)
                outcome = "ok"
                return answer
            except TimeoutError:
                outcome = "timeout"
                raise PluginTimeout(
                    f"The request was not done within {self._settings.time_limit_s:g} seconds."
                ) from None
            except asyncio.CancelledError:
                outcome = "cancelled"
                raise
            except BatonError as error:
                outcome = "refused" if error.status < 500 else "failed"
                raise
            finally:
                self._metrics.requests.labels(self._engine.name, outcome).inc()
                if outcome != "ok":
                    await _forget(self._processor, context.request_id)

    async def _run(self, work: Json | Upload, context: RequestContext, priority: int) -> Answer:
        name = self._processor.name
        try:
            with self._timed("parse"):
                data = await self._parse(work)
                params = await self._processor.params()
            with self._timed("prepare"):
                prompts = await self._processor.prompts(data, context.request_id)
        except Exception as error:  # the border to the plugin
            raise _told(error, name, "prepare", at_input=True) from error
        encoding = Encoding(
            self._engine, prompts, params, context, priority=priority, room=self._settings.prompts
        )
        try:
            with self._timed("encode"):
                output = await self._processor.answer(encoding, context.request_id)
            if encoding.failure is not None:  # a plugin may have swallowed it
                raise encoding.failure
        except Exception as error:  # the border to the plugin, and to the engine behind it
            lazily = encoding.failure is not None  # by the engine, or while a prompt was made
            raise _told(encoding.failure or error, name, "encode", at_input=lazily) from error
        finally:
            await encoding.close()
            self._metrics.prompts.labels(self._engine.name).inc(encoding.count)
        if output is None:
            raise _told(PluginFailed(), name, "answer", at_input=False)
        return Answer(self._processor, output, context.request_id)

    async def _parse(self, work: Json | Upload) -> Any:
        if isinstance(work, Upload):
            return await self._processor.parse_upload(work)
        return await self._processor.parse(work)

    @contextlib.contextmanager
    def _timed(self, step: str) -> Any:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._metrics.seconds.labels(self._engine.name, step).observe(time.perf_counter() - began)


def _told(error: BaseException, plugin: str, step: str, *, at_input: bool) -> BatonError:
    told = refusal(error, at_input=at_input)
    if told.status >= 500 and not told.retryable:
        log.error("plugin_failed", plugin=plugin, step=step, cause=where(error))
        log.debug("plugin_failed", plugin=plugin, exc_info=error)
    return told


async def _forget(processor: Processor, request_id: str) -> None:
    """Shielded: what a request leaves goes, also when the request is cancelled once more."""
    forgetting = asyncio.ensure_future(processor.forget(request_id))
    try:
        await asyncio.shield(forgetting)
    except Exception as error:  # noqa: BLE001  # the border to the plugin; the request is over anyway
        log.error("plugin_failed", plugin=processor.name, step="forget", cause=where(error))


class Pooling:
    """The runners of one gateway, one for each engine that has a plugin.

    Args:
        settings: what requests may take.
        metrics: where to count.
    """

    def __init__(self, settings: PoolingSettings, metrics: PoolingMetrics) -> None:
        self.settings = settings
        self._metrics = metrics
        self._runners: dict[str, Runner] = {}

    def runner(self, engine: Engine) -> Runner | None:
        """The runner of an engine's plugin; None: it has none. An engine that was restarted has a new one."""
        plugin = engine.plugin
        if plugin is None:
            return None
        known = self._runners.get(engine.name)
        if known is None or known.plugin is not plugin:
            if known is not None:
                known.close()
            known = self._runners[engine.name] = Runner(engine, plugin, self.settings, self._metrics)
        return known

    def close(self) -> None:
        for runner in self._runners.values():
            runner.close()
        self._runners.clear()
