"""The thread an engine is built in, and lives as long as."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from concurrent.futures import Future

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import PrometheusStatLogger

TERMINATE_EVERY_S = 0.1


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
        self.built.set_result(client)
        self._ended.wait()
        client.shutdown()
        del client, self.built  # the last references: vLLM's finalizer fails at interpreter exit

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
