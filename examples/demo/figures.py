"""Lay out what the demo measured, side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from rich import box
from rich.table import Table

from examples.demo.agents import AGENTS, Way
from examples.demo.client import Answer

NOTHING = "-"


@dataclass(frozen=True)
class Result:
    """What came of one way.

    Attributes:
        way: which.
        answers: one of every agent.
        wall_s: seconds from the first request to the last token.
    """

    way: Way
    answers: list[Answer]
    wall_s: float

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(answer.prompt_tokens for answer in self.answers)

    @property
    def prefilled_tokens(self) -> int:
        """Tokens of all prompts that were computed."""
        return sum(answer.prefilled_tokens for answer in self.answers)

    def first_token_s(self, agent: str) -> float | None:
        """Seconds until an agent's first token."""
        return next((answer.first_token_s for answer in self.answers if answer.agent == agent), None)

    @property
    def median_first_token_s(self) -> float | None:
        """The middle of all agents' first tokens."""
        times = [answer.first_token_s for answer in self.answers if answer.first_token_s is not None]
        return median(times) if times else None

    def outcomes(self) -> Counter[str]:
        """Where the KV of the handoffs came from, counted."""
        return Counter(answer.outcome for answer in self.answers if answer.outcome is not None)


def reference_of(results: list[Result]) -> Result:
    """The result that others' answers are held against: the first text passing of the handoffs' own text."""
    copy = next(result.way.copy for result in results if result.way.relays)
    return next(result for result in results if not result.way.relays and result.way.copy == copy)


def sameness(result: Result, reference: Result) -> str:
    """How many answers are the reference's, token by token, after the very same prompt tokens."""
    if result is reference or result.way.copy != reference.way.copy:
        return NOTHING
    if not all(answer.prompt_ids for answer in (*result.answers, *reference.answers)):
        return "no token ids"  # this gateway does not give them
    pairs = list(zip(result.answers, reference.answers, strict=True))
    asked_alike = sum(mine.prompt_ids == theirs.prompt_ids for mine, theirs in pairs)
    same = sum(
        mine.prompt_ids == theirs.prompt_ids and mine.token_ids == theirs.token_ids for mine, theirs in pairs
    )
    told = f"{same} of {len(pairs)}"
    if asked_alike < len(pairs):
        told += f" ({len(pairs) - asked_alike} other prompts)"
    return told


def rows(results: list[Result]) -> list[list[str]]:
    """The table's rows: what it is, then a figure for each way."""
    reference = reference_of(results)

    def row(name: str, figure: Callable[[Result], str]) -> list[str]:
        return [name, *(figure(result) for result in results)]

    def first(agent: str) -> list[str]:
        return row(f"first token: {agent}", lambda result: _seconds(result.first_token_s(agent)))

    return [
        row("prompt tokens", lambda result: f"{result.prompt_tokens:,}"),
        row("prefilled tokens", lambda result: f"{result.prefilled_tokens:,}"),
        *(first(agent.name) for agent in AGENTS),
        row("first token: median", lambda result: _seconds(result.median_first_token_s)),
        row("wall time", lambda result: _seconds(result.wall_s)),
        row("same tokens", lambda result: sameness(result, reference)),
    ]


def table(results: list[Result]) -> Table:
    """The figures as a table, a column for each way."""
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    drawn.add_column("")
    for result in results:
        drawn.add_column(result.way.name, justify="right")
    for row in rows(results):
        drawn.add_row(*row)
    return drawn


def notes(results: list[Result]) -> list[str]:
    """What a reader of the table needs to know."""
    relayed = next(result for result in results if result.way.relays)
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in relayed.outcomes().most_common())
    return [
        "Prefilled: prompt tokens whose KV was not there yet (prompt_tokens - cached_tokens of the usage).",
        f"Same tokens: answers token by token as in '{reference_of(results).way.name}', greedily decoded.",
        f"Contexts taken from a handoff: {outcomes or 'none'}.",
    ]


def _seconds(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f} s"
