"""Load from a process of its own, so that it takes no turns from the gateway it is sent to.

Run as a script: the plan is JSON in the first argument, what came of it is JSON on standard output.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

AGAIN = (429, 503)
IDLE_S = 1.0
"""The gateway closes what is idle for longer than some seconds; such a connection is not used again."""


@dataclass
class Plan:
    """What is sent.

    Attributes:
        url: of the gateway.
        keys: an API key for each client.
        rates: requests a second of each client, whatever becomes of them; 0: as many at once as `closed` says,
            each followed by the next.
        seconds: how long.
        body: of every request.
        retries: how often a client asks again, at once, when it was turned away.
        closed: see `rates`.
        scrapes: read `/metrics` so often a second.
        metrics_url: where that is.
        seed: of the arrivals.
    """

    url: str
    keys: list[str]
    rates: list[float]
    seconds: float
    body: dict[str, Any]
    retries: int = 0
    closed: int = 0
    scrapes: float = 0.0
    metrics_url: str = ""
    seed: int = 1


@dataclass
class Answer:
    """One answer: `took` is from sending to its last byte, `at` when that was, from the start of the load."""

    client: int
    status: int
    took: float
    at: float
    retry_after: int | None


@dataclass
class Outcome:
    """What came of a plan: every answer, and every page of metrics with the seconds it took.

    `held_up` is how long sender and gateway together waited for a core that other processes had: where that
    is much, times tell of the machine and not of the gateway.
    """

    answers: list[Answer] = field(default_factory=list)
    held_up: float = 0.0
    pages: list[tuple[float, str]] = field(default_factory=list)


def run(plan: Plan) -> Outcome:
    """Send it from another process, to a gateway in this one."""
    before = waited_for_a_core()
    done = subprocess.run(
        [sys.executable, __file__, json.dumps(asdict(plan))],
        capture_output=True,
        text=True,
        timeout=plan.seconds + 60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    answers = [Answer(**answer) for answer in told["answers"]]
    held_up = told["held_up"] + waited_for_a_core() - before
    return Outcome(answers, held_up, [(took, page) for took, page in told["pages"]])


def waited_for_a_core(*threads: Path) -> float:
    """Seconds in which these threads could have run and others did (the kernel's sched-stats.rst).

    Args:
        threads: their folders in `/proc`; without any, all threads of this process.
    """
    waited = 0
    for thread in threads or Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it may have ended
            waited += int((thread / "schedstat").read_text().split()[1])
    return waited / 1e9


class Load:
    """The process that sends."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._where = urlsplit(plan.url)
        self._idle: list[tuple[float, asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._outcome = Outcome()
        self._began = 0.0

    async def send(self) -> Outcome:
        plan = self._plan
        self._began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            if plan.scrapes:
                group.create_task(self._scrape())
            for client, rate in enumerate(plan.rates):
                if rate:
                    group.create_task(self._open(client, rate, group))
                else:
                    for _ in range(plan.closed):
                        group.create_task(self._closed(client))
        self._outcome.held_up = waited_for_a_core()
        return self._outcome

    @property
    def _now(self) -> float:
        return time.perf_counter() - self._began

    async def _open(self, client: int, rate: float, group: asyncio.TaskGroup) -> None:
        """Arrivals that do not wait for answers."""
        draw = random.Random(f"{self._plan.seed} {client}")
        due = draw.expovariate(rate)
        while due < self._plan.seconds:
            if (early := due - self._now) > 0:
                await asyncio.sleep(early)
            group.create_task(self._ask(client))
            due += draw.expovariate(rate)

    async def _closed(self, client: int) -> None:
        while self._now < self._plan.seconds:
            await self._ask(client)

    async def _ask(self, client: int) -> None:
        body = json.dumps(self._plan.body)
        for _ in range(1 + self._plan.retries):
            sent = time.perf_counter()
            status, headers, _ = await self._request("POST /v1/completions", client, body)
            took = time.perf_counter() - sent
            after = headers.get("retry-after")
            answer = Answer(client, status, took, self._now, int(after) if after else None)
            self._outcome.answers.append(answer)
            if status not in AGAIN:
                return

    async def _scrape(self) -> None:
        scraper = Load(replace(self._plan, url=self._plan.metrics_url))
        while self._now < self._plan.seconds:
            sent = time.perf_counter()
            status, _, page = await scraper._request("GET /metrics", 0, "")
            assert status == 200
            self._outcome.pages.append((time.perf_counter() - sent, page.decode()))
            await asyncio.sleep(1 / self._plan.scrapes)

    async def _request(self, target: str, client: int, body: str) -> tuple[int, dict[str, str], bytes]:
        reader, writer = await self._connection()
        lines = [
            f"{target} HTTP/1.1",
            f"Host: {self._where.netloc}",
            f"Authorization: Bearer {self._plan.keys[client]}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
        ]
        writer.write(("\r\n".join(lines) + "\r\n\r\n" + body).encode())
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").splitlines()
        headers = {name.lower(): value.strip() for name, _, value in (row.partition(":") for row in head[1:])}
        content = await reader.readexactly(int(headers["content-length"]))
        self._idle.append((self._now, reader, writer))
        return int(head[0].split()[1]), headers, content

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self._idle:
            used, reader, writer = self._idle.pop()
            if self._now - used < IDLE_S:
                return reader, writer
            writer.close()
        return await asyncio.open_connection(self._where.hostname, self._where.port)


if __name__ == "__main__":
    print(json.dumps(asdict(asyncio.run(Load(Plan(**json.loads(sys.argv[1]))).send()))))
