"""Read the header of the first image of a TIFF or BigTIFF without a TIFF library.

A hostile header is so refused before libtiff parses it. Formats: TIFF 6.0 (Adobe, 1992), sections 2
and 15; BigTIFF (AWare Systems, 2007).
"""

from __future__ import annotations

import io
import os
import struct
import unicodedata
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from baton_geo.errors import RasterBroken, RasterTooLarge

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


class TiffHeader:
    """Tags of the first image.

    Args:
        fd: open for reading.
        size: of the file.

    Attributes:
        images: full-size images in the file, overviews and masks left out.

    Raises:
        RasterBroken: the header lies outside the file, is cyclic or contradictory.
        RasterTooLarge: there are more than `IMAGES_LIMIT` images.
    """

    def __init__(self, fd: int, size: int) -> None:
        self._fd, self._size = fd, size
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
        head = os.pread(self._fd, 16, 0)
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
        data = os.pread(self._fd, length, place)
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
    """A file as it is, but for some bytes of its texts.

    Args:
        fd: the file.
        texts: bytes to read instead of the file's, by their place.
    """

    def __init__(self, fd: int, texts: dict[int, bytes]) -> None:
        self._fd, self._texts = fd, texts
        self._size = os.fstat(fd).st_size
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
        data = bytearray(os.pread(self._fd, self._size if size < 0 else size, self._place))
        begin, end = self._place, self._place + len(data)
        for place, text in self._texts.items():
            first, last = max(begin, place), min(end, place + len(text))
            if first < last:
                data[first - begin : last - begin] = text[first - place : last - place]
        self._place = end
        return bytes(data)
