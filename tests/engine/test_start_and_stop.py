"""Gateways that are started and stopped: quietly, leaving no process; or that fail to start, in one paragraph."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest
from support.gateways import READY_WITHIN_S, RealGateway

pytestmark = pytest.mark.engine


@pytest.mark.chaos
def test_the_gateway_ends_quietly_and_leaves_no_process(tmp_path: Path) -> None:
    """SIGTERM: exit 0, nothing left, no traceback. On a gateway of its own, started as people do.

    How long it takes is measured against the import of torch on the same machine. `stop` looks for what is left.
    """
    with RealGateway(
        ["smollm2", "--max-model-len", "512", "--served-model-name", "tiny", "small"], tmp_path
    ) as gateway:
        gateway.wait_until_ready()
        children = psutil.Process(gateway.process.pid).children(recursive=True)
        assert len(children) >= 2
        answer = httpx.post(
            f"{gateway.url}/v1/completions", json={"prompt": "x", "max_tokens": 2}, timeout=60
        )
        assert answer.json()["model"] == "tiny"
        alias = {"model": "small", "prompt": "x", "max_tokens": 2}
        assert httpx.post(f"{gateway.url}/v1/completions", json=alias, timeout=60).status_code == 200
        cards = httpx.get(f"{gateway.url}/v1/models").json()["data"]
        assert [(card["id"], card["max_model_len"]) for card in cards] == [("tiny", 512), ("small", 512)]
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        imported = time.monotonic() - began
        began = time.monotonic()
        assert gateway.stop() == 0
        took = time.monotonic() - began
        print(f"stop: {took:.1f} s, import of torch {imported:.1f} s")
        assert took < 2 + 2 * imported
        assert "Traceback" not in gateway.log
        assert "engine_processes_left" not in gateway.log


@pytest.mark.chaos
def test_a_stop_while_the_engine_starts_is_as_quiet(tmp_path: Path) -> None:
    """The start blocks for seconds in vLLM; its process is ended, so that it gives up."""
    with RealGateway(["smollm2"], tmp_path) as gateway:
        process = psutil.Process(gateway.process.pid)
        deadline = time.monotonic() + READY_WITHIN_S
        while "EngineCor" not in " ".join(child.name() for child in process.children(recursive=True)):
            assert time.monotonic() < deadline, gateway.log
            time.sleep(0.05)
        assert gateway.stop() == 0
        assert "is ready on" not in gateway.log
        for word in ("Traceback", "error", "baton: "):
            assert word not in gateway.log


@pytest.mark.parametrize(
    ("settings", "code", "reason"),
    [
        ('[[engines]]\nname = "a"\nmodel = "smollm2"\nargs = {max_model_len = 99999}', 1, "99999"),
        pytest.param(  # also in tests/seams/test_vllm.py, without a process
            '[[engines]]\nname = "a"\nmodel = "smollm2"\nargs = {max_len = 1}',
            2,
            "unknown to vLLM",
            marks=pytest.mark.chaos,
        ),
        ('[[engines]]\nname = "a"\nmodel = "./nowhere"', 1, "does not exist"),
        pytest.param(  # the weights are loaded before it is known
            '[[engines]]\nname = "a"\nmodel = "smollm2"\nkv_cache_memory = "16MiB"',
            1,
            "KV cache",
            marks=pytest.mark.chaos,
        ),
        ("prot = 1", 2, "did you mean 'port'"),
        ('host = "0.0.0.0"', 2, "baton keys create"),
    ],
)
def test_a_start_that_fails_is_one_readable_paragraph(
    tmp_path: Path, settings: str, code: int, reason: str
) -> None:
    config = tmp_path / "baton.toml"
    config.write_text(settings)
    with RealGateway(["--config", str(config), "--log-level", "error"], tmp_path) as gateway:
        assert gateway.process.wait(timeout=120) == code
    assert reason in gateway.log, gateway.log
    assert "Traceback" not in gateway.log
    told = gateway.log[gateway.log.index("baton: ") :]
    assert len(told) < 900, told
