"""Define the agents of the demo, and the ways in which a context gets from one to the next."""

from __future__ import annotations

from dataclasses import dataclass

SYSTEM = "You answer questions about a ship's log in one short sentence."


@dataclass(frozen=True)
class Agent:
    """One agent, which asks the model one thing.

    Attributes:
        name: what it is called on the screen.
        question: what it asks.
        leaves: whether another goes on from its context.
    """

    name: str
    question: str
    leaves: bool = False


READER = Agent("reader", "What is the name of the island?", leaves=True)
NATURALIST = Agent("naturalist", "What did Mirela see on the beacon?", leaves=True)
SPECIALISTS = (
    Agent("navigator", "What did Jun break?"),
    NATURALIST,
    Agent("steward", "What did Tomas count?"),
)
EDITOR = Agent("editor", "Write one sentence about the whole voyage.")
AGENTS = (READER, *SPECIALISTS, EDITOR)


@dataclass(frozen=True)
class Way:
    """One way of passing the context on.

    Attributes:
        name: what it is called on the screen.
        told: what happens, in a line.
        reader: the engine that the reader asks.
        others: the engine that the other agents ask.
        relays: by handoff; else as text, which every agent sends whole.
        copy: which copy of the text is read.
        key: the API key it is done with, where there are any.
    """

    name: str
    told: str
    reader: str
    others: str
    relays: bool = False
    copy: str = ""
    key: str = ""

    def engine_of(self, agent: Agent) -> str:
        """The engine that an agent asks."""
        return self.reader if agent is READER else self.others


def ways_of_our_own(reader: str, cold: str, keys: dict[str, str]) -> list[Way]:
    """The ways on a gateway that the demo started.

    Args:
        reader: the engine with a prefix cache.
        cold: the engine without one.
        keys: of the tenants `handoff` and `text`, neither of which sees the other's prefix cache.
    """
    handoff, text = keys["handoff"], keys["text"]
    return [
        Way("handoff", "the computed context goes to another engine", reader, cold, True, key=handoff),
        Way("text, cold", "every agent sends the whole text again, nothing cached", cold, cold, key=text),
        Way("text, prefix cache", "the same, on one engine that caches prefixes", reader, reader, key=text),
    ]


def ways_on(model: str, copies: tuple[str, str], key: str) -> list[Way]:
    """The ways on one engine of a gateway that runs already.

    Args:
        model: the engine.
        copies: two copies of the text that it has not seen.
        key: the API key, if it wants one.
    """
    first, second = copies
    return [
        Way("handoff", "the computed context goes on", model, model, True, first, key),
        Way("text, new copy", "every agent sends the whole text again", model, model, False, second, key),
        Way("text, same copy", "the text that the handoffs were of", model, model, False, first, key),
    ]
