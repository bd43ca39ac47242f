"""Fetches a file from a host the operator allows, and from nowhere else.

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
from typing import Protocol
from urllib.parse import urljoin

import httpx

from baton_fetch.addresses import IP, PORTS, URL_CHARACTERS, AllowedHosts, Target, ip_of, target_of
from baton_fetch.errors import FetchFailed, FetchRefused

REDIRECTS = 5
_ADDRESSES_TRIED = 4
_CONNECT_SECONDS = 5.0
_REDIRECT_STATUS = (301, 302, 303, 307, 308)
_CHUNK = 1024 * 1024


class Sink(Protocol):
    """Where a file goes as it comes; what it raises ends the fetch."""

    def expect(self, size: int) -> None:
        """The host says that the file has so many bytes."""

    async def write(self, data: bytes) -> None:
        """The next of them."""


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
        hosts: the operator's list.
        allow_http: plain http is taken too.
        seconds: that one file may take, redirects and all.
        accept: what the host is told we take.
        agent: what the host is told we are.
        resolver: how names become addresses.
        tls: what certificates are trusted; None: the usual authorities.
    """

    def __init__(
        self,
        hosts: AllowedHosts,
        *,
        allow_http: bool,
        seconds: float,
        accept: str,
        agent: str,
        resolver: Resolver = system_resolver,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._hosts = hosts
        self._allow_http = allow_http
        self._seconds = seconds
        self._headers = {
            "Accept": accept,
            "Accept-Encoding": "identity",
            "Connection": "close",
            "User-Agent": agent,
        }
        self._resolver = resolver
        self._tls = tls

    async def fetch(self, url: str, sink: Sink) -> None:
        """Puts the file at an address into `sink`.

        Raises:
            FetchRefused: the address, or one it redirects to, is not allowed.
            FetchFailed: it could not be read, or not in time.
        """
        target = self._target(url)
        try:
            async with asyncio.timeout(self._seconds):
                await self._follow(target, sink)
        except TimeoutError:
            raise FetchFailed(f"the file took longer than {self._seconds:g} s") from None

    async def _follow(self, target: Target, sink: Sink) -> None:
        for _ in range(REDIRECTS + 1):
            onward = await self._hop(target, sink)
            if onward is None:
                return
            try:
                target = self._target(onward)
            except FetchRefused as error:
                raise FetchRefused(f"{error.reason} (a redirect leads there)") from None
        raise FetchFailed(f"more than {REDIRECTS} redirects")

    def _target(self, url: str) -> Target:
        return target_of(url, self._hosts, allow_http=self._allow_http)

    async def _hop(self, target: Target, sink: Sink) -> str | None:
        """Hands on what the target answers, or says where it redirects to."""
        addresses = await self._addresses(target)
        # A bare transport, of this hop's own: it follows no redirect, knows no proxy and keeps no cookie.
        async with httpx.AsyncHTTPTransport(verify=await self._trust(target), trust_env=False) as transport:
            try:
                response = await self._send(transport, target, addresses)
                try:
                    return await _take(response, target, sink)
                finally:
                    await response.aclose()
            except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
                raise FetchFailed(_reason(error)) from None

    async def _send(
        self, transport: httpx.AsyncHTTPTransport, target: Target, addresses: Sequence[IP]
    ) -> httpx.Response:
        """The answer's head, from the first address that takes the connection."""
        seconds = self._seconds
        timeout = httpx.Timeout(seconds, connect=min(seconds, _CONNECT_SECONDS))
        for address in addresses[:-1]:
            try:
                return await transport.handle_async_request(self._request(target, address, timeout))
            except (httpx.ConnectError, httpx.ConnectTimeout):
                continue
        return await transport.handle_async_request(self._request(target, addresses[-1], timeout))

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
            raise FetchFailed("the host's name could not be resolved")
        for address in addresses:
            if not self._hosts.may_connect(address, target.port, PORTS[target.scheme]):
                raise FetchRefused(
                    "the host's name leads to an address that is not a public one; "
                    "such a host is fetched from only where the operator allows its IP address too"
                )
        return addresses[:_ADDRESSES_TRIED]

    def _request(self, target: Target, address: IP, timeout: httpx.Timeout) -> httpx.Request:
        """To the address by number; Host header and TLS name are the target's."""
        path = target.path.encode("ascii")
        return httpx.Request(
            "GET",
            httpx.URL(scheme=target.scheme, host=str(address), port=target.port, raw_path=path),
            headers={"Host": target.authority} | self._headers,
            extensions={"sni_hostname": target.host, "timeout": timeout.as_dict()},
        )


async def _take(response: httpx.Response, target: Target, sink: Sink) -> str | None:
    if response.status_code in _REDIRECT_STATUS:
        return _location(response, target)
    if response.status_code != 200:
        raise FetchFailed(f"the host answered {response.status_code}, not the file")
    # Unpacking it would let a few bytes become any number of them.
    if response.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise FetchFailed("the host sent the file compressed, which was not asked for")
    said = response.headers.get("content-length", "")
    if said.isascii() and said.isdigit() and len(said) < 20:
        sink.expect(int(said))
    async for chunk in _gathered(response.aiter_raw()):
        await sink.write(chunk)
    return None


def _location(response: httpx.Response, target: Target) -> str:
    location = str(response.headers.get("location", ""))
    if not location or len(location) > URL_CHARACTERS:
        raise FetchFailed("the host redirects, and does not say where to")
    try:
        return urljoin(target.url, location)
    except ValueError:
        raise FetchFailed("the host redirects to what is not an address") from None


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
