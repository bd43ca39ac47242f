"""Check a raster's header before any library parses it: format, size, type, storage, memory.

The tags of the first image of a TIFF or BigTIFF are read without a TIFF library, so that a hostile header is
refused before libtiff sees it. Formats: TIFF 6.0 (Adobe, 1992), sections 2 and 15; BigTIFF (AWare Systems,
2007).
"""

from __future__ import annotations

import io
import os
import struct
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from baton_geo.card import Card
from baton_geo.errors import NotARaster, RasterBroken, RasterTooLarge, RasterUnusable
from baton_geo.raster.messages import PAGE, SceneRequest
from baton_geo.raster.pixels.grid import count_tiles

Kind = Literal["TIFF", "JPEG 2000", "PNG", "JPEG"]
Ranges = Sequence[tuple[int, int]]
HEAD_BYTES = 64

TAKEN: tuple[tuple[bytes, Kind], ...] = (
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"II+\0", "TIFF"),  # BigTIFF
    (b"MM\0+", "TIFF"),
    (b"\0\0\0\x0cjP  ", "JPEG 2000"),
    (b"\xff\x4f\xff\x51", "JPEG 2000"),  # a codestream without boxes
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"\xff\xd8\xff", "JPEG"),
)
KNOWN: tuple[tuple[bytes, str], ...] = (
    (b"\x89HDF\r\n\x1a\n", "an HDF5 or netCDF-4 file"),
    (b"\x0e\x03\x13\x01", "an HDF4 file"),
    (b"CDF\x01", "a netCDF file"),
    (b"CDF\x02", "a netCDF file"),
    (b"CDF\x05", "a netCDF file"),
    (b"%PDF", "a PDF"),
    (b"PK\x03\x04", "a ZIP archive (or a KMZ, NPZ or Office file)"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"7z\xbc\xaf", "a 7-Zip archive"),
    (b"GIF8", "a GIF"),
    (b"BM", "a BMP"),
    (b"GRIB", "a GRIB file"),
    (b"SQLite format 3\0", "a GeoPackage or other SQLite file"),
    (b"NITF", "a NITF file"),
    (b"SIMPLE  =", "a FITS file"),
    (b"ENVI", "an ENVI header"),
    (b"\x93NUMPY", "a numpy array"),
)
IMAGES_LIMIT = 256  # with overviews and masks; a usual file has about twenty
ENTRIES_LIMIT = 4096
BLOCKS_LIMIT = 8_000_000
SUBFILE, WIDTH, HEIGHT, BITS, COMPRESSION, PHOTOMETRIC = 254, 256, 257, 258, 259, 262
STRIP_OFFSETS, SAMPLES, ROWS_PER_STRIP, STRIP_COUNTS, PLANAR = 273, 277, 278, 279, 284
TILE_WIDTH, TILE_HEIGHT, TILE_OFFSETS, TILE_COUNTS, SAMPLE_FORMAT = 322, 323, 324, 325, 339
REDUCED_OR_MASK = 0b101  # bits of SUBFILE
ASCII = 2  # the type of texts
TEXT_BYTES = 1024 * 1024  # a longer text is not looked at
# The types whose values are whole numbers: BYTE, SHORT, LONG, IFD, LONG8, IFD8.
INTEGERS = {1: "u1", 3: "u2", 4: "u4", 13: "u4", 16: "u8", 18: "u8"}
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


def recognise(head: bytes) -> Kind:
    """Recognise a GeoTIFF, JPEG 2000, PNG or JPEG.

    Args:
        head: the file's first `HEAD_BYTES` bytes.

    Raises:
        NotARaster: the file is something else; the message names what it looks like.
    """
    for magic, kind in TAKEN:
        if head.startswith(magic):
            return kind
    raise NotARaster(
        f"this is {_looks_like(head)}; send a GeoTIFF or JPEG 2000, or for a model of three bands a PNG or "
        "JPEG"
    )


def _looks_like(head: bytes) -> str:
    if not head:
        return "an empty file"
    for magic, name in KNOWN:
        if head.startswith(magic):
            return name
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "a WebP image"
    if head[4:8] == b"ftyp":
        return "an AVIF, HEIC or MP4 file"
    return _looks_like_text(head.removeprefix(b"\xef\xbb\xbf").lstrip())


def _looks_like_text(head: bytes) -> str:
    if head.startswith(b"<VRTDataset"):
        return "a GDAL virtual raster (VRT), which names other files"
    if head.startswith(b"<"):
        return "XML or HTML (perhaps a GDAL virtual raster)"
    if head[:1] in (b"{", b"["):
        return "JSON"
    if head and all(byte in b"\t\r\n" or 32 <= byte < 127 for byte in head):
        return "text"
    return "no known raster format"


@dataclass(frozen=True)
class TiffTag:
    """One tag: type and count of its values, and their offset in the file."""

    type: int
    count: int
    place: int


@dataclass(frozen=True)
class Layout:
    """The layout of a directory, in classic TIFF or BigTIFF."""

    order: str  # "<" or ">"
    count: str  # struct codes, as are the next
    offset: str
    entry: int  # bytes of an entry
    inline: int  # bytes of values that fit into an entry


class RasterFile:
    """A file that is all there.

    Attributes:
        size: bytes.
        by_ranges: whether parts of it may have to be asked for.
    """

    by_ranges = False

    def __init__(self, fd: int) -> None:
        self.fd, self.size = fd, os.fstat(fd).st_size

    def pread(self, length: int, place: int) -> bytes:
        """Read at most `length` bytes from `place` on."""
        return os.pread(self.fd, length, place)


class RangedFile(RasterFile):
    """A file of which the gateway fetches what is read: a sparse file that it fills.

    Args:
        number: of the file among those of its scene.
        fetched: bytes that are there, from the beginning on.
        ask: has pages of files fetched, [number of the file, [[first, number of pages], ...]] each; returns
            when they are there.
    """

    by_ranges = True

    def __init__(self, fd: int, number: int, fetched: int, ask: Callable[[list[Any]], None]) -> None:
        super().__init__(fd)
        self.number, self.ask = number, ask
        self._there = np.zeros(-(-self.size // PAGE), np.bool_)
        self._there[: len(self._there) if fetched >= self.size else fetched // PAGE] = True

    def take_missing(self, ranges: Ranges) -> list[tuple[int, int]]:
        """List the missing pages of some ranges, (first, number of pages) each; they count as there now."""
        missing = np.zeros_like(self._there)
        for begin, end in ranges:
            missing[max(begin, 0) // PAGE : -(-min(end, self.size) // PAGE)] = True
        missing &= ~self._there
        self._there |= missing
        edges = np.flatnonzero(np.diff(missing, prepend=False, append=False)).reshape(-1, 2)
        return [(int(first), int(last - first)) for first, last in edges]

    def pread(self, length: int, place: int) -> bytes:
        want([(self, [(place, place + length)])])
        return os.pread(self.fd, length, place)


def want(wanted: Iterable[tuple[RasterFile, Ranges]]) -> None:
    """Have ranges of files there, (begin, end) each, before they are read one by one; fetched together."""
    files = [(file, ranges) for file, ranges in wanted if isinstance(file, RangedFile)]
    asked = [(file, pages) for file, ranges in files if (pages := file.take_missing(ranges))]
    if asked:
        asked[0][0].ask([(file.number, pages) for file, pages in asked])


class TiffHeader:
    """Tags of the first image.

    Attributes:
        images: full-size images in the file, overviews and masks left out.

    Raises:
        RasterBroken: the header lies outside the file, is cyclic or contradictory.
        RasterTooLarge: there are more than `IMAGES_LIMIT` images.
    """

    def __init__(self, file: RasterFile) -> None:
        self._file, self._size = file, file.size
        self._layout, first = self._start()
        self._tags, following = self._directory(first)
        self.images = 1 + self._count_others(first, following)
        self.width, self.height = self._one(WIDTH, 0), self._one(HEIGHT, 0)
        self.samples = self._one(SAMPLES, 1)
        self.compression = self._one(COMPRESSION, 1)
        self.photometric = self._one(PHOTOMETRIC, 1)
        self.planar = self._one(PLANAR, 1) == 2
        self.tiled = TILE_WIDTH in self._tags

    @property
    def block(self) -> tuple[int, int]:
        """Width and height of one strip or tile, pixels."""
        if self.tiled:
            return self._one(TILE_WIDTH, 0), self._one(TILE_HEIGHT, 0)
        return self.width, min(self._one(ROWS_PER_STRIP, self.height), self.height)

    def sample_types(self) -> set[tuple[int, int]]:
        """Return (sample format, bits): 1 is unsigned, 2 signed, 3 float, 5 and 6 complex."""
        bits = self._numbers(BITS, self.samples, 1)
        formats = self._numbers(SAMPLE_FORMAT, self.samples, 1)
        if len(bits) != len(formats):
            bits, formats = np.resize(bits, self.samples), np.resize(formats, self.samples)
        return {(int(kind), int(depth)) for kind, depth in zip(formats, bits, strict=True)}

    def blocks(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """Return offsets and byte counts of all strips or tiles; 0, 0 for one that is not stored.

        Raises:
            RasterBroken: the header does not give them.
            RasterTooLarge: there are more than `BLOCKS_LIMIT`.
        """
        across, down = self.block
        if not across or not down:
            raise RasterBroken("the TIFF header says that its tiles or strips have no pixels")
        wanted = -(-self.width // across) * -(-self.height // down) * (self.samples if self.planar else 1)
        if wanted > BLOCKS_LIMIT:
            raise RasterTooLarge(
                f"the file is cut into {wanted} strips or tiles; at most {BLOCKS_LIMIT} are allowed"
            )
        tags = (TILE_OFFSETS, TILE_COUNTS) if self.tiled else (STRIP_OFFSETS, STRIP_COUNTS)
        if not set(tags) <= self._tags.keys():
            raise RasterBroken("the TIFF header does not say where its strips or tiles lie")
        offsets, counts = (self._numbers(tag, wanted, 0) for tag in tags)
        if len(offsets) < wanted or len(counts) < wanted:
            raise RasterBroken(f"the TIFF header says where {len(offsets)} of {wanted} strips or tiles lie")
        return offsets[:wanted], counts[:wanted]

    def foreign_texts(self) -> dict[int, bytes]:
        """Return, by their places in the file, the texts that are not UTF-8, with plain letters for the
        others.

        Band names, tags and names of CRSs are often Latin-1, which rasterio takes for damage.
        """
        texts = {}
        for tag in self._tags.values():
            if tag.type != ASCII or not 0 < tag.count <= TEXT_BYTES:
                continue
            place = tag.place
            if tag.count > self._layout.inline:
                place = self._unpack(self._layout.offset, place, self._layout)
            if place + tag.count > self._size:
                continue  # GDAL leaves it out
            text = self._read(place, tag.count)
            try:
                text.decode()
            except UnicodeDecodeError:
                texts[place] = _plain_letters(text)
        return texts

    def _start(self) -> tuple[Layout, int]:
        head = self._file.pread(16, 0)
        order = "<" if head[:2] == b"II" else ">"
        if head[2:4] in (b"+\0", b"\0+"):
            layout = Layout(order, "Q", "Q", entry=20, inline=8)
            return layout, int(self._unpack("Q", 8, layout))
        layout = Layout(order, "H", "I", entry=12, inline=4)
        return layout, int(self._unpack("I", 4, layout))

    def _unpack(self, code: str, place: int, layout: Layout) -> int:
        form = layout.order + code
        return int(struct.unpack(form, self._read(place, struct.calcsize(form)))[0])

    def _read(self, place: int, length: int) -> bytes:
        if place + length > self._size:
            raise RasterBroken("the file is truncated or damaged: its TIFF header points beyond its end")
        data = self._file.pread(length, place)
        if len(data) != length:
            raise RasterBroken("the file became shorter while it was read")
        return data

    def _directory(self, place: int) -> tuple[dict[int, TiffTag], int]:
        """Read the tags of the directory at `place`, and the offset of the next one; 0: there is none."""
        layout = self._layout
        count = self._unpack(layout.count, place, layout)
        if not count or count > ENTRIES_LIMIT:
            raise RasterBroken(f"the TIFF header has {count} tags")
        begin = place + struct.calcsize("<" + layout.count)
        data = self._read(begin, count * layout.entry)
        tags: dict[int, TiffTag] = {}
        for number in range(count):
            start = number * layout.entry
            tag, kind, values = struct.unpack_from(f"{layout.order}HH{layout.offset}", data, start)
            tags.setdefault(tag, self._entry(kind, values, begin + start + layout.entry - layout.inline))
        return tags, self._unpack(layout.offset, begin + len(data), layout)

    def _entry(self, kind: int, count: int, place: int) -> TiffTag:
        """Return a tag's entry: short values are in the entry itself, others where it points."""
        width = np.dtype(INTEGERS[kind]).itemsize if kind in INTEGERS else 1
        if kind in INTEGERS and count * width > self._layout.inline:
            place = self._unpack(self._layout.offset, place, self._layout)
        return TiffTag(kind, count, place)

    def _count_others(self, first: int, place: int) -> int:
        seen, others = {first}, 0
        while place:
            if place in seen:
                raise RasterBroken("the TIFF header's list of images runs in a circle")
            if len(seen) >= IMAGES_LIMIT:
                raise RasterTooLarge(f"the file holds more than {IMAGES_LIMIT} images")
            seen.add(place)
            tags, place = self._directory(place)
            subfile = self._values(tags[SUBFILE], 1) if SUBFILE in tags else np.zeros(1, np.uint64)
            others += not (len(subfile) and int(subfile[0]) & REDUCED_OR_MASK)
        return others

    def _one(self, tag: int, default: int) -> int:
        values = self._numbers(tag, 1, default)
        return int(values[0])

    def _numbers(self, tag: int, at_most: int, default: int) -> npt.NDArray[np.uint64]:
        """Return the values of a tag; a single default if the file does not have the tag."""
        entry = self._tags.get(tag)
        if entry is None or not entry.count:
            return np.array([default], np.uint64)
        return self._values(entry, at_most)

    def _values(self, entry: TiffTag, at_most: int) -> npt.NDArray[np.uint64]:
        if entry.type not in INTEGERS:
            raise RasterBroken("the TIFF header has a number of the wrong type")
        kind: np.dtype[Any] = np.dtype(self._layout.order + INTEGERS[entry.type])
        data = self._read(entry.place, min(entry.count, at_most) * kind.itemsize)
        return np.frombuffer(data, kind).astype(np.uint64)


def _plain_letters(text: bytes) -> bytes:
    """Return a Latin-1 text in ASCII, as long as it was: letters without their marks, else question marks."""
    letters = (unicodedata.normalize("NFKD", letter)[0] for letter in text.decode("latin-1"))
    return "".join(letters).encode("ascii", "replace")


class PlainTexts(io.RawIOBase):
    """A file for GDAL, as it is but for some bytes of its texts.

    Args:
        texts: bytes to read instead of the file's, by their place.
    """

    def __init__(self, file: RasterFile, texts: dict[int, bytes]) -> None:
        self._file, self._texts = file, texts
        self._size = file.size
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._size}[whence]
        return self._place

    def read(self, size: int = -1) -> bytes:
        data = bytearray(self._file.pread(self._size if size < 0 else size, self._place))
        begin, end = self._place, self._place + len(data)
        for place, text in self._texts.items():
            first, last = max(begin, place), min(end, place + len(text))
            if first < last:
                data[first - begin : last - begin] = text[first - place : last - place]
        self._place = end
        return bytes(data)


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


def check_shape(width: int, height: int, bands: int, file_bytes: int, request: SceneRequest) -> None:
    """Check the size and the bands of a file; of a part that is wanted the size is checked once it is known.

    Raises:
        RasterBroken: the raster has no pixels or no bands.
        RasterTooLarge: it is beyond the limits.
    """
    if request.window is None and request.bbox is None:
        check_size(width, height, file_bytes, request)
    elif not width or not height:
        raise RasterBroken(f"the header says {width} x {height} pixels")
    if bands < 1:
        raise RasterBroken("the header says 0 bands")
    if bands > BANDS_OF_A_FILE:
        raise RasterTooLarge(f"the raster has {bands} bands; at most {BANDS_OF_A_FILE} are allowed")


def check_tiff(header: TiffHeader, file: RasterFile, request: SceneRequest) -> str:
    """Check a TIFF header and return numpy's name of the pixels' type.

    Raises:
        RasterBroken: the file is damaged or truncated.
        RasterTooLarge: the raster is beyond the limits.
        RasterUnusable: the type or storage of the pixels is not supported.
    """
    check_shape(header.width, header.height, header.samples, file.size, request)
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
    _check_blocks(header, file.size, np.dtype(dtype).itemsize, request)
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
        itemsize: bytes per pixel and band.

    Raises:
        RasterTooLarge: the raster is too wide, or its strips are too tall.
    """
    rows = min(request.card.tile + block_height, height + block_height)
    blended = min(2 * request.card.tile, height) * (
        0 if request.card.embedding else request.card.channels * 4
    )
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
