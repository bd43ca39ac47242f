"""Small real rasters with known numbers, made where a test needs them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from rasterio import Affine
from rasterio.errors import NotGeoreferencedWarning
from rasterio.io import MemoryFile

SIX = ("BLUE", "GREEN", "RED", "NIR_NARROW", "SWIR_1", "SWIR_2")
RGB = ("RED", "GREEN", "BLUE")


def geotiff(
    pixels: NDArray[Any],
    names: tuple[str, ...] = SIX,
    *,
    crs: str | None = "EPSG:32633",
    origin: tuple[float, float] = (500_000.0, 5_000_000.0),
    size: float = 10.0,
    nodata: float | None = None,
    **options: Any,
) -> bytes:
    """A GeoTIFF of (bands, height, width)."""
    count, height, width = pixels.shape
    profile = {"driver": "GTiff", "count": count, "height": height, "width": width, "dtype": pixels.dtype}
    profile |= {
        "crs": crs,
        "nodata": nodata,
        "transform": Affine(size, 0, origin[0], 0, -size, origin[1]),
    } | options
    with MemoryFile() as memory:
        with memory.open(**profile) as file:
            file.write(pixels)
            file.descriptions = names[:count]
        return bytes(memory.read())


def opened(content: bytes) -> tuple[NDArray[Any], dict[str, Any]]:
    """Pixels (bands, height, width) and profile of a GeoTIFF."""
    with warnings.catch_warnings(), MemoryFile(content) as memory:
        warnings.simplefilter("ignore", NotGeoreferencedWarning)  # so are photos
        with memory.open() as file:
            return file.read(), {**file.profile, "tags": file.tags(), "overviews": file.overviews(1)}


def written(folder: Path, name: str, content: bytes) -> Path:
    """A file in a folder that is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    return folder / name
