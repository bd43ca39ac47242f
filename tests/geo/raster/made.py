"""Rasters made for a test: with rasterio where they are sound, byte by byte where they are not."""

from __future__ import annotations

import struct
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import rasterio
import torch
from rasterio.errors import NotGeoreferencedWarning

from baton_geo.card import Band, Card, ClassLabel
from baton_geo.raster.messages import CARRIED, Products
from baton_geo.raster.open_scene import OpenScene
from baton_geo.scenes import normalised

NORTH_UP = rasterio.Affine(10.0, 0.0, 500_000.0, 0.0, -10.0, 5_000_000.0)
UTM = "EPSG:32633"
Model = Callable[[npt.NDArray[np.float32]], npt.NDArray[np.float32]]


def make_card(bands: int = 1, classes: int = 2, **fields: Any) -> Card:
    """A model that sees the file's own numbers: mean 0, deviation 1, scale 1."""
    known: dict[str, Any] = {
        "bands": tuple(Band(name=f"B{number}", mean=0.0, std=1.0) for number in range(1, bands + 1)),
        "classes": tuple(
            ClassLabel(name=f"class {number}", colour=(40 * number % 256, 90, 200 - 20 * number % 200))
            for number in range(classes)
        ),
        "tile": 32,
        "overlap": 8,
    }
    return Card(**(known | fields))


def write_tiff(path: Path, pixels: npt.NDArray[Any], names: tuple[str, ...] = (), **options: Any) -> Path:
    """A GeoTIFF of `pixels`, shape (bands, height, width), in UTM at 10 m unless `options` say otherwise."""
    count, height, width = pixels.shape
    profile = {"crs": UTM, "transform": NORTH_UP, "dtype": pixels.dtype} | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotGeoreferencedWarning)
        with rasterio.open(
            path, "w", driver="GTiff", width=width, height=height, count=count, **profile
        ) as file:
            file.write(pixels)
            for band, name in enumerate(names, 1):
                file.set_band_description(band, name)
    return path


def write_jp2(path: Path, pixels: npt.NDArray[Any], **options: Any) -> Path:
    """The same as a lossless JPEG 2000 file; `CODEC="J2K"`: a codestream without boxes."""
    count, height, width = pixels.shape
    profile = {
        "crs": UTM,
        "transform": NORTH_UP,
        "dtype": pixels.dtype,
        "REVERSIBLE": "YES",
        "QUALITY": "100",
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotGeoreferencedWarning)
        with rasterio.open(
            path, "w", driver="JP2OpenJPEG", width=width, height=height, count=count, **(profile | options)
        ) as file:
            file.write(pixels)
    return path


def read_tiff(path: Path) -> npt.NDArray[Any]:
    """All bands, shape (bands, height, width)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotGeoreferencedWarning)
        with rasterio.open(path) as file:
            pixels: npt.NDArray[Any] = file.read()
    return pixels


def read_tile(scene: OpenScene, tile: int) -> npt.NDArray[np.float32] | None:
    """A tile as the model sees it, shape (bands, frames, tile, tile); None if all of it is nodata."""
    tiles, strip = scene.read(tile)
    if not tiles:
        return None
    card, scaling = scene.card, torch.tensor(scene.info.scaling, dtype=torch.float32)
    shape = len(card.bands), card.frames, card.tile, card.tile
    carried = CARRIED.index(scene.info.carried)
    seen: npt.NDArray[np.float32] = normalised(torch.from_numpy(strip), carried, scaling, shape)[0].numpy()
    return seen


def seen_by_the_model(prompt: dict[str, Any], shape: tuple[int, ...]) -> torch.Tensor:
    """A prompt's tiles as the model sees them, shape (tiles, bands, frames, side, side)."""
    image = prompt["multi_modal_data"]["image"]
    return normalised(image["tiles"], int(image["carried"]), image["scaling"], shape)


def run(scene: OpenScene, model: Model) -> Products:
    """Every tile through a model, in order."""
    for tile in range(scene.info.tiles):
        pixels = read_tile(scene, tile)
        if pixels is not None:
            scene.write(tile, model(pixels))
    return scene.finish()


def sign_model(pixels: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Class 1 where the first band is above 0."""
    first = pixels[0, 0]
    return np.stack([-first, first])


def raw_tiff(
    tags: dict[int, tuple[int, list[int]]], data: bytes = b"", *, following: int = 0, order: str = "<"
) -> bytes:
    """A classic TIFF: header, one directory at 8, the values that do not fit, then `data`.

    Args:
        tags: {number: (type, values)}; a value of -1 - n becomes the place of byte n of `data`.
        data: pixels.
        following: where the header says the next directory is.
        order: "<" or ">".
    """
    codes = {1: "B", 3: "H", 4: "I", 12: "d", 16: "Q"}
    outside = 8 + 2 + 12 * len(tags) + 4
    packed = {
        tag: (kind, values, struct.calcsize(f"<{len(values)}{codes[kind]}"))
        for tag, (kind, values) in tags.items()
    }
    place = outside + sum(size for _, _, size in packed.values() if size > 4)
    entries, values_outside = b"", b""
    for tag, (kind, values, size) in sorted(packed.items()):
        known = [place - 1 - value if value < 0 else value for value in values]
        bytes_ = struct.pack(f"{order}{len(known)}{codes[kind]}", *known)
        entries += struct.pack(f"{order}HHI", tag, kind, len(known))
        if size > 4:
            entries += struct.pack(f"{order}I", outside + len(values_outside))
            values_outside += bytes_
        else:
            entries += bytes_.ljust(4, b"\0")
    magic = b"II*\0" if order == "<" else b"MM\0*"
    head = magic + struct.pack(f"{order}I", 8) + struct.pack(f"{order}H", len(tags))
    return head + entries + struct.pack(f"{order}I", following) + values_outside + data


def plain_tags(width: int = 40, height: int = 30, **changed: Any) -> dict[int, tuple[int, list[int]]]:
    """Tags of an uncompressed grey 8-bit image in one strip; `t258=(3, [16])` replaces one, None removes it."""
    tags: dict[int, Any] = {
        256: (4, [width]),
        257: (4, [height]),
        258: (3, [8]),
        259: (3, [1]),
        262: (3, [1]),
        273: (4, [-1]),
        277: (3, [1]),
        278: (4, [height]),
        279: (4, [width * height]),
    }
    tags |= {int(name[1:]): value for name, value in changed.items()}
    return {tag: value for tag, value in tags.items() if value is not None}


def write_strips(path: Path, pixels: npt.NDArray[Any], rows: int) -> Path:
    """A TIFF of `pixels`, shape (bands, height, width), in DEFLATE strips of some rows, band after band.

    Rasterio does not write strips of a height one asks for.
    """
    count, height, width = pixels.shape
    strips = [
        zlib.compress(np.ascontiguousarray(band[top : top + rows]).tobytes(), 1)
        for band in pixels
        for top in range(0, height, rows)
    ]
    places = np.cumsum([0, *map(len, strips[:-1])])
    tags = plain_tags(width, height) | {
        258: (3, [pixels.dtype.itemsize * 8] * count),
        259: (3, [8]),
        273: (4, [-1 - int(place) for place in places]),
        277: (3, [count]),
        278: (4, [rows]),
        279: (4, [len(strip) for strip in strips]),
        284: (3, [2]),
        339: (3, [{"u": 1, "i": 2, "f": 3}[pixels.dtype.kind]] * count),
    }
    path.write_bytes(raw_tiff(tags, b"".join(strips)))
    return path


def png_chunk(kind: bytes, data: bytes) -> bytes:
    """One chunk of a PNG."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def raw_png(
    width: int, height: int, *chunks: bytes, depth: int = 8, colour: int = 2, rows: bytes = b""
) -> bytes:
    """A PNG of the chunks given between its header and its pixels."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    parts = [
        png_chunk(b"IHDR", header),
        *chunks,
        png_chunk(b"IDAT", zlib.compress(rows)),
        png_chunk(b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)
