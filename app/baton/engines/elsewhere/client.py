"""Ask a server elsewhere over HTTP: at its configured address alone, within limits of time and size."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx
import structlog

from baton import __version__
from baton.admission.fair_threads import OURS
from baton.config.groups import EngineSettings, RemoteSettings
from baton.engines.elsewhere.answers import not_an_answer
from baton.errors import RemoteFailed, RemoteLost, RemoteTimeout, RemoteUnreachable, SettingsError

log = structlog.get_logger("baton.engine")
IDLE_S = 2.0
"""Idle connections are kept so long: servers close theirs after five seconds, which no request may meet."""
ONE = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=IDLE_S)


class Connections:
    """Connections to one server: each for one tenant, and one request at a time, the last used one first.

    A server, or a proxy before it, that sends two answers to one request puts the second one before the
    answer to the next request. So a connection with anything left in it is closed, and none goes from tenant
    to tenant.

    Each is a transport of httpx of its own. A transport with many looks through all of them for each of them
    whenever a request begins or ends: with 200 requests at once that took most of the processor's time.
    """

    def __init__(self, tls: ssl.SSLContext) -> None:
        self._tls = tls
        self._idle: deque[Connection] = deque()
        self._used: set[Connection] = set()

    def take(self, tenant: str = OURS) -> Connection:
        """Return a connection that no other request uses. It connects once a request is sent."""
        taken = next((each for each in reversed(self._idle) if each.tenant == tenant), None)
        if taken is None:
            taken = Connection(self._tls, tenant)
        else:
            self._idle.remove(taken)
        self._used.add(taken)
        return taken

    async def give_back(self, connection: Connection) -> None:
        """Keep a connection for later requests, and close those that none has used for a while."""
        if connection not in self._used:
            return  # it was given back before
        if not connection.is_clean:
            log.warning("remote_connection_dropped", reason="the server sent more than its answer")
            await self.drop(connection)
            return
        self._used.remove(connection)
        connection.idle_since = time.monotonic()
        self._idle.append(connection)
        while self._idle and self._idle[0].idle_since < connection.idle_since - IDLE_S:
            await self._idle.popleft().transport.aclose()

    async def drop(self, connection: Connection) -> None:
        """Close a connection whose request was not answered whole."""
        self._used.discard(connection)
        await connection.transport.aclose()

    async def close(self) -> None:
        """Close all connections."""
        every = [*self._used, *self._idle]
        self._used.clear()
        self._idle.clear()
        for connection in every:
            await connection.transport.aclose()


class Connection:
    """One connection to a server; proxies of the environment are not used.

    Attributes:
        tenant: whose requests it is for.
        transport: sends a request over it, and connects where it must.
        idle_since: when it was given back, in monotonic seconds.
    """

    def __init__(self, tls: ssl.SSLContext, tenant: str) -> None:
        self.tenant = tenant
        self.transport = httpx.AsyncHTTPTransport(verify=tls, trust_env=False, limits=ONE)
        self.idle_since = 0.0

    @property
    def is_clean(self) -> bool:
        """True if nothing has come over it behind the last answer."""
        opened = [each._connection for each in self.transport._pool.connections]  # type: ignore[attr-defined]
        return not any(each is not None and _has_rest(each) for each in opened)


def _has_rest(connection: Any) -> bool:
    """Return whether bytes wait in httpcore's connection: read by its parser or by TLS, or in the socket."""
    stream = connection._network_stream
    if connection._h11_state.trailing_data[0] or stream.get_extra_info("is_readable"):
        return True
    tls = stream.get_extra_info("ssl_object")
    if tls is None:
        return False
    try:
        tls.read(1)
    except ssl.SSLWantReadError:
        return False
    except ssl.SSLError:  # it ends
        return True
    return True


CONNECTING = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


class Answer:
    """An answer whose head has come. Close it, or read it to its end."""

    def __init__(
        self,
        response: httpx.Response,
        connections: Connections,
        connection: Connection,
        settings: RemoteSettings,
    ) -> None:
        self._response = response
        self._connections = connections
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
        """True if its end can be told from a lost connection."""
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
            body = bytearray()
            with _translated():
                async with asyncio.timeout(self._settings.answer_s):
                    while len(body) <= most and (part := await self.next()) is not None:
                        take(len(part))
                        body += part
            if len(body) > most and not cut:
                raise RemoteFailed(
                    "The answer of the server for this model is larger than this gateway takes "
                    "(setting remote.answer_bytes)."
                )
            return bytes(body[:most])
        finally:
            await self.close()

    async def close(self) -> None:
        """Close the connection, unless the body was read; then the next request may use it."""
        connection, self._connection = self._connection, None
        if connection is None:
            return  # it may be another request's by now
        try:
            await self._response.aclose()
        except BaseException:
            await self._connections.drop(connection)
            raise
        await self._connections.give_back(connection)


class RemoteClient:
    """Connections to the server of one engine.

    Redirects are not followed, proxies of the environment not used, cookies not kept.

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
            await self._connections.drop(connection)
            raise
        answer = Answer(response, self._connections, connection, self._settings)
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
