"""The play: a reader, three specialists who go on from its context at once, and an editor after one."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from functools import partial

import httpx

from examples.demo.agents import EDITOR, NATURALIST, READER, SPECIALISTS, SYSTEM, Agent, Way
from examples.demo.client import Answer, Json, ask
from examples.demo.display import Stage
from examples.demo.figures import Result


@dataclass(frozen=True)
class Turn:
    """One agent's part, when it is over.

    Attributes:
        answer: what it got.
        messages: the whole conversation, the answer too: what text passing sends again.
    """

    answer: Answer
    messages: list[Json]


class Play:
    """The agents' work, done one way.

    Args:
        client: of the gateway.
        way: how the context gets from one to the next.
        text: what the reader reads.
        stage: where it is shown.
        max_tokens: of every answer.
    """

    def __init__(
        self, client: httpx.AsyncClient, way: Way, text: str, stage: Stage, *, max_tokens: int
    ) -> None:
        self._client = client
        self._way = way
        self._text = text
        self._stage = stage
        self._max_tokens = max_tokens

    async def run(self) -> Result:
        """Do it.

        Raises:
            OperatorError: a request failed.
        """
        began = time.perf_counter()
        with self._stage.showing(self._way):
            read = await self._turn(READER, None)
            specialists = await self._at_once(read)
            after = specialists[SPECIALISTS.index(NATURALIST)]
            closing = await self._turn(EDITOR, after)
        answers = [turn.answer for turn in (read, *specialists, closing)]
        return Result(self._way, answers, time.perf_counter() - began)

    async def _at_once(self, read: Turn) -> list[Turn]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._turn(agent, read)) for agent in SPECIALISTS]
        except ExceptionGroup as several:
            raise several.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _turn(self, agent: Agent, before: Turn | None) -> Turn:
        own = self._messages(agent)
        said = before.messages if before is not None else []
        body: Json = {"model": self._way.engine_of(agent), "max_tokens": self._max_tokens}
        if self._way.relays:
            body |= {"messages": own, "handoff": _wish(agent, before)}
        else:
            body |= {"messages": [*said, *own]}
        self._stage.reads(agent)
        heard = partial(self._stage.says, agent)
        answer = await ask(self._client, agent.name, body, self._way.key, heard)
        self._stage.ends(agent, answer)
        return Turn(answer, [*said, *own, {"role": "assistant", "content": answer.text}])

    def _messages(self, agent: Agent) -> list[Json]:
        if agent is not READER:
            return [{"role": "user", "content": agent.question}]
        return [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"{self._text}\n\n{agent.question}"},
        ]


def _wish(agent: Agent, before: Turn | None) -> Json:
    """The request's `handoff` field: where it starts, and whether it leaves something."""
    wish: Json = {"save": agent.leaves}
    if before is not None:
        wish["from"] = before.answer.handoff
    return wish
