"""Write embeddings as GeoParquet 1.1: a row a tile, in one row group, plain and not compressed.

Parquet's own format (https://parquet.apache.org/docs/file-format/) is a few structures of Thrift's compact
protocol around plain columns; floats of a model hardly compress, so no library is needed for it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

MAGIC = b"PAR1"
INT32, FLOAT, BYTES = 1, 4, 6  # Parquet's physical types
REQUIRED, OPTIONAL, REPEATED = 0, 1, 2
UTF8, LIST = 0, 3  # converted types
PLAIN, RLE = 0, 3  # encodings
I32, I64, BINARY, SEQUENCE, STRUCT = 5, 6, 8, 9, 12  # Thrift's compact types


@dataclass(frozen=True)
class Row:
    """One tile.

    Attributes:
        tile: its number.
        corners: of its part of the scene, in CRS units, around.
        embedding: float32.
    """

    tile: int
    corners: Sequence[tuple[float, float]]
    embedding: npt.NDArray[np.float32]


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*out, number))


def _struct(*fields: tuple[int, int, Any]) -> bytes:
    """Encode a structure of (number, type, value), in the order of the numbers."""
    out, last = b"", 0
    for number, kind, value in fields:
        out += bytes(((number - last) << 4 | kind,)) + _value(kind, value)
        last = number
    return out + b"\0"


def _value(kind: int, value: Any) -> bytes:
    if kind in (I32, I64):
        return _varint(value << 1 if value >= 0 else (-value << 1) - 1)
    if kind == BINARY:
        data = value.encode() if isinstance(value, str) else value
        return _varint(len(data)) + bytes(data)
    if kind == SEQUENCE:
        of, items = value
        head = (
            bytes((len(items) << 4 | of,)) if len(items) < 15 else bytes((0xF0 | of,)) + _varint(len(items))
        )
        return head + b"".join(_value(of, item) for item in items)
    return bytes(value)  # a structure is encoded already


def _levels(runs: Sequence[tuple[int, int]]) -> bytes:
    """Encode runs of (count, level) of levels up to 1."""
    data = b"".join(_varint(count << 1) + bytes((level,)) for count, level in runs)
    return struct.pack("<I", len(data)) + data


def _wkb(corners: Sequence[tuple[float, float]]) -> bytes:
    ring = [*corners, corners[0]]
    return struct.pack("<BIII", 1, 3, 1, len(ring)) + b"".join(struct.pack("<dd", *point) for point in ring)


def _texts(values: Sequence[bytes]) -> bytes:
    return b"".join(struct.pack("<I", len(value)) + value for value in values)


def _schema(name: str, repetition: int, kind: int | None, converted: int | None, children: int = 0) -> bytes:
    fields: list[tuple[int, int, Any]] = [] if kind is None else [(1, I32, kind)]
    fields += [(3, I32, repetition), (4, BINARY, name)]
    fields += [(5, I32, children)] if children else []
    return _struct(*fields, *([] if converted is None else [(6, I32, converted)]))


def write_geoparquet(
    path: Path, rows: Sequence[Row], *, model: str, date: str | None, crs: dict[str, Any] | None
) -> None:
    """Write the rows.

    Args:
        model: fingerprint of the model.
        date: of acquisition, ISO 8601; None: unknown.
        crs: PROJJSON; None: the scene has none.
    """
    count, width = len(rows), len(rows[0].embedding)
    lists = b"".join(_varint(1 << 1) + b"\0" + _varint((width - 1) << 1) + b"\1" for _ in rows)
    levels = struct.pack("<I", len(lists)) + lists + _levels([(count * width, 1)])
    floats = np.stack([row.embedding for row in rows]).astype("<f4").tobytes()
    text = _texts([(date or "").encode()] * count) if date else b""
    columns = (
        (["tile"], INT32, count, np.array([row.tile for row in rows], "<i4").tobytes()),
        (["geometry"], BYTES, count, _texts([_wkb(row.corners) for row in rows])),
        (["embedding", "list", "element"], FLOAT, count * width, levels + floats),
        (["model"], BYTES, count, _texts([model.encode()] * count)),
        (["date"], BYTES, count, _levels([(count, 1 if date else 0)]) + text),
    )
    schema = (
        _struct((4, BINARY, "schema"), (5, I32, len(columns))),
        _schema("tile", REQUIRED, INT32, None),
        _schema("geometry", REQUIRED, BYTES, None),
        _schema("embedding", REQUIRED, None, LIST, 1),
        _schema("list", REPEATED, None, None, 1),
        _schema("element", REQUIRED, FLOAT, None),
        _schema("model", REQUIRED, BYTES, UTF8),
        _schema("date", OPTIONAL, BYTES, UTF8),
    )
    chunks, total = [], 0
    with open(path, "wb") as file:
        file.write(MAGIC)
        for names, kind, values, body in columns:
            page = _struct((1, I32, values), (2, I32, PLAIN), (3, I32, RLE), (4, I32, RLE))
            header = _struct((1, I32, 0), (2, I32, len(body)), (3, I32, len(body)), (5, STRUCT, page))
            place, size = file.tell(), len(header) + len(body)
            file.write(header + body)
            meta = _struct(
                (1, I32, kind),
                (2, SEQUENCE, (I32, [PLAIN, RLE])),
                (3, SEQUENCE, (BINARY, names)),
                (4, I32, 0),
                (5, I64, values),
                (6, I64, size),
                (7, I64, size),
                (9, I64, place),
            )
            chunks.append(_struct((2, I64, place), (3, STRUCT, meta)))
            total += size
        group = _struct((1, SEQUENCE, (STRUCT, chunks)), (2, I64, total), (3, I64, count))
        geo = _struct((1, BINARY, "geo"), (2, BINARY, json.dumps(_geo(rows, crs))))
        footer = _struct(
            (1, I32, 1),
            (2, SEQUENCE, (STRUCT, schema)),
            (3, I64, count),
            (4, SEQUENCE, (STRUCT, [group])),
            (5, SEQUENCE, (STRUCT, [geo])),
            (6, BINARY, "baton_geo"),
        )
        file.write(footer + struct.pack("<I", len(footer)) + MAGIC)


def _geo(rows: Sequence[Row], crs: dict[str, Any] | None) -> dict[str, Any]:
    points = np.array([row.corners for row in rows]).reshape(-1, 2)
    box = [*points.min(axis=0).tolist(), *points.max(axis=0).tolist()]
    column = {"encoding": "WKB", "geometry_types": ["Polygon"], "crs": crs, "bbox": box}
    return {"version": "1.1.0", "primary_column": "geometry", "columns": {"geometry": column}}
