"""Run the requests of one plugin: admit, parse, make prompts, encode, answer."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import structlog

from baton.admission.fair_queue import QueueLimits, watched_queue
from baton.config.groups import PoolingSettings
from baton.engines.backend import Json
from baton.engines.engine import LocalEngine, Plugin
from baton.errors import BatonError, EngineOverloaded, PluginFailed, PluginTimeout
from baton.pooling.answer import PluginAnswer, client_error, forget, too_long
from baton.pooling.encoding import Encoding
from baton.pooling.hooks import PluginLoopThread
from baton.pooling.processor import PluginProcessor
from baton.pooling.refusals import where
from baton.pooling.values import Upload
from baton.telemetry.ids import RequestContext
from baton.telemetry.metrics import PoolingMetrics, QueueMetrics

log = structlog.get_logger("baton.pooling")

RETRY_AFTER_S = 5


class Runner:
    """Runs the requests of one plugin.

    Args:
        engine: encodes the prompts.
        plugin: the engine's plugin.
        settings: limits of requests and uploads.
        metrics: of plugin requests.
        queues: of waiting requests.
    """

    def __init__(
        self,
        engine: LocalEngine,
        plugin: Plugin,
        settings: PoolingSettings,
        metrics: PoolingMetrics,
        *,
        queues: QueueMetrics,
    ) -> None:
        self.plugin = plugin
        self._engine = engine
        self._settings = settings
        self._metrics = metrics
        self._processor = PluginProcessor(plugin, settings.threads)
        requests = QueueLimits(settings.requests, settings.waiting, settings.wait_s)
        uploads = QueueLimits(settings.requests + settings.waiting, waiting=0)
        self._places = watched_queue(requests, _no_place, queues, "plugin", engine=engine.name)
        self._uploads = watched_queue(uploads, _no_place, queues, "uploads", engine=engine.name)
        metrics.left_behind.labels(engine.name).set_function(lambda: self._processor.left_behind)

    def close(self) -> None:
        self._processor.close()

    @contextlib.asynccontextmanager
    async def receiving(self, tenant: str) -> AsyncIterator[None]:
        """Hold a place for an upload while its body is read, for at most the time limit.

        Raises:
            OperationUnsupported: the plugin takes JSON only.
            EngineOverloaded: as many uploads of this tenant arrive already as its requests may run and wait.
            PluginTimeout: the upload took longer than the time limit.
        """
        self._processor.require_uploads()
        self._processor.require_threads()
        self._places.require_room(tenant)
        async with self._uploads.place(tenant):
            try:
                async with asyncio.timeout(self._settings.time_limit_s):
                    yield
            except TimeoutError:
                limit = self._settings.time_limit_s
                raise PluginTimeout(f"The file had not arrived after {limit:g} seconds.") from None

    @contextlib.asynccontextmanager
    async def _admitted(self, tenant: str) -> AsyncIterator[None]:
        """Hold a place among the running requests; a request is parsed only once it has one."""
        self._processor.require_threads()
        async with self._places.place(tenant):
            running = self._metrics.running.labels(self._engine.name)
            running.inc()
            try:
                yield
            finally:
                running.dec()

    async def run(
        self, work: Json | Upload, context: RequestContext, *, priority: int = 0, describe: bool = False
    ) -> PluginAnswer:
        """Run one request up to its answer.

        Args:
            work: the body of a JSON request, or an uploaded file.
            context: our ids of the request.
            priority: of its prompts in the engine; lower is sooner.
            describe: whether `PluginAnswer.describe` will be called.

        Raises:
            BatonError: the request was refused or failed; the plugin has been made to forget it.
        """
        if describe:
            self._processor.require_description()
        processor = self._processor.of(context.tenant)
        outcome, limit = "failed", self._settings.time_limit_s
        try:
            async with self._admitted(context.tenant):
                deadline = asyncio.get_running_loop().time() + limit
                async with asyncio.timeout_at(deadline):
                    output = await self._run(processor, work, context, priority, describe=describe)
            outcome = "ok"
            return PluginAnswer(processor, output, context.request_id, deadline=deadline, time_limit_s=limit)
        except TimeoutError:
            outcome = "timeout"
            raise too_long(limit) from None
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        except BatonError as error:
            outcome = "refused" if error.status < 500 else "failed"
            raise
        finally:
            self._metrics.requests.labels(self._engine.name, outcome).inc()
            if outcome != "ok":
                await forget(processor, context.request_id)

    async def _run(
        self,
        processor: PluginProcessor,
        work: Json | Upload,
        context: RequestContext,
        priority: int,
        *,
        describe: bool,
    ) -> Any:
        with processor.loop_thread() as thread:
            try:
                with self._timed("parse"):
                    data = await _parsed(processor, work)
                    if describe:
                        data = await processor.for_description(data)
                    params = await processor.params()
                with self._timed("prepare"):
                    prompts = await processor.prompts(data, context.request_id, thread)
            except Exception as error:
                raise client_error(error, processor.name, "prepare", at_input=True) from error
            encoding = Encoding(
                self._engine, prompts, params, context, priority=priority, room=self._settings.prompts
            )
            with self._timed("encode"):
                output = await self._encoded(processor, encoding, context, thread)
        await self._count(processor, output)
        return output

    async def _encoded(
        self,
        processor: PluginProcessor,
        encoding: Encoding,
        context: RequestContext,
        thread: PluginLoopThread | None,
    ) -> Any:
        name = processor.name
        try:
            output = await processor.answer(encoding, context.request_id, thread)
            if encoding.failure is not None:  # a plugin may have swallowed it
                raise encoding.failure
        except Exception as error:
            at_input = encoding.failure is not None  # by the engine, or while a prompt was made
            raise client_error(encoding.failure or error, name, "encode", at_input=at_input) from error
        finally:
            self._metrics.prompts.labels(self._engine.name).inc(encoding.count)
            await self._close(encoding)
        if output is None:
            raise client_error(PluginFailed(), name, "answer", at_input=False)
        return output

    async def _count(self, processor: PluginProcessor, output: Any) -> None:
        """Count what the plugin says the answer amounts to; an error is logged and fails nothing."""
        try:
            self._metrics.count_amounts(self._engine.name, await processor.amounts(output))
        except Exception as error:  # noqa: BLE001  # the border to the plugin
            log.error("plugin_failed", plugin=processor.name, step="amounts", cause=where(error))

    async def _close(self, encoding: Encoding) -> None:
        """Close the prompts; an error of the plugin meanwhile is logged and fails nothing."""
        try:
            await encoding.close()
        except Exception as error:  # noqa: BLE001  # the border to the plugin
            log.error("plugin_failed", plugin=self._processor.name, step="close", cause=where(error))

    @contextlib.contextmanager
    def _timed(self, step: str) -> Any:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._metrics.seconds.labels(self._engine.name, step).observe(time.perf_counter() - began)


async def _parsed(processor: PluginProcessor, work: Json | Upload) -> Any:
    return await (processor.parse_upload(work) if isinstance(work, Upload) else processor.parse(work))


def _no_place(waited_s: float | None) -> BatonError:
    message = None
    if waited_s is not None:
        message = f"The plugin had no place for this request within {waited_s:g} seconds; try again later."
    return EngineOverloaded(message, retry_after_s=RETRY_AFTER_S)
