"""Keep connections to one server: each for one tenant, and one request at a time, the last used one first.

A server, or a proxy before it, that sends two answers to one request puts the second one before the answer to
the next request. So a connection with anything left in it is closed, and none goes from tenant to tenant.
"""

from __future__ import annotations

import ssl
import time
from collections import deque
from typing import Any

import httpx
import structlog

from baton.admission.fair_threads import OURS

log = structlog.get_logger("baton.engine")
IDLE_S = 2.0
"""Idle connections are kept so long: servers close theirs after five seconds, which no request may meet."""
ONE = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=IDLE_S)


class Connections:
    """Connections to one server, as many as there are requests at once.

    Each is a transport of httpx of its own. A transport with many looks through all of them for each of them
    whenever a request begins or ends: with 200 requests at once that took most of the processor's time.

    Args:
        tls: whom to trust.
    """

    def __init__(self, tls: ssl.SSLContext) -> None:
        self._tls = tls
        self._idle: deque[Connection] = deque()
        self._used: set[Connection] = set()

    def take(self, tenant: str = OURS) -> Connection:
        """Return a connection that no other request uses. It connects once a request is sent.

        Args:
            tenant: of the request.
        """
        taken = next((each for each in reversed(self._idle) if each.tenant == tenant), None)
        if taken is None:
            taken = Connection(self, self._tls, tenant)
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
    """One connection to a server.

    Proxies of the environment are not used.

    Args:
        owner: where it is given back.
        tls: whom to trust.
        tenant: whose requests it is for; also an attribute.

    Attributes:
        transport: sends a request over it, and connects where it must.
        idle_since: when it was given back, in monotonic seconds.
    """

    def __init__(self, owner: Connections, tls: ssl.SSLContext, tenant: str) -> None:
        self._owner = owner
        self.tenant = tenant
        self.transport = httpx.AsyncHTTPTransport(verify=tls, trust_env=False, limits=ONE)
        self.idle_since = 0.0

    @property
    def is_clean(self) -> bool:
        """Whether nothing has come over it behind the last answer."""
        opened = [each._connection for each in self.transport._pool.connections]  # type: ignore[attr-defined]
        return not any(each is not None and _has_rest(each) for each in opened)

    async def give_back(self) -> None:
        """Let the next request use it."""
        await self._owner.give_back(self)

    async def drop(self) -> None:
        """Close it."""
        await self._owner.drop(self)


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
