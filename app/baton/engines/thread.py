"""The thread an engine is built in, and lives as long as."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import threading
from concurrent.futures import Future
from pathlib import Path

import psutil
import structlog
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import PrometheusStatLogger

from baton.engines.segments import release, segments_of

TERMINATE_EVERY_S = 0.1
SWEEP_AFTER_S = 5.0
"""An engine's processes end by themselves when one of them is lost; those that have not by then are ended."""
log = structlog.get_logger("baton.engine")


class EngineThread(threading.Thread):
    """Builds one AsyncLLM and lives as long as it does.

    Building blocks for some twenty seconds, so it is not done on the event loop; and the kernel ends
    an engine's processes when the *thread* that spawned them ends.
    """

    def __init__(self, args: AsyncEngineArgs, logger: type[PrometheusStatLogger], name: str) -> None:
        super().__init__(name=f"engine-{name}", daemon=True)
        self._args = args
        self._logger = logger
        self._settled = threading.Event()
        self._ended = threading.Event()
        self._processes: list[psutil.Process] = []
        self._segments: list[Path] = []
        self._foreign = set(multiprocessing.active_children())  # other engines'; they start one by one
        self.built: Future[AsyncLLM] = Future()

    def run(self) -> None:
        self.built.set_running_or_notify_cancel()  # whoever stops waiting must not cancel what goes on
        try:
            client = AsyncLLM.from_engine_args(self._args, stat_loggers=[self._logger])
        except BaseException as error:  # noqa: BLE001  # the thread's border: handed to who waits for `built`
            self._settled.set()
            self.built.set_exception(error)
            return
        self._settled.set()
        self._processes = processes_of(client)
        self._segments = list(segments_of(self._processes))
        self.built.set_result(client)
        self._ended.wait()
        client.shutdown()
        self._sweep()
        del client, self.built  # the last references: vLLM's finalizer fails at interpreter exit

    def kill(self) -> None:
        """End the engine's processes at once; one that is stopped hears nothing else."""
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _sweep(self) -> None:
        """End what outlived the engine, and give back the shared memory that nobody else will."""
        _gone, left = psutil.wait_procs(self._processes, timeout=SWEEP_AFTER_S)
        if left:
            log.warning("engine_processes_left", count=len(left))
            self.kill()
            psutil.wait_procs(left, timeout=SWEEP_AFTER_S)
        for segment in self._segments:
            release(segment)

    async def end(self) -> None:
        """Stop the engine, also one that is still being built, and wait until it is gone."""
        self._ended.set()
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        while not self._settled.wait(TERMINATE_EVERY_S):
            # The build notices within milliseconds that its process ended, and gives up.
            for process in set(multiprocessing.active_children()) - self._foreign:
                process.terminate()
        self.join()


def processes_of(client: AsyncLLM) -> list[psutil.Process]:
    """The processes an engine is made of: its core and the core's workers."""
    manager = client.engine_core.resources.engine_manager
    cores = [psutil.Process(process.pid) for process in manager.processes]
    return [found for core in cores for found in (core, *core.children(recursive=True))]
