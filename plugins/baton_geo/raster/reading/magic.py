"""Recognise a file's format by its first bytes."""

from __future__ import annotations

from typing import Literal

from baton_geo.errors import NotARaster

Kind = Literal["TIFF", "PNG", "JPEG"]
HEAD_BYTES = 64

TAKEN: tuple[tuple[bytes, Kind], ...] = (
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"II+\0", "TIFF"),  # BigTIFF
    (b"MM\0+", "TIFF"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"\xff\xd8\xff", "JPEG"),
)
KNOWN: tuple[tuple[bytes, str], ...] = (
    (b"\0\0\0\x0cjP  ", "a JPEG 2000 file"),
    (b"\xff\x4f\xff\x51", "a JPEG 2000 codestream"),
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


def recognise(head: bytes) -> Kind:
    """Recognise a GeoTIFF, PNG or JPEG.

    Args:
        head: the file's first `HEAD_BYTES` bytes.

    Raises:
        NotARaster: the file is something else; the message names what it looks like.
    """
    for magic, kind in TAKEN:
        if head.startswith(magic):
            return kind
    raise NotARaster(
        f"this is {_looks_like(head)}; send a GeoTIFF, or for a model of three bands a PNG or JPEG"
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
