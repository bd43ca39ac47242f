"""Read the images of requests in threads that tenants share, from data: URLs or allowed hosts."""

from __future__ import annotations

import asyncio
import base64
import binascii
import time
from collections.abc import Awaitable, Callable, Sequence

from baton.admission.fair_queue import QueueLimits, watched_queue
from baton.admission.fair_threads import FairThreads
from baton.config.groups import ImageSettings
from baton.errors import (
    BatonError,
    GatewayOverloaded,
    ImageFetchFailed,
    ImageTooLarge,
    InvalidImage,
    InvalidRequest,
    SettingsError,
)
from baton.images.decoding import decode_image
from baton.images.image import ClientImage
from baton.images.parts import ImagePart
from baton.telemetry.metrics import ImageMetrics, QueueMetrics
from baton_fetch.addresses import AllowedHosts, FetchFailed, FetchRefused
from baton_fetch.fetch import Fetcher, Resolver, system_resolver

Fetch = Callable[[str, str], Awaitable[bytes]]
"""Fetches the file at a URL; the second argument is the image's place in the request, for messages."""

DATA = "data:"
RETRY_AFTER_S = 5
ACCEPT = "image/png, image/jpeg, image/webp, image/gif"


class ImageBudget:
    """Counts the bytes of one request's images.

    Args:
        limit: bytes of all images together.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._left = limit

    def take(self, size: int, where: str) -> None:
        """Count one image in the form that the engine gets.

        Raises:
            ImageTooLarge: the images exceed the limit together.
        """
        self._left -= size
        if self._left < 0:
            raise ImageTooLarge(
                f"{where}: the images of one request may take {self._limit} bytes together, in the form that "
                "the model gets (setting images.request_bytes): send fewer, or smaller ones.",
                param=where,
            )


class ImageReader:
    """Reads the images of all requests, a bounded number at once, shared fairly between tenants.

    Args:
        wait_s: seconds that an image may wait to be decoded.
    """

    def __init__(
        self,
        settings: ImageSettings,
        metrics: ImageMetrics,
        fetch: Fetch,
        *,
        queues: QueueMetrics,
        wait_s: float,
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._fetch = fetch
        reads = QueueLimits(settings.threads, wait_s=wait_s)
        fetches = QueueLimits(settings.fetches, wait_s=settings.fetch_s)
        self._threads = FairThreads(watched_queue(reads, _not_read, queues, "image_reads"), "baton-image")
        self._fetches = watched_queue(fetches, _not_fetched, queues, "image_fetches")

    def close(self) -> None:
        """Refuse further images; those being decoded are finished."""
        self._threads.close()

    async def read(self, parts: Sequence[ImagePart], tenant: str) -> list[ClientImage]:
        """Read the images of one request; return them in the same order.

        Raises:
            BatonError: one of the images is refused; reading the others is cancelled.
        """
        budget = ImageBudget(int(self._settings.request_bytes))
        reads = [asyncio.ensure_future(self._one(part, budget, tenant)) for part in parts]
        try:
            return await asyncio.gather(*reads)
        finally:
            for task in reads:
                task.cancel()
            await asyncio.gather(*reads, return_exceptions=True)

    async def _one(self, part: ImagePart, budget: ImageBudget, tenant: str) -> ClientImage:
        began = time.monotonic()
        outcome = "other"
        try:
            image = await self._read(part, tenant)
            budget.take(len(image.data), part.where)
            outcome = "read"
            self._metrics.bytes.inc(len(image.data))
            return image
        except BatonError as error:
            outcome = error.reason if isinstance(error, InvalidImage) else outcome
            raise
        finally:
            self._metrics.images.labels(outcome).inc()
            self._metrics.seconds.observe(time.monotonic() - began)

    async def _read(self, part: ImagePart, tenant: str) -> ClientImage:
        url = part.url.strip()
        if url[: len(DATA)].lower() != DATA:
            async with self._fetches.place(tenant):  # until it is decoded, for its bytes are held that long
                data = await self._fetch(url, part.where)
                return await self._threads.run(tenant, lambda: self._checked(data, part.where))
        return await self._threads.run(
            tenant, lambda: self._checked(decoded_url(url, self._settings, part.where), part.where)
        )

    def _checked(self, data: bytes, where: str) -> ClientImage:
        image = decode_image(data, self._settings, where)
        if image.data is not data:
            self._metrics.rewritten.inc()
        return image


def _not_read(_waited_s: float | None) -> BatonError:
    return GatewayOverloaded(
        "Too many images wait to be decoded already; try again shortly.", retry_after_s=RETRY_AFTER_S
    )


def _not_fetched(_waited_s: float | None) -> BatonError:
    return GatewayOverloaded(
        "Too many images are being fetched already; try again shortly, or send them as data: URLs.",
        retry_after_s=RETRY_AFTER_S,
    )


def decoded_url(url: str, settings: ImageSettings, where: str) -> bytes:
    """Decode a `data:` URL; its media type is ignored, for the bytes tell the format.

    Raises:
        InvalidImage: the URL is not in base64.
        ImageTooLarge: the file exceeds `images.file_bytes`.
    """
    head, comma, data = url.partition(",")
    if not comma or head.rpartition(";")[2].strip().lower() != "base64":
        raise InvalidImage(
            f"{where}: write the data: URL of an image as data:image/png;base64,...", param=where
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


class ImageBuffer:
    """Collects a fetched file in memory, up to a limit.

    Args:
        limit: bytes at most.
        where: the image's place in the request, for messages.
    """

    def __init__(self, limit: int, where: str) -> None:
        self.data = bytearray()
        self._limit = limit
        self._where = where

    def expect(self, size: int) -> None:
        """Check the size that the file will have.

        Raises:
            ImageTooLarge: `size` is above the limit.
        """
        if size > self._limit:
            raise ImageTooLarge(
                f"{self._where}: the image file at this URL has more than {self._limit} bytes "
                "(setting images.file_bytes).",
                param=self._where,
            )

    async def write(self, data: bytes) -> None:
        self.expect(len(self.data) + len(data))
        self.data += data


def fetcher_of(settings: ImageSettings, resolver: Resolver = system_resolver) -> Fetch:
    """Make the function that fetches an image by its URL.

    It raises `InvalidRequest` (the URL is not allowed), `ImageFetchFailed` or `ImageTooLarge`.

    Raises:
        SettingsError: an entry of `images.allowed_hosts` is no host.
    """
    try:
        hosts = AllowedHosts(settings.allowed_hosts, "images.allowed_hosts")
    except ValueError as error:
        raise SettingsError(str(error)) from None
    fetcher = Fetcher(
        hosts,
        allow_http=settings.allow_http,
        seconds=settings.fetch_s,
        accept=ACCEPT,
        agent="baton",
        resolver=resolver,
    )

    async def fetch(url: str, where: str) -> bytes:
        if not hosts:
            raise InvalidRequest(
                f"{where}: this server fetches no images by URL; send the image as a data: URL.", param=where
            )
        file = ImageBuffer(int(settings.file_bytes), where)
        try:
            await fetcher.fetch(url, file)
        except FetchRefused as error:
            raise InvalidRequest(f"{where}: {error.reason}.", param=where) from None
        except FetchFailed as error:
            raise ImageFetchFailed(f"{where}: {error.reason}.", param=where) from None
        return bytes(file.data)

    return fetch
