"""Fetches a raster from a host the operator allows, and from nowhere else.

Each hop, the first and every redirect, goes the same way: the address is taken apart
(`addresses.target_of`), its host is resolved once, every address it resolves to is checked, and the
connection is made to one of these by number, so that no second answer of a resolver counts. TLS still
asks for and checks the host's name.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol
from urllib.parse import urljoin

import httpx

from baton_geo.addresses import IP, PORTS, AllowedHosts, Target, ip_of, target_of
from baton_geo.contract import URL_CHARACTERS
from baton_geo.errors import SourceFailed, SourceRefused
from baton_geo.settings import MIB, GeoSettings
from baton_geo.spool import Spool, Spooled

REDIRECTS = 5
_ADDRESSES_TRIED = 4
_CONNECT_SECONDS = 5.0
_REDIRECT_STATUS = (301, 302, 303, 307, 308)
_CHUNK = 1 * MIB


class Resolver(Protocol):
    """Turns a host name into IP addresses."""

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        """The addresses, best first; raises `OSError` where there are none."""


async def system_resolver(host: str, port: int) -> Sequence[str]:
    """What the machine's resolver answers."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return [str(address[4][0]) for address in found]


class Fetcher:
    """Fetches files; may be used by many requests at a time.

    Args:
        settings: the operator's: hosts, schemes, time and size.
        resolver: how names become addresses.
        tls: what certificates are trusted; None: the usual authorities.

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
        self._hosts = AllowedHosts(settings.allowed_hosts)
        self._resolver = resolver
        self._tls = tls

    async def fetch(self, url: str) -> Spooled:
        """The file at an address, on disk.

        Raises:
            SourceRefused: the address, or one it redirects to, is not allowed.
            SourceFailed: it could not be read, or not in time.
            RasterTooLarge: it is over the size limit.
        """
        settings = self._settings
        target = self._target(url)
        with Spool(settings.spool, settings.limits.file_bytes) as spool:
            try:
                async with asyncio.timeout(settings.fetch_seconds):
                    await self._follow(target, spool)
            except TimeoutError:
                raise _failed(f"the file took longer than {settings.fetch_seconds:g} s") from None
            return spool.finish()

    def fetch_sync(self, url: str) -> Spooled:
        """`fetch` for callers without an event loop, or inside one they may not await on; blocks."""
        with ThreadPoolExecutor(1, thread_name_prefix="baton-geo-fetch") as pool:
            return pool.submit(asyncio.run, self.fetch(url)).result()

    async def _follow(self, target: Target, spool: Spool) -> None:
        for _ in range(REDIRECTS + 1):
            onward = await self._hop(target, spool)
            if onward is None:
                return
            try:
                target = self._target(onward)
            except SourceRefused as error:
                raise SourceRefused(f"{error.message} (a redirect leads there)", param=error.param) from None
        raise _failed(f"more than {REDIRECTS} redirects")

    def _target(self, url: str) -> Target:
        return target_of(url, self._hosts, allow_http=self._settings.allow_http)

    async def _hop(self, target: Target, spool: Spool) -> str | None:
        """Writes what the target answers, or says where it redirects to."""
        addresses = await self._addresses(target)
        # A bare transport, of this hop's own: it follows no redirect, knows no proxy and keeps no cookie.
        async with httpx.AsyncHTTPTransport(verify=await self._trust(target), trust_env=False) as transport:
            try:
                response = await self._send(transport, target, addresses)
                try:
                    return await _take(response, target, spool)
                finally:
                    await response.aclose()
            except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
                raise _failed(_reason(error)) from None

    async def _send(
        self, transport: httpx.AsyncHTTPTransport, target: Target, addresses: Sequence[IP]
    ) -> httpx.Response:
        """The answer's head, from the first address that takes the connection."""
        seconds = self._settings.fetch_seconds
        timeout = httpx.Timeout(seconds, connect=min(seconds, _CONNECT_SECONDS))
        for address in addresses[:-1]:
            try:
                return await transport.handle_async_request(_request(target, address, timeout))
            except (httpx.ConnectError, httpx.ConnectTimeout):
                continue
        return await transport.handle_async_request(_request(target, addresses[-1], timeout))

    async def _trust(self, target: Target) -> ssl.SSLContext:
        if target.scheme == "http":
            return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # not used; one that trusts nobody costs nothing
        if self._tls is None:
            # About 20 ms: hundreds of certificates are parsed.
            self._tls = await asyncio.to_thread(httpx.create_ssl_context, trust_env=False)
        return self._tls

    async def _addresses(self, target: Target) -> list[IP]:
        """The addresses to connect to, each of them checked.

        One that is not allowed spoils the rest: a name that points both out and in is an attack or a mistake.
        """
        literal = ip_of(target.host)
        if literal is not None:
            return [literal]  # it is in the operator's list as it stands
        try:
            answers = await self._resolver(target.host, target.port)
        except (OSError, UnicodeError):
            answers = []
        addresses = [address for text in answers if (address := ip_of(text)) is not None]
        if not addresses or len(addresses) < len(answers):
            raise _failed("the host's name could not be resolved")
        for address in addresses:
            if not self._hosts.may_connect(address, target.port, PORTS[target.scheme]):
                raise SourceRefused(
                    "data.data: the host's name leads to an address that is not a public one; "
                    "such a host is fetched from only where the operator allows its IP address too",
                    param="data.data",
                )
        return addresses[:_ADDRESSES_TRIED]


def _request(target: Target, address: IP, timeout: httpx.Timeout) -> httpx.Request:
    """To the address by number; Host header and TLS name are the target's."""
    path = target.path.encode("ascii")
    return httpx.Request(
        "GET",
        httpx.URL(scheme=target.scheme, host=str(address), port=target.port, raw_path=path),
        headers={
            "Host": target.authority,
            "Accept": "image/tiff, image/png, image/jpeg, */*;q=0.1",
            "Accept-Encoding": "identity",
            "Connection": "close",
            "User-Agent": "baton-geo",
        },
        extensions={"sni_hostname": target.host, "timeout": timeout.as_dict()},
    )


async def _take(response: httpx.Response, target: Target, spool: Spool) -> str | None:
    if response.status_code in _REDIRECT_STATUS:
        return _location(response, target)
    if response.status_code != 200:
        raise _failed(f"the host answered {response.status_code}, not the file")
    # Unpacking it would let a few bytes become any number of them.
    if response.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise _failed("the host sent the file compressed, which was not asked for")
    said = response.headers.get("content-length", "")
    if said.isascii() and said.isdigit() and len(said) < 20:
        spool.expect(int(said))
    async for chunk in _gathered(response.aiter_raw()):
        await asyncio.to_thread(spool.write, chunk)  # a full disk cache makes writes wait
    return None


def _location(response: httpx.Response, target: Target) -> str:
    location = str(response.headers.get("location", ""))
    if not location or len(location) > URL_CHARACTERS:
        raise _failed("the host redirects, and does not say where to")
    try:
        return urljoin(target.url, location)
    except ValueError:
        raise _failed("the host redirects to what is not an address") from None


async def _gathered(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The same bytes in pieces of about a MiB: one change of thread each, not one a packet."""
    held = bytearray()
    async for chunk in chunks:
        held += chunk
        if len(held) >= _CHUNK:
            yield bytes(held)
            held.clear()
    if held:
        yield bytes(held)


def _reason(error: Exception) -> str:
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ssl.SSLCertVerificationError):
            return "the host's certificate is not valid for it"
        seen = seen.__cause__ or seen.__context__
    if isinstance(error, httpx.ConnectError):
        return "no connection to the host"
    if isinstance(error, httpx.TimeoutException):
        return "the host did not answer in time"
    return "the host broke off, or does not speak HTTP"


def _failed(reason: str) -> SourceFailed:
    return SourceFailed(f"data.data: {reason}", param="data.data")
