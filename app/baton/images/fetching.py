"""Fetch images by URL, from the hosts that the operator allows only."""

from __future__ import annotations

from baton.config.groups import ImageSettings
from baton.errors import ImageFetchFailed, ImageTooLarge, InvalidRequest, SettingsError
from baton.images.reader import Fetch
from baton_fetch.addresses import AllowedHosts, FetchFailed, FetchRefused
from baton_fetch.fetch import Fetcher, Resolver, system_resolver

ACCEPT = "image/png, image/jpeg, image/webp, image/gif"


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
    """Return the function that fetches an image by its URL.

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
