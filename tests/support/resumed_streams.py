"""Streams of two engines of the same weights, one of which, or both, are killed while they answer."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from support.gateways import RealGateway
from support.relay_requests import ask
from support.watched_streams import cores, wait_for

CONFIG = Path(__file__).with_name("resumed_engines.toml")


@contextmanager
def two_engines(folder: Path) -> Iterator[RealGateway]:
    (folder / "baton.toml").write_text(CONFIG.read_text().format(folder=folder))
    with RealGateway(["--config", str(folder / "baton.toml")], folder, forked=True) as running:
        running.wait_until_ready()
        yield running


def wait_until_both_are_ready(gateway: RealGateway) -> None:
    wait_for(lambda: httpx.get(f"{gateway.url}/readyz").json()["engines"] == {"ready": 2}, 60)


def core_of(gateway: RealGateway, model: str) -> psutil.Process:
    """The core that works when this engine is asked; one that was killed a moment ago may still count as ready."""
    while True:
        wait_until_both_are_ready(gateway)
        with contextlib.suppress(psutil.NoSuchProcess):
            both = cores(gateway.process.pid)
            before = [core.cpu_times().user for core in both]
            ask(gateway, model, "One two three", max_tokens=24)
            worked = [core.cpu_times().user - was for core, was in zip(both, before, strict=True)]
            if len(both) == 2:
                return both[worked.index(max(worked))]


@dataclass
class Told:
    """What a client was told.

    Attributes:
        events: the data of the stream's events.
        gap_s: longest time between two of them.
    """

    events: list[dict[str, Any]] = field(default_factory=list)
    gap_s: float = 0.0


def stream(
    gateway: RealGateway, path: str, body: dict[str, Any], kill_after: int = 0, *, both: bool = False
) -> Told:
    """Stream an answer; after some of its events its engine's core is killed, or both engines' cores."""
    wait_until_both_are_ready(gateway)
    doomed = cores(gateway.process.pid) if both else [core_of(gateway, body["model"])] if kill_after else []

    def kill() -> None:
        for core in doomed:
            core.kill()

    return read(gateway, path, body, at=kill_after, then=kill)


def read(
    gateway: RealGateway,
    path: str,
    body: dict[str, Any],
    *,
    at: int = 0,
    then: Callable[[], None] = lambda: None,
) -> Told:
    """Stream an answer; `then` is called after so many of its events."""
    told = Told()
    with gateway.client() as client, client.stream("POST", path, json=body | {"stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        last = time.monotonic()
        for line in answer.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            now = time.monotonic()
            told.gap_s, last = max(told.gap_s, now - last), now
            told.events.append(json.loads(line[6:]))
            if len(told.events) == at:
                then()
    return told
