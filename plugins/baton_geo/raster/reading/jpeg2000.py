"""Read a JPEG 2000 file, JP2 or a codestream alone, with GDAL's JP2OpenJPEG driver only.

The boxes before the codestream, its SIZ marker and the places of its tile-parts are read without a library,
so that a hostile header is refused before OpenJPEG sees it. Format: ISO/IEC 15444-1 (2019), annexes A and I.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from baton_geo.errors import RasterBroken, RasterTooLarge, RasterUnusable
from baton_geo.raster.messages import FileSpec, SceneRequest
from baton_geo.raster.reading.geotiff import CheckedHeader, GdalRaster
from baton_geo.raster.reading.headers import MEMORY_SHARE, RasterFile, check_shape, want

BOXES_LIMIT = 4096
MARKERS_LIMIT = 65_536  # of the main header: one or two for each component
TILES_LIMIT = 65_535  # as the standard has it
PARTS_LIMIT = 131_072  # of all tiles; a usual file has one a tile, or one a resolution of a tile
SIZ_BYTES = 38  # without its components
SAMPLE_BYTES = 4  # of a sample in OpenJPEG, whatever its bits
COPIES = 2  # of a tile in memory: OpenJPEG's, and the file's data with GDAL's blocks
SOC, SIZ, SOT, EOC = 0xFF4F, 0xFF51, 0xFF90, 0xFFD9
SOT_BYTES = 12
# (signed, bytes): numpy's name. GDAL reads signed numbers of up to 8 bits as unsigned ones.
TYPES = {(False, 1): "uint8", (False, 2): "uint16", (True, 2): "int16"}


@dataclass(frozen=True)
class Box:
    """A box of a JP2 file: its type, and where its content lies."""

    type: bytes
    begin: int
    end: int


class Jpeg2000Header:
    """Size, tiles and components by the boxes before the first codestream and by its SIZ marker.

    Attributes:
        begin: of the codestream, its place in the file.
        end: of the codestream.
        origins: offsets of the image and of its tiles on the reference grid.
        tile: width and height of a tile, no larger than the image.
        tiles: how many there are.
        depths: (bits, whether signed) of the components.
        subsampled: whether a component has fewer pixels than the reference grid.
        palette: whether the pixels are numbers of a colour table.

    Raises:
        RasterBroken: the header lies outside the file, is missing or contradictory.
    """

    def __init__(self, file: RasterFile) -> None:
        self._file, self._boxes_read = file, 0
        self.palette = False
        self.begin, self.end, images = self._find_codestream()
        soc, siz, length, _, *sizes, components = self._unpack(">4H8IH", self.begin)
        if (soc, siz) != (SOC, SIZ):
            raise RasterBroken("the JPEG 2000 codestream does not begin with its size (SIZ)")
        right, bottom, left, top, across, down, tiles_left, tiles_top = sizes
        if left >= right or top >= bottom or not across or not down:
            raise RasterBroken(
                f"the JPEG 2000 header says an image from {left}, {top} to {right}, {bottom} in tiles of "
                f"{across} x {down} pixels"
            )
        self.width, self.height, self.samples = right - left, bottom - top, components
        self.origins = {left, top, tiles_left, tiles_top}
        self.tile = min(across, self.width), min(down, self.height)
        self.tiles = -(-self.width // across) * -(-self.height // down)
        if length != SIZ_BYTES + 3 * components:
            raise RasterBroken(f"the JPEG 2000 header has {components} components in a SIZ of {length} bytes")
        if any(image != (self.height, self.width, components) for image in images):
            raise RasterBroken("the JPEG 2000 header contradicts itself: its boxes say another size than SIZ")
        each = self._read(self.begin + 4 + SIZ_BYTES, 3 * components)
        self.depths = {((depth & 0x7F) + 1, depth >= 0x80) for depth in each[::3]}
        self.subsampled = set(each[1::3] + each[2::3]) != {1}

    def check_tiles(self) -> None:
        """Check that all tiles lie in the file.

        Raises:
            RasterBroken: some do not.
            RasterTooLarge: there are more than `PARTS_LIMIT` parts of tiles.
        """
        place = self._skip_main_header()
        seen = np.zeros(self.tiles, np.bool_)
        for _ in range(PARTS_LIMIT):
            marker, _, tile, length, _, _ = self._unpack(">HHHIBB", place)
            if marker != SOT or tile >= self.tiles or 0 < length < SOT_BYTES + 2:
                raise RasterBroken(f"the JPEG 2000 codestream is damaged at byte {place}")
            seen[tile] = True
            place = place + length if length else self.end - 2  # 0: of the last one
            if place + 2 > self.end:
                raise RasterBroken("the file is truncated: a tile of it lies beyond its end")
            if self._unpack(">H", place) == (EOC,):
                break
        else:
            raise RasterTooLarge(f"the file is cut into more than {PARTS_LIMIT} parts of tiles")
        if not seen.all():
            raise RasterBroken(f"{int((~seen).sum())} of the {self.tiles} tiles are not in the file")

    def _find_codestream(self) -> tuple[int, int, list[tuple[int, int, int]]]:
        """Return begin and end of the codestream, and what image headers say: height, width, components."""
        images: list[tuple[int, int, int]] = []
        if self._unpack(">H", 0) == (SOC,):
            return 0, self._file.size, images
        for box in self._boxes(0, self._file.size):
            if box.type == b"jp2c":
                return box.begin, box.end, images
            inner = self._boxes(box.begin, box.end) if box.type == b"jp2h" else ()
            for part in (box, *inner):
                self.palette |= part.type == b"pclr"
                if part.type == b"ihdr":
                    images.append(self._unpack(">IIH", part.begin))
        raise RasterBroken("the file is truncated: it has no JPEG 2000 codestream")

    def _boxes(self, begin: int, end: int) -> Iterator[Box]:
        """Yield the boxes from `begin` to `end`."""
        while begin < end:
            self._boxes_read += 1
            if self._boxes_read > BOXES_LIMIT:
                raise RasterBroken(f"the file has more than {BOXES_LIMIT} boxes before its codestream")
            length, kind = self._unpack(">I4s", begin)
            content, following = begin + 8, begin + length if length else end
            if length == 1:
                following = begin + self._unpack(">Q", content)[0]
                content += 8
            if not content <= following <= end:
                raise RasterBroken("the file is truncated or damaged: a box of it lies beyond its end")
            yield Box(kind, content, following)
            begin = following

    def _skip_main_header(self) -> int:
        """Return the place of the first tile-part."""
        place = self.begin + 2
        for _ in range(MARKERS_LIMIT):
            marker, length = self._unpack(">HH", place)
            if marker == SOT:
                return place
            if marker <= 0xFF00 or length < 2:
                break
            place += 2 + length
        raise RasterBroken("the JPEG 2000 codestream's header is damaged: it does not lead to a tile")

    def _unpack(self, form: str, place: int) -> tuple[Any, ...]:
        return struct.unpack(form, self._read(place, struct.calcsize(form)))

    def _read(self, place: int, length: int) -> bytes:
        data = self._file.pread(length, place) if place + length <= self._file.size else b""
        if len(data) != length:
            raise RasterBroken("the file is truncated: its JPEG 2000 header ends beyond its end")
        return data


def check_jpeg2000(header: Jpeg2000Header, file: RasterFile, request: SceneRequest) -> str:
    """Check a header and return numpy's name of the pixels' type.

    Raises:
        RasterBroken: the file is damaged or truncated.
        RasterTooLarge: the raster is beyond the limits.
        RasterUnusable: the type or storage of the pixels is not supported.
    """
    check_shape(header.width, header.height, header.samples, file.size, request)
    if header.palette:
        raise RasterUnusable("its pixels are numbers of a colour table; send the bands themselves")
    if header.subsampled:
        raise RasterUnusable("its bands are subsampled; send bands of different sizes as a file each")
    if len(header.depths) > 1:
        raise RasterUnusable("its bands are of different types; all have to be of one")
    bits, signed = next(iter(header.depths))
    dtype = TYPES.get((signed, -(-bits // 8)))
    if dtype is None:
        raise RasterUnusable(
            f"its pixels are {bits}-bit {'signed ' if signed else ''}integers; supported are, in JPEG 2000, "
            "integers of at most 16 bits, signed ones of 9 to 16"
        )
    if header.origins != {0}:
        raise RasterUnusable("its image or its tiles do not begin at 0, 0 of the JPEG 2000 reference grid")
    if header.tiles > TILES_LIMIT:
        raise RasterTooLarge(f"the file is cut into {header.tiles} tiles; at most {TILES_LIMIT} are allowed")
    tile_bytes = header.tile[0] * header.tile[1] * header.samples * SAMPLE_BYTES
    beside_rows = (1 - MEMORY_SHARE) * request.limits.memory
    most = min(int(request.limits.block_bytes), int(beside_rows / COPIES))
    if tile_bytes > most:
        raise RasterTooLarge(
            f"its tiles take {tile_bytes} bytes each while they are decoded; at most {most} are allowed: "
            "rewrite it with tiles of 256 to 1024 pixels, or as a Cloud Optimized GeoTIFF"
        )
    return dtype


class Jpeg2000(GdalRaster):
    """A JPEG 2000 file as a `Source`. One at an address is fetched whole once its header is found usable.

    Raises:
        RasterBroken: the file is damaged or truncated.
        RasterTooLarge: the raster is beyond the limits.
        RasterUnusable: the type or storage of the pixels is not supported.
    """

    def __init__(self, file: RasterFile, request: SceneRequest, spec: FileSpec) -> None:
        self._header = header = Jpeg2000Header(file)
        dtype = np.dtype(check_jpeg2000(header, file, request))
        want([(file, [(0, file.size)])])
        header.check_tiles()
        checked = CheckedHeader("JPEG 2000", header.width, header.height, header.samples, dtype)
        # Without PAM, which is switched off, GDAL leaves the transform of a file that has none unset.
        super().__init__(file, spec, "JP2OpenJPEG", checked, GEOREF_SOURCES="PAM,INTERNAL")

    def _block(self) -> tuple[int, int]:
        """Return `block_height` and `first_look` of `Source`; of tiles that are large GDAL decodes parts."""
        across, down = self._header.tile
        rows, _ = self._dataset.block_shapes[0]
        return int(rows), across * down * self._header.samples * SAMPLE_BYTES
