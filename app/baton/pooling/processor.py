"""One plugin behind one interface, whichever vLLM it was written for.

| step      | vLLM 0.11 to 0.15              | vLLM 0.32                | ours, optional                    |
|-----------|--------------------------------|--------------------------|-----------------------------------|
| parse     | `parse_request(request)`       | `parse_data(data)`       | `parse_upload`, see `Upload`      |
| params    | `validate_or_generate_params()`| `merge_pooling_params()` |                                   |
| prompts   | `pre_process_async`, `pre_process` | the same             | may return an iterator, also async|
| outputs   | `post_process_async`, `post_process` | the same           |                                   |
| answer    | `output_to_response(output)`   | the output itself        | `output_to_files(output)`         |
| count     |                                |                          | `amounts(output)`                 |
| describe  |                                |                          | `describe`, `for_description`     |
| afterwards|                                |                          | `forget(request_id)`              |

A hook that a class has from vLLM's own base does nothing of its own: the base's coroutines call the
synchronous hook on the loop, so for those the synchronous one runs in a thread.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
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
from typing import Any

from baton.engines.port import Json, Plugin
from baton.errors import OperationUnsupported, PluginBusy, PluginFailed
from baton.pooling.hooks import Home, HookLoop, HookThreads
from baton.telemetry.ids import LOCAL_TENANT

VLLM = "vllm."
_END = object()


@dataclass(frozen=True)
class Upload:
    """A file sent as it is.

    Attributes:
        file: where it was put; whoever made it removes it.
        media_type: as the client says.
        query: the request's other parameters.
        accept: the media types the answer may have, the client's favourite first.
    """

    file: Path
    media_type: str
    query: Mapping[str, str]
    accept: Sequence[str] = ()


@dataclass(frozen=True)
class ResultFile:
    """One file of an answer.

    Attributes:
        name: for the person who keeps it.
        media_type: of its content.
        path: where it is, until `forget`.
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


class Processor:
    """A plugin's steps, each awaited without touching the gateway's loop.

    Args:
        plugin: the engine's plugin.
        threads: how many threads its synchronous hooks may take.
    """

    def __init__(self, plugin: Plugin, threads: int) -> None:
        self.name = plugin.name
        self._tenant = LOCAL_TENANT
        self._plugin = plugin
        self._instance = plugin.instance
        self._limit = threads
        self._threads = HookThreads(plugin.name, threads)
        self._last_threads = HookThreads(plugin.name, None)
        self._loop = HookLoop(plugin.name, threads)

    def close(self) -> None:
        self._loop.close()

    def of(self, tenant: str) -> Processor:
        """The same processor, for one tenant's request: its hooks wait for that tenant's turn."""
        theirs = copy(self)
        theirs._tenant = tenant
        return theirs

    @property
    def left_behind(self) -> int:
        """Threads still in the plugin's code though their request is over."""
        return self._threads.left_behind + self._loop.stuck

    def require_threads(self) -> None:
        """See to it that there is a thread to work in.

        Raises:
            PluginBusy: too many are stuck in what ended requests left behind.
        """
        if self.left_behind >= self._limit:
            raise PluginBusy()

    def require_uploads(self) -> None:
        """See to it that the plugin takes files sent as they are.

        Raises:
            OperationUnsupported: it takes JSON only.
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

    def _own(self, hook: str) -> bool:
        """Whether the plugin itself defines `hook`, not vLLM's base class for it."""
        for cls in type(self._instance).__mro__:
            if hook in vars(cls):
                return not cls.__module__.startswith(VLLM)
        return False

    @contextmanager
    def at_home(self) -> Iterator[Home | None]:
        """The loop that one request's coroutines run on, where the plugin has any."""
        if not (self._own("pre_process_async") or self._own("post_process_async")):
            yield None
            return
        with self._loop.borrowed() as home:
            yield home

    async def parse(self, body: Json) -> Any:
        """The plugin's own form of a request's `data`."""
        if self._own("parse_data"):
            return await self._threads.run(self._tenant, self._instance.parse_data, body["data"])
        if self._own("parse_request"):
            request = self._plugin.request(body)
            return await self._threads.run(self._tenant, self._instance.parse_request, request)
        raise PluginFailed(f"The plugin '{self.name}' parses no requests.")

    async def parse_upload(self, upload: Upload) -> Any:
        """The plugin's own form of a file sent as it is."""
        self.require_uploads()
        hook = self._instance.parse_upload
        return await self._threads.run(
            self._tenant, hook, upload.file, upload.media_type, dict(upload.query), tuple(upload.accept)
        )

    async def params(self) -> Any:
        """vLLM's `PoolingParams` for every prompt; None: the plugin says nothing of them."""
        for hook in ("merge_pooling_params", "validate_or_generate_params"):
            if self._own(hook):
                return await self._threads.run(self._tenant, getattr(self._instance, hook))
        return None

    async def prompts(self, data: Any, request_id: str, home: Home | None) -> AsyncGenerator[Any, None]:
        """The engine's prompts, each made only when it is asked for where the plugin can."""
        if home is not None and self._own("pre_process_async"):
            hook = partial(self._instance.pre_process_async, prompt=data, request_id=request_id)
            made = await home.run_here(_called(hook))
        else:
            made = await self._threads.run(
                self._tenant, partial(self._instance.pre_process, prompt=data, request_id=request_id)
            )
        return self._each(made, home)

    async def _each(self, made: Any, home: Home | None) -> AsyncGenerator[Any, None]:
        if home is not None and isinstance(made, AsyncIterator):
            async with aclosing(_each_async(made, home)) as theirs:
                async for prompt in theirs:
                    yield prompt
        elif _is_one_prompt(made):
            yield made
        elif isinstance(made, list | tuple):
            for prompt in made:
                yield prompt
        elif isinstance(made, Iterable):
            async with aclosing(self._each_in_threads(made)) as theirs:
                async for prompt in theirs:
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
        self, outputs: AsyncIterator[tuple[int, Any]], request_id: str, home: Home | None
    ) -> Any:
        """What the plugin makes of the outputs, handed to it as they come."""
        if home is not None and self._own("post_process_async"):
            pulled = _pulled(outputs, asyncio.get_running_loop())
            hook = partial(self._instance.post_process_async, pulled, request_id=request_id)
            return await home.run_here(_called(hook))
        in_order = sorted([item async for item in outputs], key=lambda item: item[0])
        collected = [output for _, output in in_order]
        return await self._threads.run(
            self._tenant, partial(self._instance.post_process, collected, request_id=request_id)
        )

    async def data(self, output: Any) -> Any:
        """What stands in `data` of the answer."""
        if not self._own("output_to_response"):
            return output
        response = await self._threads.run(self._tenant, self._instance.output_to_response, output)
        return getattr(response, "data", response)

    async def files(self, output: Any) -> list[ResultFile]:
        """The answer as files; none: the plugin makes none.

        Raises:
            Exception: whatever the plugin raises, or it names a file that is not there.
        """
        if not self._own("output_to_files"):
            return []
        return await self._threads.run(self._tenant, _result_files, self._instance.output_to_files, output)

    async def for_description(self, data: Any) -> Any:
        """Return the parsed request, changed so that its answer can be described."""
        if not self._own("for_description"):
            return data
        return await self._threads.run(self._tenant, self._instance.for_description, data)

    async def describe(self, output: Any) -> Description:
        """Return the plugin's description of its answer.

        Raises:
            Exception: the plugin raised, or returned something else.
        """
        return await self._threads.run(self._tenant, _description, self._instance.describe, output)

    async def amounts(self, output: Any) -> dict[str, float]:
        """What the plugin says the answer amounts to, by unit; nothing: it does not count."""
        if not self._own("amounts"):
            return {}
        counted = await self._threads.run(self._tenant, self._instance.amounts, output)
        return {str(unit): float(amount) for unit, amount in counted.items()}

    async def forget(self, request_id: str) -> None:
        """Let go of whatever the plugin keeps for a request; called once, however it ended."""
        if self._own("forget"):
            await self._last_threads.run(self._tenant, self._instance.forget, request_id)


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
    """Call a hook on the loop this runs on; one that is no coroutine function gives what it gives."""
    given = hook()
    return await given if inspect.isawaitable(given) else given


def _is_one_prompt(made: Any) -> bool:
    tokens = isinstance(made, list) and bool(made) and all(isinstance(item, int) for item in made)
    return isinstance(made, str | bytes | Mapping) or tokens


async def _each_async(made: AsyncIterator[Any], home: Home) -> AsyncGenerator[Any, None]:
    try:
        while (prompt := await home.run_here(_next(made))) is not _END:
            yield prompt
    finally:
        if isinstance(made, AsyncGenerator):
            await home.run_here(_closed(made))


async def _next(iterator: AsyncIterator[Any]) -> Any:
    return await anext(iterator, _END)


async def _pulled(
    outputs: AsyncIterator[Any], home: asyncio.AbstractEventLoop
) -> AsyncGenerator[tuple[int, Any], None]:
    """`outputs`, which live on the loop `home`, as a generator of the loop that runs this."""
    while True:
        item = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_next(outputs), home))
        if item is _END:
            return
        yield item


async def _closed(generator: AsyncGenerator[Any, None]) -> None:
    await generator.aclose()
