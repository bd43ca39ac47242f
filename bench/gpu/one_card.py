"""Leave in a CUDA library only the kernels that one card runs; write the library, which keeps its size.

A library holds its kernels in containers (fatbins), each with the same kernels for several cards. Kernels of
other cards are taken out, and a container of which nothing remains gets a small kernel of the same library,
so that it stays valid. The bytes that fall free are zeros, which compress to nothing.

    python bench/gpu/one_card.py FROM TO [NAMES]    # NAMES: pattern of the source files that are kept
"""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ARCHITECTURE = 90
"""Hopper: H100 and H200."""
MAGIC = struct.pack("<IH", 0xBA55ED50, 1)
HEADER = struct.Struct("<IHHQ")
"""Of a container: magic, version, size of this header, size of what follows."""
KERNELS = struct.Struct("<HHIQ")
"""Of what is in it: kind, version, size of this header, size of what follows; the card is at 28."""
BINARY, SOURCE = 2, 1
SMALL = 2**16
"""Bytes: sources of kernels (PTX), which the driver compiles for any later card, are kept up to this size."""
SOURCE_FILE = re.compile(rb"_INTERNAL_[0-9a-f]{8}_\d+_([A-Za-z0-9_]*?)_cu_[0-9a-f]{8}")


@dataclass(frozen=True)
class Container:
    """A container: where its contents begin and end, and the kernels that `ARCHITECTURE` runs."""

    start: int
    stop: int
    mine: tuple[bytes, ...]


def containers(data: bytes) -> Iterator[Container]:
    """Return the containers of a library."""
    at = 0
    while (at := data.find(MAGIC, at)) >= 0:
        _, _, header, size = HEADER.unpack_from(data, at)
        start, stop = at + header, at + header + size
        if header != HEADER.size or stop > len(data):
            at += 4  # bytes that look like a header
            continue
        mine, sources, at = [], [], start
        while at < stop:
            kind, _, header, size = KERNELS.unpack_from(data, at)
            (card,) = struct.unpack_from("<I", data, at + 28)
            if (kind, card) == (BINARY, ARCHITECTURE):
                mine.append(data[at : at + header + size])
            elif kind == SOURCE and card <= ARCHITECTURE and size <= SMALL:
                sources.append(data[at : at + header + size])
            at += header + size
        if at != stop:
            raise SystemExit(f"a container at {start:#x} is not understood")
        yield Container(start, stop, tuple(mine or sources))


def is_wanted(contents: bytes, names: str | None) -> bool:
    """Return whether a container was made from one of these source files; all are, without names."""
    found = (name.decode() for name in SOURCE_FILE.findall(contents))
    return names is None or any(re.fullmatch(names, name) for name in found)


def main() -> None:
    """Rewrite a library."""
    source, target, *rest = sys.argv[1:]
    names = rest[0] if rest else None
    data = Path(source).read_bytes()
    written, found = bytearray(data), list(containers(data))
    binaries = (
        kernels for each in found for kernels in each.mine if KERNELS.unpack_from(kernels)[0] == BINARY
    )
    filler = min(binaries, key=len)
    kept = 0
    for each in found:
        wanted = bool(each.mine) and is_wanted(data[each.start : each.stop], names)
        kept += wanted
        contents = b"".join(each.mine) if wanted else filler
        if len(contents) > each.stop - each.start:
            continue  # smaller than the filler: as it was
        padding = bytes(each.stop - each.start - len(contents))
        written[each.start : each.stop] = contents + padding
        HEADER.pack_into(written, each.start - HEADER.size, 0xBA55ED50, 1, HEADER.size, len(contents))
    Path(target).write_bytes(written)
    print(f"{Path(source).name}: kernels of {kept} of {len(found)} source files kept")


if __name__ == "__main__":
    main()
