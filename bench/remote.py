"""Measure what a request costs more through a gateway whose engine is another gateway.

Asked in turn: the other gateway itself, one that sends requests on to it, and Envoy before it, as the least
that a server in between costs. The engine computes nothing, so that all of the time is theirs.
"""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

from fronts import envoy_before
from handoff import Rows, medians, table
from load import stream_round, whole_round
from servers import Server, free_port

TOKENS = 64
"""Events of a stream."""
FIGURES = (
    ("requests/s", "requests/s"),
    ("request p50 ms", "a request: p50 ms"),
    ("request p99 ms", "p99 ms"),
    ("TTFT p50 ms", "a stream's first event: p50 ms"),
    ("TTFT p99 ms", "p99 ms"),
    ("events/s", "events/s"),
)


def fake_gateway(name: str, far: str | None = None) -> Server:
    """Return a gateway with a fake engine, or with one that the gateway `far` answers for."""
    port = free_port()
    command = [sys.executable, str(Path(__file__).with_name("fake_gateway.py")), str(port)]
    return Server(name, [*command, far] if far is not None else command, f"http://127.0.0.1:{port}")


async def remote_part(rounds: int, clients: int, requests: int) -> None:
    """Print a table for one client, and one for several at once, of medians; below them the ratios."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        far = stack.enter_context(fake_gateway("far"))
        near = stack.enter_context(fake_gateway("near", far.url))
        envoy = stack.enter_context(envoy_before(folder, [int(far.url.rpartition(":")[2])]))
        urls = {"the gateway itself": far.url, "through another gateway": near.url, "through Envoy": envoy}
        for count in (1, clients):
            rows: dict[str, Rows] = defaultdict(lambda: defaultdict(list))
            for turn in range(rounds + 1):
                for name in list(urls) if turn % 2 else list(urls)[::-1]:
                    found = await figures(urls[name], count, requests // (2 if count == 1 else 1))
                    for figure, value in found.items() if turn else ():  # the first round warms up
                        rows[name][figure].append(value)
            print(f"{count} client{'s' if count > 1 else ''} at once:\n")
            show({name: medians(rows[name]) for name in urls})


async def figures(url: str, clients: int, requests: int) -> dict[str, float]:
    """Return the figures of short answers in one piece, and of streams."""
    whole = await whole_round(url, clients=clients, requests=range(requests), tokens=1)
    streamed = await stream_round(url, clients=clients, requests=range(max(8, requests // 8)), tokens=TOKENS)
    found = streamed.figures() | whole.figures()
    return {name: found.get(name, 0.0) for name, _ in FIGURES}


def show(found: dict[str, dict[str, float]]) -> None:
    """Print the medians, then what each costs beside asking the gateway itself."""
    base, *others = found
    lines = [[name, *(number(found[name][figure]) for figure, _ in FIGURES)] for name in found]
    for name in others:
        ratios = (found[name][figure] / found[base][figure] for figure, _ in FIGURES)
        lines.append([f"{name} / itself", *(f"{ratio:.2f}" for ratio in ratios)])
    for name in others:
        added = (
            f"{found[name][figure] - found[base][figure]:+.2f}" if figure.endswith("ms") else ""
            for figure, _ in FIGURES
        )
        lines.append([f"{name}: added", *added])
    table(["asked", *(head for _, head in FIGURES)], lines)
    print()


def number(value: float) -> str:
    """Return a figure as the tables show it."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
