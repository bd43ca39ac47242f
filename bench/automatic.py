"""Measure what automatic handoffs save conversations, and what they cost others. `make bench-automatic`.

One engine of real weights without a prefix cache is asked with the header `X-Baton-Handoff: off` and with
`auto`. What is compared alternates in one run; printed are medians and ratios. The look-up is measured in
this process, over an index of as many contexts as `--contexts`.

vLLM's own tiers of KV (`vllm/v1/kv_offload`) are not beside it: vLLM 0.32 has them for GPUs only.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import re
import statistics
import sys
import tempfile
import time
from array import array
from collections import defaultdict
from pathlib import Path

from handoff import Client, Rows, medians, prefilled, prompt, said, table
from servers import Server, free_port, machine

from baton.library.handoff import Handoff
from baton.library.prefixes import PrefixIndex

CONFIG = """
[handoffs]
store = "file:{folder}/store"
budget = "6GiB"

[[engines]]
name = "smollm2"
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
MODEL = "smollm2"
WAYS = ("off", "auto")
"""The values of the header."""
CHAINS = (2, 8, 32)
LENGTHS = (1024, 4096)


class Clients(dict[str, Client]):
    """A client for each value of the header."""

    def __init__(self, url: str) -> None:
        super().__init__({way: Client(url, **{"X-Baton-Handoff": way}) for way in WAYS})


def in_turn(number: int) -> tuple[str, ...]:
    """Both values of the header, each the first in every second round."""
    return WAYS if number % 2 == 0 else WAYS[::-1]


async def turns(client: Client, seed: int, count: int) -> list[float]:
    """Milliseconds of each turn of a conversation whose every request holds all of it."""
    context, took = prompt(FIRST_TOKENS, seed), []
    for number in range(count):
        answer, ms = await client.ask(MODEL, context, max_tokens=SAID)
        took.append(ms)
        context = said(answer) + prompt(TURN_TOKENS, seed * 100 + number)
        await asyncio.sleep(0.3)  # the client reads, and its context is saved
    return took


async def turns_part(clients: Clients, folder: Path, rounds: int) -> None:
    """A conversation that is sent again with every turn."""
    rows: Rows = defaultdict(list)
    count, taken = 8, []
    for number in range(rounds):
        before = stored(folder)
        for way in in_turn(number):
            took = await turns(clients[way], 300 + 10 * number + len(way), count)
            rows[f"first {way}"].append(took[0])
            rows[f"later {way}"] += took[1:]
        await asyncio.sleep(2)
        taken.append((stored(folder) - before) / 1024**2)
    found = medians(rows)
    cells = [[name, *(f"{found[f'{name} {way}']:.0f}" for way in WAYS)] for name in ("first", "later")]
    for row in cells:
        row.append(f"{float(row[2]) / float(row[1]):.3f}")
    mib = statistics.median(taken)
    print(f"{count} turns of {TURN_TOKENS} tokens after {FIRST_TOKENS}; stored: {mib:.0f} MiB\n")
    table(["turn, ms", "off", "auto", "auto / off"], cells)


async def chains_part(clients: Clients, folder: Path) -> None:
    """Chains of named handoffs: each turn saved with all that came before it, and as what it adds."""
    rows, client = [], clients["auto"]
    for count in CHAINS:
        found = {}
        for name in ("whole", "added"):
            before, seconds = stored(folder), await save_seconds(client)
            left = await chain(client, count, 40_000 + count, added=name == "added")
            found[name] = ((stored(folder) - before) / 1024**2, await save_seconds(client) - seconds)
            for handoff in left:
                await client.forget(handoff)
        (whole, whole_s), (added, added_s) = found["whole"], found["added"]
        times = [f"{1000 * seconds / count:.1f}" for seconds in (whole_s, added_s)]
        rows.append([str(count), f"{whole:.0f}", f"{added:.0f}", f"{added / whole:.3f}", *times])
    print(f"Named handoffs, turns of {TURN_TOKENS} tokens after {FIRST_TOKENS}, each saved\n")
    table(["turns", "whole, MiB", "added, MiB", "ratio", "whole, ms a save", "added, ms a save"], rows)


async def chain(client: Client, count: int, seed: int, *, added: bool) -> list[str]:
    """The handoffs of a conversation's turns, each continuing the one before it, or holding all of it."""
    context, left = prompt(FIRST_TOKENS, seed), []
    for number in range(count):
        named = {"from": left[-1]} if added and left else {}
        asked = prompt(TURN_TOKENS, seed + number) if named else context
        answer, _ = await client.ask(MODEL, asked, max_tokens=SAID, handoff={"save": True} | named)
        left.append(answer["handoff"]["id"])
        context = said(answer) + prompt(TURN_TOKENS, seed + number + 1)
        await asyncio.sleep(0.2)
    return left


async def save_seconds(client: Client) -> float:
    """Seconds that the engine has spent on saves so far."""
    name = r'^baton_store_op_duration_seconds_sum\{engine="smollm2",op="save"\} (\S+)$'
    found = re.search(name, await client.metrics(), re.MULTILINE)
    return float(found[1]) if found else 0.0


Left = list[tuple[int, list[int], str]]
"""Contexts that are stored: the length of the prompt, all token ids, and the id of a named handoff."""


async def leave(clients: Clients, rounds: int, seed: int) -> Left:
    """Save contexts that named and automatic handoffs find."""
    left = []
    for number, length in ((number, length) for number in range(rounds) for length in LENGTHS):
        tokens = prompt(length, seed + 10 * number + length % 7)
        named, _ = await clients["auto"].ask(MODEL, tokens, max_tokens=SAID, handoff={"save": True})
        await asyncio.sleep(1)
        left.append((length, said(named), named["handoff"]["id"]))
    return left


async def first_token_part(clients: Clients, left: Left, when: str) -> None:
    """The first token behind stored contexts: computed, from a named handoff, and automatically."""
    found: dict[int, Rows] = {length: defaultdict(list) for length in LENGTHS}
    for number, (length, context, handoff) in enumerate(left):
        own, rows = prompt(TURN_TOKENS, 70_000 + number + len(when)), found[length]
        rows["computed"].append((await clients["off"].ask(MODEL, context + own))[1])
        rows["named"].append((await clients["auto"].ask(MODEL, own, handoff={"from": handoff}))[1])
        answer, took = await clients["auto"].ask(MODEL, context + own)
        assert prefilled(answer) < length / 2, "nothing was loaded"
        rows["automatic"].append(took)
    cells = []
    for length, rows in found.items():
        computed, named, automatic = (medians(rows)[name] for name in ("computed", "named", "automatic"))
        cells.append(
            [
                str(length),
                *(f"{each:.0f}" for each in (computed, named, automatic)),
                f"{automatic / computed:.3f}",
            ]
        )
    print(f"First token of {TURN_TOKENS} tokens behind a stored context, {when}\n")
    table(["context", "computed, ms", "named, ms", "automatic, ms", "automatic / computed"], cells)


async def pace_part(clients: Clients, rounds: int) -> None:
    """A stream beside which other contexts begin, and are saved or not."""
    rows: Rows = defaultdict(list)
    for number in range(3 * rounds):
        for way in in_turn(number):
            client, seed = clients[way], 5000 + 100 * number + 10 * len(way)
            stream = asyncio.create_task(client.stream(MODEL, prompt(64, seed), max_tokens=160))
            for other in range(4):
                await client.ask(MODEL, prompt(FIRST_TOKENS, seed + 1 + other), max_tokens=4)
            first, gaps = await stream
            await asyncio.sleep(1)
            rows[f"first {way}"].append(first)
            rows[f"mean gap {way}"].append(statistics.mean(gaps))
            rows[f"longest gap {way}"].append(max(gaps))
    found = medians(rows)
    names = ("first", "mean gap", "longest gap")
    cells = [[name, *(f"{found[f'{name} {way}']:.1f}" for way in WAYS)] for name in names]
    for row in cells:
        row.append(f"{float(row[2]) / float(row[1]):.3f}")
    print(f"One stream of 160 tokens while four prompts of {FIRST_TOKENS} tokens come one after the other\n")
    table(["of the stream, ms", "off", "auto", "auto / off"], cells)


def lookup_part(contexts: int) -> None:
    """What a look-up takes, whether it finds something or not."""
    index, shared = PrefixIndex(), list(range(2048))
    for number in range(contexts):
        tokens = array("i", [number, *shared[:95]])
        index.add(
            Handoff(tenant="a", model="m", weights="w", created_at=0, ttl_s=60, expires_at=60, tokens=tokens)
        )
    index.add(
        Handoff(
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


async def run(url: str, folder: Path, options: argparse.Namespace) -> Left:
    """All parts, one after the other; returns what a gateway that is started again may load."""
    clients = Clients(url)
    for number, way in enumerate(WAYS):
        await turns(clients[way], 1 + number, 2)  # warm
    if options.pace:
        await pace_part(clients, options.rounds)
        return []
    await turns_part(clients, folder, options.rounds)
    await pace_part(clients, options.rounds)
    await chains_part(clients, folder)
    await first_token_part(clients, await leave(clients, options.rounds, 50_000), "same gateway")
    return await leave(clients, options.rounds, 60_000)


async def run_again(url: str, left: Left) -> None:
    """What was stored before the gateway ended."""
    clients = Clients(url)
    for number, way in enumerate(WAYS):
        await turns(clients[way], 3 + number, 2)  # warm
    await first_token_part(clients, left, "after a restart")


def main() -> None:
    """Measure, and print Markdown for RESULTS.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="how often each is measured")
    parser.add_argument("--contexts", type=int, default=100_000, help="contexts that a look-up searches")
    parser.add_argument("--pace", action="store_true", help="only what others lose")
    options = parser.parse_args()
    typed = f"make bench-automatic ARGS='{' '.join(sys.argv[1:])}'"
    print(f"`{typed}`, {datetime.date.today()}, {machine()}\n")
    lookup_part(options.contexts)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        config = Path(folder) / "bench.toml"
        config.write_text(CONFIG.format(folder=folder))
        port = free_port()
        command = [str(Path(sys.executable).parent / "baton"), "serve", "--config", str(config)]
        address = f"http://127.0.0.1:{port}"
        with Server("automatic", [*command, "--port", str(port)], address) as server:
            left = asyncio.run(run(server.url, Path(folder), options))
        if left:
            with Server("automatic", [*command, "--port", str(port)], address) as server:
                asyncio.run(run_again(server.url, left))


if __name__ == "__main__":
    main()
