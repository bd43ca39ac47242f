"""Where a plugin's own code runs: never on the gateway's event loop.

Synchronous hooks run in threads, so many at once; a request that ends early leaves its thread behind.
Coroutines run on an event loop that the plugin has for itself, in one thread as its author expects. A
coroutine that blocks holds up that loop, so later requests get a fresh one; a request stays on the loop it
began on, and a loop goes when its last request has.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import structlog

from baton.admission.fair_queue import FairQueue, QueueLimits
from baton.errors import PluginBusy

Result = TypeVar("Result")
log = structlog.get_logger("baton.pooling")

HEARTBEAT_S = 0.25
STALLED_S = 1.0
"""A plugin's loop that has not come round for so long is blocked."""


class HookEscape(Exception):
    """A plugin raised what means something else to who runs it: `SystemExit`, `StopIteration`, ..."""


def _never(_waited_s: float | None) -> PluginBusy:
    """Make the error that this queue has no use for: a hook waits as long as its request has time."""
    return PluginBusy()


class HookThreads:
    """Threads for one plugin's synchronous code, shared between tenants.

    Args:
        name: of the plugin, for the threads' names.
        limit: threads at once, of one tenant; None: as many as are asked for.

    Attributes:
        left_behind: threads whose request has ended, still at work.
    """

    def __init__(self, name: str, limit: int | None) -> None:
        self._name = name
        self._places = None if limit is None else FairQueue(QueueLimits(limit), _never)
        self.left_behind = 0

    async def run(self, tenant: str, hook: Callable[..., Result], *args: Any) -> Result:
        """Call `hook` in a thread, once it is the tenant's turn.

        Raises:
            Exception: whatever the hook raises.
        """
        async with self._places.place(tenant) if self._places else contextlib.nullcontext():
            call = _Call(asyncio.get_running_loop(), hook, args)
            context = contextvars.copy_context()
            threading.Thread(
                target=context.run, args=(call.work,), name=f"hook-{self._name}", daemon=True
            ).start()
            try:
                result: Result = await call.future
                return result
            except asyncio.CancelledError:
                if not call.over:
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
        self.over = False
        self.when_over: Callable[[], None] = lambda: None

    def work(self) -> None:
        result: Any = None
        error: Exception | None = None
        try:
            result = self._hook(*self._args)
        except (StopIteration, StopAsyncIteration) as raised:  # no future can hold one
            error = HookEscape(type(raised).__name__)
        except Exception as raised:  # noqa: BLE001  # the thread's border: handed to who waits
            error = raised
        except BaseException as raised:  # noqa: BLE001  # a plugin must not end the process
            error = HookEscape(type(raised).__name__)
        try:
            self._loop.call_soon_threadsafe(self._settle, result, error)
        except RuntimeError:  # the loop has been closed; nobody waits any more
            log.debug("hook_outlived_gateway")

    def _settle(self, result: Any, error: Exception | None) -> None:
        self.over = True
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
        name: of the plugin, for the threads' names.
        limit: loops that may be stuck; then requests are refused.
    """

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = limit
        self._current: Home | None = None
        self._retired: list[Home] = []

    @property
    def stuck(self) -> int:
        """Loops nobody begins anything on any more, whose thread is still there."""
        self._retired = [home for home in self._retired if home.is_alive()]
        return len(self._retired)

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[Home]:
        """The loop for one request, for as long as that lasts.

        Raises:
            PluginBusy: too many loops are stuck already.
        """
        home = self._pick()
        home.users += 1
        try:
            yield home
        finally:
            home.users -= 1
            if home is not self._current and home.users == 0:
                home.end()

    def _pick(self) -> Home:
        if self._current is not None and not self._current.sound:
            log.warning("plugin_blocks_its_loop", plugin=self._name)
            self._retire()
        if self._current is None:
            if self.stuck >= self._limit:
                raise PluginBusy()
            self._current = Home(self._name)
            self._current.start()
        return self._current

    def _retire(self) -> None:
        home, self._current = self._current, None
        if home is None:
            return
        self._retired.append(home)
        if home.users == 0:
            home.end()

    def close(self) -> None:
        self._retire()


class Home(threading.Thread):
    """A thread that runs one event loop, whatever a plugin does to it, until it is told to end.

    Attributes:
        users: requests under way on it.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name=f"hooks-{name}", daemon=True)
        self._loop = asyncio.new_event_loop()
        self._beat = time.monotonic()
        self._ending = False
        self.users = 0

    @property
    def sound(self) -> bool:
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
        with contextlib.suppress(Exception):  # what a plugin does while its generators are closed
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _pulse(self) -> None:
        self._beat = time.monotonic()
        self._loop.call_later(HEARTBEAT_S, self._pulse)

    def end(self) -> None:
        """Let the thread end, once what blocks it lets go."""
        self._ending = True
        with contextlib.suppress(RuntimeError):  # closed already
            self._loop.call_soon_threadsafe(self._loop.stop)

    async def run_here(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Await `coroutine` on this loop; cancelled, it is cancelled here."""
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
        raise HookEscape("CancelledError") from None
    except BaseException as error:  # noqa: BLE001  # a plugin must not end the thread
        raise HookEscape(type(error).__name__) from None
