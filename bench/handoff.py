"""Time to B's first token: prefilling A's context against starting from its handoff. `make bench-handoff`.

Two engines of the same real weights, bf16, without prefix caching, so that nothing but the handoff can
help. A reads a context of L tokens on the first engine; B adds 32 of its own on the first and on the
second. Plain and relayed alternate; printed are medians and the ratio relayed / plain.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from rich.console import Console
from rich.progress import track
from servers import Server, free_port

CONFIG = """
[handoffs]
store = "file:{store}"
budget = "4GiB"

[[engines]]
name = "first"
model = "smollm2"
handoff = true
args = {{ enable_prefix_caching = false, max_num_seqs = 8 }}

[[engines]]
name = "second"
model = "smollm2"
handoff = true
args = {{ enable_prefix_caching = false, max_num_seqs = 8 }}
"""
OWN_TOKENS = 32


def prompt(length: int, seed: int) -> list[int]:
    """Token ids that no other call shares a prefix with."""
    return [1 + (seed * 104729 + index * 7919 + index * index * 31) % 40000 for index in range(length)]


def ask(url: str, body: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """An answer, and the milliseconds it took."""
    sent = Request(f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    began = time.perf_counter()
    with urlopen(sent, timeout=120) as answer:
        found: dict[str, Any] = json.loads(answer.read())
    return found, (time.perf_counter() - began) * 1000


def measure(url: str, length: int, rounds: int) -> dict[str, float]:
    """Medians for one length of A's context."""
    seen: dict[str, list[float]] = {}
    for number in range(rounds):
        asked = {"max_tokens": 1, "temperature": 0}
        context = prompt(length, length + number * 31)
        left, _ = ask(url, asked | {"model": "first", "prompt": context, "handoff": {"save": True}})
        own = prompt(OWN_TOKENS, number)
        body = asked | {"prompt": own, "handoff": {"from": left["handoff"]["id"]}}
        whole = [*context, 0, *own]  # the one token A said, whichever it was: its cost is the same
        for model in ("first", "second"):
            _, took = ask(url, asked | {"model": model, "prompt": whole})
            seen.setdefault(f"B plain, {model} engine", []).append(took)
            relayed, took = ask(url, body | {"model": model})
            source = relayed["handoff"]["source"]
            assert source["outcome"] == "loaded", source
            seen.setdefault(f"B relayed, {model} engine", []).append(took)
            seen.setdefault("load", []).append(source["load_ms"])
        seen.setdefault("MiB", []).append(left["handoff"]["bytes"] / 1024 / 1024)
    return {name: statistics.median(values) for name, values in seen.items()}


def main() -> None:
    """Measure, and print Markdown for RESULTS.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 2048, 4096, 7500])
    options = parser.parse_args()
    print(f"`make bench-handoff ARGS='{' '.join(sys.argv[1:])}'`, {datetime.date.today()}\n")
    print(
        "| A's tokens | entry MiB | plain, ms | relayed, ms | ratio | other engine, ms | ratio | load, ms |"
    )
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=_fast_folder()) as folder:
        config = Path(folder) / "bench.toml"
        config.write_text(CONFIG.format(store=f"{folder}/store"))
        port = free_port()
        command = [str(Path(sys.executable).parent / "baton"), "serve", "--config", str(config)]
        with Server("relay", [*command, "--port", str(port)], f"http://127.0.0.1:{port}") as server:
            measure(server.url, 256, 2)  # warm
            for length in track(options.lengths, "lengths", console=Console(stderr=True)):
                print(_row(length, measure(server.url, length, options.rounds)), flush=True)


def _row(length: int, found: dict[str, float]) -> str:
    plain, relayed = found["B plain, first engine"], found["B relayed, first engine"]
    elsewhere, cold = found["B relayed, second engine"], found["B plain, second engine"]
    figures = (found["MiB"], plain, relayed, relayed / plain, elsewhere, elsewhere / cold, found["load"])
    return f"| {length} | {' | '.join(f'{figure:.2f}' for figure in figures)} |"


def _fast_folder() -> str | None:
    """Shared memory where there is some, as the gateway itself chooses."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


if __name__ == "__main__":
    main()
