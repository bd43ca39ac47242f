"""Baton against plain vLLM's own server, side by side in one run: `make bench`, minutes.

Both serve the same model with the same engine settings; rounds alternate, A B then B A, so that a
machine whose speed drifts is fair to both. Printed are medians and the ratio Baton / plain vLLM.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from direct import PAUSE_S, PROMPT_IDS
from load import Seen, one_token_ms, stream_round, whole_round
from rich.console import Console
from rich.progress import track
from servers import ENVIRONMENT, Server, baton, cpu_seconds, machine, plain_vllm, tiny_model

from baton.config.settings import load_settings
from baton.config.vllm_environment import SPINS
from baton.models.store import ModelStore

Round = Callable[..., Coroutine[Any, Any, Seen]]
ROUND_S = 4.0
WARM_UP_S = 1.0
LEAST_REQUESTS = 16
"""A round goes on until so many were sent, however long they take."""
ONE_TOKEN_COUNT = 40
ONE_TOKEN_SLICES = 6
"""Short slices, many of them: an engine's own pace drifts by more than what is measured here."""


def alternate(
    servers: list[Server], round_: Round, rounds: int, label: str, **load: int
) -> dict[str, dict[str, float]]:
    """Medians by server and figure."""
    seen: dict[str, list[dict[str, float]]] = {server.name: [] for server in servers}
    for server in servers:
        asyncio.run(round_(server.url, requests=within(WARM_UP_S), **load))
    for number in track(range(rounds), label, console=Console(stderr=True)):
        for server in servers if number % 2 == 0 else servers[::-1]:
            began = server.cpu_seconds
            answered = asyncio.run(round_(server.url, requests=within(ROUND_S), **load))
            cpu_ms = (server.cpu_seconds - began) * 1000 / answered.requests
            seen[server.name].append(answered.figures() | {"server CPU ms/request": cpu_ms})
    return {
        name: {figure: statistics.median(one[figure] for one in found) for figure in found[0]}
        for name, found in seen.items()
    }


def within(seconds: float) -> Iterable[int]:
    """Numbers of requests, until `seconds` are over."""
    ends = time.perf_counter() + seconds
    return itertools.takewhile(
        lambda sent: sent < LEAST_REQUESTS or time.perf_counter() < ends, itertools.count()
    )


def named(clients: int) -> str:
    """A number of clients in words."""
    return f"{clients} client{'s' if clients > 1 else ''}"


def table(found: dict[int, dict[str, dict[str, float]]]) -> list[str]:
    """Rows of a Markdown table, a column for each number of clients: Baton / plain vLLM = ratio."""
    rows = [f"| Baton / plain vLLM | {' | '.join(map(named, found))} |", f"|{'---|' * (len(found) + 1)}"]
    pairs = [tuple(medians.values()) for medians in found.values()]
    for figure in pairs[0][0]:
        cells = [
            f"{ours[figure]:.2f} / {theirs[figure]:.2f} = {ours[figure] / theirs[figure]:.2f}"
            for ours, theirs in pairs
        ]
        rows.append(f"| {figure} | {' | '.join(cells)} |")
    return rows


def added_over_direct(servers: list[Server], model: Path, rounds: int) -> list[str]:
    """Table of one-token completions: each server's times beside those of a direct `AsyncLLM` call."""
    command = [sys.executable, str(Path(__file__).parent / "direct.py"), str(model), str(ONE_TOKEN_COUNT)]
    seen: dict[str, list[float]] = {"direct": []} | {server.name: [] for server in servers}
    cpu = dict.fromkeys(seen, 0.0)
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | ENVIRONMENT,
    ) as direct:
        assert direct.stdin is not None
        assert direct.stdout is not None
        while direct.stdout.readline().strip() != "ready":
            assert direct.poll() is None
        clock = {"direct": lambda: cpu_seconds(direct.pid)} | {
            server.name: partial(cpu_seconds, server.process.pid) for server in servers
        }
        for number in track(range(ONE_TOKEN_SLICES * rounds + 1), "one token", console=Console(stderr=True)):
            before = {name: read() for name, read in clock.items()}
            direct.stdin.write(f"{number}\n")
            direct.stdin.flush()
            while not (line := direct.stdout.readline()).startswith("["):
                pass
            found = {"direct": json.loads(line)}
            for server in servers if number % 2 else servers[::-1]:
                found[server.name] = one_token_ms(server.url, PROMPT_IDS, ONE_TOKEN_COUNT, PAUSE_S)
            for name, values in found.items() if number else ():  # the first round warms up
                seen[name] += values
                cpu[name] += (clock[name]() - before[name]) * 1000
        direct.stdin.close()
    rows = [
        "| one token, one client | p50 ms | added | mean ms | added | processor ms | added |",
        "|---|---|---|---|---|---|---|",
    ]
    per_request = {name: cpu[name] / len(values) for name, values in seen.items()}
    base = (statistics.median(seen["direct"]), statistics.fmean(seen["direct"]))
    for name, values in seen.items():
        p50, mean = statistics.median(values), statistics.fmean(values)
        spent = per_request[name]
        figures = (p50, p50 - base[0], mean, mean - base[1], spent, spent - per_request["direct"])
        rows.append(f"| {name} | {' | '.join(f'{figure:.2f}' for figure in figures)} |")
    return rows


def compare(
    title: str, model: Path, clients: list[int], *, rounds: int, tokens: int, part: str, spins: str | None
) -> None:
    """Compare everything on one model, and print each table once it is known."""
    told(f"\n### {title}")
    with (
        tempfile.TemporaryDirectory() as folder,
        baton(model, Path(folder)) as ours,
        plain_vllm(model, spins=spins) as theirs,
    ):
        servers = [ours, theirs]
        for kind, round_ in (("streaming", stream_round), ("in one piece", whole_round)):
            if part == "one-token":
                break
            found = {}
            for count in clients:
                label = f"{kind}, {named(count)}"
                found[count] = alternate(servers, round_, rounds, label, clients=count, tokens=tokens)
            told(f"\n{kind}:\n", *table(found))
        if part != "rounds":
            told("", *added_over_direct(servers, model, rounds))
        told("\n| of the server process | baton | plain vLLM | ratio |", "|---|---|---|---|")
        for what, values in (
            ("memory, MiB", [server.memory_mib for server in servers]),
            ("start until healthy, s", [server.start_seconds for server in servers]),
        ):
            told(f"| {what} | {values[0]:.1f} | {values[1]:.1f} | {values[0] / values[1]:.3f} |")


def told(*lines: str) -> None:
    """Print lines, without a wait for the next ones where the output is a file."""
    print(*lines, sep="\n", flush=True)


def main() -> None:
    """Compare, and print Markdown for `docs/results/overhead.md`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--part", choices=["all", "rounds", "one-token"], default="all")
    parser.add_argument("--only", choices=["tiny", "smollm2"])
    parser.add_argument("--spin", action="store_true", help="plain vLLM's OpenMP threads wait as Baton's do")
    options = parser.parse_args()
    smollm2 = Path(ModelStore(load_settings().models_folder).resolve("smollm2"))
    ways = {"rounds": options.rounds, "part": options.part, "spins": SPINS if options.spin else None}
    told(f"## overhead: {datetime.date.today()}, {machine()}, `make bench ARGS='{' '.join(sys.argv[1:])}'`")
    if options.only != "smollm2":
        with tempfile.TemporaryDirectory() as folder:
            tiny = tiny_model(smollm2, Path(folder))
            title = "Random two-layer model: the front end is what is measured"
            compare(title, tiny, options.clients, tokens=32, **ways)
    if options.only != "tiny":
        compare("SmolLM2-135M", smollm2, options.clients, tokens=16, **ways)


if __name__ == "__main__":
    main()
