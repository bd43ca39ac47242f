"""Images read beside the event loop: from inside a request, or from an address that may be fetched."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from baton.errors import BatonError, GatewayOverloaded, ImageTooLarge, InvalidImage
from baton.images.parts import Part
from baton.images.picture import Picture
from baton.images.reader import read_picture
from baton.setting_groups import ImageSettings
from baton.telemetry.metrics import ImageMetrics

Fetch = Callable[[str, str], Awaitable[bytes]]
"""The file at an address, for a place of the request."""

DATA = "data:"


class Room:
    """What the images of one request may take together.

    Args:
        limit: in bytes.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._left = limit

    def take(self, size: int, where: str) -> None:
        """Count one image, as the engine gets it.

        Raises:
            ImageTooLarge: the images are larger than they may be together.
        """
        self._left -= size
        if self._left < 0:
            raise ImageTooLarge(
                f"{where}: the images of one request may take {self._limit} bytes together, as they are "
                "handed to the model (setting images.request_bytes): send fewer, or smaller ones.",
                param=where,
            )


class ImageReading:
    """Reads the images of many requests, so many at a time.

    Args:
        settings: what an image may be.
        metrics: counts them.
        fetch: gets one that is only named.
    """

    def __init__(self, settings: ImageSettings, metrics: ImageMetrics, fetch: Fetch) -> None:
        self._settings = settings
        self._metrics = metrics
        self._fetch = fetch
        self._threads = ThreadPoolExecutor(settings.threads, thread_name_prefix="baton-image")
        self._fetches = asyncio.Semaphore(settings.fetches)

    def close(self) -> None:
        """Take no more; what is being read comes to its end."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def read(self, parts: Sequence[Part]) -> list[Picture]:
        """The images of one request, in its order.

        Raises:
            BatonError: why one of them is not taken; the others are given up.
        """
        room = Room(int(self._settings.request_bytes))
        reading = [asyncio.ensure_future(self._one(part, room)) for part in parts]
        try:
            return await asyncio.gather(*reading)
        finally:
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)

    async def _one(self, part: Part, room: Room) -> Picture:
        began = time.monotonic()
        outcome = "other"
        try:
            picture = await self._read(part)
            room.take(len(picture.data), part.where)
            outcome = "read"
            self._metrics.bytes.inc(len(picture.data))
            return picture
        except BatonError as error:
            outcome = error.reason if isinstance(error, InvalidImage) else outcome
            raise
        finally:
            self._metrics.images.labels(outcome).inc()
            self._metrics.seconds.observe(time.monotonic() - began)

    async def _read(self, part: Part) -> Picture:
        url = part.url.strip()
        if url[: len(DATA)].lower() != DATA:
            async with self._place():  # until it is read: that long its bytes are held
                data = await self._fetch(url, part.where)
                return await self._in_thread(lambda: self._checked(data, part.where))
        return await self._in_thread(
            lambda: self._checked(decoded(url, self._settings, part.where), part.where)
        )

    @contextlib.asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """One of the places of those that are fetched at once.

        Raises:
            GatewayOverloaded: none came free within the time that fetching one may take.
        """
        try:
            async with asyncio.timeout(self._settings.fetch_s):
                await self._fetches.acquire()
        except TimeoutError:
            raise GatewayOverloaded(
                "Too many images are being fetched already; try again shortly, or send them as data: URLs."
            ) from None
        try:
            yield
        finally:
            self._fetches.release()

    def _checked(self, data: bytes, where: str) -> Picture:
        picture = read_picture(data, self._settings, where)
        if picture.data is not data:
            self._metrics.rewritten.inc()
        return picture

    async def _in_thread(self, work: Callable[[], Picture]) -> Picture:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def decoded(url: str, settings: ImageSettings, where: str) -> bytes:
    """The bytes of a `data:` URL. The media type it names is not looked at: what the bytes are counts.

    Raises:
        InvalidImage: it is no base64.
        ImageTooLarge: there is too much of it.
    """
    head, comma, data = url.partition(",")
    if not comma or head.rpartition(";")[2].strip().lower() != "base64":
        raise InvalidImage(
            f"{where}: a data: URL of an image is written data:image/png;base64,...", param=where
        )
    if len(data) > 4 * (settings.file_bytes // 3 + 2):
        raise ImageTooLarge(
            f"{where}: the image file has more than {settings.file_bytes} bytes (setting images.file_bytes).",
            param=where,
        )
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidImage(
            f"{where}: what follows 'base64,' is not base64 (RFC 4648, padded, without line breaks).",
            param=where,
        ) from None
