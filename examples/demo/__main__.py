"""Run a demo: `python -m examples.demo agents` or `python -m examples.demo vision`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from baton.errors import OperatorError
from examples.demo import run, vision

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.command()
def agents(
    url: Annotated[
        str | None, typer.Option(help="A running gateway; without it one is started, and ended.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The engine to ask there; without it the first it names.")
    ] = None,
    key: Annotated[str, typer.Option(help="The API key, if that gateway wants one.")] = "",
    quick: Annotated[bool, typer.Option("--quick", hidden=True)] = False,
) -> None:
    """Watch agents hand their context to one another (two minutes)."""
    run.run(url, model, key, quick=quick)


@app.command("vision")
def with_images(
    out: Annotated[
        Path | None, typer.Option(help="Keep the scene, the mask and the preview in this folder.")
    ] = None,
) -> None:
    """Watch a scene mapped, described, and asked about by agents that share one image (two minutes)."""
    vision.run(out)


if __name__ == "__main__":
    try:
        app()
    except OperatorError as error:
        Console(stderr=True, highlight=False).print(f"demo: {error.message}", markup=False)
        raise SystemExit(error.exit_code) from None
