"""Where a plugin's own code runs: never on the gateway's event loop.

Synchronous hooks run in threads, so many at once; a request that ends early leaves its thread behind.
Coroutines run on an event loop that the plugin has for itself, in one thread as its author expects; a
coroutine that blocks holds up that loop, so later requests get a fresh one.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import structlog

from baton.errors import PluginBusy

Result = TypeVar("Result")
log = structlog.get_logger("baton.pooling")

HEARTBEAT_S = 0.25
STALLED_S = 1.0
"""A plugin's loop that has not come round for so long is blocked."""


class HookEscape(Exception):
    """A plugin raised what would end the interpreter (`SystemExit`, `KeyboardInterrupt`)."""


class HookThreads:
    """Threads for one plugin's synchronous code.

    Args:
        name: of the plugin, for the threads' names.
        limit: threads at once; those left behind by requests that ended count up to this again.

    Attributes:
        left_behind: threads whose request has ended, still at work.
    """

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = limit
        self._slots = asyncio.Semaphore(limit)
        self.left_behind = 0

    async def run(self, hook: Callable[..., Result], *args: Any) -> Result:
        """Call `hook` in a thread.

        Raises:
            PluginBusy: too many threads are stuck in what ended requests left behind.
            Exception: whatever the hook raises.
        """
        if self.left_behind >= self._limit:
            raise PluginBusy()
        async with self._slots:
            call = _Call(asyncio.get_running_loop(), hook, args)
            context = contextvars.copy_context()
            threading.Thread(
                target=context.run, args=(call.work,), name=f"hook-{self._name}", daemon=True
            ).start()
            try:
                result: Result = await call.future
                return result
            except asyncio.CancelledError:
                self.left_behind += 1
                call.when_over = self._one_came_back
                raise

    def _one_came_back(self) -> None:
        self.left_behind -= 1


class _Call:
    """One hook on its way through a thread."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, hook: Callable[..., Any], args: tuple[Any, ...]
    ) -> None:
        self._loop = loop
        self._hook = hook
        self._args = args
        self.future: asyncio.Future[Any] = loop.create_future()
        self.when_over: Callable[[], None] = lambda: None

    def work(self) -> None:
        result, error = None, None
        try:
            result = self._hook(*self._args)
        except Exception as raised:  # noqa: BLE001  # the thread's border: handed to who waits
            error = raised
        except BaseException as raised:  # noqa: BLE001  # a plugin must not end the process
            error = HookEscape(type(raised).__name__)
        try:
            self._loop.call_soon_threadsafe(self._settle, result, error)
        except RuntimeError:  # the loop has been closed; nobody waits any more
            log.debug("hook_outlived_gateway")

    def _settle(self, result: Any, error: Exception | None) -> None:
        self.when_over()
        if self.future.done():
            return
        if error is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(error)


class HookLoop:
    """The event loop of one plugin's coroutines.

    Args:
        name: of the plugin, for the thread's name.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._current: _LoopThread | None = None

    def home(self) -> asyncio.AbstractEventLoop:
        """The loop for what begins now; what has begun stays on its own."""
        if self._current is not None and self._current.stalled:
            log.warning("plugin_blocks_its_loop", plugin=self._name)
            self._current.retire()
            self._current = None
        if self._current is None:
            self._current = _LoopThread(self._name)
            self._current.start()
        return self._current.loop

    def close(self) -> None:
        if self._current is not None:
            self._current.retire()
            self._current = None


async def run_on(home: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Await `coroutine` on another thread's loop; cancelled, it is cancelled there."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_contained(coroutine), home))


async def _contained(coroutine: Coroutine[Any, Any, Result]) -> Result:
    try:
        return await coroutine
    except (SystemExit, KeyboardInterrupt) as error:
        raise HookEscape(type(error).__name__) from None


class _LoopThread(threading.Thread):
    """A thread that runs one event loop until it is retired and idle."""

    def __init__(self, name: str) -> None:
        super().__init__(name=f"hooks-{name}", daemon=True)
        self.loop = asyncio.new_event_loop()
        self._beat = time.monotonic()

    @property
    def stalled(self) -> bool:
        return time.monotonic() - self._beat > STALLED_S

    def run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.call_soon(self._pulse)
        try:
            self.loop.run_forever()
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        finally:
            self.loop.close()

    def _pulse(self) -> None:
        self._beat = time.monotonic()
        self.loop.call_later(HEARTBEAT_S, self._pulse)

    def retire(self) -> None:
        """Let what runs there go on until it ends by itself; then the thread ends."""
        asyncio.run_coroutine_threadsafe(self._end_when_idle(), self.loop)

    async def _end_when_idle(self) -> None:
        others = asyncio.all_tasks(self.loop) - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)
        self.loop.stop()
