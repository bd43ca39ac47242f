"""Scenes to send to a gateway, the requests that send them, and what to look for afterwards."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from baton.models.catalog import FLOOD_TINY
from baton.models.store import ModelStore
from support.gateways import RealGateway

FORBIDDEN = re.compile(r"/tmp|/home|/root|/proc|Traceback|\w+(Error|Exception)\b|0x[0-9a-f]{6}|site-packages")
"""What no error text may hold (row F7)."""


def flood_folder() -> Path:
    return ModelStore(Path("/nowhere")).place(FLOOD_TINY)


def send(
    client: httpx.Client, content: bytes, model: str = "rgb", accept: str = "image/tiff", query: str = ""
) -> httpx.Response:
    headers = {"content-type": "image/tiff", "accept": accept}
    return client.post(f"/pooling?model={model}{query}", content=content, headers=headers)


def code_of(response: httpx.Response) -> tuple[int, str]:
    assert FORBIDDEN.search(response.text) is None, response.text
    return response.status_code, response.json()["error"]["code"]


def colourful(height: int, width: int, seed: int = 0) -> Any:
    """Three bands of blobs, the same for the same seed."""
    random = np.random.default_rng(seed)
    coarse = random.integers(0, 255, (3, height // 16 + 2, width // 16 + 2))
    smooth = np.kron(coarse, np.ones((16, 16)))[:, :height, :width]
    return (smooth + random.integers(0, 20, smooth.shape)).clip(0, 255).astype(np.uint8)


def decoders(gateway: RealGateway) -> list[psutil.Process]:
    """The processes that decode rasters for scenes now."""
    servers = [
        p
        for p in psutil.Process(gateway.process.pid).children()
        if "baton_geo.raster.fork_server" in " ".join(p.cmdline())
    ]
    return [child for server in servers for child in server.children()]


def until(condition: Callable[[], object], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(condition())
