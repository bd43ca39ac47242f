"""Build a vLLM engine in a thread of its own, and stop the engine before the thread.

The engine's core is forked from a `ForkServer` where there is one, else spawned.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import structlog
from vllm import envs
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.models import registry
from vllm.usage.usage_lib import UsageContext
from vllm.utils.system_utils import get_mp_context
from vllm.v1.engine import core_client, utils
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import PrometheusStatLogger

from baton.admission.fair_threads import in_own_thread
from baton.engines.process.fork_server import CURRENT, ForkContext, ForkServer, Launch
from baton.engines.process.processes import kill, release, segments_of, trees_of, wait_until_gone
from baton.engines.vllm.core import with_core

GRACE_S = 0.5
"""Seconds an engine's processes get to end by themselves. On a CPU a worker never does: its interpreter takes
more than five to unload its modules. Saves have ended before."""
LOOK_EVERY_S = 0.01
"""Seconds between two looks of a build whether it is the next."""
BREAK_OFF_EVERY_S = 0.1
"""Seconds between two looks for new processes of a build that is to end."""
KILLED_WITHIN_S = 5.0
"""Seconds within which killed processes should be gone; else they are logged."""
log = structlog.get_logger("baton.engine")


def fork_cores() -> None:
    """Make vLLM start the core of an engine that has a `Launch` through it: the seam of the fork server."""
    utils.get_mp_context = _context_of_launch


def inspect_models_here() -> None:
    """Make vLLM look at a model's class in this process, where no GPU can be opened by that.

    Otherwise it starts an interpreter that imports vLLM once more, some ten seconds for each architecture
    that it has not seen on this machine.
    """
    registry._run_in_subprocess = lambda look: look()


class Resources(core_client.BackgroundResources):  # type: ignore[misc]  # vLLM has no types
    """Sockets, tasks and processes that vLLM's client closes; its ZeroMQ context then ends in its own thread.

    vLLM leaves the context to the garbage collector, which ends it wherever it runs, on the event loop too.
    That waits for all of its sockets: tenths of a second on a busy machine, and for ever for one that nobody
    closes any more.
    """

    def __call__(self) -> None:
        loop = self.output_queue_task.get_loop() if self.output_queue_task is not None else None
        super().__call__()
        end = threading.Thread(target=self.ctx.term, name="zmq-context", daemon=True).start
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(end)  # behind the sockets' own closing
        else:
            end()


def end_contexts_apart() -> None:
    """Make vLLM's clients close their `Resources`."""
    core_client.BackgroundResources = Resources


def _context_of_launch() -> Any:
    return ForkContext() if CURRENT.get() is not None else get_mp_context()


class Starts:
    """The way in which the engines of one fleet start.

    Args:
        server: the fork server; None: every engine core is spawned.

    Attributes:
        turn: held while vLLM makes an engine's configuration, which changes process-wide state, and until
            its core runs; of a spawned core until it is ready.
        waiting: builds that have not had it, in the order of the settings.
    """

    def __init__(self, server: ForkServer | None = None) -> None:
        self.server = server
        self.turn = threading.Lock()
        self.waiting: deque[EngineThread] = deque()
        self._running = 0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Have vLLM read its environment variables anew while an engine starts, which sets some.

        Otherwise it keeps them: it asks for several at every step of every engine, a thirtieth of the front
        end's processor time. Called on the event loop.
        """
        self._running += 1
        envs.disable_envs_cache()
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                envs.enable_envs_cache()


class Client(AsyncLLM):  # type: ignore[misc]  # vLLM has no types
    """vLLM's client, ended where it was being built when that fails.

    vLLM leaves this to `__del__`, which waits until the processor of images is warm. The garbage collector
    may call that in the very thread that warms it up: this would wait for itself, and the gateway's
    interpreter at its end for it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().__init__(*args, **kwargs)
        except BaseException:
            with contextlib.suppress(Exception):  # of half a client: why it could not be built says more
                self.shutdown()
            raise


def processes_of(client: AsyncLLM) -> list[psutil.Process]:
    """List an engine's processes: its core and the core's workers."""
    manager = client.engine_core.resources.engine_manager
    return trees_of(process.pid for process in manager.processes)


class EngineThread(threading.Thread):
    """A thread that builds one `AsyncLLM` and lives as long as it does.

    The build blocks for some twenty seconds, so it must not run on the event loop; and the kernel ends an
    engine's processes when the thread that started them ends.

    Attributes:
        built: the engine's client, once it is built, or the error that the build ended with.
    """

    def __init__(
        self,
        args: AsyncEngineArgs,
        logger: type[PrometheusStatLogger],
        name: str,
        starts: Starts,
        *,
        forked: bool = False,
    ) -> None:
        super().__init__(name=f"engine-{name}", daemon=True)
        self._args = args
        self._logger = logger
        self._starts = starts
        starts.waiting.append(self)
        self._forked = forked
        self._core: int | None = None
        self._has_begun = False
        self._forks = False
        self._forking = threading.Lock()
        self._settled = threading.Event()
        self._ended = threading.Event()
        self._processes: list[psutil.Process] = []
        self._segments: set[Path] = set()
        self._of_others: set[BaseProcess] = set()
        self.built: Future[AsyncLLM] = Future()

    def run(self) -> None:
        self.built.set_running_or_notify_cancel()  # a waiter that gives up must not cancel the build
        try:
            # vLLM's sockets lie there; a cleaner of temporary files may have removed it meanwhile.
            Path(envs.VLLM_RPC_BASE_PATH).mkdir(mode=0o700, exist_ok=True)
            client = self._build()
        except BaseException as error:  # noqa: BLE001  # the thread's border: raised where `built` is awaited
            self._settled.set()
            self.built.set_exception(error)
            return
        self._processes = processes_of(client)
        self._segments |= set(segments_of(self._processes))
        self._settled.set()
        self.built.set_result(client)
        self._ended.wait()
        client.shutdown(timeout=GRACE_S)  # then kills the core and its descendants
        del client, self.built  # the last references: at interpreter exit vLLM's finalizer fails

    def _build(self) -> AsyncLLM:
        """Build the client; other engines may start once this one's core is forked, or is ready."""
        with contextlib.ExitStack() as turn:
            waiting = self._starts.waiting
            while not (waiting[0] is self and self._starts.turn.acquire(timeout=BREAK_OFF_EVERY_S)):
                if self._ended.wait(LOOK_EVERY_S):
                    waiting.remove(self)
                    raise SystemExit
            waiting.popleft()
            turn.callback(self._starts.turn.release)
            self._of_others = set(multiprocessing.active_children())
            self._has_begun = True  # from now on `end` may interrupt it: before, the turn would stay taken
            if self._ended.is_set():
                raise SystemExit
            if self._forked and self._starts.server is not None:

                def launched(core: int) -> None:
                    self._core = core
                    turn.close()

                # This thread's context ends with it.
                CURRENT.set(Launch(self._starts.server, self._before_fork, launched))
            args = self._args
            return Client.from_vllm_config(
                with_core(args.create_engine_config(UsageContext.ENGINE_CONTEXT)),
                stat_loggers=[self._logger],
                enable_log_requests=args.enable_log_requests,
                disable_log_stats=args.disable_log_stats,
            )

    def _before_fork(self) -> None:
        """End the time in which `end` may interrupt the build: a core that is forked must become known."""
        with self._forking:
            self._forks = True

    @property
    def memory_bytes(self) -> int | None:
        """Bytes that the engine's processes hold in memory; None: there are none."""
        found = 0
        for process in self._processes:
            with contextlib.suppress(psutil.Error):
                found += process.memory_info().rss
        return found or None

    def kill(self) -> None:
        """Kill the engine's processes at once."""
        kill(self._processes)

    async def end(self) -> None:
        """Stop the engine, or its build, and wait until its processes are gone."""
        self._ended.set()
        await in_own_thread(self._end)

    def _end(self) -> None:
        if self.is_alive() and self._has_begun and not self._settled.is_set() and not self._cores():
            self._interrupt()
        while not self._settled.wait(BREAK_OFF_EVERY_S) and self.is_alive():
            self._break_off()
        self.join()
        self._sweep()

    def _interrupt(self) -> None:
        """Raise `SystemExit` in a build that has started no process yet, which may take it seconds more."""
        assert self.ident is not None
        raised = ctypes.py_object(SystemExit)
        with self._forking:
            if not self._forks:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident), raised)

    def _cores(self) -> list[int | None]:
        """List the process ids of the cores that this build has started."""
        if not self._has_begun:  # then nobody knows yet which of the processes are others'
            return []
        if self._forked:
            return [self._core] if self._core is not None else []
        return [child.pid for child in set(multiprocessing.active_children()) - self._of_others]

    def _break_off(self) -> None:
        """Kill the processes that the build has started so far; it notices within milliseconds, and fails.

        A core that is asked to end while it starts would go on until it has started.
        """
        found = trees_of(self._cores())
        self._processes += found
        self._segments |= set(segments_of(found))
        kill(found)

    def _sweep(self) -> None:
        """Kill processes that outlived the engine, e.g. workers of a dead core; release its shared memory."""
        self.kill()
        if left := wait_until_gone(self._processes, KILLED_WITHIN_S):
            log.warning("engine_processes_left", count=len(left))
        for segment in self._segments:
            release(segment)
