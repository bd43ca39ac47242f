"""Streams that are watched while something is broken on purpose."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

from baton.engines.process.processes import segments_of

LONG = {"prompt": "Once upon a time", "max_tokens": 1800, "ignore_eos": True, "stream": True}


class Stream(threading.Thread):
    """One streaming completion.

    Attributes:
        times: when each event came.
        lines: the last lines, to see how it ended.
        ended: when, or None.
    """

    def __init__(self, url: str, model: str) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._body = LONG | {"model": model}
        self.times: list[float] = []
        self.lines: list[str] = []
        self.ended: float | None = None
        self._left = threading.Event()

    def leave(self) -> None:
        """Go away with the next event: nobody watches any more, and others want the processor."""
        self._left.set()

    def run(self) -> None:
        try:
            with httpx.stream("POST", f"{self._url}/v1/completions", json=self._body, timeout=600) as answer:
                for line in answer.iter_lines():
                    if line:
                        self.times.append(time.monotonic())
                        self.lines = [*self.lines[-2:], line]
                    if self._left.is_set():
                        break
        except httpx.HTTPError as error:
            self.lines.append(f"cut: {type(error).__name__}")
        self.ended = time.monotonic()

    @property
    def error(self) -> str | None:
        """The code of the one error event it ended with."""
        if len(self.lines) < 2 or self.lines[-2] != "event: error":
            return None
        code: str = json.loads(self.lines[-1].removeprefix("data: "))["error"]["code"]
        return code

    def longest_gap(self, after: float, before: float) -> float:
        """Seconds between two events within this time."""
        times = [moment for moment in self.times if after <= moment <= before]
        return max((late - early for early, late in itertools.pairwise(times)), default=0.0)


@contextmanager
def streaming(url: str, models: dict[str, int]) -> Iterator[dict[str, list[Stream]]]:
    """So many streams for each model, all under way."""
    streams = {model: [Stream(url, model) for _ in range(count)] for model, count in models.items()}
    watched = [stream for group in streams.values() for stream in group]
    for stream in watched:
        stream.start()
    wait_for(lambda: all(len(stream.times) > 3 for stream in watched), 120)
    try:
        yield streams
    finally:
        for stream in watched:
            stream.leave()


def wait_for(condition: object, within_s: float) -> float:
    """Wait for it to hold; returns the seconds that took."""
    assert callable(condition)
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < began + within_s, "it did not come to pass"
        time.sleep(0.005)
    return time.monotonic() - began


def cores(pid: int) -> list[psutil.Process]:
    """The engine cores of a server, in the order of their engines."""
    found = [child for child in psutil.Process(pid).children(recursive=True) if "EngineCor" in child.name()]
    return sorted(found, key=lambda process: process.create_time())


def family(pid: int) -> list[psutil.Process]:
    """A server and every process under it."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def shared_memory(pid: int) -> set[Path]:
    """The shared memory that a server's processes have open."""
    return set(segments_of(family(pid)))
