"""Measure what a handed-over image saves B, and what the cache of processed images saves everybody.

`make bench-vision`. One gateway with engines of the same weights: two without a prefix cache, so that nothing
but the handoff can help; one of them without the cache of processed pictures too. What is compared alternates
in one run; printed are medians and ratios. Every context has pictures that no other had.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import datetime
import io
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy
from PIL import Image
from rich.console import Console
from rich.progress import track
from servers import Server, free_port, machine

CONFIG = """
[handoffs]
auto = "off"
store = "file:{folder}/store"
budget = "4GiB"

[[engines]]
name = "first"
model = "look-tiny"
handoff = true
args = {{ enable_prefix_caching = false, limit_mm_per_prompt = {{ image = 16 }} }}

[[engines]]
name = "second"
model = "look-tiny"
handoff = true
args = {{ enable_prefix_caching = false, limit_mm_per_prompt = {{ image = 16 }} }}

[[engines]]
name = "uncached"
model = "look-tiny"
args = {{ enable_prefix_caching = false, mm_processor_cache_gb = 0, limit_mm_per_prompt = {{ image = 16 }} }}
"""
ASKED = {"max_tokens": 1, "temperature": 0}
TEXT = "The agents had looked at every picture twice before they agreed on what to say about them. "
QUESTION = "Is there water in the picture?"
Rows = dict[str, list[float]]
Part = dict[str, Any]


def picture(seed: int, side: int) -> Part:
    """A message part with a picture nobody has seen: blurred noise, `side` pixels wide and high, as PNG."""
    rng = numpy.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (side // 8, side // 8, 3), dtype=numpy.uint8))
    file = io.BytesIO()
    coarse.resize((side, side)).save(file, "PNG", compress_level=1)
    data = base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def message(parts: Sequence[Part], text: str) -> Part:
    """A user's message of pictures and a text."""
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


class Client:
    """Asks one gateway."""

    def __init__(self, url: str) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=300)

    async def ask(self, model: str, messages: list[Part], **more: Any) -> tuple[dict[str, Any], float]:
        """An answer, and the milliseconds it took."""
        body = ASKED | {"model": model, "messages": messages} | more
        began = time.perf_counter()
        answer = await self._http.post("/v1/chat/completions", json=body)
        took = (time.perf_counter() - began) * 1000
        found: dict[str, Any] = answer.raise_for_status().json()
        return found, took

    async def forget(self, handoff: str) -> None:
        await self._http.delete(f"/v1/handoffs/{handoff}")


async def first_token(client: Client, pictures: int, sentences: int, rounds: int) -> dict[str, float]:
    """B's first token after a context of so many pictures and sentences, by handoff and plain."""
    rows: Rows = defaultdict(list)
    for number in range(rounds):
        seed = 10_000 * pictures + 1_000 * sentences + 20 * number
        parts = [picture(seed + index, 512) for index in range(pictures)]
        opening = message(parts, TEXT * sentences + "What do you see?")
        left, _ = await client.ask("first", [opening], handoff={"save": True})
        said = left["choices"][0]["message"]
        history = [opening, {"role": "assistant", "content": said["content"]}]
        own = {"role": "user", "content": QUESTION}
        answer, took = await client.ask("second", [own], handoff={"from": left["handoff"]["id"]})
        source = answer["handoff"]["source"]
        assert source["outcome"] == "loaded", source
        rows["handoff"].append(took)
        rows["load"].append(source["load_ms"])
        answer, took = await client.ask("second", [*history, own])
        rows["plain, new to the engine"].append(took)
        rows["tokens"].append(answer["usage"]["prompt_tokens"])
        rows["plain, again"].append((await client.ask("second", [*history, own]))[1])
        await client.forget(left["handoff"]["id"])
    return {name: statistics.median(values) for name, values in rows.items()}


async def rate(client: Client, model: str, parts: Sequence[Part], at_once: int) -> float:
    """Answers per second, one picture a request, so many at once."""
    room = asyncio.Semaphore(at_once)

    async def one(part: Part) -> None:
        async with room:
            await client.ask(model, [message([part], QUESTION)])

    began = time.perf_counter()
    await asyncio.gather(*(one(part) for part in parts))
    return len(parts) / (time.perf_counter() - began)


async def throughput(client: Client, side: int, requests: int, rounds: int) -> dict[str, float]:
    """Requests per second with pictures that were processed before, that were not, and without the cache."""
    rows: Rows = defaultdict(list)
    for number in range(rounds):
        fresh = [
            picture(5_000_000 + side * 1000 + number * requests + index, side) for index in range(requests)
        ]
        known = [fresh[index % 4] for index in range(requests)]
        rows["cold"].append(await rate(client, "first", fresh, 8))
        rows["warm"].append(await rate(client, "first", known, 8))
        rows["no cache"].append(await rate(client, "uncached", known, 8))
    return {name: statistics.median(values) for name, values in rows.items()}


def table(head: list[str], rows: list[list[str]]) -> None:
    """Print Markdown."""
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    print(flush=True)


async def first_token_part(client: Client, options: argparse.Namespace) -> None:
    """B's first token."""
    head = ["pictures", "sentences", "tokens", "handoff", "load", "plain, new to the engine", "plain, again"]
    rows = []
    contexts = [(1, 0), (1, 50), (4, 0), (16, 0), (4, 120)]
    for pictures, sentences in track(contexts, "first token", console=Console(stderr=True)):
        found = await first_token(client, pictures, sentences, options.rounds)
        new, again = found["plain, new to the engine"], found["plain, again"]
        cells = [str(pictures), str(sentences), f"{found['tokens']:.0f}", f"{found['handoff']:.0f}"]
        cells += [f"{found['load']:.1f}", f"{new:.0f}", f"{again:.0f}"]
        rows.append([*cells, f"{new / found['handoff']:.1f}x", f"{again / found['handoff']:.1f}x"])
    table([*head, "new / handoff", "again / handoff"], rows)


async def cache_part(client: Client, options: argparse.Namespace) -> None:
    """The cache of processed pictures."""
    rows = []
    for side in track((256, 1024, 2048), "cache", console=Console(stderr=True)):
        found = await throughput(client, side, options.requests, max(3, options.rounds // 2))
        cells = [f"{side} x {side}", *(f"{found[name]:.1f}" for name in ("warm", "cold", "no cache"))]
        rows.append(
            [*cells, f"{found['warm'] / found['cold']:.2f}", f"{found['warm'] / found['no cache']:.2f}"]
        )
    table(["picture", "warm, requests/s", "cold", "no cache", "warm / cold", "warm / no cache"], rows)


PARTS = {"first-token": first_token_part, "cache": cache_part}


async def run(url: str, options: argparse.Namespace) -> None:
    """The parts that were asked for, one after the other."""
    client = Client(url)
    await first_token(client, 1, 1, 2)  # warm
    await rate(client, "uncached", [picture(1, 64)], 1)
    for part in options.parts:
        await PARTS[part](client, options)


def main() -> None:
    """Measure, and print Markdown for RESULTS.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--parts", choices=PARTS, nargs="+", default=list(PARTS))
    options = parser.parse_args()
    typed = f"make bench-vision ARGS='{' '.join(sys.argv[1:])}'"
    print(f"`{typed}`, {datetime.date.today()}, {machine()}, times in ms\n")
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        config = Path(folder) / "bench.toml"
        config.write_text(CONFIG.format(folder=folder))
        port = free_port()
        command = [str(Path(sys.executable).parent / "baton"), "serve", "--config", str(config)]
        with Server("vision", [*command, "--port", str(port)], f"http://127.0.0.1:{port}") as server:
            asyncio.run(run(server.url, options))


if __name__ == "__main__":
    main()
