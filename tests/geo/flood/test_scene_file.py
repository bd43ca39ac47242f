"""The example scene: a GeoTIFF any tool reads."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import rasterio

from baton_geo.flood.scenes import make_scene


def test_scene_as_a_geotiff(tmp_path):
    """The command writes the scene's bands with names, nodata, CRS and 10 m pixels, within seconds."""
    path = tmp_path / "scene.tif"
    command = [sys.executable, "-m", "baton_geo.flood.scene", str(path), "--seed", "12", "--size", "96"]
    start = time.monotonic()
    subprocess.run(command, check=True, capture_output=True)
    assert time.monotonic() - start < 10
    with rasterio.open(path) as file:
        assert file.descriptions == ("BLUE", "GREEN", "RED", "NIR_NARROW", "SWIR_1", "SWIR_2")
        assert (file.crs.to_epsg(), file.res, file.nodata) == (32633, (10.0, 10.0), -9999)
        np.testing.assert_array_equal(file.read(), make_scene(12, 96, 96).pixels)
