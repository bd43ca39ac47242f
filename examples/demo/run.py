"""The demo from its first line to its table."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx
from rich.console import Console

from baton.config.settings import load_settings
from baton.errors import OperatorError
from baton.telemetry.progress import PhaseProgress
from examples.demo.agents import Way, ways_of_our_own, ways_on
from examples.demo.client import ANSWER_WITHIN_S, served
from examples.demo.display import stage_for
from examples.demo.figures import Result, notes, table
from examples.demo.gateway import COLD, READER, own_gateway
from examples.demo.rounds import Play
from examples.demo.ships_log import DAYS, FEW_DAYS, ships_log

MAX_TOKENS, FEW_TOKENS = 32, 8
INTRODUCTION = (
    "Five agents and one long text. A reader takes in a ship's log and answers a question; three specialists "
    "go on from the reader's context at the same time; an editor goes on from one of theirs. It is done in "
    "three ways: passing on what the engine computed (handoffs), and passing the text itself, twice."
)
OWN_NOTE = (
    "vLLM's prefix cache saves nearly the same prefill, but only on the engine that read the text, and only "
    "while its memory still holds it; a handoff goes to other engines too, and outlives its gateway."
)
CLOSING = "The answers are those of a model with 135 million parameters: expect some to be wrong."


@dataclass(frozen=True)
class Plan:
    """What is done where.

    Attributes:
        client: of the gateway.
        ways: one after the other.
        note: what the table alone does not tell.
    """

    client: httpx.AsyncClient
    ways: list[Way]
    note: str


def run(url: str | None, model: str | None, key: str, *, quick: bool) -> None:
    """Show the demo.

    Args:
        url: a running gateway; None: one is started, and ended.
        model: the engine to ask there; None: the first it names.
        key: the API key, if the gateway wants one.
        quick: a short text and short answers.

    Raises:
        OperatorError: why it could not be shown to its end.
    """
    if url is None and (model or key):
        raise OperatorError("--model and --key are for a running gateway: name it with --url.")
    console = Console(highlight=False)
    try:
        asyncio.run(_shown(console, url, model, key, quick=quick))
    except KeyboardInterrupt:
        console.print("Stopped.")
        raise SystemExit(128 + signal.SIGINT) from None
    except asyncio.CancelledError:
        raise SystemExit(128 + signal.SIGTERM) from None


async def _shown(console: Console, url: str | None, model: str | None, key: str, *, quick: bool) -> None:
    _end_on_sigterm()
    console.print(INTRODUCTION, markup=False)
    days, max_tokens = (FEW_DAYS, FEW_TOKENS) if quick else (DAYS, MAX_TOKENS)
    stage = stage_for(console)
    results: list[Result] = []
    async with _plan_of_our_own(console) if url is None else _plan_on(url, model, key) as plan:
        for way in plan.ways:
            text = ships_log(days, way.copy)
            results.append(await Play(plan.client, way, text, stage, max_tokens=max_tokens).run())
        _print_figures(console, results, plan.note)


def _end_on_sigterm() -> None:
    """Take SIGTERM as Ctrl-C is taken, so that the gateway is ended too."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


@contextlib.asynccontextmanager
async def _plan_of_our_own(console: Console) -> AsyncIterator[Plan]:
    settings = load_settings()
    console.print("\nFirst a gateway with two engines is started; that takes most of a minute.", markup=False)
    with PhaseProgress(sys.stdout) as progress:
        async with own_gateway(settings, progress) as gateway, _client(gateway.url) as client:
            progress.close()
            yield Plan(client, ways_of_our_own(READER, COLD, gateway.keys), OWN_NOTE)


@contextlib.asynccontextmanager
async def _plan_on(url: str, model: str | None, key: str) -> AsyncIterator[Plan]:
    async with _client(url) as client:
        names = await served(client, key)
        chosen = model or next(iter(names), "")
        if chosen not in names:
            raise OperatorError(f"There is no model '{chosen}' on {url}; there are: {', '.join(names)}.")
        note = (
            f"All of it ran on '{chosen}'. Where that has a prefix cache, the second way began without its "
            "text in it, and the third found there what the first had left."
        )
        copies = secrets.token_hex(4), secrets.token_hex(4)
        yield Plan(client, ways_on(chosen, copies, key), note)


def _client(url: str) -> httpx.AsyncClient:
    try:
        base = httpx.URL(url.rstrip("/").removesuffix("/v1"))
    except httpx.InvalidURL:
        base = httpx.URL("")
    if base.scheme not in ("http", "https") or not base.host:
        raise OperatorError(f"--url: '{url}' is no address of a gateway, such as http://127.0.0.1:8000.")
    # trust_env: a proxy of this machine's would be asked for 127.0.0.1 too.
    return httpx.AsyncClient(base_url=base, timeout=ANSWER_WITHIN_S, trust_env=False)


def _print_figures(console: Console, results: list[Result], note: str) -> None:
    console.print()
    console.print(table(results))
    for line in (*notes(results), note, CLOSING):
        console.print(line, markup=False)
