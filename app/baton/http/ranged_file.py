"""Send a file, or the ranges of it that `Range` names (RFC 9110, sections 13 and 14)."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import FileResponse
from starlette.types import Receive, Scope, Send

from baton.admission.fair_threads import in_own_thread
from baton.errors import BatonError, RangeNotSatisfiable

RANGE = re.compile(r"(?=\d|-\d)(\d{0,300})-(\d{0,300})", re.ASCII)


class RangedFileResponse(FileResponse):
    """The answer with a file, or with ranges of it.

    Starlette refuses what the standard has ignored, and answers a file's end with plain text: what it is
    given of `Range` is only what it can send.

    Args:
        gone: raised where the file was removed since it was found.
    """

    def __init__(self, path: Path, *, gone: BatonError, **options: Any) -> None:
        super().__init__(path, **options)
        self._gone = gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            found = self.stat_result = await in_own_thread(os.stat, self.path)
        except FileNotFoundError:
            raise self._gone from None
        self.set_stat_headers(found)
        asked = Headers(scope=scope)
        if "range" in asked:
            scope = dict(scope, headers=list(scope["headers"]))
            headers = MutableHeaders(scope=scope)
            known = (None, self.headers["etag"], self.headers["last-modified"])
            ranges = ranges_of(asked["range"], found.st_size) if asked.get("if-range") in known else []
            for name in ("range", "if-range"):
                del headers[name]
            if ranges:
                headers["range"] = "bytes=" + ",".join(f"{first}-{last}" for first, last in ranges)
        await super().__call__(scope, receive, send)


def ranges_of(header: str, size: int) -> list[tuple[int, int]]:
    """Read the ranges that `Range` names and a file has, (first, last) byte each.

    Empty: the header is none that the standard knows, and is ignored, as it says (section 14.2).

    Raises:
        RangeNotSatisfiable: the file has none of them.
    """
    unit, _, named = header.partition("=")
    parts = [part.strip(" \t") for part in named.split(",")]
    found = [RANGE.fullmatch(part) for part in parts if part]
    if unit.strip(" \t").lower() != "bytes" or not found:
        return []
    ranges: list[tuple[int, int]] = []
    for match in found:
        if match is None or (match[1] and match[2] and int(match[1]) > int(match[2])):
            return []
        first = int(match[1]) if match[1] else max(size - int(match[2]), 0)
        last = min(int(match[2]), size - 1) if match[1] and match[2] else size - 1
        if first <= last:
            ranges.append((first, last))
    if not ranges:
        raise RangeNotSatisfiable(size)
    return ranges
