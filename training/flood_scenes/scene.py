"""Write one synthetic scene as a GeoTIFF.

python -m training.flood_scenes.scene scene.tif --seed 9001 --size 512
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import rasterio
import typer
from rasterio.transform import from_origin

from training.flood_scenes.scenes import SyntheticScene, make_scene
from training.flood_scenes.sensor import NODATA
from training.flood_scenes.sky import PIXEL_M
from training.flood_scenes.spectra import BANDS

CRS: Final = "EPSG:32633"
DEFAULT_SEED: Final = 9101  # flood-tiny was not trained on it
WEST, NORTH = 399_960.0, 5_100_000.0  # metres; an arbitrary place in UTM zone 33 N


def write_geotiff(scene: SyntheticScene, path: Path) -> None:
    """Write the six bands as a tiled, deflated, georeferenced int16 GeoTIFF with band names and nodata.

    Raises:
        rasterio.errors.RasterioIOError: the file cannot be written.
    """
    count, height, width = scene.pixels.shape
    with rasterio.open(
        path,
        "w",
        driver="GTiff",
        dtype="int16",
        count=count,
        height=height,
        width=width,
        crs=CRS,
        transform=from_origin(WEST, NORTH, PIXEL_M, PIXEL_M),
        nodata=NODATA,
        tiled=True,
        blockxsize=256,
        blockysize=256,
        compress="deflate",
        predictor=2,
    ) as file:
        file.write(scene.pixels)
        file.descriptions = BANDS


def main(
    out: Annotated[Path, typer.Argument(help="File to write.")],
    seed: Annotated[int, typer.Option(min=0, help="Which scene.")] = DEFAULT_SEED,
    size: Annotated[int, typer.Option(min=16, max=8192, help="Height and width, pixels.")] = 512,
) -> None:
    """Write a synthetic satellite scene of a flood: six bands, 10 m pixels."""
    write_geotiff(make_scene(seed, size, size), out)
    print(f"{out}: six bands of {size} x {size} pixels, {CRS}, seed {seed}")


if __name__ == "__main__":
    typer.run(main)
