"""Scenes as files: GeoTIFFs any tool reads, and the one that the package ships."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import rasterio

from baton_geo.flood.scene import SAMPLE
from training.flood_scenes.scenes import make_scene


def test_scene_as_a_geotiff(tmp_path):
    """The command writes the scene's bands with names, nodata, CRS and 10 m pixels, within seconds."""
    path = tmp_path / "scene.tif"
    command = [sys.executable, "-m", "training.flood_scenes.scene", str(path), "--seed", "12", "--size", "96"]
    start = time.monotonic()
    subprocess.run(command, check=True, capture_output=True)
    assert time.monotonic() - start < 10
    with rasterio.open(path) as file:
        assert file.descriptions == ("BLUE", "GREEN", "RED", "NIR_NARROW", "SWIR_1", "SWIR_2")
        assert (file.crs.to_epsg(), file.res, file.nodata) == (32633, (10.0, 10.0), -9999)
        np.testing.assert_array_equal(file.read(), make_scene(12, 96, 96).pixels)


def test_the_package_ships_one_of_them(tmp_path):
    """The command that the first map begins with writes it, as it was drawn, without anything but the package."""
    path = tmp_path / "scene.tif"
    command = [sys.executable, "-P", "-m", "baton_geo.flood.scene", str(path)]
    said = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path).stdout
    assert said.startswith(f"{path}: six bands of 128 x 128 pixels of 10 m, EPSG:32633")
    assert path.read_bytes() == SAMPLE.read_bytes()
    with rasterio.open(path) as file:
        assert file.descriptions == ("BLUE", "GREEN", "RED", "NIR_NARROW", "SWIR_1", "SWIR_2")
        assert (file.crs.to_epsg(), file.res, file.nodata) == (32633, (10.0, 10.0), -9999)
        np.testing.assert_array_equal(file.read(), make_scene(9116, 128, 128).pixels)
