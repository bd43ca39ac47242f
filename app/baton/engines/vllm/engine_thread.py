"""Build a vLLM engine in a thread of its own, and stop the engine before the thread."""

from __future__ import annotations

import ctypes
import multiprocessing
import threading
from concurrent.futures import Future
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import structlog
from vllm import envs
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import PrometheusStatLogger

from baton.admission.fair_threads import in_own_thread
from baton.engines.process.processes import kill, trees_of, wait_until_gone
from baton.engines.process.shared_memory import release, segments_of

GRACE_S = 0.5
"""Seconds an engine's processes get to end by themselves. On a CPU a worker never does: its interpreter takes
more than five to unload its modules. Saves have ended before."""
BREAK_OFF_EVERY_S = 0.1
"""Seconds between two looks for new processes of a build that is to end."""
KILLED_WITHIN_S = 5.0
"""Seconds within which killed processes should be gone; else they are logged."""
log = structlog.get_logger("baton.engine")


def processes_of(client: AsyncLLM) -> list[psutil.Process]:
    """List an engine's processes: its core and the core's workers."""
    manager = client.engine_core.resources.engine_manager
    return trees_of(process.pid for process in manager.processes)


class EngineThread(threading.Thread):
    """A thread that builds one `AsyncLLM` and lives as long as it does.

    The build blocks for some twenty seconds, so it must not run on the event loop; and the kernel ends an
    engine's processes when the thread that started them ends.

    Args:
        args: vLLM's engine arguments.
        logger: the stat logger's class.
        name: the engine's name.

    Attributes:
        built: the engine's client, once it is built, or the error that the build ended with.
    """

    def __init__(self, args: AsyncEngineArgs, logger: type[PrometheusStatLogger], name: str) -> None:
        super().__init__(name=f"engine-{name}", daemon=True)
        self._args = args
        self._logger = logger
        self._settled = threading.Event()
        self._ended = threading.Event()
        self._processes: list[psutil.Process] = []
        self._segments: set[Path] = set()
        self._of_others = set(multiprocessing.active_children())  # engines start one by one
        self.built: Future[AsyncLLM] = Future()

    def run(self) -> None:
        self.built.set_running_or_notify_cancel()  # a waiter that gives up must not cancel the build
        try:
            # vLLM's sockets lie there; a cleaner of temporary files may have removed it meanwhile.
            Path(envs.VLLM_RPC_BASE_PATH).mkdir(mode=0o700, exist_ok=True)
            client = AsyncLLM.from_engine_args(self._args, stat_loggers=[self._logger])
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

    def kill(self) -> None:
        """Kill the engine's processes at once."""
        kill(self._processes)

    async def end(self) -> None:
        """Stop the engine, or its build, and wait until its processes are gone."""
        self._ended.set()
        await in_own_thread(self._end)

    def _end(self) -> None:
        if self.is_alive() and not self._settled.is_set() and not self._cores():
            self._interrupt()
        while not self._settled.wait(BREAK_OFF_EVERY_S) and self.is_alive():
            self._break_off()
        self.join()
        self._sweep()

    def _interrupt(self) -> None:
        """Raise `SystemExit` in a build that has started no process yet, which may take it seconds more."""
        assert self.ident is not None
        raised = ctypes.py_object(SystemExit)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident), raised)

    def _cores(self) -> set[BaseProcess]:
        """Return the processes that this build has started."""
        return set(multiprocessing.active_children()) - self._of_others

    def _break_off(self) -> None:
        """Kill the processes that the build has started so far; it notices within milliseconds, and fails.

        A core that is asked to end while it starts would go on until it has started.
        """
        found = trees_of(core.pid for core in self._cores())
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
