"""One plugin engine's requests: admitted, prepared, encoded, answered, forgotten."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import structlog

from baton.admission.fair_queue import QueueLimits, watched_queue
from baton.config.groups import PoolingSettings
from baton.engines.port import Engine, Json, Plugin
from baton.errors import BatonError, EngineOverloaded, PluginFailed, PluginTimeout
from baton.pooling.encoding import Encoding
from baton.pooling.hooks import Home
from baton.pooling.processor import Description, Processor, ResultFile, Upload
from baton.pooling.refusals import refusal, where
from baton.pooling.uploads import require_folder
from baton.telemetry.ids import RequestContext
from baton.telemetry.metrics import PoolingMetrics
from baton.telemetry.queues import QueueMetrics

log = structlog.get_logger("baton.pooling")

RETRY_AFTER_S = 5
FORGET_WAIT_S = 1.0
"""How long an answer waits for the plugin to forget its request; the forgetting goes on."""


class Answer:
    """What a plugin made of one request; kept until it is closed.

    Args:
        processor: the plugin's.
        output: of its last hook.
        request_id: ours.
        deadline: by the loop's clock, for what is still to be made of it.
        time_limit_s: what that came from.
    """

    def __init__(
        self, processor: Processor, output: Any, request_id: str, *, deadline: float, time_limit_s: float
    ) -> None:
        self._processor = processor
        self._output = output
        self._request_id = request_id
        self._deadline = deadline
        self._closed = False
        self.time_limit_s = time_limit_s

    async def data(self) -> Any:
        """What stands in `data` of a JSON answer.

        Raises:
            BatonError: the plugin failed, or took too long.
        """
        return await self._step(self._processor.data(self._output))

    async def files(self) -> list[ResultFile]:
        """The answer as files; none: the plugin makes none.

        Raises:
            BatonError: the plugin failed, or took too long.
        """
        files: list[ResultFile] = await self._step(self._processor.files(self._output))
        return files

    async def describe(self) -> Description:
        """Return the plugin's description of the answer; the request must have been run with `describe`.

        Raises:
            BatonError: the plugin failed, or took too long.
        """
        description: Description = await self._step(self._processor.describe(self._output))
        return description

    async def _step(self, step: Any) -> Any:
        try:
            async with asyncio.timeout_at(self._deadline):
                return await step
        except TimeoutError:
            raise _too_long(self.time_limit_s) from None
        except Exception as error:
            raise _told(error, self._processor.name, "answer", at_input=False) from error

    async def close(self) -> None:
        """Let the plugin forget the request; a second call does nothing."""
        if not self._closed:
            self._closed = True
            await _forget(self._processor, self._request_id)


class Runner:
    """Runs the requests of one plugin.

    Args:
        engine: what encodes; its plugin is there.
        plugin: its plugin.
        settings: what requests may take.
        metrics: where to count.
        queues: counts who waits.
    """

    def __init__(
        self,
        engine: Engine,
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
        self._processor = Processor(plugin, settings.threads)
        works = QueueLimits(settings.requests, settings.waiting, settings.wait_s)
        uploads = QueueLimits(settings.requests + settings.waiting, waiting=0)
        self._places = watched_queue(works, _no_place, queues, "plugin", engine=engine.name)
        self._uploads = watched_queue(uploads, _no_place, queues, "uploads", engine=engine.name)
        metrics.left_behind.labels(engine.name).set_function(lambda: self._processor.left_behind)

    def close(self) -> None:
        self._processor.close()

    @contextlib.asynccontextmanager
    async def receiving(self, tenant: str) -> AsyncIterator[None]:
        """A place for a file on its way in, and the time it may take; before it is read.

        Raises:
            OperationUnsupported: the plugin takes JSON only.
            EngineOverloaded: as many of this tenant's files as requests may run and wait come in already.
            PluginTimeout: it took too long to come.
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
        """A place among the requests under way; nothing of a request is looked at before it has one."""
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
    ) -> Answer:
        """Do one request.

        Args:
            work: the body of a JSON request, or a file sent as it is.
            context: our ids for it.
            priority: lower is sooner.
            describe: `Answer.describe` will be called.

        Raises:
            BatonError: whatever went wrong; nothing of the request is left.
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
            return Answer(processor, output, context.request_id, deadline=deadline, time_limit_s=limit)
        except TimeoutError:
            outcome = "timeout"
            raise _too_long(limit) from None
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        except BatonError as error:
            outcome = "refused" if error.status < 500 else "failed"
            raise
        finally:
            self._metrics.requests.labels(self._engine.name, outcome).inc()
            if outcome != "ok":
                await _forget(processor, context.request_id)

    async def _run(
        self,
        processor: Processor,
        work: Json | Upload,
        context: RequestContext,
        priority: int,
        *,
        describe: bool,
    ) -> Any:
        with processor.at_home() as home:
            try:
                with self._timed("parse"):
                    data = await _parsed(processor, work)
                    if describe:
                        data = await processor.for_description(data)
                    params = await processor.params()
                with self._timed("prepare"):
                    prompts = await processor.prompts(data, context.request_id, home)
            except Exception as error:
                raise _told(error, processor.name, "prepare", at_input=True) from error
            encoding = Encoding(
                self._engine, prompts, params, context, priority=priority, room=self._settings.prompts
            )
            with self._timed("encode"):
                output = await self._encoded(processor, encoding, context, home)
        await self._count(processor, output)
        return output

    async def _encoded(
        self, processor: Processor, encoding: Encoding, context: RequestContext, home: Home | None
    ) -> Any:
        name = processor.name
        try:
            output = await processor.answer(encoding, context.request_id, home)
            if encoding.failure is not None:  # a plugin may have swallowed it
                raise encoding.failure
        except Exception as error:
            lazily = encoding.failure is not None  # by the engine, or while a prompt was made
            raise _told(encoding.failure or error, name, "encode", at_input=lazily) from error
        finally:
            self._metrics.prompts.labels(self._engine.name).inc(encoding.count)
            await self._close(encoding)
        if output is None:
            raise _told(PluginFailed(), name, "answer", at_input=False)
        return output

    async def _count(self, processor: Processor, output: Any) -> None:
        """What the plugin says the answer amounts to; failing here costs the count and nothing else."""
        try:
            self._metrics.count_amounts(self._engine.name, await processor.amounts(output))
        except Exception as error:  # noqa: BLE001  # the border to the plugin
            log.error("plugin_failed", plugin=processor.name, step="amounts", cause=where(error))

    async def _close(self, encoding: Encoding) -> None:
        """What a plugin does while its prompts are closed changes nothing of the answer."""
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


async def _parsed(processor: Processor, work: Json | Upload) -> Any:
    return await (processor.parse_upload(work) if isinstance(work, Upload) else processor.parse(work))


def _no_place(waited_s: float | None) -> BatonError:
    told = None
    if waited_s is not None:
        told = f"The plugin had no place for this request within {waited_s:g} seconds; try again later."
    return EngineOverloaded(told, retry_after_s=RETRY_AFTER_S)


def _too_long(limit: float) -> PluginTimeout:
    return PluginTimeout(f"The request was not done within {limit:g} seconds.")


def _told(error: BaseException, plugin: str, step: str, *, at_input: bool) -> BatonError:
    told = refusal(error, at_input=at_input)
    if told.status >= 500 and not told.retryable:
        log.error("plugin_failed", plugin=plugin, step=step, cause=where(error))
        log.debug("plugin_failed", plugin=plugin, exc_info=error)
    return told


async def _forget(processor: Processor, request_id: str) -> None:
    """Have the plugin forget a request; waits a moment for it, no more."""
    forgetting = asyncio.ensure_future(_forgotten(processor, request_id))
    await asyncio.wait({forgetting}, timeout=FORGET_WAIT_S)


async def _forgotten(processor: Processor, request_id: str) -> None:
    try:
        await processor.forget(request_id)
    except Exception as error:  # noqa: BLE001  # the border to the plugin; the request is over anyway
        log.error("plugin_failed", plugin=processor.name, step="forget", cause=where(error))


class Pooling:
    """The runners of one gateway, one for each engine that has a plugin.

    Args:
        settings: what requests may take.
        metrics: where to count.
        queues: counts who waits.

    Raises:
        SettingsError: files cannot be put where the settings say.
    """

    def __init__(self, settings: PoolingSettings, metrics: PoolingMetrics, queues: QueueMetrics) -> None:
        self.settings = settings
        self._metrics = metrics
        self._queues = queues
        require_folder(settings.spool_dir)
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
            known = self._runners[engine.name] = Runner(
                engine, plugin, self.settings, self._metrics, queues=self._queues
            )
        return known

    def close(self) -> None:
        for runner in self._runners.values():
            runner.close()
        self._runners.clear()
