"""A host that the operator allows, a trap that nobody allows, and a reader of requests for them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from geo.sources.hosts import Host, Names, left, settings

from baton_geo.contract import GeoRequest
from baton_geo.errors import GeoError
from baton_geo.sources import Sources

NAME = "rasters.example.org"


def at_url(url: str) -> GeoRequest:
    return GeoRequest(data=url, data_format="url")


class Setup:
    """A host the operator allows, and a trap on the same port of another address, which nobody allows."""

    def __init__(self, good: Host, trap: Host, spool: Path) -> None:
        self.good = good
        self.trap = trap
        self.spool = spool
        self.names = Names({NAME: [["127.0.0.1"]]})
        self.url = f"http://{NAME}:{good.port}/scene.tif"

    def sources(self, *hosts: str, **more: Any) -> Sources:
        port = self.good.port
        allowed = hosts or (f"{NAME}:{port}", f"127.0.0.1:{port}")
        return Sources(settings(self.spool, *allowed, **more), resolver=self.names)

    def fetch(self, url: str | None = None, **more: Any) -> bytes:
        with asyncio.run(self.sources(**more).open(at_url(url or self.url))) as spooled:
            found = spooled.path.read_bytes()
        assert left(self.spool) == []
        return found

    def refuse(self, url: str | None = None, **more: Any) -> GeoError:
        with pytest.raises(GeoError) as caught:
            asyncio.run(self.sources(**more).open(at_url(url or self.url)))
        assert left(self.spool) == []
        return caught.value
