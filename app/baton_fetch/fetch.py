"""Fetch a file from an allowed host without giving clients access to internal addresses (SSRF).

The first request and every redirect are handled alike: the URL is checked (`addresses.target_of`), its host
resolved once, every resulting IP address checked, and the connection made to one of these addresses, so that
a second answer of the resolver (DNS rebinding) has no effect. TLS still verifies the host's name.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol
from urllib.parse import urljoin

import httpx

from baton_fetch.addresses import (
    IP,
    PORTS,
    URL_CHARACTERS,
    AllowedHosts,
    FetchFailed,
    FetchRefused,
    Target,
    ip_of,
    target_of,
)

REDIRECTS = 5
_ADDRESSES_TRIED = 4
_CONNECT_SECONDS = 5.0
_REDIRECT_STATUS = (301, 302, 303, 307, 308)
_CHUNK = 1024 * 1024
_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})", re.ASCII)


@dataclass(frozen=True)
class RangedFile:
    """A file at a URL whose host sends ranges of it.

    Attributes:
        size: of the whole file, bytes.
        validator: the host's ETag, else its Last-Modified; "": it sends neither.
        first: bytes of the file's beginning that `Fetcher.look` has written.
    """

    url: str
    size: int
    validator: str
    first: int


class Sink(Protocol):
    """Receives a file piece by piece; an exception from it ends the fetch."""

    def expect(self, size: int) -> None:
        """Take note of the Content-Length, in bytes; called only if the host sends one."""

    async def write(self, data: bytes) -> None:
        """Take the next bytes of the file."""


class Resolver(Protocol):
    """Turns a host name into IP addresses."""

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        """Return the IP addresses, best first; raise `OSError` if there are none."""


async def system_resolver(host: str, port: int) -> Sequence[str]:
    """Resolve a name with the machine's resolver."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return [str(address[4][0]) for address in found]


class Fetcher:
    """Fetches files; many requests may use it at once.

    Args:
        tls: context with the trusted certificates; None for the usual authorities.
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
        """Fetch the file at a URL and write it to `sink`.

        Raises:
            FetchRefused: the URL, or one to which it redirects, is not allowed.
            FetchFailed: the file could not be fetched, or not in time.
        """
        await self._in_time(url, {}, partial(_take, sink=sink))

    async def look(self, url: str, first: int, sink: Sink) -> RangedFile | None:
        """Write the first bytes of the file at a URL to `sink`, or all of it if its host sends no ranges.

        Args:
            first: bytes to ask for.

        Returns:
            None: all of the file was written.

        Raises:
            FetchRefused, FetchFailed: as `fetch`.
        """
        found: list[RangedFile] = []

        async def take(response: httpx.Response) -> None:
            if response.status_code != 206:
                return await _take(response, sink)
            begin, end, size = _content_range(response)
            if begin or end != min(first, size):
                raise FetchFailed("the host sent another range than it was asked for")
            await _take_range(response, end, sink)
            found.append(RangedFile(url, size, _validator(response), end))
            return None

        await self._in_time(url, {"Range": f"bytes=0-{first - 1}"}, take)
        return found[0] if found else None

    async def fetch_range(self, file: RangedFile, begin: int, end: int, sink: Sink) -> None:
        """Write the bytes from `begin` up to `end`, not included, of a file to `sink`.

        Raises:
            FetchRefused: as `fetch`.
            FetchFailed: as `fetch`, or the file is not the one that `look` has seen.
        """

        async def take(response: httpx.Response) -> None:
            if response.status_code == 200:
                raise FetchFailed("the host sent no range, though it did before")
            if response.status_code == 206 and (
                _content_range(response)[2] != file.size or _validator(response) != file.validator
            ):
                raise FetchFailed("the file changed while it was read; try again")
            if response.status_code != 206 or _content_range(response)[:2] != (begin, end):
                raise FetchFailed("the host sent another range than it was asked for")
            await _take_range(response, end - begin, sink)

        await self._in_time(file.url, {"Range": f"bytes={begin}-{end - 1}"}, take)

    async def _in_time(
        self, url: str, more: Mapping[str, str], take: Callable[[httpx.Response], Awaitable[None]]
    ) -> None:
        target = self._target(url)
        try:
            async with asyncio.timeout(self._seconds):
                await self._follow(target, more, take)
        except TimeoutError:
            raise FetchFailed(f"the file took longer than {self._seconds:g} s") from None

    async def _follow(
        self, target: Target, more: Mapping[str, str], take: Callable[[httpx.Response], Awaitable[None]]
    ) -> None:
        for _ in range(REDIRECTS + 1):
            onward = await self._hop(target, more, take)
            if onward is None:
                return
            try:
                target = self._target(onward)
            except FetchRefused as error:
                raise FetchRefused(f"{error.reason} (a redirect leads there)") from None
        raise FetchFailed(f"more than {REDIRECTS} redirects")

    def _target(self, url: str) -> Target:
        return target_of(url, self._hosts, allow_http=self._allow_http)

    async def _hop(
        self, target: Target, more: Mapping[str, str], take: Callable[[httpx.Response], Awaitable[None]]
    ) -> str | None:
        """Request a target; take its file, or return the URL to which it redirects.

        Args:
            more: headers beside the usual ones.
        """
        addresses = await self._addresses(target)
        # A transport for this request alone: no automatic redirects, proxies or cookies.
        async with httpx.AsyncHTTPTransport(verify=await self._trust(target), trust_env=False) as transport:
            try:
                response = await self._send(transport, target, addresses, more)
                try:
                    if response.status_code in _REDIRECT_STATUS:
                        return _location(response, target)
                    await take(response)
                    return None
                finally:
                    await response.aclose()
            except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
                raise FetchFailed(_reason(error)) from None

    async def _send(
        self,
        transport: httpx.AsyncHTTPTransport,
        target: Target,
        addresses: Sequence[IP],
        more: Mapping[str, str],
    ) -> httpx.Response:
        """Return the response (head only) from the first IP address that accepts a connection."""
        seconds = self._seconds
        timeout = httpx.Timeout(seconds, connect=min(seconds, _CONNECT_SECONDS))
        for address in addresses[:-1]:
            try:
                return await transport.handle_async_request(self._request(target, address, timeout, more))
            except (httpx.ConnectError, httpx.ConnectTimeout):
                continue
        return await transport.handle_async_request(self._request(target, addresses[-1], timeout, more))

    async def _trust(self, target: Target) -> ssl.SSLContext:
        if target.scheme == "http":
            return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # unused; an empty context is cheap
        if self._tls is None:
            # Takes about 20 ms, since hundreds of certificates are parsed.
            make = partial(httpx.create_ssl_context, trust_env=False)
            with ThreadPoolExecutor(1, thread_name_prefix="baton-fetch-tls") as once:
                self._tls = await asyncio.get_running_loop().run_in_executor(once, make)
        return self._tls

    async def _addresses(self, target: Target) -> list[IP]:
        """Resolve a target and return the IP addresses to connect to.

        A single forbidden address refuses the target: a name with both public and internal addresses is an
        attack or a mistake.
        """
        literal = ip_of(target.host)
        if literal is not None:
            return [literal]  # the operator's list contains this very address
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
                    "the host resolves to a private address; "
                    f"the operator has to add that address to {self._hosts.setting} too"
                )
        return addresses[:_ADDRESSES_TRIED]

    def _request(
        self, target: Target, address: IP, timeout: httpx.Timeout, more: Mapping[str, str]
    ) -> httpx.Request:
        """Build the request to an IP address, with the target's name in the Host header and in TLS."""
        path = target.path.encode("ascii")
        return httpx.Request(
            "GET",
            httpx.URL(scheme=target.scheme, host=str(address), port=target.port, raw_path=path),
            headers={"Host": target.authority, **self._headers, **more},
            extensions={"sni_hostname": target.host, "timeout": timeout.as_dict()},
        )


async def _take(response: httpx.Response, sink: Sink) -> None:
    if response.status_code != 200:
        raise FetchFailed(f"the host answered {response.status_code}, not the file")
    _require_plain(response)
    said = response.headers.get("content-length", "")
    if said.isascii() and said.isdigit() and len(said) < 20:
        sink.expect(int(said))
    async for chunk in _gathered(response.aiter_raw()):
        await sink.write(chunk)


async def _take_range(response: httpx.Response, length: int, sink: Sink) -> None:
    """Write a range's bytes, exactly `length` of them, however many the host sends."""
    _require_plain(response)
    left = length
    async for chunk in _gathered(response.aiter_raw()):
        left -= len(chunk)
        if left < 0:
            break
        await sink.write(chunk)
    if left:
        raise FetchFailed("the host sent more or fewer bytes than the range it announced")


def _require_plain(response: httpx.Response) -> None:
    # Decompressing could turn a few bytes into any number (decompression bomb).
    if response.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise FetchFailed("the host sent the file compressed, which was not asked for")


def _content_range(response: httpx.Response) -> tuple[int, int, int]:
    """Read begin, end (not included) and size of the file from `Content-Range` (RFC 9110, section 14.4)."""
    found = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", "").strip())
    if found is None:
        raise FetchFailed("the host sent a range and does not say which, or of how many bytes")
    begin, last, size = map(int, found.groups())
    if not begin <= last < size:
        raise FetchFailed("the host sent a range that cannot be")
    return begin, last + 1, size


def _validator(response: httpx.Response) -> str:
    """Return a file's validator, which differs between its versions: a line of at most 256 characters."""
    headers = response.headers
    return str(headers.get("etag") or headers.get("last-modified") or "")[:256]


def _location(response: httpx.Response, target: Target) -> str:
    location = str(response.headers.get("location", ""))
    if not location or len(location) > URL_CHARACTERS:
        raise FetchFailed("the host redirects, and does not say where to")
    try:
        return urljoin(target.url, location)
    except ValueError:
        raise FetchFailed("the host redirects to what is not an address") from None


async def _gathered(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Join chunks to pieces of about 1 MiB, so that a sink in a thread is called less often."""
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
