"""Check size, type, storage and memory of a raster by its header, before any pixel is decoded."""

from __future__ import annotations

import numpy as np

from baton_geo.card import Card
from baton_geo.errors import RasterBroken, RasterTooLarge, RasterUnusable
from baton_geo.raster.messages import SceneRequest
from baton_geo.raster.pixels.grid import count_tiles
from baton_geo.raster.reading.tiff import TiffHeader

# TIFF's (sample format, bits): numpy's name
TYPES = {
    (1, 8): "uint8",
    (2, 8): "int8",
    (1, 16): "uint16",
    (2, 16): "int16",
    (1, 32): "uint32",
    (2, 32): "int32",
    (1, 64): "uint64",
    (2, 64): "int64",
    (3, 16): "float32",  # as GDAL reads them
    (3, 32): "float32",
    (3, 64): "float64",
}
# Numbers of the TIFF tag; libtiff's list.
COMPRESSIONS = {
    1: "none", 5: "LZW", 7: "JPEG", 8: "DEFLATE", 32773: "PackBits", 32946: "DEFLATE", 34887: "LERC",
    34925: "LZMA", 50000: "ZSTD",
}  # fmt: skip
UNCOMPRESSED, JPEG = 1, 7
PALETTE = 3
PHOTOMETRICS = {0, 1, 2, 6}  # grey, grey, RGB, YCbCr
BANDS_OF_A_FILE = 4096  # used or not: `indices` goes no further
FREE_TILES = 64  # a small scene of one value is hardly longer than its header
MEMORY_SHARE = 0.7  # of a decoder's memory, for the rows it works on
SLACK = 1024 * 1024  # bytes that a compressed block may be longer than its pixels


def check_file(file_bytes: int, request: SceneRequest) -> None:
    """Refuse a file that is too large.

    Raises:
        RasterTooLarge: the file is larger than `limits.file_bytes`.
    """
    if file_bytes > request.limits.file_bytes:
        raise RasterTooLarge(
            f"the file has {file_bytes} bytes; at most {int(request.limits.file_bytes)} are allowed"
        )


def check_size(width: int, height: int, file_bytes: int, request: SceneRequest) -> int:
    """Check the size of a raster and return its number of tiles.

    Raises:
        RasterBroken: the raster has no pixels.
        RasterTooLarge: it has more pixels or tiles than the limits allow, or than so short a file can hold.
    """
    limits, card = request.limits, request.card
    if not width or not height:
        raise RasterBroken(f"the header says {width} x {height} pixels")
    if width * height > limits.pixels:
        raise RasterTooLarge(
            f"the raster has {width} x {height} pixels; at most {limits.pixels} pixels are allowed"
        )
    tiles = count_tiles(width, height, card.tile, card.overlap)
    if tiles > limits.tiles:
        raise RasterTooLarge(
            f"{width} x {height} pixels make {tiles} tiles of {card.tile} pixels; "
            f"at most {limits.tiles} are allowed"
        )
    if file_bytes < (tiles - FREE_TILES) * limits.tile_bytes:
        raise RasterTooLarge(
            f"{file_bytes} bytes claim to hold {width} x {height} pixels, which is {tiles} tiles; "
            f"a file has to have {limits.tile_bytes} bytes for each tile beyond {FREE_TILES}"
        )
    return tiles


def check_tiff(header: TiffHeader, file_bytes: int, request: SceneRequest) -> str:
    """Check a TIFF header and return numpy's name of the pixels' type.

    Raises:
        RasterBroken: the file is damaged or truncated.
        RasterTooLarge: the raster is beyond the limits.
        RasterUnusable: the type or storage of the pixels is not supported.
    """
    check_size(header.width, header.height, file_bytes, request)
    if header.samples < 1:
        raise RasterBroken("the header says 0 bands")
    if header.samples > BANDS_OF_A_FILE:
        raise RasterTooLarge(f"the raster has {header.samples} bands; at most {BANDS_OF_A_FILE} are allowed")
    dtype = _dtype(header.sample_types())
    if header.compression not in COMPRESSIONS:
        supported = ", ".join(sorted(set(COMPRESSIONS.values()), key=str.casefold))
        raise RasterUnusable(
            f"its compression (TIFF number {header.compression}) is not supported; supported are: {supported}"
        )
    if header.photometric == PALETTE:
        raise RasterUnusable("its pixels are numbers of a colour table; send the bands themselves")
    if header.photometric not in PHOTOMETRICS or (header.photometric == 6 and header.compression != JPEG):
        raise RasterUnusable(
            f"its colours (TIFF photometric interpretation {header.photometric}) are not supported"
        )
    _check_blocks(header, file_bytes, np.dtype(dtype).itemsize, request)
    return dtype


def check_bands(used: int, request: SceneRequest) -> None:
    """Refuse a request that uses too many bands.

    Raises:
        RasterTooLarge: it uses more than `limits.bands`.
    """
    if used > request.limits.bands:
        raise RasterTooLarge(f"{used} bands are used; at most {request.limits.bands} are allowed")


def _dtype(types: set[tuple[int, int]]) -> str:
    if len(types) > 1:
        raise RasterUnusable("its bands are of different types; all have to be of one")
    kind, bits = next(iter(types))
    dtype = TYPES.get((1 if kind == 4 else kind, bits))  # 4: unspecified
    if dtype is None:
        what = {2: "signed integers", 3: "floats", 5: "complex integers", 6: "complex numbers"}
        raise RasterUnusable(
            f"its pixels are {bits}-bit {what.get(kind, 'integers')}; supported are integers of 8, 16, 32 or "
            "64 bits, and floats of 16, 32 or 64"
        )
    return dtype


def _check_blocks(header: TiffHeader, file_bytes: int, itemsize: int, request: SceneRequest) -> None:
    across, down = header.block
    offsets, counts = header.blocks()
    block_bytes = across * down * itemsize * (1 if header.planar else header.samples)
    # libtiff splits uncompressed strips into small ones, whatever the header says.
    cut = header.compression == UNCOMPRESSED and not header.tiled
    if block_bytes > request.limits.block_bytes and not cut:
        raise RasterTooLarge(
            f"its {'tiles' if header.tiled else 'strips'} hold {block_bytes} bytes each; at most "
            f"{int(request.limits.block_bytes)} are allowed: rewrite it with tiles of 256 or 512 pixels"
        )
    size = np.uint64(file_bytes)
    beyond = (counts > 0) & ((offsets > size) | (counts > size) | (offsets + counts > size))
    if beyond.any():
        raise RasterBroken(
            f"the file is truncated: {int(beyond.sum())} of its {len(offsets)} strips or tiles lie beyond "
            f"its end"
        )
    if len(counts) and not cut and int(counts.max()) > 4 * block_bytes + SLACK:
        raise RasterBroken("a strip or tile of it takes many times the bytes it can hold")


def check_memory(
    width: int, height: int, block_height: int, itemsize: int, bands: int, request: SceneRequest
) -> None:
    """Refuse a raster whose rows need more memory than a decoder has.

    Args:
        width: of the scene, pixels.
        height: of the scene, pixels.
        block_height: rows that are decoded together.
        itemsize: bytes per pixel and band.
        bands: number of bands used.
        request: outputs, limits and card of the request.

    Raises:
        RasterTooLarge: the raster is too wide, or its strips are too tall.
    """
    rows = min(request.card.tile + block_height, height + block_height)
    blended = min(2 * request.card.tile, height) * len(request.card.classes) * 4
    if width * (rows * (bands * itemsize + 1) + blended) > MEMORY_SHARE * request.limits.memory:
        raise RasterTooLarge(
            f"a scene {width} pixels wide in strips or tiles {block_height} rows tall needs more memory than "
            f"a decoder has; cut it into narrower ones, or rewrite it with tiles of 256 or 512 pixels"
        )


def check_image_model(card: Card) -> None:
    """Refuse PNG and JPEG for a model that does not take three bands.

    Raises:
        RasterUnusable: the model takes another number of bands.
    """
    if len(card.bands) * card.frames != 3:
        names = ", ".join(band.name for band in card.bands)
        raise RasterUnusable(
            f"PNG and JPEG are supported for models of three bands; this one takes "
            f"{len(card.bands) * card.frames}: {names}; send a GeoTIFF"
        )
