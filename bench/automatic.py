"""Measure what automatic handoffs save conversations, and what they cost others. `make bench-automatic`.

One gateway with two engines of the same real weights, both without a prefix cache: on one of them handoffs
are automatic. What is compared alternates in one run; printed are medians and ratios. The look-up is measured
in this process, over an index of as many contexts as `--contexts`.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import statistics
import sys
import tempfile
import time
from array import array
from collections import defaultdict
from pathlib import Path

from handoff import Client, Rows, medians, prompt, said, table
from servers import Server, free_port, machine

from baton.handoffs.records.prefix_index import PrefixIndex
from baton.handoffs.records.record import HandoffRecord

CONFIG = """
[handoffs]
store = "file:{folder}/store"
budget = "6GiB"

[[engines]]
name = "off"
model = "smollm2"
handoff = true
args = {{ enable_prefix_caching = false, max_num_seqs = 16 }}

[[engines]]
name = "on"
model = "smollm2"
handoff = true
auto = "on"
args = {{ enable_prefix_caching = false, max_num_seqs = 16 }}
"""
FIRST_TOKENS = 1100
"""A first prompt is so long: those that are no messages are saved from 1,024 tokens on."""
TURN_TOKENS = 160
SAID = 16
LOOKUPS = 1000


async def turns(client: Client, model: str, seed: int, count: int) -> list[float]:
    """Milliseconds of each turn of a conversation whose every request holds all of it."""
    context, took = prompt(FIRST_TOKENS, seed), []
    for number in range(count):
        answer, ms = await client.ask(model, context, max_tokens=SAID)
        took.append(ms)
        context = said(answer) + prompt(TURN_TOKENS, seed * 100 + number)
        await asyncio.sleep(0.3)  # the client reads, and its context is saved
    return took


async def turns_part(client: Client, folder: Path, rounds: int) -> None:
    """A conversation that is sent again with every turn."""
    rows: Rows = defaultdict(list)
    count, taken = 8, []
    for number in range(rounds):
        before = stored(folder)
        for model in ("off", "on"):
            took = await turns(client, model, 300 + 10 * number + len(model), count)
            rows[f"first {model}"].append(took[0])
            rows[f"later {model}"] += took[1:]
        await asyncio.sleep(2)
        taken.append((stored(folder) - before) / 1024**2)
    found = medians(rows)
    cells = [
        [name, *(f"{found[f'{name} {model}']:.0f}" for model in ("off", "on"))] for name in ("first", "later")
    ]
    for row in cells:
        row.append(f"{float(row[2]) / float(row[1]):.3f}")
    mib = statistics.median(taken)
    print(f"{count} turns of {TURN_TOKENS} tokens after {FIRST_TOKENS}; stored: {mib:.0f} MiB\n")
    table(["turn, ms", "off", "on", "on / off"], cells)


async def pace_part(client: Client, rounds: int) -> None:
    """A stream beside which other contexts begin, and are saved or not."""
    rows: Rows = defaultdict(list)
    for number in range(rounds):
        for model in ("off", "on"):
            seed = 5000 + 100 * number + 10 * len(model)
            stream = asyncio.create_task(client.stream(model, prompt(64, seed), max_tokens=160))
            for other in range(4):
                await client.ask(model, prompt(FIRST_TOKENS, seed + 1 + other), max_tokens=4)
            first, gaps = await stream
            rows[f"first {model}"].append(first)
            rows[f"mean gap {model}"].append(statistics.mean(gaps))
            rows[f"longest gap {model}"].append(max(gaps))
    found = medians(rows)
    names = ("first", "mean gap", "longest gap")
    cells = [[name, *(f"{found[f'{name} {model}']:.1f}" for model in ("off", "on"))] for name in names]
    for row in cells:
        row.append(f"{float(row[2]) / float(row[1]):.3f}")
    print(f"One stream of 160 tokens while four prompts of {FIRST_TOKENS} tokens come one after the other\n")
    table(["of the stream, ms", "off", "on", "on / off"], cells)


def lookup_part(contexts: int) -> None:
    """What a look-up takes, whether it finds something or not."""
    index, shared = PrefixIndex(), list(range(2048))
    for number in range(contexts):
        tokens = array("i", [number, *shared[:95]])
        index.add(
            HandoffRecord(
                tenant="a", model="m", weights="w", created_at=0, ttl_s=60, expires_at=60, tokens=tokens
            )
        )
    index.add(
        HandoffRecord(
            tenant="a",
            model="m",
            weights="w",
            created_at=0,
            ttl_s=60,
            expires_at=60,
            tokens=array("i", shared),
        )
    )
    rows = []
    for name, asked in (("nothing found", [7] * 8192), ("2,048 of 8,192 tokens found", shared + [7] * 6144)):
        began = time.perf_counter()
        for _ in range(LOOKUPS):
            index.find("a", "w", asked, lambda _record: True)
        rows.append([name, f"{(time.perf_counter() - began) / LOOKUPS * 1e6:.0f}"])
    print(f"{contexts + 1:,} contexts of one tenant\n")
    table(["look-up", "us"], rows)


def stored(folder: Path) -> int:
    """Bytes of the store's files, those with several names counted once."""
    found = {}
    for path in (folder / "store" / "entries").rglob("*"):
        if path.is_file():
            status = path.stat()
            found[status.st_ino] = status.st_size
    return sum(found.values())


async def run(url: str, folder: Path, options: argparse.Namespace) -> None:
    """All parts, one after the other."""
    client = Client(url)
    for model in ("off", "on"):
        await turns(client, model, 1, 2)  # warm
    await turns_part(client, folder, options.rounds)
    await pace_part(client, options.rounds)


def main() -> None:
    """Measure, and print Markdown for RESULTS.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="how often each is measured")
    parser.add_argument("--contexts", type=int, default=100_000, help="contexts that a look-up searches")
    options = parser.parse_args()
    typed = f"make bench-automatic ARGS='{' '.join(sys.argv[1:])}'"
    print(f"`{typed}`, {datetime.date.today()}, {machine()}\n")
    lookup_part(options.contexts)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        config = Path(folder) / "bench.toml"
        config.write_text(CONFIG.format(folder=folder))
        port = free_port()
        command = [str(Path(sys.executable).parent / "baton"), "serve", "--config", str(config)]
        with Server("automatic", [*command, "--port", str(port)], f"http://127.0.0.1:{port}") as server:
            asyncio.run(run(server.url, Path(folder), options))


if __name__ == "__main__":
    main()
