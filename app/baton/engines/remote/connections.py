"""Keep connections to one server: each for one request at a time, the one that was used last first."""

from __future__ import annotations

import ssl
import time
from collections import deque

import httpx

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

    def take(self) -> Connection:
        """Return a connection that no other request uses. It connects once a request is sent."""
        taken = self._idle.pop() if self._idle else Connection(self, self._tls)
        self._used.add(taken)
        return taken

    async def give_back(self, connection: Connection) -> None:
        """Keep a connection for later requests, and close those that none has used for a while."""
        if connection not in self._used:
            return  # it was given back before
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

    Attributes:
        transport: sends a request over it, and connects where it must.
        idle_since: when it was given back, in monotonic seconds.
    """

    def __init__(self, owner: Connections, tls: ssl.SSLContext) -> None:
        self._owner = owner
        self.transport = httpx.AsyncHTTPTransport(verify=tls, trust_env=False, limits=ONE)
        self.idle_since = 0.0

    async def give_back(self) -> None:
        """Let the next request use it."""
        await self._owner.give_back(self)

    async def drop(self) -> None:
        """Close it."""
        await self._owner.drop(self)
