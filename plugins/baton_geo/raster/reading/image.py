"""Read a PNG or JPEG with Pillow, for models of three bands."""

from __future__ import annotations

import os
import struct
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from baton_geo.errors import RasterBroken, RasterTooLarge, RasterUnusable
from baton_geo.raster.messages import SceneRequest, note
from baton_geo.raster.pixels.bands import FileBand, FileBands
from baton_geo.raster.pixels.calibration import ScaleOffset, Stated
from baton_geo.raster.pixels.values import Pixels, Valid
from baton_geo.raster.reading.headers import (
    MEMORY_SHARE,
    Kind,
    Ranges,
    RasterFile,
    check_image_model,
    check_size,
)
from baton_geo.raster.reading.rows import BandNumbers, Georeference, Window

COPIES = 4  # of an image in memory while it is rotated and its alpha band separated
BROKEN = (
    UnidentifiedImageError,
    OSError,
    SyntaxError,
    ValueError,
    struct.error,
    EOFError,
)  # Pillow's errors for damaged files
MODES = {"RGB", "RGBA", "P", "PA"}
TRANSVERSE = (5, 6, 7, 8)  # EXIF orientations that swap width and height
ORIENTATION = 0x0112
UNDECODABLE = "the image could not be decoded: its data are damaged or truncated"


class ImageSource:
    """A PNG or JPEG as a `Source`; the whole image is decoded at the first read.

    Pillow is used instead of GDAL because it applies EXIF orientation and tRNS, limits text and profile
    chunks, and reads the first frame of an animated PNG without the others.

    Raises:
        RasterBroken: the file is damaged or truncated.
        RasterTooLarge: the image is beyond the limits.
        RasterUnusable: the image is not of three 8-bit colours, or the model does not take three bands.
    """

    def __init__(self, fd: int, kind: Kind, request: SceneRequest) -> None:
        check_image_model(request.card)
        Image.MAX_IMAGE_PIXELS = None  # Pillow's limit; check_size applies ours
        self._file = os.fdopen(os.dup(fd), "rb")
        try:
            self._image: Image.Image = Image.open(self._file, formats=[kind])
        except BROKEN:
            raise RasterBroken(f"the {kind} header is damaged") from None
        check_size(*self._image.size, os.fstat(fd).st_size, request)
        self._check_kind(fd, kind)
        pixels = self._image.width * self._image.height
        if pixels * COPIES * 4 > MEMORY_SHARE * request.limits.memory:
            raise RasterTooLarge(f"a {kind} of {pixels} pixels does not fit into a decoder; send a GeoTIFF")
        self.width, self.height = self._upright_size()
        self.dtype: np.dtype[Any] = np.dtype("uint8")
        self.bands = FileBands((FileBand("RED"), FileBand("GREEN"), FileBand("BLUE")))
        self.nodata: float | None = None
        self.stated = Stated((ScaleOffset(),) * 3)
        self.block_height, self.first_look = 1, pixels * 3
        self.place = Georeference()
        self.acquired: str | None = None
        self.numbers: tuple[BandNumbers, ...] | None = None
        self.notes = [
            note("no_crs", f"a {kind} has no CRS; the mask has none either, and areas are in pixels only")
        ]
        frames = getattr(self._image, "n_frames", 1)
        if frames > 1:
            self.notes.append(note("first_image", f"the {kind} has {frames} frames; the first is used"))
        self._pixels: Pixels | None = None
        self._clear: Valid | None = None

    def read(self, top: int, left: int, bands: tuple[int, ...], out: Pixels) -> None:
        """See `Source`."""
        pixels = self._decode()
        for place, band in enumerate(bands):
            out[place] = pixels[top : top + out.shape[1], left : left + out.shape[2], band]

    def wanted(
        self, top: int, left: int, rows: int, columns: int, bands: tuple[int, ...]
    ) -> list[tuple[RasterFile, Ranges]]:
        """See `Source`; the whole file is there."""
        return []

    def hidden(self, top: int, left: int, rows: int, columns: int, bands: tuple[int, ...]) -> Valid | None:
        """See `Source`."""
        self._decode()
        return None if self._clear is None else self._clear[top : top + rows, left : left + columns]

    def placed(self, window: Window) -> Georeference:
        """See `Source`."""
        return self.place

    def close(self) -> None:
        """Close the file."""
        self._image.close()
        self._file.close()

    def _upright_size(self) -> tuple[int, int]:
        """Return width and height after EXIF orientation, which a PNG may state after its pixels."""
        try:
            turned = self._image.getexif().get(ORIENTATION, 1) in TRANSVERSE
        except BROKEN:
            raise RasterBroken(UNDECODABLE) from None
        width, height = self._image.size
        return (height, width) if turned else (width, height)

    def _check_kind(self, fd: int, kind: Kind) -> None:
        depth = os.pread(fd, 1, 24)[0] if kind == "PNG" else 8  # IHDR's bit depth
        if self._image.mode not in MODES or depth > 8:
            raise RasterUnusable(
                f"a {kind} of {depth} bits and mode {self._image.mode}; "
                "only three 8-bit colours are supported"
            )

    def _decode(self) -> Pixels:
        if self._pixels is None:
            try:
                image = ImageOps.exif_transpose(self._image)
                clear = "A" in image.mode or "transparency" in image.info
                array = np.asarray(image.convert("RGBA" if clear else "RGB"))
            except BROKEN:
                raise RasterBroken(UNDECODABLE) from None
            self._pixels = array[:, :, :3]
            self._clear = array[:, :, 3] == 0 if clear else None
        return self._pixels
