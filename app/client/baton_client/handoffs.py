"""Offer the routes of `/v1/handoffs`, for the sync and the async client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

from baton_client import routes
from baton_client.driver import AsyncDriver, Driver, awaiting, blocking
from baton_client.routes import Start
from baton_client.scripts import delete, exchange, until_ready
from baton_client.values import Handoff

WAIT_S = 60.0


class Handoffs:
    """The handoffs of the client's tenant.

    All methods raise `NotFound` for a handoff that is unknown, expired, deleted or another tenant's, and
    `ConnectionLost` where no answer comes.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    create = blocking(routes.create_handoff)
    get = blocking(routes.get_handoff)
    change = blocking(routes.change_handoff)
    messages = blocking(routes.get_messages)
    warm = blocking(routes.warm_handoff)

    def list(self) -> Iterator[Handoff]:
        """Iterate over all handoffs, the newest first; pages are requested as they are needed."""
        after: str | None = None
        while True:
            page = self._driver.run(exchange(routes.list_handoffs(after), self._driver.retries))
            yield from page.handoffs
            after = page.after
            if after is None:
                return

    def find(self, label: str) -> Handoff | None:
        """Return the newest handoff with this label; None: there is none."""
        return next((handoff for handoff in self.list() if handoff.label == label), None)

    def delete(self, handoff: Start) -> bool:
        """Delete a handoff; returns whether it was there. Handoffs that continue it go on working."""
        return self._driver.run(delete(handoff, self._driver.retries))

    def wait(self, handoff: Start, timeout_s: float = WAIT_S) -> Handoff:
        """Return a handoff once it is ready.

        Raises:
            HandoffFailed: the request that saves it failed.
            HandoffNotReady: it is still pending after `timeout_s`.
        """
        return self._driver.run(until_ready(routes.id_of(handoff), timeout_s, self._driver.retries))


class AsyncHandoffs:
    """The handoffs of the client's tenant; see `Handoffs`."""

    def __init__(self, driver: AsyncDriver) -> None:
        self._driver = driver

    create = awaiting(routes.create_handoff)
    get = awaiting(routes.get_handoff)
    change = awaiting(routes.change_handoff)
    messages = awaiting(routes.get_messages)
    warm = awaiting(routes.warm_handoff)

    async def list(self) -> AsyncIterator[Handoff]:
        """Iterate over all handoffs, the newest first; pages are requested as they are needed."""
        after: str | None = None
        while True:
            page = await self._driver.run(exchange(routes.list_handoffs(after), self._driver.retries))
            for handoff in page.handoffs:
                yield handoff
            after = page.after
            if after is None:
                return

    async def find(self, label: str) -> Handoff | None:
        """Return the newest handoff with this label; None: there is none."""
        async for handoff in self.list():
            if handoff.label == label:
                return handoff
        return None

    async def delete(self, handoff: Start) -> bool:
        """Delete a handoff; returns whether it was there. Handoffs that continue it go on working."""
        return await self._driver.run(delete(handoff, self._driver.retries))

    async def wait(self, handoff: Start, timeout_s: float = WAIT_S) -> Handoff:
        """Return a handoff once it is ready; see `Handoffs.wait`."""
        script = until_ready(routes.id_of(handoff), timeout_s, self._driver.retries)
        return await self._driver.run(script)
