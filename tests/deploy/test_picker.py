"""llm-d's endpoint picker can score our pods: vLLM's gauges are on our page as on vLLM's own."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge
from support.endpoint_picker import CACHE, RUNNING, USED, WAITING, scored
from support.gateways import RealGateway

from baton.telemetry.page import MergedRegistry

PAGE = (Path(__file__).parents[2] / "deploy/kubernetes/README.md").read_text()


def engine_registry(name: str, waiting: int) -> CollectorRegistry:
    registry = CollectorRegistry()
    for series, value in ((WAITING, waiting), (RUNNING, 1), (USED, 0.5)):
        Gauge(series, "As vLLM's.", ("model_name", "engine"), registry=registry).labels(name, "0").set(value)
    Gauge(CACHE, "As vLLM's.", ("block_size", "num_gpu_blocks"), registry=registry).labels("16", "100").set(1)
    return registry


def test_without_settings_the_picker_sees_the_first_engine() -> None:
    """So the page lists engines in the order of the settings; `model_name` in its selectors picks another."""
    page = MergedRegistry((engine_registry("b", 3), engine_registry("a", 7))).page().decode()
    assert scored(page).waiting == 3
    assert scored(page, model_name="a").waiting == 7
    with pytest.raises(AssertionError, match="no series"):
        scored(page, model_name="c")


def test_the_installed_vllm_has_what_the_picker_reads() -> None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    source = (Path(spec.origin).parent / "v1/metrics/loggers.py").read_text()
    for name in (WAITING, RUNNING, USED):
        assert f'name="{name}"' in source, name
    assert '"vllm:cache_config_info"' in source


def test_the_page_names_what_is_read() -> None:
    for name in (WAITING, RUNNING, USED, CACHE, "vllm:lora_requests_info"):
        assert f"`{name}`" in PAGE, name


@pytest.mark.engine
def test_the_picker_scores_a_gateway_by_its_engine(real_gateway: RealGateway) -> None:
    """Idle, and with a request: the engine of each selector, whatever other engines do."""
    with real_gateway.client() as client:
        page = client.get("/metrics").text
        idle = scored(page)
        assert (idle.waiting, idle.running, idle.used) == (0, 0, 0.0)
        assert idle.block_size > 0
        assert idle.blocks > 0
        assert re.search(rf'^{RUNNING}{{engine="0",model_name="smollm2"}} 0', page, re.MULTILINE)
        body = {"prompt": "x", "max_tokens": 150, "ignore_eos": True, "model": "smollm2-fp32"}
        asked = threading.Thread(target=client.post, args=("/v1/completions",), kwargs={"json": body})
        asked.start()
        with real_gateway.client() as other:
            deadline = time.monotonic() + 20
            while scored(page := other.get("/metrics").text, model_name="smollm2-fp32").running == 0:
                assert time.monotonic() < deadline, "the request never ran"
        asked.join()
    assert scored(page, model_name="smollm2-fp32").used > 0
    assert scored(page).running == 0


@pytest.mark.engine
@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_the_parser_of_the_picker_takes_the_page(real_gateway: RealGateway) -> None:
    """1: it could not be parsed; 3: names that its linter would have chosen otherwise, as vLLM's colons."""
    with real_gateway.client() as client:
        page = client.get("/metrics").content
    done = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, check=False)
    assert done.returncode in (0, 3), done.stderr.decode()
    assert b"error while linting" not in done.stderr
    broken = subprocess.run(
        ["promtool", "check", "metrics"], input=page + b"no metric {\n", capture_output=True, check=False
    )
    assert broken.returncode == 1
