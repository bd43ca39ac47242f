"""Read a request's raster onto disk, or check that it is refused, both ways."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import pytest
from geo.sources.hosts import left, settings

from baton_geo.contract import GeoRequest
from baton_geo.errors import (
    GeoError,
)
from baton_geo.sources import Sources


def b64(raster: bytes) -> GeoRequest:
    return GeoRequest(data=base64.b64encode(raster).decode(), data_format="b64_json")


def read(at: Path, request: GeoRequest, **more: Any) -> bytes:
    """What lands on disk, by the asynchronous and by the synchronous way."""
    made = Sources(settings(at, **more))
    with asyncio.run(made.open(request)) as first:
        found = first.path.read_bytes()
    with made.open_sync(request) as second:
        assert second.path.read_bytes() == found
        assert second.path.stat().st_mode & 0o777 == 0o600
    assert left(at) == []
    return found


def refused(at: Path, request: GeoRequest, kind: type[GeoError], **more: Any) -> GeoError:
    made = Sources(settings(at, **more))
    with pytest.raises(kind) as caught:
        asyncio.run(made.open(request))
    with pytest.raises(kind) as again:
        made.open_sync(request)
    assert caught.value.message == again.value.message
    assert left(at) == []
    return caught.value
