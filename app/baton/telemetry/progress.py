"""Show the progress of long work in a terminal."""

from __future__ import annotations

import time
from typing import IO

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


class PhaseProgress:
    """One line for each task, with its phase and the time it has taken.

    On a terminal the lines are updated in place; elsewhere each phase is printed once.
    """

    def __init__(self, stream: IO[str]) -> None:
        self.console = Console(file=stream, highlight=False, soft_wrap=True)
        self._live = Progress(
            SpinnerColumn(finished_text="✓"),
            TextColumn("[bold]{task.fields[name]}"),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=self.console,
        )
        self._tasks: dict[str, TaskID] = {}
        self._began: dict[str, float] = {}

    def __enter__(self) -> PhaseProgress:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop drawing; a second call does nothing."""
        self._live.stop()

    def phase(self, name: str, text: str) -> None:
        """Show that the task `name` is in the phase `text`."""
        self._began.setdefault(name, time.monotonic())
        if not self.console.is_terminal:
            seconds = time.monotonic() - self._began[name]
            self.console.print(f"[{seconds:5.1f}s] {name}: {text}", markup=False)
        elif name in self._tasks:
            self._live.update(self._tasks[name], description=text)
        else:
            self._tasks[name] = self._live.add_task(text, total=None, name=name)

    def done(self, name: str, text: str = "ready") -> None:
        """Show that the task `name` is done."""
        self.phase(name, text)
        if name in self._tasks:
            self._live.update(self._tasks[name], total=1, completed=1)
