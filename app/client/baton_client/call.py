"""Define what the clients are told to do: send a call, or pause.

A `Script` is a generator that yields these steps, gets a `Reply` for each call, and returns its result. It
sends nothing itself, so that one script serves the sync and the async client.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeAlias, TypeVar

from baton_client.values import Json, Progress

T = TypeVar("T")
Report: TypeAlias = Callable[[Progress], object]
Told: TypeAlias = Callable[[str], object]
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Reply:
    """A whole answer.

    Attributes:
        status: HTTP status.
        headers: by name, in any case.
        content: the body; empty where it was written to the call's `target`.
    """

    status: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def media_type(self) -> str:
        """The type of the content, without its parameters."""
        return self.headers.get("content-type", "").partition(";")[0].strip()


@dataclass(frozen=True)
class Upload:
    """A body that is sent in pieces; a file is read while it is sent.

    Attributes:
        source: the bytes, or the file they are read from.
        report: called with the progress after each piece.
    """

    source: bytes | Path
    report: Report | None = None

    @property
    def size(self) -> int:
        """Number of bytes."""
        return len(self.source) if isinstance(self.source, bytes) else self.source.stat().st_size

    def pieces(self) -> Iterator[bytes]:
        """Read the body from its beginning."""
        total, done = self.size, 0
        with self._open() as file:
            while piece := file.read(CHUNK_BYTES):
                yield piece
                done += len(piece)
                self._tell(done, total)

    async def pieces_async(self) -> AsyncIterator[bytes]:
        """Read the body from its beginning, in a thread."""
        total, done = self.size, 0
        with self._open() as file:
            while piece := await asyncio.to_thread(file.read, CHUNK_BYTES):
                yield piece
                done += len(piece)
                self._tell(done, total)

    def _open(self) -> BinaryIO:
        return io.BytesIO(self.source) if isinstance(self.source, bytes) else self.source.open("rb")

    def _tell(self, done: int, total: int) -> None:
        if self.report is not None:
            self.report(Progress("sending", done, total))


@dataclass(frozen=True)
class Call(Generic[T]):
    """One request, and how its answer is read.

    Attributes:
        method: `GET`, `POST`, `PATCH` or `DELETE`.
        path: from the gateway's root, such as `/v1/handoffs`.
        read: makes the result of a reply that is no error.
        body: JSON, a file, or nothing.
        params: of the query.
        headers: besides those of every request.
        target: the file that the answer is written to; None: it is returned.
        report: called with the progress of the answer's arrival.
        told: called with each piece of a chat's text as it comes; the answer is then a stream of events, and
            read as if it had come whole.
    """

    method: str
    path: str
    read: Callable[[Reply], T]
    body: Json | Upload | None = None
    params: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    target: Path | None = None
    report: Report | None = None
    told: Told | None = None


@dataclass(frozen=True)
class Pause:
    """Wait.

    Attributes:
        seconds: for how long.
    """

    seconds: float


Script: TypeAlias = Generator[Call[Any] | Pause, Reply | None, T]
