"""Measure what handoffs save B, chains and fan-outs, and what saving one costs A. `make bench-handoff`.

One gateway with four engines of the same real weights in the dtype that suits the processor: two without a
prefix cache, so that nothing but the handoff can help; one with, to hold handoffs against the engine's own
hits; one with vLLM's ExampleConnector, the only one of its own that runs on a CPU. What is compared
alternates in one run; printed are medians and ratios.

How fast this machine prefills is measured first. From it follow the lengths of the contexts and the number
of rounds, so that a run takes about `--minutes`; `--lengths` and `--rounds` overrule that.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import math
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy
from rich.console import Console
from rich.progress import track
from servers import Server, free_port, machine

CONFIG = """
[handoffs]
auto = "off"
store = "file:{folder}/store"
budget = "6GiB"

[[engines]]
name = "first"
model = "smollm2"
handoff = true
args = {{ enable_prefix_caching = false, max_num_seqs = 16 }}

[[engines]]
name = "second"
model = "smollm2"
handoff = true
args = {{ enable_prefix_caching = false, max_num_seqs = 16 }}

[[engines]]
name = "caching"
model = "smollm2"
handoff = true
args = {{ max_num_seqs = 16 }}

[[engines]]
name = "example"
model = "smollm2"
[engines.args]
enable_prefix_caching = false
max_num_seqs = 16
max_num_batched_tokens = 8192  # in chunks it saves the wrong tokens, and its next load ends the engine
[engines.args.kv_transfer_config]
kv_connector = "ExampleConnector"
kv_role = "kv_both"
kv_connector_extra_config = {{ shared_storage_path = "{folder}/example" }}
"""
OWN_TOKENS = 32
PACE_TOKENS = 2048
"""The length of the prompt whose prefill is measured."""
OTHER_WORK = 1.5
"""What a run takes for each second of prefill: decoding, saving and loading come on top."""
ASKED = {"max_tokens": 1, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
Rows = dict[str, list[float]]


@dataclass(frozen=True)
class Plan:
    """What one run measures.

    Attributes:
        lengths: tokens of A's contexts.
        rounds: how often each is measured.
        shared: tokens of the context that a fan-out's agents share.
    """

    lengths: tuple[int, ...]
    rounds: int
    shared: int

    @property
    def prefilled(self) -> int:
        """Tokens that the engines compute in a whole run."""
        first = 4 * sum(self.lengths) * self.rounds
        fan_out = (sum(CONSUMERS) + len(CONSUMERS)) * self.shared * self.fan_out_rounds
        chains = sum(CHAINS) * 1400 + len(CHAINS) * 1024
        return first + 2 * 1024 * self.rounds + fan_out + chains

    @property
    def fan_out_rounds(self) -> int:
        return max(2, self.rounds // 2)


CONSUMERS = (1, 2, 4, 8, 16)
CHAINS = (2, 4, 8)
LENGTHS = (128, 512, 2048, 4096, 7500)
PLANS = (
    Plan(LENGTHS, 7, 2048),
    Plan(LENGTHS, 4, 2048),
    Plan(LENGTHS, 3, 1024),
    Plan(LENGTHS[:4], 3, 1024),
    Plan(LENGTHS[:3], 3, 512),
    Plan((128, 512, 1024), 3, 256),
)
"""From the most to the least that a run measures."""


def plan_for(seconds_per_token: float, minutes: float) -> Plan:
    """The most that can be measured in so many minutes; the least there is, if even that takes longer."""
    fitting = (plan for plan in PLANS if minutes_of(plan, seconds_per_token) <= minutes)
    return next(fitting, PLANS[-1])


def minutes_of(plan: Plan, seconds_per_token: float) -> float:
    """How long a run is expected to take."""
    return plan.prefilled * seconds_per_token * OTHER_WORK / 60


def prompt(length: int, seed: int) -> list[int]:
    """Token ids that no other call shares a prefix with."""
    return [1 + (seed * 104729 + index * 7919 + index * index * 31) % 40000 for index in range(length)]


def medians(rows: Rows) -> dict[str, float]:
    """The median of each row."""
    return {name: statistics.median(values) for name, values in rows.items()}


class Client:
    """Asks one gateway."""

    def __init__(self, url: str, **headers: str) -> None:
        self.url = url
        self._http = httpx.AsyncClient(base_url=url, timeout=300, headers=headers)

    async def ask(self, model: str, tokens: str | list[int], **more: Any) -> tuple[dict[str, Any], float]:
        """An answer, and the milliseconds it took."""
        body = ASKED | {"model": model, "prompt": tokens} | more
        began = time.perf_counter()
        answer = await self._http.post("/v1/completions", json=body)
        took = (time.perf_counter() - began) * 1000
        found: dict[str, Any] = answer.raise_for_status().json()
        return found, took

    async def stream(self, model: str, tokens: list[int], **more: Any) -> tuple[float, list[float]]:
        """Milliseconds to the first token, and between each two after it."""
        body = ASKED | {"model": model, "prompt": tokens, "stream": True} | more
        times = [time.perf_counter()]
        async with self._http.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                    times.append(time.perf_counter())
        gaps = [(later - earlier) * 1000 for earlier, later in pairwise(times)]
        return gaps[0], gaps[1:]

    async def metrics(self) -> str:
        """The gateway's metrics."""
        return (await self._http.get("/metrics")).text

    async def join_ahead(self, model: str, handoffs: list[str]) -> str:
        """The id of the handoff that joins several, once it is ready."""
        answer = await self._http.post("/v1/handoffs", json={"model": model, "from": handoffs})
        joined = answer.raise_for_status().json()
        while joined["state"] == "pending":
            await asyncio.sleep(0.05)
            joined = (await self._http.get(f"/v1/handoffs/{joined['id']}")).json()
        return str(joined["id"])

    async def forget(self, handoff: str) -> None:
        await self._http.delete(f"/v1/handoffs/{handoff}")


def said(answer: dict[str, Any]) -> list[int]:
    """Prompt and answer, in token ids."""
    choice = answer["choices"][0]
    whole: list[int] = choice["prompt_token_ids"] + choice["token_ids"]
    return whole


def prefilled(answer: dict[str, Any]) -> int:
    """How many tokens of the prompt were computed."""
    usage = answer["usage"]
    return int(usage["prompt_tokens"] - (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0))


def copy_ms(size: int) -> float:
    """Milliseconds a plain copy of so many bytes takes in memory."""
    source, target = numpy.ones(size, numpy.uint8), numpy.zeros(size, numpy.uint8)
    took = []
    for _ in range(5):
        began = time.perf_counter()
        numpy.copyto(target, source)
        took.append((time.perf_counter() - began) * 1000)
    return statistics.median(took)


async def example(client: Client, context: list[int], whole: list[int]) -> float:
    """B's first token through vLLM's ExampleConnector; not a number when that ended its engine."""
    try:
        await client.ask("example", context)
        return (await client.ask("example", whole))[1]
    except httpx.HTTPStatusError:
        return math.nan


async def first_token(client: Client, length: int, rounds: int) -> dict[str, float]:
    """B's first token after a context of so many tokens, every way there is."""
    rows: Rows = defaultdict(list)
    for number in range(rounds):
        context = prompt(length, length + number * 31)
        left, _ = await client.ask("first", context, handoff={"save": True})
        handoff, own, whole = left["handoff"], prompt(OWN_TOKENS, number), said(left)
        b = {"handoff": {"from": handoff["id"]}}
        rows["plain"].append((await client.ask("second", whole + own))[1])
        for name, model in (("same engine", "first"), ("other engine", "second")):
            answer, took = await client.ask(model, own, **b)
            assert answer["handoff"]["source"]["outcome"] == "loaded", answer["handoff"]
            rows[name].append(took)
            rows["load"].append(answer["handoff"]["source"]["load_ms"])
        await client.ask("caching", whole)
        rows["hit"].append((await client.ask("caching", whole + own))[1])
        answer, took = await client.ask("caching", prompt(OWN_TOKENS, number + 1000), **b)
        rows["same engine, caching"].append(took)
        rows["ExampleConnector"].append(await example(client, context, whole + own))
        rows["bytes"].append(handoff["bytes"])
        await client.forget(handoff["id"])
    found = medians(rows)
    found["limit"] = found["hit"] + copy_ms(int(found["bytes"]))
    return found


async def saving(client: Client, rounds: int) -> dict[str, float]:
    """A's own pace with and without leaving its KV behind."""
    rows: Rows = defaultdict(list)
    for number in range(rounds):
        for name, more in (("plain", {}), ("saving", {"handoff": {"save": True}})):
            tokens = prompt(1024, 7000 + 2 * number + len(more))
            first, gaps = await client.stream("first", tokens, max_tokens=48, **more)
            rows[f"first token, {name}"].append(first)
            rows[f"between tokens, {name}"] += gaps
    return medians(rows)


async def fan_out(client: Client, consumers: int, plan: Plan) -> dict[str, float]:
    """Milliseconds until the last of several agents that share a context has its first token."""
    rows: Rows = defaultdict(list)
    for number in range(plan.fan_out_rounds):
        left, _ = await client.ask("first", prompt(plan.shared, 9000 + number), handoff={"save": True})
        own = [prompt(OWN_TOKENS, 50 + number * 100 + index) for index in range(consumers)]
        for name in ("plain", "relayed"):
            b = {"handoff": {"from": left["handoff"]["id"]}} if name == "relayed" else {}
            whole = [] if b else said(left)
            began = time.perf_counter()
            await asyncio.gather(*(client.ask("second", whole + mine, **b) for mine in own))
            rows[name].append((time.perf_counter() - began) * 1000)
        await client.forget(left["handoff"]["id"])
    return medians(rows)


async def chain(client: Client, agents: int) -> dict[str, float]:
    """Agents one after the other, on two engines in turn, each adding 64 tokens of its own and 32 it says."""
    found: dict[str, float] = defaultdict(float)
    for name in ("text", "relay"):
        context, handoff = prompt(1024, agents), None
        began = time.perf_counter()
        for number in range(agents):
            own = prompt(64, agents * 100 + number)
            more: dict[str, Any] = {"max_tokens": 32}
            if name == "relay":
                more["handoff"] = {"save": True} | ({"from": handoff} if handoff else {})
            tokens = own if handoff else context + own
            answer, _ = await client.ask(("first", "second")[number % 2], tokens, **more)
            context, handoff = said(answer), answer.get("handoff", {}).get("id")
            found[f"{name} prefilled"] += prefilled(answer)
        found[f"{name} ms"] = (time.perf_counter() - began) * 1000
    return found


def table(head: list[str], rows: list[list[str]]) -> None:
    """Print Markdown."""
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    print(flush=True)


def first_token_row(length: int, found: dict[str, float]) -> list[str]:
    """One length's cells."""
    names = ("plain", "same engine", "other engine", "hit", "same engine, caching", "ExampleConnector")
    cells = [str(length), f"{found['bytes'] / 1024**2:.1f}", *(f"{found[name]:.0f}" for name in names)]
    cells += [f"{found['load']:.1f}", f"{found['plain'] / found['other engine']:.1f}x"]
    cells += [f"{found['limit'] / found['other engine']:.2f}"]
    return [*cells, f"{found['same engine, caching'] / found['hit']:.2f}"]


async def first_token_part(client: Client, plan: Plan) -> None:
    """B's first token."""
    head = "A's tokens|entry MiB|plain|same engine|other engine|own prefix cache|handoff where it is cached"
    head += "|ExampleConnector|load|plain / other engine|limit / other engine|cached handoff / own hit"
    rows = []
    for length in track(plan.lengths, "first token", console=Console(stderr=True)):
        rows.append(first_token_row(length, await first_token(client, length, plan.rounds)))
    table(head.split("|"), rows)


async def saving_part(client: Client, plan: Plan) -> None:
    """What leaving a handoff costs A."""
    found = await saving(client, plan.rounds)
    rows = []
    for name in ("first token", "between tokens"):
        plain, saved = found[f"{name}, plain"], found[f"{name}, saving"]
        rows.append([name, f"{plain:.1f}", f"{saved:.1f}", f"{saved / plain:.3f}"])
    table(["of A, ms", "plain", "saving", "ratio"], rows)


async def fan_out_part(client: Client, plan: Plan) -> None:
    """Several agents at once."""
    rows = []
    for consumers in CONSUMERS:
        found = await fan_out(client, consumers, plan)
        ratio = found["plain"] / found["relayed"]
        rows.append([str(consumers), f"{found['plain']:.0f}", f"{found['relayed']:.0f}", f"{ratio:.1f}x"])
    table(["agents at once", "plain, ms", "relayed, ms", "factor"], rows)


async def chain_part(client: Client, _plan: Plan) -> None:
    """Agents one after the other."""
    rows = []
    names = ("text prefilled", "relay prefilled", "text ms", "relay ms")
    for agents in CHAINS:
        found = await chain(client, agents)
        rows.append([str(agents), *(f"{found[name]:.0f}" for name in names)])
    table(["agents", "prefilled, text", "prefilled, relay", "text, ms", "relay, ms"], rows)


PARTS = {
    "first-token": first_token_part,
    "saving": saving_part,
    "fan-out": fan_out_part,
    "chain": chain_part,
}


async def pace(client: Client) -> float:
    """Seconds one token of a prompt takes to prefill."""
    await first_token(client, 256, 2)  # warm
    took = [(await client.ask("second", prompt(PACE_TOKENS, 100 + number)))[1] for number in range(2)]
    return min(took) / 1000 / PACE_TOKENS


async def run(url: str, options: argparse.Namespace) -> None:
    """The parts that were asked for, one after the other."""
    client = Client(url)
    seconds = await pace(client)
    plan = plan_for(seconds, options.minutes)
    given = {key: value for key in ("lengths", "rounds") if (value := getattr(options, key)) is not None}
    plan = replace(plan, **given)
    print(
        f"1,000 tokens are prefilled in {seconds * 1000:.2f} s; so contexts of "
        f"{', '.join(map(str, plan.lengths))} tokens, {plan.rounds} rounds, fan-outs over {plan.shared}: "
        f"about {minutes_of(plan, seconds):.0f} minutes in all\n",
        flush=True,
    )
    for part in options.parts:
        await PARTS[part](client, plan)


def main() -> None:
    """Measure, and print Markdown for RESULTS.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10, help="how long a run may take, about")
    parser.add_argument("--rounds", type=int, help="in place of what suits this machine")
    parser.add_argument("--lengths", type=int, nargs="+", help="in place of what suits this machine")
    parser.add_argument("--parts", choices=PARTS, nargs="+", default=list(PARTS))
    options = parser.parse_args()
    typed = f"make bench-handoff ARGS='{' '.join(sys.argv[1:])}'"
    print(f"`{typed}`, {datetime.date.today()}, {machine()}, times in ms\n")
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        config = Path(folder) / "bench.toml"
        config.write_text(CONFIG.format(folder=folder))
        port = free_port()
        command = [str(Path(sys.executable).parent / "baton"), "serve", "--config", str(config)]
        with Server("relay", [*command, "--port", str(port)], f"http://127.0.0.1:{port}") as server:
            asyncio.run(run(server.url, options))


if __name__ == "__main__":
    main()
