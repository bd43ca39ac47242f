"""Look at the fork server and the children of decoders."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import psutil
from geo.raster.made import make_card, run, sign_model

from baton_geo.raster.decoders import Decoders
from baton_geo.raster.messages import SceneRequest
from baton_geo.settings import GeoLimits

REQUEST = SceneRequest(card=make_card(), limits=GeoLimits(open_seconds=20))


def fork_server_of(decoders: Decoders) -> psutil.Process:
    return psutil.Process(decoders._fork_server._server.process.pid)


def children_of(decoders: Decoders) -> list[psutil.Process]:
    return fork_server_of(decoders).children()


def until(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    """Whether something comes true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def works(decoders: Decoders, raster: Path) -> bool:
    with decoders.open(raster, REQUEST) as scene:
        return run(scene, sign_model).areas[1].pixels == 200 * 100
