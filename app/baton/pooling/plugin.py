"""Call a plugin's hooks, of vLLM's old and of its new plugin interface.

| step      | vLLM 0.11 to 0.15              | vLLM 0.32                | ours, optional                    |
|-----------|--------------------------------|--------------------------|-----------------------------------|
| parse     | `parse_request(request)`       | `parse_data(data)`       | `parse_upload`, see `Upload`      |
| params    | `validate_or_generate_params()`| `merge_pooling_params()` |                                   |
| prompts   | `pre_process_async`, `pre_process` | the same             | may return an iterator, also async|
| outputs   | `post_process_async`, `post_process` | the same           |                                   |
| answer    | `output_to_response(output)`   | the output itself        | `output_to_files(output)`         |
| count     |                                |                          | `amounts(output)`                 |
| describe  |                                |                          | `describe`, `for_description`     |
| kept files|                                |                          | `for_files`, `progress`           |
|           |                                |                          | `left_out(output)`                |
| afterwards|                                |                          | `forget(request_id)`              |
| at once   |                                |                          | `prompts_at_once`, a number       |

A hook that a class inherits from vLLM's base class is not the plugin's: the base's coroutines call the
synchronous hook on the event loop, so the synchronous one is run in a thread instead.

All of them run off the gateway's event loop. Synchronous hooks run in threads, a bounded number at once; the
hook of a request that ends early goes on in its thread. Coroutines run on an event loop of the plugin's own,
in one thread as its author expects. A coroutine that blocks holds up that loop, so later requests get a new
one; a request stays on the loop it began on, and a loop is closed when its last request is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import Any, TypeVar

import structlog

from baton.admission.fair_queue import FairQueue, QueueLimits
from baton.admission.fair_threads import FairThreads, WorkEscape
from baton.engines.backend import Json
from baton.engines.engine import Plugin
from baton.errors import OperationUnsupported, PluginBusy, PluginFailed
from baton.telemetry.ids import LOCAL_TENANT

Result = TypeVar("Result")
log = structlog.get_logger("baton.pooling")

VLLM = "vllm."
HEARTBEAT_S = 0.25
STALLED_S = 1.0
"""A plugin's loop that has not run its heartbeat for so many seconds is blocked."""
_END = object()
PROGRESS = ("tiles", "tiles_done", "bytes_fetched")


@dataclass(frozen=True)
class Upload:
    """A file that a client sent as the request's body.

    Attributes:
        file: path of the temporary file; its maker removes it.
        media_type: as the client gave it.
        query: the request's other parameters.
        accept: the media types that the answer may have, the preferred one first.
    """

    file: Path
    media_type: str
    query: Mapping[str, str]
    accept: Sequence[str] = ()


@dataclass(frozen=True)
class ResultFile:
    """One file of a plugin's answer.

    Attributes:
        name: the file name that the client is offered.
        path: where it is, until the plugin's `forget` is called.
    """

    name: str
    media_type: str
    path: Path


@dataclass(frozen=True)
class Description:
    """A plugin's description of its answer, for a model that is asked about it.

    Attributes:
        text: a line or a few.
        picture: media type and bytes; None: there is none.
    """

    text: str
    picture: tuple[str, bytes] | None = None


class PluginProcessor:
    """The steps of one plugin, each run off the gateway's event loop.

    Args:
        threads: threads that one tenant's synchronous hooks may take at once.
    """

    def __init__(self, plugin: Plugin, threads: int) -> None:
        self.name = plugin.name
        self._tenant = LOCAL_TENANT
        self._plugin = plugin
        self._instance = plugin.instance
        self._limit = threads
        name = f"hook-{plugin.name}"
        self._threads = FairThreads(FairQueue(QueueLimits(threads), _never), name, may_hang=True)
        self._last_threads = FairThreads(None, name, may_hang=True)
        self._loop = HookLoop(plugin.name, threads)

    def close(self) -> None:
        self._loop.close()

    def of(self, tenant: str) -> PluginProcessor:
        """Copy the processor for one tenant's request: its hooks wait for that tenant's turn."""
        mine = copy(self)
        mine._tenant = tenant
        return mine

    @property
    def left_behind(self) -> int:
        """Number of threads that still run the plugin's code though their request is over."""
        return self._threads.left_behind + self._loop.stuck

    def require_threads(self) -> None:
        """Require a thread for another request.

        Raises:
            PluginBusy: too many threads still run hooks of requests that are over.
        """
        if self.left_behind >= self._limit:
            raise PluginBusy()

    def require_uploads(self) -> None:
        """Require that the plugin takes uploaded files.

        Raises:
            OperationUnsupported: the plugin has no `parse_upload` hook.
        """
        if not self._own("parse_upload"):
            raise OperationUnsupported(
                f'The plugin \'{self.name}\' takes JSON only: send {{"model": ..., "data": {{...}}}}.'
            )

    def require_description(self) -> None:
        """Require that the plugin can describe its answers.

        Raises:
            OperationUnsupported: the plugin has no `describe` hook.
        """
        if not self._own("describe"):
            raise OperationUnsupported(
                f"The plugin '{self.name}' does not describe its results, so no model can be asked about "
                "them: leave 'follow_up' out.",
                param="follow_up",
            )

    def prompts_at_once(self, most: int) -> int:
        """Limit the prompts of a request in the engine: to `most`, or to the fewer that the plugin wants."""
        said = getattr(self._instance, "prompts_at_once", most)
        return max(1, min(int(said), most))

    def _own(self, hook: str) -> bool:
        """Find out whether the plugin itself defines `hook`, rather than vLLM's base class."""
        for cls in type(self._instance).__mro__:
            if hook in vars(cls):
                return not cls.__module__.startswith(VLLM)
        return False

    @contextmanager
    def loop_thread(self) -> Iterator[PluginLoopThread | None]:
        """Lend one request the loop that its coroutines run on; None where the plugin has no coroutines."""
        if not (self._own("pre_process_async") or self._own("post_process_async")):
            yield None
            return
        with self._loop.borrowed() as thread:
            yield thread

    async def parse(self, body: Json) -> Any:
        """Parse a request's `data` into the plugin's own form."""
        if self._own("parse_data"):
            return await self._threads.run(self._tenant, self._instance.parse_data, body["data"])
        if self._own("parse_request"):
            request = self._plugin.request(body)
            return await self._threads.run(self._tenant, self._instance.parse_request, request)
        raise PluginFailed(f"The plugin '{self.name}' parses no requests.")

    async def parse_upload(self, upload: Upload) -> Any:
        """Parse an uploaded file into the plugin's own form."""
        self.require_uploads()
        hook = self._instance.parse_upload
        return await self._threads.run(
            self._tenant, hook, upload.file, upload.media_type, dict(upload.query), tuple(upload.accept)
        )

    async def params(self) -> Any:
        """Ask for vLLM's `PoolingParams` of every prompt; None: the plugin gives none."""
        for hook in ("merge_pooling_params", "validate_or_generate_params"):
            if self._own(hook):
                return await self._threads.run(self._tenant, getattr(self._instance, hook))
        return None

    async def prompts(
        self, data: Any, request_id: str, thread: PluginLoopThread | None
    ) -> AsyncGenerator[Any, None]:
        """Make the engine's prompts, one by one if the plugin returns an iterator."""
        if thread is not None and self._own("pre_process_async"):
            hook = partial(self._instance.pre_process_async, prompt=data, request_id=request_id)
            made = await thread.run_here(_called(hook))
        else:
            made = await self._threads.run(
                self._tenant, partial(self._instance.pre_process, prompt=data, request_id=request_id)
            )
        return self._each(made, thread)

    async def _each(self, made: Any, thread: PluginLoopThread | None) -> AsyncGenerator[Any, None]:
        if thread is not None and isinstance(made, AsyncIterator):
            async with aclosing(_each_async(made, thread)) as prompts:
                async for prompt in prompts:
                    yield prompt
        elif _is_one_prompt(made):
            yield made
        elif isinstance(made, list | tuple):
            for prompt in made:
                yield prompt
        elif isinstance(made, Iterable):
            async with aclosing(self._each_in_threads(made)) as prompts:
                async for prompt in prompts:
                    yield prompt
        else:
            raise TypeError(f"pre_process of '{self.name}' returned no prompts")

    async def _each_in_threads(self, made: Iterable[Any]) -> AsyncGenerator[Any, None]:
        prompts: Iterator[Any] = await self._threads.run(self._tenant, iter, made)
        try:
            while (prompt := await self._threads.run(self._tenant, next, prompts, _END)) is not _END:
                yield prompt
        finally:
            if isinstance(prompts, Generator):
                await self._last_threads.run(self._tenant, prompts.close)

    async def answer(
        self, outputs: AsyncIterator[tuple[int, Any]], request_id: str, thread: PluginLoopThread | None
    ) -> Any:
        """Make the plugin's result of the outputs, which a coroutine hook gets as they finish."""
        if thread is not None and self._own("post_process_async"):
            pulled = _pulled(outputs, asyncio.get_running_loop())
            hook = partial(self._instance.post_process_async, pulled, request_id=request_id)
            return await thread.run_here(_called(hook))
        in_order = sorted([item async for item in outputs], key=lambda item: item[0])
        collected = [output for _, output in in_order]
        return await self._threads.run(
            self._tenant, partial(self._instance.post_process, collected, request_id=request_id)
        )

    async def data(self, output: Any) -> Any:
        """Make the `data` of the JSON answer."""
        if not self._own("output_to_response"):
            return output
        response = await self._threads.run(self._tenant, self._instance.output_to_response, output)
        return getattr(response, "data", response)

    async def files(self, output: Any) -> list[ResultFile]:
        """Name the answer's files; an empty list: the plugin makes none.

        Raises:
            Exception: the plugin raised it, or named a file that does not exist.
        """
        if not self._own("output_to_files"):
            return []
        return await self._threads.run(self._tenant, _result_files, self._instance.output_to_files, output)

    async def left_out(self, output: Any) -> dict[str, str]:
        """Name the files that the plugin did not make though they were wanted, each with the reason."""
        if not self._own("left_out"):
            return {}
        said = await self._threads.run(self._tenant, self._instance.left_out, output)
        return {str(name): str(reason) for name, reason in said.items()}

    async def for_description(self, data: Any) -> Any:
        """Change the parsed request so that its answer can be described."""
        if not self._own("for_description"):
            return data
        return await self._threads.run(self._tenant, self._instance.for_description, data)

    async def for_files(self, data: Any) -> Any:
        """Have the plugin prepare a parsed request for an answer that is kept as files.

        Raises:
            OperationUnsupported: the plugin makes no files.
        """
        if not self._own("output_to_files"):
            raise OperationUnsupported(f"The plugin '{self.name}' makes no files that could be kept.")
        if not self._own("for_files"):
            return data
        return await self._threads.run(self._tenant, self._instance.for_files, data)

    async def progress(self, request_id: str) -> dict[str, int]:
        """Ask how far a running request is, by the names of `PROGRESS`; empty: it is not known."""
        if not self._own("progress"):
            return {}
        said = await self._threads.run(self._tenant, self._instance.progress, request_id)
        return {name: int(said[name]) for name in PROGRESS if name in said}

    async def describe(self, output: Any) -> Description:
        """Describe the plugin's answer.

        Raises:
            Exception: the plugin raised, or returned something else.
        """
        return await self._threads.run(self._tenant, _description, self._instance.describe, output)

    async def amounts(self, output: Any) -> dict[str, float]:
        """Count the answer's amounts by unit; empty: the plugin has no `amounts` hook."""
        if not self._own("amounts"):
            return {}
        counted = await self._threads.run(self._tenant, self._instance.amounts, output)
        return {str(unit): float(amount) for unit, amount in counted.items()}

    async def forget(self, request_id: str) -> None:
        """Have the plugin drop what it keeps for a request; called once, however the request ended."""
        if self._own("forget"):
            await self._last_threads.run(self._tenant, self._instance.forget, request_id)


def _never(_waited_s: float | None) -> PluginBusy:
    """Make the error that `FairQueue` asks for; never raised, for a hook waits without a limit."""
    return PluginBusy()


def _result_files(hook: Callable[[Any], Iterable[tuple[str, str, Path]]], output: Any) -> list[ResultFile]:
    files = [ResultFile(str(name), str(kind), Path(path)) for name, kind, path in hook(output)]
    for file in files:
        sound_name = file.name.isascii() and file.name.isprintable() and PurePath(file.name).name == file.name
        if not sound_name or "/" not in file.media_type or not file.path.is_file():
            raise LookupError("a file of the answer is not there, or has no proper name")
    return files


def _description(hook: Callable[[Any], tuple[str, tuple[str, Path] | None]], output: Any) -> Description:
    text, picture = hook(output)
    if picture is None:
        return Description(str(text))
    media_type, path = picture
    return Description(str(text), (str(media_type), Path(path).read_bytes()))


async def _called(hook: Callable[[], Any]) -> Any:
    """Call a hook on the current loop, and await its result if that is awaitable."""
    result = hook()
    return await result if inspect.isawaitable(result) else result


def _is_one_prompt(made: Any) -> bool:
    tokens = isinstance(made, list) and bool(made) and all(isinstance(item, int) for item in made)
    return isinstance(made, str | bytes | Mapping) or tokens


async def _each_async(made: AsyncIterator[Any], thread: PluginLoopThread) -> AsyncGenerator[Any, None]:
    try:
        while (prompt := await thread.run_here(_next(made))) is not _END:
            yield prompt
    finally:
        if isinstance(made, AsyncGenerator):
            await thread.run_here(_closed(made))


async def _next(iterator: AsyncIterator[Any]) -> Any:
    return await anext(iterator, _END)


async def _pulled(
    outputs: AsyncIterator[Any], owner: asyncio.AbstractEventLoop
) -> AsyncGenerator[tuple[int, Any], None]:
    """Yield `outputs`, which belong to the event loop `owner`, on the current loop."""
    while True:
        item = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_next(outputs), owner))
        if item is _END:
            return
        yield item


async def _closed(generator: AsyncGenerator[Any, None]) -> None:
    await generator.aclose()


class HookLoop:
    """The event loop of one plugin's coroutines, replaced when it is blocked.

    Args:
        limit: blocked loops there may be; with more, requests are refused.
    """

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = limit
        self._current: PluginLoopThread | None = None
        self._retired: list[PluginLoopThread] = []

    @property
    def stuck(self) -> int:
        """Number of replaced loops whose thread still runs."""
        self._retired = [thread for thread in self._retired if thread.is_alive()]
        return len(self._retired)

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[PluginLoopThread]:
        """Lend one request a loop for as long as the block runs.

        Raises:
            PluginBusy: too many loops are blocked.
        """
        thread = self._pick()
        thread.users += 1
        try:
            yield thread
        finally:
            thread.users -= 1
            if thread is not self._current and thread.users == 0:
                thread.end()

    def _pick(self) -> PluginLoopThread:
        if self._current is not None and not self._current.responsive:
            log.warning("plugin_blocks_its_loop", plugin=self._name)
            self._retire()
        if self._current is None:
            if self.stuck >= self._limit:
                raise PluginBusy()
            self._current = PluginLoopThread(self._name)
            self._current.start()
        return self._current

    def _retire(self) -> None:
        thread, self._current = self._current, None
        if thread is None:
            return
        self._retired.append(thread)
        if thread.users == 0:
            thread.end()

    def close(self) -> None:
        self._retire()


class PluginLoopThread(threading.Thread):
    """A thread that keeps one event loop running, whatever a plugin does to it, until `end` is called.

    Attributes:
        users: requests that use the loop now.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name=f"hooks-{name}", daemon=True)
        self._loop = asyncio.new_event_loop()
        self._beat = time.monotonic()
        self._ending = False
        self.users = 0

    @property
    def responsive(self) -> bool:
        return self.is_alive() and time.monotonic() - self._beat <= STALLED_S

    def run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.call_soon(self._pulse)
        while not self._ending:
            try:
                self._loop.run_forever()  # returns when a plugin stops it, too
            except BaseException as error:  # noqa: BLE001  # a task of the plugin's own; the others go on
                log.error("plugin_task_failed", thread=self.name, cause=type(error).__name__)
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        with contextlib.suppress(Exception):  # of the plugin's, while its generators are closed
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _pulse(self) -> None:
        self._beat = time.monotonic()
        self._loop.call_later(HEARTBEAT_S, self._pulse)

    def end(self) -> None:
        """End the thread once no coroutine blocks it."""
        self._ending = True
        with contextlib.suppress(RuntimeError):  # closed already
            self._loop.call_soon_threadsafe(self._loop.stop)

    async def run_here(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Await `coroutine` on this thread's loop; cancelling the caller cancels the coroutine."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_contained(coroutine), self._loop))


async def _contained(coroutine: Coroutine[Any, Any, Result]) -> Result:
    try:
        return await coroutine
    except Exception:
        raise
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise WorkEscape("CancelledError") from None
    except BaseException as error:  # noqa: BLE001  # a plugin must not end the thread
        raise WorkEscape(type(error).__name__) from None
