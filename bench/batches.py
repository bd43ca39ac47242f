"""Batches behind clients, and what lines with one context save: `make bench-batches` (some four minutes).

Clients ask one after the other, with pauses; by turns nothing else runs, or a batch of long lines that has
every place whenever nobody asks. Printed are their times to the first token and to the last, and for a batch
of questions about a few documents the prompt tokens that were computed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI
from openai.types import Batch
from servers import free_port, machine

MODEL = "smollm2"
CHAT = "/v1/chat/completions"
PAUSE_S, QUIET_S = 0.4, 0.2
"""The batch begins in every pause, and has to give way at its end."""
ROUNDS = 4
WITHIN_S = 240.0
DOCUMENTS, QUESTIONS = 4, 12
WORDS = ["lake", "tower", "bridge", "boat", "mill", "gate", "road", "hill", "farm", "barn", "well", "oak"] * 4
ENDED = ("completed", "failed", "expired", "cancelled")
Times = tuple[list[float], list[float]]
"""Seconds to the first token, and to the last, of each request."""


@contextmanager
def gateway(beside: int) -> Iterator[tuple[OpenAI, str]]:
    """A gateway with one engine, all of whose files are its own."""
    with tempfile.TemporaryDirectory() as folder:
        config, port = Path(folder) / "baton.toml", free_port()
        config.write_text(f'[[engines]]\nname = "{MODEL}"\nmodel = "{MODEL}"\n')
        own = {
            "BATON_BATCHES__FOLDER": f"{folder}/batches",
            "BATON_BATCHES__LINES_BESIDE": str(beside),
            "BATON_BATCHES__QUIET_S": str(QUIET_S),
            "BATON_RESPONSES__BUDGET": "0",
        }
        command = [
            str(Path(sys.executable).parent / "baton"),
            "serve",
            "--port",
            str(port),
            "--config",
            str(config),
        ]
        url = f"http://127.0.0.1:{port}"
        with Path(folder, "log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | own)
            try:
                _until_ready(url, process)
                yield OpenAI(base_url=f"{url}/v1", api_key="none"), url
            finally:
                process.terminate()
                process.wait(60)


def _until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    latest = time.monotonic() + WITHIN_S
    while True:
        assert process.poll() is None, "the gateway ended"
        assert time.monotonic() < latest, "the gateway is not ready"
        try:
            if httpx.get(f"{url}/readyz").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)


def begin(client: OpenAI, bodies: list[dict[str, Any]]) -> Batch:
    """A batch of these chats."""
    rows = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": CHAT,
            "body": {"model": MODEL, "temperature": 0} | body,
        }
        for number, body in enumerate(bodies)
    ]
    content = "\n".join(map(json.dumps, rows)).encode()
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )


def until(client: OpenAI, batch: Batch, *statuses: str) -> Batch:
    """The batch, once it has one of these statuses."""
    while (found := client.batches.retrieve(batch.id)).status not in statuses:
        time.sleep(0.05)
    return found


def computed(client: OpenAI, url: str) -> None:
    """Print how many prompt tokens questions about a few documents cost, in mixed order."""
    texts = [
        " ".join(f"Fact {n} of document {d}: the {word} is {n * d + 7}." for n, word in enumerate(WORDS))
        for d in range(DOCUMENTS)
    ]
    bodies: list[dict[str, Any]] = [
        {
            "max_tokens": 8,
            "messages": [
                {"role": "system", "content": text},
                {"role": "user", "content": f"What is fact {q}?"},
            ],
        }
        for q in range(QUESTIONS)
        for text in texts
    ]
    began = time.monotonic()
    done = until(client, begin(client, bodies), *ENDED)
    took = time.monotonic() - began
    page = httpx.get(f"{url}/metrics").text
    asked, hits = (
        sum(map(float, re.findall(rf"^vllm:prefix_cache_{name}_total{{.*}} (\S+)$", page, re.MULTILINE)))
        for name in ("queries", "hits")
    )
    assert done.status == "completed"
    print(
        f"{len(bodies)} questions about {DOCUMENTS} documents, mixed: {asked - hits:.0f} of {asked:.0f} "
        f"prompt tokens computed ({(asked - hits) / asked:.2f}), {took:.1f} s"
    )


def clients(client: OpenAI, number: int, times: Times) -> None:
    """Ask so many times, with pauses, and note how long each took."""
    for _ in range(number):
        time.sleep(PAUSE_S)
        content = f"It is {time.time()}. Tell me about the sea."
        began, first = time.perf_counter(), 0.0
        stream = client.chat.completions.create(
            model=MODEL,
            temperature=0,
            max_tokens=8,
            stream=True,
            messages=[{"role": "user", "content": content}],
        )
        for _ in stream:
            first = first or time.perf_counter() - began
        times[0].append(first)
        times[1].append(time.perf_counter() - began)


def beside_clients(client: OpenAI, requests: int) -> tuple[Times, Times]:
    """The times of clients alone, and beside a batch that is always there, in turns."""
    alone: Times = ([], [])
    beside: Times = ([], [])
    clients(client, 5, ([], []))
    stories = [
        {
            "max_tokens": 200,
            "ignore_eos": True,
            "messages": [{"role": "user", "content": f"A story about {n}."}],
        }
        for n in range(2000)
    ]
    for _ in range(ROUNDS):
        clients(client, requests // ROUNDS, alone)
        batch = until(client, begin(client, stories), "in_progress")
        time.sleep(2 * QUIET_S)
        clients(client, requests // ROUNDS, beside)
        client.batches.cancel(batch.id)
        until(client, batch, "cancelled")
    return alone, beside


def shown(times: Times) -> str:
    """Half, 95 and 99 of a hundred, in milliseconds, to the first token and to the last."""
    return "   ".join(
        "  ".join(
            f"{sorted(each)[min(len(each) - 1, int(part * len(each)))] * 1000:5.0f}"
            for part in (0.5, 0.95, 0.99)
        )
        for each in times
    )


def main() -> None:
    """Measure, and print."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument(
        "--requests", type=int, default=100, help="of clients, alone and beside a batch each"
    )
    options.add_argument("--requests-beside", type=int, default=40, help="the same with one line beside them")
    given = options.parse_args()
    print(f"{machine()}, {datetime.date.today()}, load {os.getloadavg()[0]:.1f}", flush=True)
    for lines, requests in ((0, given.requests), (1, given.requests_beside)):
        with gateway(lines) as (client, url):
            if not lines:
                computed(client, url)
            print(f"lines_beside = {lines}: first token p50 p95 p99, last token p50 p95 p99 (ms)", flush=True)
            alone, beside = beside_clients(client, requests)
            print(f"  alone          {shown(alone)}\n  beside a batch {shown(beside)}")
            page = httpx.get(f"{url}/metrics").text
            told = dict(re.findall(r'^baton_batch_lines_total{result="(\w+)"} (\S+)$', page, re.MULTILINE))
            print(f"  lines: {told}, load {os.getloadavg()[0]:.1f}", flush=True)


if __name__ == "__main__":
    main()
