"""Offer the routes of `/v1/handoffs`, for the sync and the async client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from baton_client import routes
from baton_client.async_driver import AsyncDriver
from baton_client.driver import Driver
from baton_client.routes import Messages, Start, Starts
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

    def create(
        self,
        model: str,
        *,
        messages: Messages | None = None,
        prompt: str | Sequence[int] | None = None,
        start: Starts | None = None,
        join: str | None = None,
        order: str | None = None,
        translate: bool | None = None,
        label: str | None = None,
        pin: bool = False,
        ttl_s: int | None = None,
        latent_steps: int = 0,
        **fields: Any,
    ) -> Handoff:
        """Compute a context and save it, without an answer. It may still be pending: see `wait`.

        Args:
            model: name of the engine.
            messages: the context as a chat; a text is one message of the user.
            prompt: the context as a text or token ids; either this or `messages`.
            start: the handoff that the new one continues, or several, whose contexts are joined; then neither
                `prompt` nor `messages` is needed.
            join: how: `exact` (None), or `moved`, which is faster and not exact.
            order: in which order: `given` (None), or `any`.
            translate: whether `start` may be of another model: the new handoff holds its text, and neither
                `prompt` nor `messages` is needed; None: as the engine is configured.
            label: a text of your own, for `find`.
            pin: whether its KV stays when others' is evicted.
            ttl_s: seconds it lives; None: as long as the gateway allows.
            latent_steps: number of latent steps after the context.
            fields: further fields of the body, such as `images`.
        """
        starting = {"join": join, "order": order, "translate": translate}
        saving = {"label": label, "pin": pin, "ttl_s": ttl_s, "latent_steps": latent_steps}
        call = routes.create_handoff(model, messages, prompt, start, starting, saving, fields)
        return self._driver.run(exchange(call, self._driver.retries))

    def get(self, handoff: Start) -> Handoff:
        """Return a handoff as it is now."""
        return self._driver.run(exchange(routes.get_handoff(handoff), self._driver.retries))

    def list(self) -> Iterator[Handoff]:
        """Iterate over all handoffs, the newest first; pages are requested as they are needed."""
        after: str | None = None
        while True:
            call = routes.list_handoffs(after)
            page = self._driver.run(exchange(call, self._driver.retries))
            yield from page.handoffs
            after = page.after
            if after is None:
                return

    def find(self, label: str) -> Handoff | None:
        """Return the newest handoff with this label; None: there is none."""
        return next((handoff for handoff in self.list() if handoff.label == label), None)

    def change(
        self,
        handoff: Start,
        *,
        label: str | None = None,
        ttl_s: int | None = None,
        pin: bool | None = None,
    ) -> Handoff:
        """Change a handoff: its label, its life from now in seconds, its pin. What is None stays."""
        call = routes.change_handoff(handoff, {"label": label, "ttl_s": ttl_s, "pin": pin})
        return self._driver.run(exchange(call, self._driver.retries))

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

    async def create(
        self,
        model: str,
        *,
        messages: Messages | None = None,
        prompt: str | Sequence[int] | None = None,
        start: Starts | None = None,
        join: str | None = None,
        order: str | None = None,
        translate: bool | None = None,
        label: str | None = None,
        pin: bool = False,
        ttl_s: int | None = None,
        latent_steps: int = 0,
        **fields: Any,
    ) -> Handoff:
        """Compute a context and save it, without an answer; see `Handoffs.create`."""
        starting = {"join": join, "order": order, "translate": translate}
        saving = {"label": label, "pin": pin, "ttl_s": ttl_s, "latent_steps": latent_steps}
        call = routes.create_handoff(model, messages, prompt, start, starting, saving, fields)
        return await self._driver.run(exchange(call, self._driver.retries))

    async def get(self, handoff: Start) -> Handoff:
        """Return a handoff as it is now."""
        return await self._driver.run(exchange(routes.get_handoff(handoff), self._driver.retries))

    async def list(self) -> AsyncIterator[Handoff]:
        """Iterate over all handoffs, the newest first; pages are requested as they are needed."""
        after: str | None = None
        while True:
            call = routes.list_handoffs(after)
            page = await self._driver.run(exchange(call, self._driver.retries))
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

    async def change(
        self,
        handoff: Start,
        *,
        label: str | None = None,
        ttl_s: int | None = None,
        pin: bool | None = None,
    ) -> Handoff:
        """Change a handoff: its label, its life from now in seconds, its pin. What is None stays."""
        call = routes.change_handoff(handoff, {"label": label, "ttl_s": ttl_s, "pin": pin})
        return await self._driver.run(exchange(call, self._driver.retries))

    async def delete(self, handoff: Start) -> bool:
        """Delete a handoff; returns whether it was there. Handoffs that continue it go on working."""
        return await self._driver.run(delete(handoff, self._driver.retries))

    async def wait(self, handoff: Start, timeout_s: float = WAIT_S) -> Handoff:
        """Return a handoff once it is ready; see `Handoffs.wait`."""
        script = until_ready(routes.id_of(handoff), timeout_s, self._driver.retries)
        return await self._driver.run(script)
