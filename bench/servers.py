"""The servers that are compared: each in its own process, on a free port, with the same settings."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from urllib.request import urlopen

import psutil

from baton.engines.hardware import read_processor

READY_WITHIN_S = 240
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
    "TORCHDYNAMO_DISABLE": "1",
}
ENGINE_ARGS: dict[str, object] = {
    "max_model_len": 1024,
    "max_num_seqs": 64,
    "enforce_eager": True,
    "dtype": "auto",  # vLLM's choice on both sides; Baton's own depends on the processor
}
KV_BYTES = 256 * 1024 * 1024


def machine() -> str:
    """The processor and how many of its cores may be used, to stand beside every figure."""
    return f"{read_processor()}, {len(os.sched_getaffinity(0))} cores"


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def cpu_seconds(pid: int) -> float:
    """Processor time one process has used, without its children, to the nanosecond.

    `/proc/PID/stat` counts in steps of 10 ms. This clock is that of `clock_getcpuclockid(3)`, which Python
    has for threads alone.
    """
    return time.clock_gettime(~pid << 3 | 2)


class Server:
    """A server process that answers `/health`.

    Args:
        name: what it is called in the tables.
        command: what starts it.
        url: where it listens.
        environment: variables of its own.
    """

    def __init__(
        self, name: str, command: list[str], url: str, environment: dict[str, str] | None = None
    ) -> None:
        self.name = name
        self.url = url
        self._command = command
        self._environment = os.environ | ENVIRONMENT | (environment or {})

    def __enter__(self) -> Server:
        self._log = tempfile.NamedTemporaryFile("w+", suffix=f"-{self.name}.log")  # closed in __exit__
        began = time.monotonic()
        self.process = subprocess.Popen(
            self._command, stdout=self._log, stderr=subprocess.STDOUT, env=self._environment
        )
        while not self._healthy():
            if self.process.poll() is not None or time.monotonic() - began > READY_WITHIN_S:
                raise RuntimeError(f"{self.name} did not start:\n{Path(self._log.name).read_text()[-3000:]}")
            time.sleep(0.1)
        self.start_seconds = time.monotonic() - began
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.terminate()
        self.process.wait(60)
        self._log.close()

    def _healthy(self) -> bool:
        try:
            with urlopen(f"{self.url}/health", timeout=1) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    @property
    def cpu_seconds(self) -> float:
        """Processor time the front-end process alone has used."""
        return cpu_seconds(self.process.pid)

    @property
    def memory_mib(self) -> float:
        """Resident memory of the front-end process alone, without its engines."""
        return float(psutil.Process(self.process.pid).memory_info().rss) / 1024 / 1024


def baton(model: Path, folder: Path) -> Server:
    """Baton with one engine named `bench`."""
    config = folder / "bench.toml"
    args = ", ".join(f"{key} = {json.dumps(value)}" for key, value in ENGINE_ARGS.items())
    config.write_text(
        f'[[engines]]\nname = "bench"\nmodel = "{model}"\nkv_cache_memory = {KV_BYTES}\nargs = {{ {args} }}\n'
    )
    port = free_port()
    command = [
        str(Path(sys.executable).parent / "baton"),
        "serve",
        "--config",
        str(config),
        "--port",
        str(port),
    ]
    return Server("baton", command, f"http://127.0.0.1:{port}")


def plain_vllm(model: Path, *, spins: str | None = None) -> Server:
    """vLLM's own server with the same engine settings; `spins`: how long its OpenMP threads wait."""
    port = free_port()
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--served-model-name", "bench", "--host", "127.0.0.1", "--port", str(port)),
        *("--kv-cache-memory-bytes", str(KV_BYTES), "--enable-prompt-tokens-details"),
    ]
    for key, value in ENGINE_ARGS.items():
        command += [f"--{key.replace('_', '-')}"] + ([] if value is True else [str(value)])
    own = {} if spins is None else {"GOMP_SPINCOUNT": spins}
    return Server("plain vLLM", command, f"http://127.0.0.1:{port}", own)


def tiny_model(source: Path, folder: Path, head: int = 32) -> Path:
    """A random two-layer model with the source's tokenizer: the front end is what is measured."""
    script = f"""
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
config = AutoConfig.from_pretrained({str(source)!r})
config.num_hidden_layers, config.hidden_size, config.intermediate_size = 2, 64, 128
config.num_attention_heads = config.num_key_value_heads = 2
config.head_dim = {head}
torch.manual_seed(0)
AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained({str(folder)!r})
AutoTokenizer.from_pretrained({str(source)!r}).save_pretrained({str(folder)!r})
"""
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
    return folder
