"""Fuzz GDAL's JPEG 2000 driver (OpenJPEG): whether a decoder of ours could be given such files.

`python bench/jpeg2000.py --minutes 60`. Files of several kinds are written with the driver itself, damaged
from a seed, and each is opened and read in a forked process with a decoder's limits of memory and processor
time. Counted are how these processes ended; a file that ended one by a signal is kept in `--folder`.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import resource
import signal
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import rasterio
from rasterio.io import MemoryFile
from rasterio.windows import Window

MEMORY = 1 << 30
SECONDS = 10
MARKERS = [bytes((0xFF, code)) for code in (0x4F, 0x51, 0x52, 0x53, 0x5C, 0x5D, 0x5E, 0x5F, 0x64, 0x90, 0x93)]
"""SOC, SIZ, COD, COC, QCD, QCC, RGN, POC, COM, SOT, SOD: ISO/IEC 15444-1, annex A."""
NAMES = [b"jp2h", b"ihdr", b"colr", b"uuid", b"asoc", b"lbl ", b"xml ", b"jp2c", b"II*\0", b"gml:", b"EPSG"]
"""Of boxes and of what is in them: GeoJP2 is a TIFF, GMLJP2 is XML."""
PLACE = {"crs": "EPSG:32633", "transform": rasterio.Affine(10, 0, 500_000, 0, -10, 5_000_000)}
EDGES = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)


def written(dtype: str, bands: int, size: int, **options: Any) -> bytes:
    """A file as the driver writes it."""
    pixels = np.random.default_rng(size).integers(0, 250, (bands, size, size)).astype(dtype)
    pixels[:, : size // 2] = np.arange(size, dtype=dtype) % 100
    profile = {"driver": "JP2OpenJPEG", "width": size, "height": size, "count": bands, "dtype": dtype}
    with MemoryFile(ext=".jp2") as memory:
        with memory.open(**profile, **options) as file:
            file.write(pixels)
        return bytes(memory.read())


def seeds() -> list[bytes]:
    """Lossless and lossy, of one or more bands and tiles, in all orders of progression."""
    plain = {"REVERSIBLE": "YES", "QUALITY": "100"}
    tiled = {"blockxsize": 64, "blockysize": 64}
    return [
        written("uint8", 1, 96, **plain),
        written("uint16", 1, 200, **plain, **tiled),
        written("int16", 3, 100, **plain, **tiled),
        written("uint8", 3, 128, QUALITY="20", YCC="YES"),
        written("uint16", 13, 64, QUALITY="50", **tiled),
        *(written("uint8", 3, 96, PROGRESSION=order, **plain) for order in ("RLCP", "RPCL", "PCRL", "CPRL")),
        written("uint8", 4, 96, CODEBLOCK_STYLE="63", **plain),
        written("uint16", 2, 96, SOP="YES", EPH="YES", RESOLUTIONS="4", PRECINCTS="{64,64},{32,32}", **plain),
        written("uint8", 1, 96, PLT="YES", TLM="YES", **plain, **tiled),
        *(
            written("uint16", 1, 32, **PLACE, **plain, **{box: "NO"})
            for box in ("GEOJP2", "GMLJP2", "WRITE_METADATA")
        ),
    ]


def damaged(chance: random.Random, files: list[bytes]) -> bytes:
    """One of the files with one to eight damages."""
    data = bytearray(chance.choice(files))
    for _ in range(chance.choice((1, 1, 2, 3, 8))):
        place = chance.randrange(len(data))
        if chance.random() < 0.6:  # near a marker or a box, where lengths and sizes are
            found = data.find(chance.choice(MARKERS + NAMES)) - 8
            place = min(len(data) - 1, max(0, found) + chance.randrange(56))
        match chance.randrange(7):
            case 0:
                data[place] ^= 1 << chance.randrange(8)
            case 1:
                data[place] = chance.randrange(256)
            case 2:
                width = chance.choice((">H", ">I"))
                number = struct.pack(width, chance.choice(EDGES) & (0xFFFF if width == ">H" else 0xFFFFFFFF))
                data[place : place + len(number)] = number
            case 3:
                del data[place:]
            case 4:
                del data[place : place + chance.randrange(1, 64)]
            case 5:
                data[place:place] = data[
                    (other := chance.randrange(len(data))) : other + chance.randrange(1, 256)
                ]
            case _:
                other = chance.choice(files)
                begin = chance.randrange(len(other))
                data[place : place + 64] = other[begin : begin + 64]
        if not data:
            return b"\0"  # of no bytes rasterio makes a new file
    return bytes(data)


def read(data: bytes) -> None:
    """Open a file and read all of it, as a decoder would: rows of blocks, at most 64 MB a read."""
    with MemoryFile(data, ext=".jp2") as memory, memory.open(driver="JP2OpenJPEG") as file:
        if file.width * file.height > 10**8 or file.count > 64:
            return
        _ = (
            file.crs,
            file.transform,
            file.gcps,
            file.rpcs,
            file.tags(),
            file.colorinterp,
            file.mask_flag_enums,
        )
        rows = max(1, 2**26 // (file.width * file.count * 8))
        for top in range(0, min(file.height, 4 * rows), rows):
            file.read(window=Window(0, top, file.width, min(rows, file.height - top)))


def ended(data: bytes) -> str:
    """The end of a process that reads a file: `read`, `refused`, or the signal that ended it."""
    pid = os.fork()
    if not pid:
        code = 70
        try:
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY + vast(), MEMORY + vast()))
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            read(data)
            code = 0
        except (rasterio.errors.RasterioError, MemoryError):
            code = 1
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return {0: "read", 1: "refused"}.get(os.WEXITSTATUS(status), "failed otherwise")


def vast() -> int:
    """Address space of this process, bytes."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def main() -> None:
    """Fuzz, and print the counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("jpeg2000-findings"))
    options = parser.parse_args()
    chance, files = random.Random(options.seed), seeds()
    for file in files:
        assert ended(file) == "read"
    counts: collections.Counter[str] = collections.Counter()
    until, slowest, told = time.monotonic() + 60 * options.minutes, 0.0, time.monotonic()
    while time.monotonic() < until:
        data = damaged(chance, files)
        began = time.monotonic()
        how = ended(data)
        slowest = max(slowest, time.monotonic() - began)
        counts[how] += 1
        if how not in ("read", "refused"):
            options.folder.mkdir(exist_ok=True)
            (options.folder / f"{how}-{counts.total()}.jp2").write_bytes(data)
        if time.monotonic() - told > 60:
            told = time.monotonic()
            print(dict(counts), f"slowest {slowest:.1f} s", flush=True)
    print(
        f"GDAL {rasterio.__gdal_version__}, seed {options.seed}, {options.minutes:g} minutes: {dict(counts)}"
    )
    print(f"The slowest took {slowest:.1f} s.")


if __name__ == "__main__":
    main()
