"""vLLM's own server with the embedded model, to be treated as Baton is in the same run."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
import psutil

from baton.config.settings import load_settings
from baton.models.store import ModelStore
from support.engine_threads import VARIABLE, engine_cores
from support.gateways import READY_WITHIN_S, RealGateway

QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "TORCHDYNAMO_DISABLE": "1"}
ONE_PROCESS = ["--distributed-executor-backend", "uni"], {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Words and environment for the model in the core's process, as Baton has it: a third would import vLLM again."""


class VllmServer(RealGateway):
    """`vllm serve`, on a free port, with the engine settings that Baton has by itself on a CPU."""

    def __init__(
        self, folder: Path, words: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(list(words), folder, QUIET | {VARIABLE: engine_cores()} | dict(environment or {}))
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]

    def command(self) -> list[str]:
        model = ModelStore(load_settings().models_folder).resolve("smollm2")
        server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        where = ["--host", "127.0.0.1", "--port", str(self._port)]
        engine = ["--max-model-len", "2048", "--enforce-eager", "--kv-cache-memory-bytes", str(512 * 2**20)]
        words = ["--model", model, "--served-model-name", "smollm2", *engine, *self._arguments]
        return [*server, *where, *words]

    def wait_until_ready(self) -> None:
        self.url = f"http://127.0.0.1:{self._port}"
        deadline = time.monotonic() + READY_WITHIN_S
        while not self.answers():
            assert self.process.poll() is None, f"the server ended:\n{self.log[-3000:]}"
            assert time.monotonic() < deadline, self.log[-3000:]
            time.sleep(0.2)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End it; what a fault has left hanging is killed."""
        family = [self.process, *psutil.Process(self.process.pid).children(recursive=True)]
        self.process.send_signal(number)
        try:
            return self.process.wait(20)
        except subprocess.TimeoutExpired:
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            return self.process.wait(20)

    def answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=2).status_code == 200
        except httpx.TransportError:
            return False
