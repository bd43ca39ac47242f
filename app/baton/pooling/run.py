"""Run the requests of plugins: admit, parse, make prompts, encode a few at once, answer, forget."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import structlog

from baton.admission.fair_queue import USUAL, Order, QueueLimits, watched_queue
from baton.config.groups import BatchSettings, PoolingSettings
from baton.engines.backend import Json
from baton.engines.engine import Engine, LocalEngine, Plugin
from baton.errors import BatonError, EngineOverloaded, PluginFailed, PluginTimeout
from baton.pooling.errors import client_error, where
from baton.pooling.plugin import Description, PluginLoopThread, PluginProcessor, ResultFile, Upload
from baton.pooling.uploads import require_folder
from baton.telemetry.ids import RequestContext
from baton.telemetry.metrics import PoolingMetrics, QueueMetrics

log = structlog.get_logger("baton.pooling")

RETRY_AFTER_S = 5
FORGET_WAIT_S = 1.0
"""Seconds that an answer waits for the plugin's `forget`, which goes on in the background."""
_END = object()


class Pooling:
    """The runners of one gateway, one for each engine that has a plugin.

    Raises:
        SettingsError: no files can be made in `spool_dir`.
    """

    def __init__(
        self,
        settings: PoolingSettings,
        metrics: PoolingMetrics,
        queues: QueueMetrics,
        batches: BatchSettings | None = None,
    ) -> None:
        self.settings = settings
        self._batches = batches or BatchSettings()
        self._metrics = metrics
        self._queues = queues
        require_folder(settings.spool_dir)
        self._runners: dict[str, Runner] = {}

    def runner(self, engine: Engine) -> Runner | None:
        """Find the runner of an engine's plugin, a new one after a restart; None: it has no plugin."""
        if engine.forwarding is not None or (plugin := engine.plugin) is None:
            return None
        known = self._runners.get(engine.name)
        if known is None or known.plugin is not plugin:
            if known is not None:
                known.close()
            known = self._runners[engine.name] = Runner(
                engine, plugin, self.settings, self._metrics, queues=self._queues, batches=self._batches
            )
        return known

    def remove(self, name: str) -> None:
        """Close the runner of an engine that was removed, if it has one."""
        if (runner := self._runners.pop(name, None)) is not None:
            runner.close()

    def close(self) -> None:
        for runner in self._runners.values():
            runner.close()
        self._runners.clear()


class Runner:
    """Runs the requests of one engine's plugin."""

    def __init__(
        self,
        engine: LocalEngine,
        plugin: Plugin,
        settings: PoolingSettings,
        metrics: PoolingMetrics,
        *,
        queues: QueueMetrics,
        batches: BatchSettings,
    ) -> None:
        self.plugin = plugin
        self._engine = engine
        self._settings = settings
        self._metrics = metrics
        self._processor = PluginProcessor(plugin, settings.threads)
        requests = QueueLimits(
            settings.requests,
            settings.waiting,
            settings.wait_s,
            behind=min(batches.lines, settings.requests),
            beside=batches.lines_beside,
            quiet_s=batches.quiet_s,
        )
        uploads = QueueLimits(settings.requests + settings.waiting, waiting=0)
        self._places = watched_queue(requests, _no_place, queues, "plugin", engine=engine.name)
        self._uploads = watched_queue(uploads, _no_place, queues, "uploads", engine=engine.name)
        metrics.left_behind.labels(engine.name).set_function(lambda: self._processor.left_behind)

    def close(self) -> None:
        self._processor.close()

    async def progress(self, context: RequestContext) -> dict[str, int]:
        """Ask the plugin how far a running request is; empty: it is not known."""
        try:
            return await self._processor.of(context.tenant).progress(context.request_id)
        except Exception as error:  # noqa: BLE001  # the border to the plugin
            log.error("plugin_failed", plugin=self.plugin.name, step="progress", cause=where(error))
            return {}

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
    async def _admitted(self, context: RequestContext, order: Order) -> AsyncIterator[None]:
        """Hold a place among the running requests; a request is parsed only once it has one."""
        self._processor.require_threads()
        async with self._places.place(context.tenant, context.give_way, order=order):
            running = self._metrics.running.labels(self._engine.name)
            running.inc()
            try:
                yield
            finally:
                running.dec()

    async def run(
        self,
        work: Json | Upload,
        context: RequestContext,
        *,
        order: Order = USUAL,
        priority: int = 0,
        describe: bool = False,
        keep: bool = False,
    ) -> PluginAnswer:
        """Run one request up to its answer.

        Args:
            work: the body of a JSON request, or an uploaded file.
            order: of the request among its tenant's own.
            priority: of its prompts in the engine; lower is sooner.
            describe: whether `PluginAnswer.describe` will be called.
            keep: whether the files of the answer will be kept.

        Raises:
            BatonError: the request was refused or failed; the plugin has been made to forget it.
        """
        if describe:
            self._processor.require_description()
        processor = self._processor.of(context.tenant)
        outcome, limit = "failed", self._settings.time_limit_s
        try:
            async with self._admitted(context, order):
                deadline = asyncio.get_running_loop().time() + limit
                async with asyncio.timeout_at(deadline):
                    output = await self._run(processor, work, context, priority, describe=describe, keep=keep)
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
        keep: bool,
    ) -> Any:
        with processor.loop_thread() as thread:
            try:
                with self._timed("parse"):
                    data = await _parsed(processor, work)
                    if describe:
                        data = await processor.for_description(data)
                    if keep:
                        data = await processor.for_files(data)
                    params = await processor.params()
                with self._timed("prepare"):
                    prompts = await processor.prompts(data, context.request_id, thread)
            except Exception as error:
                raise client_error(error, processor.name, "prepare", at_input=True) from error
            encoding = Encoding(
                self._engine,
                prompts,
                params,
                context,
                priority=priority,
                room=processor.prompts_at_once(self._settings.prompts),
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


class Encoding:
    """An async iterator of (number of the prompt, `PoolingRequestOutput`), in the order they finish.

    The next prompt is made only when there is room for it in the engine, and an output that has not been
    taken yet keeps its room: memory stays bounded however many prompts a request has.

    Args:
        prompts: made one after the other; closed by `close`.
        priority: of each prompt; lower is sooner.
        room: prompts in the engine at once.

    Attributes:
        failure: the first error, if any; it is also raised to the consumer of the outputs.
        count: prompts made so far.
    """

    def __init__(
        self,
        engine: LocalEngine,
        prompts: AsyncGenerator[Any, None],
        params: Any,
        context: RequestContext,
        *,
        priority: int,
        room: int,
    ) -> None:
        self._engine = engine
        self._prompts = prompts
        self._params = params
        self._context = context
        self._priority = priority
        self._room = room
        self._running: dict[asyncio.Task[Any], int] = {}
        self._next_prompt: asyncio.Task[Any] | None = None
        self._exhausted = False
        self.failure: BaseException | None = None
        self.count = 0

    def __aiter__(self) -> Encoding:
        return self

    async def __anext__(self) -> tuple[int, Any]:
        while True:
            self._request_prompt()
            waited = [*self._running, *([self._next_prompt] if self._next_prompt else [])]
            if not waited:
                self._require_some()
                raise StopAsyncIteration
            done, _ = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            try:
                if self._next_prompt in done:
                    self._start()
                finished = next((task for task in done if task in self._running), None)
                if finished is not None:
                    return self._running.pop(finished), finished.result()
            except BaseException as error:
                self.failure = self.failure or error
                raise

    def _request_prompt(self) -> None:
        """Begin to make the next prompt as soon as there is room for it."""
        if self._next_prompt is None and not self._exhausted and len(self._running) < self._room:
            self._next_prompt = asyncio.ensure_future(anext(self._prompts, _END))

    def _start(self) -> None:
        assert self._next_prompt is not None
        made, self._next_prompt = self._next_prompt, None
        prompt = made.result()
        if prompt is _END:
            self._exhausted = True
            return
        number, self.count = self.count, self.count + 1
        work = self._engine.encode(
            prompt, self._params, self._context, number=number, priority=self._priority
        )
        self._running[asyncio.ensure_future(work)] = number

    def _require_some(self) -> None:
        if self.count == 0:
            self.failure = PluginFailed("The plugin made no prompt of this request.")
            raise self.failure

    async def close(self) -> None:
        """Abort the prompts in the engine and close the generator of those not made yet."""
        tasks = [*self._running, *([self._next_prompt] if self._next_prompt else [])]
        self._exhausted = True
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._prompts.aclose()


class PluginAnswer:
    """A plugin's answer to one request; the plugin keeps its files until `close` is called.

    Args:
        deadline: until when the answer must be made, by the loop's clock.
        time_limit_s: the time limit that the deadline came from.
    """

    def __init__(
        self,
        processor: PluginProcessor,
        output: Any,
        request_id: str,
        *,
        deadline: float,
        time_limit_s: float,
    ) -> None:
        self._processor = processor
        self._output = output
        self._request_id = request_id
        self._deadline = deadline
        self._closed = False
        self.time_limit_s = time_limit_s

    async def data(self) -> Any:
        """Make the `data` of a JSON answer.

        Raises:
            BatonError: the plugin failed, or took too long.
        """
        return await self._step(self._processor.data(self._output))

    async def files(self) -> list[ResultFile]:
        """Name the answer's files; an empty list: the plugin makes none.

        Raises:
            BatonError: the plugin failed, or took too long.
        """
        files: list[ResultFile] = await self._step(self._processor.files(self._output))
        return files

    async def left_out(self) -> dict[str, str]:
        """Name the files that were wanted and are not made, each with the reason.

        Raises:
            BatonError: the plugin failed, or took too long.
        """
        left_out: dict[str, str] = await self._step(self._processor.left_out(self._output))
        return left_out

    async def describe(self) -> Description:
        """Describe the answer in the plugin's words; the request must have been run with `describe`.

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
            raise too_long(self.time_limit_s) from None
        except Exception as error:
            raise client_error(error, self._processor.name, "answer", at_input=False) from error

    async def close(self) -> None:
        """Have the plugin forget the request; a second call does nothing."""
        if not self._closed:
            self._closed = True
            await forget(self._processor, self._request_id)


async def _parsed(processor: PluginProcessor, work: Json | Upload) -> Any:
    return await (processor.parse_upload(work) if isinstance(work, Upload) else processor.parse(work))


def _no_place(waited_s: float | None) -> BatonError:
    message = None
    if waited_s is not None:
        message = f"The plugin had no place for this request within {waited_s:g} seconds; try again later."
    return EngineOverloaded(message, retry_after_s=RETRY_AFTER_S)


def too_long(limit: float) -> PluginTimeout:
    """Make the error of a request that exceeded its time limit, in seconds."""
    return PluginTimeout(f"The request was not done within {limit:g} seconds.")


async def forget(processor: PluginProcessor, request_id: str) -> None:
    """Have the plugin forget a request, and wait for that at most `FORGET_WAIT_S`."""
    forgetting = asyncio.ensure_future(_forget(processor, request_id))
    await asyncio.wait({forgetting}, timeout=FORGET_WAIT_S)


async def _forget(processor: PluginProcessor, request_id: str) -> None:
    try:
        await processor.forget(request_id)
    except Exception as error:  # noqa: BLE001  # the border to the plugin; the request is over anyway
        log.error("plugin_failed", plugin=processor.name, step="forget", cause=where(error))
