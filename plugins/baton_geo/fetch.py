"""Fetch a raster from an allowed host into a spool file; `baton_fetch` guards the request."""

from __future__ import annotations

import asyncio
import ssl
from concurrent.futures import ThreadPoolExecutor

import baton_fetch.fetch
from baton_fetch.fetch import Resolver, system_resolver
from baton_geo.addresses import allowed_hosts, fetch_errors, require_hosts
from baton_geo.settings import GeoSettings
from baton_geo.spool import Spool, Spooled

ACCEPT = "image/tiff, image/png, image/jpeg, */*;q=0.1"


class RasterFetcher:
    """Fetches rasters; may be used by many requests at a time.

    Args:
        settings: allowed hosts and schemes, time and size limits.
        resolver: resolves host names.
        tls: trusted certificates; None: the system's authorities.

    Raises:
        ValueError: an entry of `allowed_hosts` is not a host.
    """

    def __init__(
        self,
        settings: GeoSettings,
        *,
        resolver: Resolver = system_resolver,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._settings = settings
        self._hosts = allowed_hosts(settings.allowed_hosts)
        self._fetcher = baton_fetch.fetch.Fetcher(
            self._hosts,
            allow_http=settings.allow_http,
            seconds=settings.fetch_seconds,
            accept=ACCEPT,
            agent="baton-geo",
            resolver=resolver,
            tls=tls,
        )

    async def fetch(self, url: str) -> Spooled:
        """Fetch the file at an address to disk.

        Raises:
            SourceRefused: the address, or one it redirects to, is not allowed.
            SourceFailed: the file could not be read, or not in time.
            RasterTooLarge: the file is larger than `limits.file_bytes`.
        """
        settings = self._settings
        with fetch_errors():
            require_hosts(self._hosts)
            with Spool(settings.spool, settings.limits.file_bytes) as spool:
                await self._fetcher.fetch(url, _ToDisk(spool))
                return spool.finish()

    def fetch_sync(self, url: str) -> Spooled:
        """Fetch a file and block; for callers that cannot await."""
        with ThreadPoolExecutor(1, thread_name_prefix="baton-geo-fetch") as pool:
            return pool.submit(asyncio.run, self.fetch(url)).result()


class _ToDisk:
    """A spool as a sink of `baton_fetch`."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool

    def expect(self, size: int) -> None:
        self._spool.expect(size)

    async def write(self, data: bytes) -> None:
        # A full disk cache makes writes wait. This is the plugin's own loop, whose requests are few.
        await asyncio.to_thread(self._spool.write, data)  # noqa: TID251


__all__ = ["RasterFetcher", "Resolver", "system_resolver"]
