"""Run the prompts of one pooling request through its engine, a bounded number at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from baton.engines.engine import LocalEngine
from baton.errors import PluginFailed
from baton.telemetry.ids import RequestContext

_END = object()


class Encoding:
    """An async iterator of (number of the prompt, `PoolingRequestOutput`), in the order they finish.

    The next prompt is made only when there is room for it in the engine, and an output that has not been
    taken yet keeps its room: memory stays bounded however many prompts a request has.

    Args:
        engine: encodes the prompts.
        prompts: made one after the other; closed by `close`.
        params: vLLM's `PoolingParams` for each prompt.
        context: of the request.
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
