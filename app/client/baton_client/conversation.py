"""Hold a conversation of which each turn sends the new message alone, for the sync and the async client."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from baton_client.driver import AsyncDriver, Driver
from baton_client.errors import BatonError
from baton_client.turns import Content, Turns, results_of, said
from baton_client.values import Answer


class Conversation:
    """A conversation whose turns each start from the handoff of the one before; use it in a `with` block.

    Leaving the block deletes the handoffs that it saved, but for those that are kept or that a fork needs.
    `Baton.conversation` makes one. Use it in one thread at a time; forks may be in others.
    """

    def __init__(self, driver: Driver, turns: Turns) -> None:
        self._driver = driver
        self._turns = turns

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except BatonError as failed:
            if error is None:
                raise
            error.add_note(f"The conversation's handoffs were not deleted, and will expire: {failed}")

    @property
    def handoff(self) -> str | None:
        """Id of the handoff that the next turn starts from; None: there is none yet."""
        return self._turns.handoff

    def say(self, content: Content, **fields: Any) -> Answer:
        """Send one message of the user, and save the context with its answer.

        Args:
            fields: of the request, such as `max_tokens`; with `label` or `pin` this turn's handoff is kept;
                `told` is called with each piece of text as it comes.

        Raises:
            NotFound: the handoff of the turn before has expired or was deleted.
            ApiError: the gateway refused the request, or failed; the turn may be said again.
            ConnectionLost: no answer came; whether the gateway worked on it is not known.
        """
        return self._driver.run(self._turns.say(said(content), fields))

    def give(self, results: Mapping[str, Content], **fields: Any) -> Answer:
        """Send what the tools returned that the last answer called (`Answer.calls`), and save as `say` does.

        Args:
            results: what each tool returned, by the id of its call; one for each call of the answer.
            fields: of the request, as for `say`: the template of most models wants the `tools` again.

        Raises:
            ValueError: there are no results.
        """
        return self._driver.run(self._turns.say(results_of(results), fields))

    def fork(self, label: str | None = None) -> Conversation:
        """Return another conversation that starts at this point, and may outlive this one.

        Args:
            label: given to what the fork saves; its last handoff is kept.
        """
        return Conversation(self._driver, self._turns.fork(label))

    def close(self) -> None:
        """Delete what it saved, as leaving its `with` block does.

        Raises:
            BatonError: a handoff could not be deleted; it expires by itself.
        """
        self._driver.run(self._turns.end())


class AsyncConversation:
    """A conversation whose turns each start from the handoff of the one before; see `Conversation`."""

    def __init__(self, driver: AsyncDriver, turns: Turns) -> None:
        self._driver = driver
        self._turns = turns

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.close()
        except BatonError as failed:
            if error is None:
                raise
            error.add_note(f"The conversation's handoffs were not deleted, and will expire: {failed}")

    @property
    def handoff(self) -> str | None:
        """Id of the handoff that the next turn starts from; None: there is none yet."""
        return self._turns.handoff

    async def say(self, content: Content, **fields: Any) -> Answer:
        """Send one message of the user, and save the context with its answer; see `Conversation.say`."""
        return await self._driver.run(self._turns.say(said(content), fields))

    async def give(self, results: Mapping[str, Content], **fields: Any) -> Answer:
        """Send what the tools returned that the last answer called; see `Conversation.give`."""
        return await self._driver.run(self._turns.say(results_of(results), fields))

    def fork(self, label: str | None = None) -> AsyncConversation:
        """Return another conversation that starts at this point; see `Conversation.fork`."""
        return AsyncConversation(self._driver, self._turns.fork(label))

    async def close(self) -> None:
        """Delete what it saved, as leaving its `async with` block does; see `Conversation.close`."""
        await self._driver.run(self._turns.end())
