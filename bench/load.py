"""Load on an OpenAI-compatible server, and what its clients saw."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import aiohttp

PROMPT = "The quick brown fox jumps over the lazy dog, and then it goes on to"


@dataclass
class Seen:
    """Times and counts of one round, as its clients saw them; seconds."""

    wall: float = 0.0
    requests: int = 0
    tokens: int = 0
    events: int = 0
    took: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        """The round in figures: per second, and milliseconds.

        A stream's events are counted, not its tokens: a server may send several in one.
        """
        found = {"requests/s": self.requests / self.wall}
        counts = {"tokens": self.tokens, "events": self.events}
        found |= {f"{name}/s": count / self.wall for name, count in counts.items() if count}
        for name, values in (("request", self.took), ("TTFT", self.first), ("inter-token", self.gaps)):
            if len(values) > 2:
                found[f"{name} p50 ms"] = statistics.median(values) * 1000
                found[f"{name} p99 ms"] = statistics.quantiles(values, n=100, method="inclusive")[98] * 1000
        return found


async def stream_round(url: str, *, clients: int, requests: Iterable[int], tokens: int) -> Seen:
    """Streaming completions from `clients` clients at once, one for each of `requests`."""
    seen, numbers = Seen(), iter(requests)
    body = {"model": "bench", "max_tokens": tokens, "ignore_eos": True, "stream": True, "temperature": 0}

    async def client(session: aiohttp.ClientSession) -> None:
        for number in numbers:
            began = last = time.perf_counter()
            sent = body | {"prompt": f"{number}: {PROMPT}"}
            async with session.post(f"{url}/v1/completions", json=sent) as answer:
                answer.raise_for_status()
                async for line in answer.content:
                    if not line.startswith(b"data: {"):
                        continue
                    now = time.perf_counter()
                    (seen.first if last == began else seen.gaps).append(now - last)
                    last = now
                    seen.events += 1
            seen.requests += 1

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        began = time.perf_counter()
        await asyncio.gather(*(client(session) for _ in range(clients)))
        seen.wall = time.perf_counter() - began
    return seen


async def whole_round(url: str, *, clients: int, requests: Iterable[int], tokens: int) -> Seen:
    """Completions in one piece."""
    seen, numbers = Seen(), iter(requests)
    body = {"model": "bench", "max_tokens": tokens, "ignore_eos": True, "temperature": 0}

    async def client(session: aiohttp.ClientSession) -> None:
        for number in numbers:
            sent, sent_at = body | {"prompt": f"{number}: {PROMPT}"}, time.perf_counter()
            async with session.post(f"{url}/v1/completions", json=sent) as answer:
                answer.raise_for_status()
                seen.tokens += (await answer.json())["usage"]["completion_tokens"]
            seen.took.append(time.perf_counter() - sent_at)
            seen.requests += 1

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        began = time.perf_counter()
        await asyncio.gather(*(client(session) for _ in range(clients)))
        seen.wall = time.perf_counter() - began
    return seen


def one_token_ms(url: str, prompt_ids: list[int], count: int, pause_s: float) -> list[float]:
    """Milliseconds of one-token completions on one connection, with the smallest client, pauses between."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    sent = json.dumps({"model": "bench", "prompt": prompt_ids, "max_tokens": 1, "temperature": 0})
    seconds = []
    for _ in range(count):
        time.sleep(random.uniform(0, pause_s))
        began = time.perf_counter()
        connection.request("POST", "/v1/completions", sent, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        seconds.append(time.perf_counter() - began)
        assert answer.status == 200
    connection.close()
    return [second * 1000 for second in seconds]
