"""GeoTIFFs that are truncated at every byte, or have bytes flipped."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from geo.raster.made import write_tiff
from geo.raster.refusals import outcome

from baton_geo.errors import GeoError, NotARaster, RasterBroken
from baton_geo.raster.decoders import Decoders

pytestmark = pytest.mark.fault("F3")


def small_tiff(tmp_path: Path) -> bytes:
    """A sound GeoTIFF of under a kilobyte: tiled, compressed, with a CRS."""
    pixels = np.random.default_rng(0).integers(0, 255, (1, 16, 16)).astype("uint8")
    path = write_tiff(
        tmp_path / "sound.tif", pixels, tiled=True, blockxsize=16, blockysize=16, compress="deflate"
    )
    return path.read_bytes()


def test_a_tiff_truncated_at_any_byte_is_refused(decoders: Decoders, tmp_path: Path) -> None:
    """Cut anywhere, the file is refused as broken, or as no TIFF when its first bytes are gone."""
    whole = small_tiff(tmp_path)

    def cut(length: int) -> GeoError | None:
        path = tmp_path / f"{length}.tif"
        path.write_bytes(whole[:length])
        return outcome(decoders, path)

    assert outcome(decoders, tmp_path / "sound.tif") is None
    with ThreadPoolExecutor(4) as pool:
        errors = list(pool.map(cut, range(len(whole))))
    assert {type(error) for error in errors[:4]} == {NotARaster}
    assert {type(error) for error in errors[4:]} == {RasterBroken}


def test_flipped_bytes_are_read_or_refused(decoders: Decoders, tmp_path: Path) -> None:
    """Any byte of the file changed: taken or refused, never anything else."""
    whole = small_tiff(tmp_path)
    random = np.random.default_rng(7)

    def flip(number: int) -> GeoError | None:
        data = bytearray(whole)
        for place in random.integers(0, len(whole), random.integers(1, 4)):
            data[place] = random.integers(0, 256)
        path = tmp_path / f"flip{number}.tif"
        path.write_bytes(data)
        return outcome(decoders, path)

    with ThreadPoolExecutor(4) as pool:
        outcomes = list(pool.map(flip, range(300)))
    assert any(outcome is None for outcome in outcomes)
    assert any(outcome is not None for outcome in outcomes)
