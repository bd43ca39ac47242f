"""Ask a server elsewhere over HTTP: at its configured address alone, within limits of time and size."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable, Iterator, Mapping

import httpx

from baton import __version__
from baton.admission.fair_threads import OURS
from baton.config.groups import EngineSettings, RemoteSettings
from baton.engines.remote.connections import Connection, Connections
from baton.engines.remote.refusals import not_an_answer
from baton.errors import RemoteFailed, RemoteLost, RemoteTimeout, RemoteUnreachable, SettingsError

CONNECTING = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


class Answer:
    """An answer whose head has come. Close it, or read it to its end.

    Args:
        response: the answer.
        connection: that it comes over.
        settings: how long it may pause, and how long it may be.
    """

    def __init__(self, response: httpx.Response, connection: Connection, settings: RemoteSettings) -> None:
        self._response = response
        self._connection: Connection | None = connection
        self._settings = settings
        self._bytes = response.aiter_raw()

    @property
    def status(self) -> int:
        return self._response.status_code

    @property
    def headers(self) -> Mapping[str, str]:
        return self._response.headers

    @property
    def media_type(self) -> str:
        """The media type without parameters, in lower case."""
        return str(self._response.headers.get("content-type", "")).partition(";")[0].strip().lower()

    @property
    def ends_itself(self) -> bool:
        """Whether its end can be told from a lost connection."""
        return self._response.headers.get("transfer-encoding", "").lower() == "chunked" or (
            "content-length" in self._response.headers
        )

    @property
    def event_s(self) -> float:
        """Seconds after which the next event of a stream must have come, whatever comments come before."""
        return self._settings.answer_s

    async def next(self) -> bytes | None:
        """Return its next bytes; None: there are no more.

        Raises:
            RemoteLost: the connection was lost.
            RemoteTimeout: it paused too long.
        """
        with _translated():
            async with asyncio.timeout(self._settings.silence_s):
                return await anext(self._bytes, None)

    async def read(
        self, most: int, *, cut: bool = False, take: Callable[[int], None] = lambda _size: None
    ) -> bytes:
        """Return its whole body, and close it.

        Args:
            most: bytes that it may have.
            cut: whether a longer body is cut off.
            take: counts bytes that have come; it raises where these are too many.

        Raises:
            RemoteFailed: it is too long.
            RemoteLost: the connection was lost.
            RemoteTimeout: it paused too long, or takes longer than `answer_s` as a whole.
        """
        try:
            with _translated():
                async with asyncio.timeout(self._settings.answer_s):
                    return await self._read(most, cut=cut, take=take)
        finally:
            await self.close()

    async def _read(self, most: int, *, cut: bool, take: Callable[[int], None]) -> bytes:
        body = bytearray()
        while len(body) <= most and (part := await self.next()) is not None:
            take(len(part))
            body += part
        if len(body) > most and not cut:
            raise RemoteFailed(
                "The answer of the server for this model is larger than this gateway takes "
                "(setting remote.answer_bytes)."
            )
        return bytes(body[:most])

    async def close(self) -> None:
        """Close the connection, unless the body was read; then the next request may use it."""
        connection, self._connection = self._connection, None
        if connection is None:
            return  # it may be another request's by now
        try:
            await self._response.aclose()
        except BaseException:
            await connection.drop()
            raise
        await connection.give_back()


class RemoteClient:
    """Connections to the server of one engine.

    Redirects are not followed, proxies of the environment not used, cookies not kept.

    Args:
        engine: the engine's settings.

    Raises:
        SettingsError: the certificates cannot be read.
    """

    def __init__(self, engine: EngineSettings) -> None:
        assert engine.url is not None
        self._url = httpx.URL(engine.url)
        self._settings = engine.remote
        self._connections = Connections(_trust(engine))

    async def close(self) -> None:
        """Close all connections."""
        await self._connections.close()

    async def ask(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        content: bytes | None = None,
        *,
        query: Mapping[str, str] | None = None,
        tenant: str = OURS,
    ) -> Answer:
        """Send a request and return the answer once its head has come. A cancelled request is closed.

        Args:
            method: of the request.
            path: below the configured address.
            headers: of the request.
            content: its body.
            query: its query.
            tenant: whose connection it takes.

        Raises:
            RemoteUnreachable: there is no connection to the server.
            RemoteFailed: the answer is compressed.
            RemoteLost: the connection was lost.
            RemoteTimeout: the answer did not begin in time.
        """
        url = self._url.copy_with(raw_path=self._url.raw_path.rstrip(b"/") + path.encode())
        if query:
            url = url.copy_merge_params(query)
        own = {"User-Agent": f"baton/{__version__}", "Accept-Encoding": "identity"}
        request = httpx.Request(method, url, headers={**own, **headers}, content=content)
        connect_s = self._settings.connect_s
        request.extensions["timeout"] = {"connect": connect_s, "write": self._settings.silence_s}
        connection = self._connections.take(tenant)
        try:
            with _translated():
                async with asyncio.timeout(self._settings.answer_s):
                    response = await connection.transport.handle_async_request(request)
        except BaseException:
            await connection.drop()
            raise
        answer = Answer(response, connection, self._settings)
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            await answer.close()
            raise not_an_answer("a compressed answer")
        return answer


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Raise our errors for those of the connection."""
    try:
        yield
    except CONNECTING as error:
        raise RemoteUnreachable() from error
    except (TimeoutError, httpx.TimeoutException) as error:
        raise RemoteTimeout() from error
    except (httpx.HTTPError, httpx.StreamError) as error:
        raise RemoteLost() from error


def _trust(engine: EngineSettings) -> ssl.SSLContext:
    if engine.url is None or engine.url.startswith("http:"):
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # unused; an empty context is cheap
    file = engine.remote.ca_file
    try:
        if file is None:
            return httpx.create_ssl_context(trust_env=False)
        return ssl.create_default_context(cafile=str(file.expanduser()))
    except (OSError, ssl.SSLError) as error:
        reason = error.strerror or "holds no certificates"
        raise SettingsError(f"engines '{engine.name}': remote.ca_file: {file}: {reason}") from None
