"""Copy a request's raster (base64, bytes, address or path) into a spool file; `baton_fetch` guards addresses.

The decoders get the name of that file, never a path or address of the client.
"""

from __future__ import annotations

import asyncio
import binascii
import contextlib
import os
import re
import ssl
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from baton_fetch.addresses import AllowedHosts, FetchFailed, FetchRefused
from baton_fetch.fetch import Fetcher, Resolver, system_resolver
from baton_geo.contract import Asset, quoted
from baton_geo.errors import RequestInvalid, SourceFailed, SourceRefused
from baton_geo.settings import MIB, GeoSettings
from baton_geo.spool import Room, Spool, Spooled

FIELD = "data.data"
ACCEPT = "image/tiff, image/jp2, image/png, image/jpeg, */*;q=0.1"

# Decoding holds the interpreter's lock: a piece of this size takes well under a millisecond.
_BASE64_CHARACTERS = 256 * 1024
_CHUNK = 1 * MIB
_DATA_PREFIX = re.compile(r"\s{0,64}data:[^,]{0,200};base64,", re.ASCII | re.IGNORECASE)
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Opening a FIFO or a terminal must neither wait nor change anything.
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class Sources:
    """Writes requests' rasters to files; many requests may use it at a time.

    Args:
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
        self.settings = settings
        self._hosts = AllowedHosts(settings.allowed_hosts, "baton_geo.allowed_hosts")
        self.fetcher = Fetcher(
            self._hosts,
            allow_http=settings.allow_http,
            seconds=settings.fetch_seconds,
            accept=ACCEPT,
            agent="baton-geo",
            resolver=resolver,
            tls=tls,
        )

    async def open(self, request: Asset, room: Room | None = None) -> Spooled:
        """Write the request's raster to disk without blocking the event loop; the caller closes the result.

        When cancelled or failed, no file is left.

        Args:
            room: that it shares with other files of its request.

        Raises:
            RequestInvalid: the data is not base64.
            RasterTooLarge: the raster is larger than `limits.file_bytes`.
            SourceRefused: the path or address, or one it redirects to, is not allowed.
            SourceFailed: the path or address could not be read, or not in time.
            DecoderBusy: the disk is full.
        """
        with self.new_spool(room) as spool:
            if request.data_format == "url":
                await self._fetch(str(request.data), spool)
            else:
                # On the plugin's own loop, whose requests are few: `pooling.requests`.
                await asyncio.to_thread(self._write, request, spool)  # noqa: TID251
            return spool.finish()

    def new_spool(self, room: Room | None = None) -> Spool:
        """Begin a file for a raster."""
        return Spool(self.settings.spool, self.settings.limits.file_bytes, room)

    def open_sync(self, request: Asset) -> Spooled:
        """Do the same for callers that cannot await, and block."""
        with ThreadPoolExecutor(1, thread_name_prefix="baton-geo-source") as pool:
            return pool.submit(asyncio.run, self.open(request)).result()

    def _write(self, request: Asset, spool: Spool) -> None:
        data = request.data
        if isinstance(data, bytes):
            spool.fill(_pieces(data))
        elif request.data_format == "path":
            _copy(data, self.settings.allowed_roots, spool)
        else:
            spool.fill(decoded(data))

    async def _fetch(self, url: str, spool: Spool) -> None:
        with self.fetching():
            await self.fetcher.fetch(url, ToDisk(spool))

    @contextlib.contextmanager
    def fetching(self) -> Iterator[None]:
        """Translate the errors of `fetcher`; refuse to fetch where the operator allows no hosts."""
        with fetch_errors():
            if not self._hosts:
                raise FetchRefused(
                    "this server fetches no addresses; send the raster itself (data_format b64_json)"
                )
            yield


@contextlib.contextmanager
def fetch_errors() -> Iterator[None]:
    """Translate errors of `baton_fetch` into this plugin's."""
    try:
        yield
    except FetchRefused as error:
        raise _refused(error.reason) from None
    except FetchFailed as error:
        raise _failed(error.reason) from None


class ToDisk:
    """A spool as a sink of `baton_fetch`."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool

    def expect(self, size: int) -> None:
        self._spool.expect(size)

    async def write(self, data: bytes) -> None:
        # A full disk cache makes writes wait. This is the plugin's own loop, whose requests are few.
        await asyncio.to_thread(self._spool.write, data)  # noqa: TID251


def decoded(text: str) -> Iterator[bytes]:
    """Decode base64 piece by piece.

    The alphabet is that of RFC 4648 section 4, padded; white space is skipped, and so is a leading
    `data:...;base64,` (RFC 2397).

    Raises:
        RequestInvalid: the text is not base64.
    """
    prefix = _DATA_PREFIX.match(text)
    start = prefix.end() if prefix else 0
    held = b""
    for place in range(start, len(text), _BASE64_CHARACTERS):
        held += _characters(text[place : place + _BASE64_CHARACTERS])
        # Hold the last group back: only the last one may have padding, and only the end shows which is last.
        whole = max(len(held) - 1, 0) // 4 * 4
        if b"=" in held[:whole]:
            raise _not_base64("a '=' before the end")
        yield _decode(held[:whole])
        held = held[whole:]
    if not held:
        raise _not_base64("nothing in it")
    yield _decode(held)


def _characters(piece: str) -> bytes:
    try:
        return piece.encode("ascii").translate(None, b" \t\r\n")
    except UnicodeEncodeError:
        raise _not_base64("a character outside its alphabet") from None


def _decode(piece: bytes) -> bytes:
    try:
        return binascii.a2b_base64(piece, strict_mode=True)
    except binascii.Error as error:
        raise _not_base64(str(error).lower()) from None


def _not_base64(reason: str) -> RequestInvalid:
    return RequestInvalid(
        f"{FIELD}: not base64 ({reason}); for an address or a path, set data_format to url or path",
        param=FIELD,
    )


def _pieces(data: bytes) -> Iterator[memoryview]:
    view = memoryview(data)
    for start in range(0, len(view), _CHUNK):
        yield view[start : start + _CHUNK]


def _copy(path: str, roots: tuple[Path, ...], spool: Spool) -> None:
    """Copy a file, so that nobody can change it while the decoder reads it."""
    source = _open_under(path, roots)
    try:
        found = os.fstat(source)
        if not stat.S_ISREG(found.st_mode):
            raise _refused(f"{quoted(path)} is not a regular file")
        spool.expect(found.st_size)
        while piece := os.read(source, _CHUNK):
            spool.write(piece)
    except OSError:
        raise _failed(f"{quoted(path)} could not be read to its end") from None
    finally:
        os.close(source)


def _open_under(path: str, roots: tuple[Path, ...]) -> int:
    """Open a file under one of the roots; safe when folders change meanwhile.

    The answer does not reveal whether a file outside exists.
    """
    if not roots:
        raise _refused("this server takes no paths; send the raster itself (data_format b64_json)")
    if "\0" in path or not path.startswith("/"):
        raise _refused(f"{quoted(path)} is not an absolute path")
    try:
        real = PurePosixPath(os.path.realpath(path))
    except (OSError, ValueError):
        raise _outside(path) from None
    for root in roots:
        within = PurePosixPath(os.path.realpath(root))
        if within in real.parents:
            return _walk(path, within, real.relative_to(within).parts)
    raise _outside(path)


def _walk(path: str, root: PurePosixPath, parts: tuple[str, ...]) -> int:
    try:
        folder = os.open(root, _FOLDER_FLAGS)
        for part in parts[:-1]:
            parent, folder = folder, _step(folder, part)
            os.close(parent)
        try:
            return os.open(parts[-1], _FILE_FLAGS, dir_fd=folder)
        finally:
            os.close(folder)
    except FileNotFoundError:
        raise _failed(f"there is no file {quoted(path)}") from None
    except OSError:
        raise _failed(f"{quoted(path)} could not be opened") from None


def _step(folder: int, part: str) -> int:
    try:
        return os.open(part, _FOLDER_FLAGS, dir_fd=folder)
    except OSError:
        os.close(folder)
        raise


def _outside(path: str) -> SourceRefused:
    return _refused(f"{quoted(path)} is not under a folder this server reads from")


def _refused(message: str) -> SourceRefused:
    return SourceRefused(f"{FIELD}: {message}", param=FIELD)


def _failed(message: str) -> SourceFailed:
    return SourceFailed(f"{FIELD}: {message}", param=FIELD)
