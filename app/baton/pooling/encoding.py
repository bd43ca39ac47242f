"""The prompts of one request in the engine: so many at once, their outputs in the order they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from baton.engines.port import Engine
from baton.errors import BatonError, PluginFailed
from baton.telemetry.ids import RequestContext

_END = object()


class Encoding:
    """An async iterator of (number of the prompt, `PoolingRequestOutput`).

    A prompt is asked for only when there is room for it in the engine, and an output that nobody has taken
    yet keeps its room: memory stays bounded however many prompts a request has.

    Args:
        engine: what encodes.
        prompts: asked for one after the other; closed in the end.
        params: vLLM's `PoolingParams` for each.
        context: of the request.
        priority: of each prompt; lower is sooner.
        room: prompts in the engine at once.

    Attributes:
        failure: what went wrong first, if something did; also raised to whoever takes the outputs.
        count: prompts so far.
    """

    def __init__(
        self,
        engine: Engine,
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
        self._coming: asyncio.Task[Any] | None = None
        self._exhausted = False
        self.failure: BaseException | None = None
        self.count = 0

    def __aiter__(self) -> Encoding:
        return self

    async def __anext__(self) -> tuple[int, Any]:
        while True:
            self._ask()
            waited = [*self._running, *([self._coming] if self._coming else [])]
            if not waited:
                self._require_some()
                raise StopAsyncIteration
            done, _ = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            try:
                if self._coming in done:
                    self._start()
                finished = next((task for task in done if task in self._running), None)
                if finished is not None:
                    return self._running.pop(finished), finished.result()
            except BaseException as error:
                self.failure = self.failure or error
                raise

    def _ask(self) -> None:
        """Ask for the next prompt as soon as there is room for it."""
        if self._coming is None and not self._exhausted and len(self._running) < self._room:
            self._coming = asyncio.ensure_future(anext(self._prompts, _END))

    def _start(self) -> None:
        assert self._coming is not None
        coming, self._coming = self._coming, None
        prompt = coming.result()
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
        """Drop what is still in the engine, and the prompts that were never asked for."""
        tasks = [*self._running, *([self._coming] if self._coming else [])]
        self._exhausted = True
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._prompts.aclose()

    @property
    def engine_failure(self) -> BatonError | None:
        """What the engine refused or failed, which stands above whatever a plugin makes of it."""
        return self.failure if isinstance(self.failure, BatonError) else None
