"""Tell clients what happens: each tenant its own handoffs, everybody the states of the engines.

A tenant has a feed while somebody listens to it, and for some time afterwards: a ring of its last events, so
that a client goes on which was cut off. Ids count within a feed: they tell nobody what others do.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from baton.errors import RateLimited, ShuttingDown
from baton.telemetry.metrics import EventMetrics

RING = 512
"""Events of a tenant that a client may have missed and still get."""
LOOK_EVERY_S = 1.0
"""Seconds between two looks whether the key of a stream is still one."""
WAITING = 256
"""Events that may wait for one client; one that does not read them is dropped."""
FEEDS = 256
"""Most feeds; the one that was listened to least lately gives way, unless somebody listens."""


class Feed:
    """The last events of one tenant, and who listens to them.

    Attributes:
        listeners: the clients that listen.
    """

    def __init__(self) -> None:
        self._name = secrets.token_hex(4)
        self._count = 0
        self._ring: deque[str] = deque(maxlen=RING)
        self.listeners: set[Listener] = set()

    @property
    def last_id(self) -> str:
        """The id of the last event so far."""
        return f"{self._name}-{self._count}"

    def add(self, kind: str, data: Mapping[str, Any]) -> None:
        """Number an event, keep it, and give it to all who listen."""
        self._count += 1
        text = _written(kind, data, self.last_id)
        self._ring.append(text)
        for listener in list(self.listeners):
            listener.add(text)

    def missed(self, last_id: str) -> list[str] | None:
        """Return the events after the one with this id; None: they are not known any more, or never were."""
        name, _, number = last_id.rpartition("-")
        if name != self._name or not number.isdecimal() or len(number) > 18:
            return None
        behind = self._count - int(number)
        if not 0 <= behind <= len(self._ring):
            return None
        return list(self._ring)[len(self._ring) - behind :]


class Listener:
    """The queue of one client.

    Args:
        first: events to begin with.
        dropped: called when the client reads too slowly.
    """

    def __init__(self, first: list[str], dropped: Callable[[], None]) -> None:
        self._waiting = deque(first)
        self._most = WAITING + len(first)
        self._dropped = dropped
        self._wake = asyncio.Event()
        self._ended = False

    def add(self, event: str) -> None:
        """Queue an event for the client, unless too many wait."""
        if self._ended:
            return
        if len(self._waiting) >= self._most:
            self._dropped()
            self._waiting.clear()
            self.end()
            return
        self._waiting.append(event)
        self._wake.set()

    def end(self, last: str | None = None) -> None:
        """End the stream once the client has what waits for it, with one more event perhaps."""
        if self._ended:
            return
        if last is not None:
            self._waiting.append(last)
        self._ended = True
        self._wake.set()

    async def next(self) -> str | None:
        """Wait for events and return them; None: there are no more."""
        while not self._waiting:
            if self._ended:
                return None
            self._wake.clear()
            await self._wake.wait()
        events = "".join(self._waiting)
        self._waiting.clear()
        return events


class Events:
    """The events of one gateway. Everything is called on its event loop.

    Args:
        wall: seconds since the epoch.
    """

    def __init__(self, metrics: EventMetrics, *, wall: Callable[[], float] = time.time) -> None:
        self._metrics = metrics
        self._wall = wall
        self._feeds: OrderedDict[str, Feed] = OrderedDict()
        self._streams: Counter[str] = Counter()
        self._closed = False

    def tell(self, tenant: str, kind: str, data: Callable[[], Mapping[str, Any]]) -> None:
        """Send a tenant an event of its own; `data` is called if somebody listens, or did lately."""
        if (feed := self._feeds.get(tenant)) is not None:
            self._metrics.events.labels(kind).inc()
            feed.add(kind, self._dated(kind, data()))

    def tell_all(self, kind: str, data: Mapping[str, Any]) -> None:
        """Send every tenant an event that is nobody's own."""
        for tenant in self._feeds:
            self.tell(tenant, kind, lambda: data)

    def _dated(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        return {"type": kind, "at": round(self._wall(), 3), **data}

    async def follow(
        self,
        tenant: str,
        key: str,
        last_id: str | None,
        *,
        most: int,
        valid: Callable[[], bool] = lambda: True,
    ) -> AsyncGenerator[str, None]:
        """Yield a tenant's events from now on, and those that a client missed before; ends with the gateway.

        Args:
            key: whose streams are counted.
            last_id: id of the last event that the client got; None: it begins.
            most: streams that a key may have open.
            valid: returns whether the key is still one; asked every second, it ends the stream.

        Raises:
            RateLimited: the key has as many.
            ShuttingDown: the gateway ends.
        """
        if self._closed:
            raise ShuttingDown()
        if self._streams[key] >= most:
            raise RateLimited(
                f"{most} streams of events are open with this key, and no more may be (setting "
                "edge.event_streams): close one.",
                retry_after_s=5,
            )
        feed = self._feed(tenant)
        listener = Listener(self._first(feed, last_id), self._metrics.dropped.inc)
        feed.listeners.add(listener)
        self._streams[key] += 1
        self._metrics.streams.inc()
        try:
            while valid():
                try:
                    async with asyncio.timeout(LOOK_EVERY_S):
                        events = await listener.next()
                except TimeoutError:
                    continue
                if events is None:
                    return
                yield events
        finally:
            feed.listeners.discard(listener)
            self._metrics.streams.dec()
            self._streams[key] -= 1
            if not self._streams[key]:
                del self._streams[key]

    def _first(self, feed: Feed, last_id: str | None) -> list[str]:
        """Return the first events of a stream: that it is open, and those that its client missed."""
        missed = feed.missed(last_id) if last_id else []
        if missed is None:
            return [_written("reset", self._dated("reset", {}), feed.last_id)]
        # With the id of what its client has: whoever is cut off here goes on from there.
        return [_written("open", self._dated("open", {}), last_id or feed.last_id), *missed]

    def close(self) -> None:
        """End all streams, and begin no more."""
        self._closed = True
        for feed in self._feeds.values():
            for listener in feed.listeners:
                listener.end(_written("end", self._dated("end", {})))

    def _feed(self, tenant: str) -> Feed:
        feed = self._feeds.setdefault(tenant, Feed())
        self._feeds.move_to_end(tenant)
        if len(self._feeds) > FEEDS:
            idle = (name for name, each in self._feeds.items() if not each.listeners and each is not feed)
            if (least := next(idle, None)) is not None:
                del self._feeds[least]
        return feed


def _written(kind: str, data: Mapping[str, Any], event_id: str | None = None) -> str:
    """Return an event as it is sent. JSON holds no line break, so that no text in it can end the event."""
    head = f"id: {event_id}\n" if event_id is not None else ""
    return f"{head}event: {kind}\ndata: {json.dumps(data)}\n\n"
