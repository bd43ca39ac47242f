"""A host that sends ranges of files, or lies about them, and scenes of the shipped model's plugin read from it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from geo.sources.hosts import Handler, Host, Page, page

from baton_geo.plugin import GeoProcessor
from training.flood_tiny.predict import SHIPPED

RANGE = re.compile(r"bytes=(\d+)-(\d+)")


@dataclass
class Ranges:
    """What a page of ranges sent.

    Attributes:
        sent: bytes of its answers' bodies.
        asked: the ranges asked for, (begin, end).
        lie: changes the answer to the ranges after the first.
    """

    path: Path
    etag: str = '"one"'
    sent: int = 0
    asked: list[tuple[int, int]] = field(default_factory=list)
    lie: Callable[[Ranges, Handler, int, int], bool] | None = None

    def __call__(self, handler: Handler) -> None:
        size = self.path.stat().st_size
        found = RANGE.fullmatch(handler.headers.get("Range", ""))
        assert found is not None, "a range is asked for"
        begin, end = int(found[1]), min(int(found[2]) + 1, size)
        self.asked.append((begin, end))
        if self.lie is not None and len(self.asked) > 1 and self.lie(self, handler, begin, end):
            return
        self.send(handler, begin, end)

    def send(self, handler: Handler, begin: int, end: int, **headers: str) -> None:
        size = self.path.stat().st_size
        with self.path.open("rb") as file:
            file.seek(begin)
            body = file.read(end - begin)
        said = {"content_range": f"bytes {begin}-{end - 1}/{size}", "etag": self.etag, **headers}
        self.sent += len(body)
        page(body, 206, **said)(handler)


def whole(path: Path) -> Page:
    """A page that knows no ranges."""
    return lambda handler: page(path.read_bytes())(handler)


def processor(spool: Path, host: Host, card: dict[str, Any] | None = None, **settings: Any) -> GeoProcessor:
    """The plugin with the shipped model, for which it fetches from a host."""
    config = json.loads((SHIPPED / "config.json").read_text())
    if card is not None:
        config["baton_geo"] |= card
    model = SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: config))
    own = {"spool": str(spool), "allowed_hosts": [f"127.0.0.1:{host.port}"], "allow_http": True, **settings}
    vllm: Any = SimpleNamespace(model_config=model, additional_config={"baton_geo": own})
    renderer: Any = None
    return GeoProcessor(vllm, renderer)
