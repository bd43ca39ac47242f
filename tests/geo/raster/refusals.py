"""Open a hostile raster and check how it is refused."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from geo.raster.made import make_card, run, sign_model

from baton_geo.errors import GeoError
from baton_geo.raster.decoders import Decoders
from baton_geo.raster.messages import SceneRequest
from baton_geo.settings import GeoLimits

SECONDS = 10.0
"""Two are promised of a machine without other work."""
LIMITS = GeoLimits(tile_bytes=0)
REQUEST = SceneRequest(card=make_card(), limits=LIMITS)
UNSPEAKABLE = re.compile(
    r"/proc|/tmp|/vsi|0x[0-9a-f]{4}|Error|Exception|Traceback|rasterio|GDAL:|baton|\bself\b"
)


def refusal(decoders: Decoders, path: Path, request: SceneRequest = REQUEST) -> GeoError:
    """Why a file is refused: at the latest when its tiles are read, in time, in fit words."""
    started = time.monotonic()
    with pytest.raises(GeoError) as caught, decoders.open(path, request) as scene:
        run(scene, sign_model)
    assert time.monotonic() - started < SECONDS
    assert not UNSPEAKABLE.search(caught.value.message), caught.value.message
    return caught.value


def refuse_bytes(
    decoders: Decoders, tmp_path: Path, data: bytes, request: SceneRequest = REQUEST
) -> GeoError:
    """As `refusal`, of a file of these bytes with the name of a TIFF."""
    path = tmp_path / "scene.tif"
    path.write_bytes(data)
    return refusal(decoders, path, request)


def outcome(decoders: Decoders, path: Path, request: SceneRequest = REQUEST) -> GeoError | None:
    """None if the file was taken; a refusal of a known kind, in time and in fit words."""
    started = time.monotonic()
    try:
        with decoders.open(path, request) as scene:
            run(scene, sign_model)
        found = None
    except GeoError as error:
        found = error
    assert time.monotonic() - started < 2 * SECONDS  # several at a time
    assert found is None or not UNSPEAKABLE.search(found.message), found.message
    return found
