"""Show the agents at work: panels that live on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from examples.demo.agents import AGENTS, EDITOR, READER, SPECIALISTS, Agent, Way
from examples.demo.client import Answer

PANEL_LINES = {READER.name: 5, EDITOR.name: 6}
NARROW_PANEL_LINES = 8
FRAMES_PER_S = 8


class Stage(Protocol):
    """Shows one way after the other."""

    def showing(self, way: Way) -> AbstractContextManager[None]:
        """Show one way as long as the context lasts."""

    def reads(self, agent: Agent) -> None:
        """An agent has sent its request."""

    def says(self, agent: Agent, text: str) -> None:
        """More of an agent's answer is there."""

    def ends(self, agent: Agent, answer: Answer) -> None:
        """An agent has its whole answer."""


def stage_for(console: Console) -> Stage:
    """Panels where they can live, else lines."""
    return PanelStage(console) if console.is_terminal else LineStage(console)


def first_token(answer: Answer) -> str:
    """When an answer's first token came."""
    return "no token" if answer.first_token_s is None else f"first token {answer.first_token_s:.2f} s"


def prefilled(answer: Answer) -> str:
    """How much of an answer's prompt was computed for it."""
    return f"prefilled {answer.prefilled_tokens:,} of {answer.prompt_tokens:,}"


class LineStage:
    """A line per answer, when it is whole."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def showing(self, way: Way) -> Iterator[None]:
        self._print(f"\n{way.name}: {way.told}")
        yield

    def reads(self, agent: Agent) -> None:
        self._print(f"  {agent.name} asks: {agent.question}")

    def says(self, agent: Agent, text: str) -> None:
        """Lines wait for the whole answer."""

    def ends(self, agent: Agent, answer: Answer) -> None:
        said = " ".join(answer.text.split())
        self._print(f"  {agent.name}: {said} [{first_token(answer)}, {prefilled(answer)}]")

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, soft_wrap=True)


@dataclass
class Seat:
    """What is known of one agent's part by now."""

    agent: Agent
    engine: str
    began: float | None = None
    text: str = ""
    answer: Answer | None = None

    def panel(self) -> Panel:
        """The agent's panel: its question, its answer as far as it is there, and what that took."""
        inside = Text(self.agent.question, style="dim italic")
        inside.append(f"\n{self.text}\n", style="not dim not italic")
        inside.append(prefilled(self.answer) if self.answer else "", style="not italic")
        title = Text.assemble((self.agent.name, "bold"), (f" on {self.engine}", "dim"))
        colour = "green" if self.answer else "yellow" if self.began else "dim"
        return Panel(
            inside,
            title=title,
            title_align="left",
            subtitle=self._state(),
            subtitle_align="right",
            border_style=colour,
            height=PANEL_LINES.get(self.agent.name, NARROW_PANEL_LINES),
        )

    def _state(self) -> str:
        if self.answer is not None:
            return first_token(self.answer)
        if self.began is None:
            return "waits"
        return "" if self.text else f"prefills, {time.perf_counter() - self.began:.1f} s"


class PanelStage:
    """A panel per agent, the specialists' side by side."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._seats: dict[str, Seat] = {}

    @contextmanager
    def showing(self, way: Way) -> Iterator[None]:
        self._seats = {agent.name: Seat(agent, way.engine_of(agent)) for agent in AGENTS}
        with Live(
            get_renderable=lambda: self._picture(way), console=self._console, refresh_per_second=FRAMES_PER_S
        ):
            yield

    def reads(self, agent: Agent) -> None:
        self._seats[agent.name].began = time.perf_counter()

    def says(self, agent: Agent, text: str) -> None:
        self._seats[agent.name].text += text

    def ends(self, agent: Agent, answer: Answer) -> None:
        self._seats[agent.name].answer = answer

    def _picture(self, way: Way) -> Group:
        side_by_side = Table.grid(expand=True)
        for _ in SPECIALISTS:
            side_by_side.add_column(ratio=1)
        side_by_side.add_row(*(self._seats[agent.name].panel() for agent in SPECIALISTS))
        return Group(
            Rule(Text.assemble((way.name, "bold"), f": {way.told}"), align="left"),
            self._seats[READER.name].panel(),
            side_by_side,
            self._seats[EDITOR.name].panel(),
        )
