"""Open the files of a request that names several, or wants a part of a scene; fetch parts of them by ranges.

A file at an address of which a part is wanted is a sparse file here: its beginning is fetched at once, the
rest as the process that reads it asks for it. That process never gets the network: it asks, and the one
guarded fetcher answers. A host without ranges sends the whole file.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from baton_fetch.fetch import RangedFile
from baton_geo.card import Card
from baton_geo.contract import AnyGeoRequest, Asset, AssetsRequest, Fetched, ItemRequest
from baton_geo.errors import GeoError, RasterTooLarge, SourceFailed
from baton_geo.raster.messages import PAGE, FileSpec
from baton_geo.raster.open_scene import FetchStopped
from baton_geo.sources import Sources, ToDisk
from baton_geo.spool import Room, Spooled, disk_error
from baton_geo.stac import ITEM_BYTES, files_of, item_of

LOOK_BYTES = 16 * PAGE  # of a file's beginning: usually its whole header
GAP_PAGES = 8  # fetched along with what is wanted on both sides of them
RANGE_PAGES = 1024  # of one request
AT_ONCE = 8  # requests of one scene
SPANS_LIMIT = 100_000  # of one question


@dataclass(frozen=True)
class Input:
    """One file of a scene.

    Attributes:
        where: the field of the request that names it, for messages.
        remote: where the rest of it is; None: all of it is here.
    """

    where: str
    spec: FileSpec
    spooled: Spooled
    remote: RangedFile | None = None


@dataclass(eq=False)
class Inputs:
    """The files of a scene, and a `RangeFetch` of what is not here yet."""

    sources: Sources
    files: tuple[Input, ...]
    room: Room
    requests: int = 0
    bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stopped: bool = False
    _running: tuple[asyncio.AbstractEventLoop, asyncio.Task[None]] | None = None

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(file.spooled.path for file in self.files)

    @property
    def specs(self) -> tuple[FileSpec, ...]:
        return tuple(file.spec for file in self.files)

    @property
    def ranged(self) -> bool:
        """Whether parts of a file are fetched as they are needed."""
        return any(file.remote is not None for file in self.files)

    @property
    def opening_seconds(self) -> float:
        """See `RangeFetch`."""
        return self.sources.settings.fetch_seconds

    def fetched(self) -> Fetched | None:
        """Count what was fetched by ranges; None: nothing was."""
        remotes = [file.remote for file in self.files if file.remote is not None]
        if not remotes:
            return None
        return Fetched(bytes=self.bytes, of=sum(remote.size for remote in remotes), requests=self.requests)

    def close(self) -> None:
        """Remove the files; a second call does nothing."""
        self.stop()
        for file in self.files:
            file.spooled.close()

    def stop(self) -> None:
        """See `RangeFetch`."""
        with self._lock:
            self._stopped = True
            if self._running is not None:
                loop, task = self._running
                with contextlib.suppress(RuntimeError):  # it has ended meanwhile
                    loop.call_soon_threadsafe(task.cancel)

    def fetch(self, need: object, deadline: float) -> None:
        """See `RangeFetch`."""
        if not isinstance(need, list) or len(need) > len(self.files):
            raise ValueError("no list of files")
        wanted: list[tuple[Input, RangedFile, list[tuple[int, int]]]] = []
        for number, pages in need:
            file = self.files[number] if number in range(len(self.files)) else None
            if file is None or file.remote is None:
                raise ValueError("no such file")
            ranges = _ranges(pages, file.remote.size)
            size = sum(end - begin for begin, end in ranges)
            with _named(file.where):
                self.room.take(size)
            self.bytes += size
            self.requests += len(ranges)
            wanted.append((file, file.remote, ranges))
        try:
            asyncio.run(self._fetch_all(wanted, deadline))
        except asyncio.CancelledError:
            raise FetchStopped from None

    async def _fetch_all(
        self, wanted: Sequence[tuple[Input, RangedFile, Sequence[tuple[int, int]]]], deadline: float
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        with self._lock:
            if self._stopped:
                raise FetchStopped
            self._running = asyncio.get_running_loop(), task
        at_once = asyncio.Semaphore(AT_ONCE)

        async def one(file: Input, remote: RangedFile, begin: int, end: int) -> None:
            async with at_once:
                with _named(file.where), self.sources.fetching():
                    async with asyncio.timeout(deadline - time.monotonic()):
                        await self.sources.fetcher.fetch_range(remote, begin, end, _At(file.spooled, begin))

        try:
            await _together(
                [one(file, remote, *range_) for file, remote, ranges in wanted for range_ in ranges]
            )
        finally:
            with self._lock:
                self._running = None


class _At:
    """A place in a file as a sink of `baton_fetch`."""

    def __init__(self, file: Spooled, place: int) -> None:
        self._file, self._place = file, place

    def expect(self, size: int) -> None:
        """The range's own length counts."""

    async def write(self, data: bytes) -> None:
        assert self._file.temporary is not None
        place, self._place = self._place, self._place + len(data)
        try:
            self._file.temporary.write_at(data, place)
        except OSError as error:
            raise disk_error(error) from None


def _ranges(pages: object, size: int) -> list[tuple[int, int]]:
    """Join pages that a child asked for to ranges (begin, end) of bytes.

    Raises:
        ValueError, TypeError: they are no pages of the file.
    """
    if not isinstance(pages, list) or len(pages) > SPANS_LIMIT:
        raise ValueError("no pages")
    last = -(-size // PAGE)
    joined: list[list[int]] = []
    for first, count in sorted((int(first), int(count)) for first, count in pages):
        if not (first >= 0 and count > 0 and first + count <= last):
            raise ValueError("no pages of this file")
        if joined and first - joined[-1][1] <= GAP_PAGES:
            joined[-1][1] = max(joined[-1][1], first + count)
        else:
            joined.append([first, first + count])
    return [
        (part * PAGE, min(part + RANGE_PAGES, end) * PAGE if min(part + RANGE_PAGES, end) < last else size)
        for begin, end in joined
        for part in range(begin, end, RANGE_PAGES)
    ]


async def _together(work: Sequence[Awaitable[None]]) -> None:
    """Await all; the first error ends the others."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.contextmanager
def _named(where: str) -> Iterator[None]:
    """Name the field that a file is named by, in errors that name `data.data`."""
    try:
        yield
    except TimeoutError:
        raise SourceFailed(f"{where}: fetching took longer than the time allowed", param=where) from None
    except GeoError as error:
        message = error.message.removeprefix("data.data: ").removeprefix(f"{where}: ")
        param = where if error.param in (None, "data.data") else error.param
        raise type(error)(f"{where}: {message}", param=param) from None


async def open_inputs(sources: Sources, request: AnyGeoRequest, card: Card) -> Inputs:
    """Open the files of a request; the caller closes the result. When cancelled or failed, no file is left.

    Raises:
        GeoError: as `Sources.open`; the message names the file.
    """
    if isinstance(request, AssetsRequest):
        named = [
            (f"data.assets.{name}", FileSpec(name=name), asset) for name, asset in request.assets.items()
        ]
    elif isinstance(request, ItemRequest):
        named = await _of_item(sources, request, card)
    else:
        named = [("data.data", FileSpec(), request)]
    opened: list[Input | None] = [None] * len(named)
    at_once, room = asyncio.Semaphore(AT_ONCE), Room(int(sources.settings.limits.file_bytes))

    async def one(place: int, where: str, spec: FileSpec, asset: Asset) -> None:
        async with at_once:
            with _named(where):
                if request.partial and asset.data_format == "url":
                    opened[place] = await _look(sources, room, where, spec, asset)
                else:
                    opened[place] = Input(where, spec, await sources.open(asset, room))

    try:
        await _together([one(place, *parts) for place, parts in enumerate(named)])
    except BaseException:
        for input_ in opened:
            if input_ is not None:
                input_.spooled.close()
        raise
    files = tuple(input_ for input_ in opened if input_ is not None)
    remotes = [file.remote for file in files if file.remote is not None]
    return Inputs(sources, files, room, len(remotes), sum(remote.first for remote in remotes))


class _InMemory:
    """A text as a sink of `baton_fetch`."""

    def __init__(self, limit: int) -> None:
        self.data, self._limit = bytearray(), limit

    def expect(self, size: int) -> None:
        if size > self._limit:
            raise RasterTooLarge(f"more than {self._limit} bytes, the most that an item may have")

    async def write(self, data: bytes) -> None:
        self.expect(len(self.data) + len(data))
        self.data += data


async def _of_item(sources: Sources, request: ItemRequest, card: Card) -> list[tuple[str, FileSpec, Asset]]:
    if not isinstance(request.item, str):
        return files_of(request.item, None, card)
    sink = _InMemory(ITEM_BYTES)
    with _named("data.item"), sources.fetching():
        await sources.fetcher.fetch(request.item, sink)
    return files_of(item_of(bytes(sink.data)), request.item, card)


async def _look(sources: Sources, room: Room, where: str, spec: FileSpec, asset: Asset) -> Input:
    with sources.new_spool(room) as spool:
        with sources.fetching():
            remote = await sources.fetcher.look(str(asset.data), LOOK_BYTES, ToDisk(spool))
        spooled = spool.finish()
    if remote is None:
        return Input(where, spec, spooled)
    assert spooled.temporary is not None
    try:
        spooled.temporary.grow(remote.size)
    except OSError as error:
        spooled.close()
        raise disk_error(error) from None
    return Input(where, spec.model_copy(update={"fetched": remote.first}), spooled, remote)


def open_inputs_sync(sources: Sources, request: AnyGeoRequest, card: Card) -> Inputs:
    """Do the same for callers that cannot await, and block."""
    with ThreadPoolExecutor(1, thread_name_prefix="baton-geo-source") as pool:
        return pool.submit(lambda: asyncio.run(open_inputs(sources, request, card))).result()
