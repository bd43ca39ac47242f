"""What a gateway and its engines hold: memory, blocks, descriptors."""

from __future__ import annotations

import re

import httpx
import psutil

from support.gateways import RealGateway


def memory_mib(gateway: RealGateway) -> float:
    """Memory of the gateway and all its engines, which is theirs alone."""
    main = psutil.Process(gateway.process.pid)
    return sum(process.memory_full_info().uss for process in (main, *main.children(recursive=True))) / 2**20


def descriptors(gateway: RealGateway) -> int:
    return int(psutil.Process(gateway.process.pid).num_fds())


def blocks_in_use(gateway: RealGateway) -> float:
    """The share of the KV cache of the engine `tiny` that requests hold."""
    page = httpx.get(f"{gateway.metrics_url}/metrics").text
    found = re.search(r'^vllm:kv_cache_usage_perc{[^}]*model_name="tiny"[^}]*} (\S+)$', page, re.MULTILINE)
    assert found
    return float(found[1])
