"""Measure what joins of handoffs cost, and what moving KV does to answers. `make bench-joins`.

Quality is measured in plain torch in float32, with the same questions put to all ways: each of four parts
names code words, which are asked for. Cost is measured on one engine without a prefix cache, in the dtype
that suits the processor; what is compared alternates in one run. Printed are medians and ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import random
import statistics
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from handoff import Client, Rows, medians, table
from rich.progress import track
from servers import Server, free_port, machine
from torch_joins import Model, Way

from baton.config.settings import load_settings
from baton.models.store import ModelStore
from baton.relay.move import HEAD_TOKENS, LONE_HEAD_TOKENS

CONFIG = """
[handoffs]
auto = "off"
store = "file:{folder}/store"
budget = "6GiB"

[[engines]]
name = "smollm2"
model = "smollm2"
handoff = true
kv_cache_memory = "1GiB"
args = {{ enable_prefix_caching = false, max_num_seqs = 16 }}
"""
MODEL = "smollm2"
RULES = "Agents report from four cities. Every report names code words. Remember all of them.\n"
CITIES = ("Rome", "Madrid", "Vienna", "Oslo", "Lima", "Cairo", "Tokyo", "Lagos", "Quito", "Perth")
THINGS = ("bridge", "tower", "market", "harbour", "garden", "station", "museum", "theatre")
WORDS = (
    "falcon", "copper", "violet", "anchor", "winter", "lantern", "meadow", "silver", "thunder", "pepper",
    "marble", "canyon", "velvet", "harvest", "island", "rocket", "shadow", "timber", "walnut", "zephyr",
)  # fmt: skip
FILLERS = (
    "It was a quiet day and the streets were empty.",
    "People spoke about the weather and the price of bread.",
    "A small boat went down the river in the morning.",
    "The old clock was repaired by two men from the north.",
    "Nobody knew when the next train would come.",
)
ANSWER_TOKENS = 6
PARTS = 4
FULL = Way("full prefill", moves=False)


@dataclass(frozen=True)
class Questions:
    """Four reports, and what is asked about them."""

    parts: list[str]
    asked: list[tuple[str, str]]


@dataclass
class Score:
    """What one way did, over all questions.

    Attributes:
        right: for each question whether the code word was said.
        divergences: KL of the next token's distribution from that of a full prefill, in nats, by question.
        same: share of places whose likeliest token is that of a full prefill, by question.
    """

    right: list[bool] = field(default_factory=list)
    divergences: list[float] = field(default_factory=list)
    same: list[float] = field(default_factory=list)


def reports(chance: random.Random, size: int, model: Model) -> Questions:
    """Four reports of about `size` tokens, and a question about each."""
    cities, words = chance.sample(CITIES, PARTS), chance.sample(WORDS, PARTS)
    parts, asked = [], []
    for city, word in zip(cities, words, strict=True):
        fact = f"The code word of {city} is"
        lines = [f"Report from {city}."]
        while len(model.tokens(" ".join(lines))) < size - 12:
            lines.append(chance.choice(FILLERS))
        lines.insert(chance.randrange(1, len(lines)), f"{fact} {word}.")
        parts.append(" ".join(lines) + "\n")
        asked.append((fact, word))
    return Questions(parts, asked)


def quality(model: Model, count: int, size: int, *, shared: bool) -> dict[str, Score]:
    """Ask about reports that were computed behind the same rules, or each alone."""
    heads = (4, HEAD_TOKENS) if shared else (HEAD_TOKENS, LONE_HEAD_TOKENS)
    ways = [FULL, Way("moved, keys not rotated", rotates=False), Way("moved")]
    ways += [Way(f"moved, first {head} computed", head=head) for head in heads]
    done = heads[-1]  # the negative control of what Baton does
    ways.append(Way(f"moved, keys not rotated, first {done} computed", rotates=False, head=done))
    scores: dict[str, Score] = defaultdict(Score)
    chance = random.Random(7)
    rules = model.tokens(RULES) if shared else []
    sets = -(-count // PARTS)
    for _ in track(range(sets), "behind the same rules" if shared else "each alone"):
        told = reports(chance, size, model)
        parts = [model.tokens(part) for part in told.parts]
        kept = [model.alone([*rules, *part]) for part in parts]
        joined = [model.joined(rules, parts, kept, way) for way in ways]
        for question, word in told.asked:
            _ask(model, dict(zip((way.name for way in ways), joined, strict=True)), question, word, scores)
    return scores


def _ask(model: Model, joined: dict[str, Any], question: str, word: str, scores: dict[str, Score]) -> None:
    tokens = model.tokens(question)
    said = {name: model.answer(cache, tokens, ANSWER_TOKENS) for name, cache in joined.items()}
    places = [*tokens, *said[FULL.name]]
    full = model.continued(joined[FULL.name], places)
    for name, cache in joined.items():
        found = model.continued(cache, places)
        scores[name].right.append(word in model.text(said[name]).lower())
        scores[name].divergences.append(float((full.exp() * (full - found)).sum(-1).mean()))
        scores[name].same.append(float((full.argmax(-1) == found.argmax(-1)).float().mean()))


def show_quality(scores: dict[str, Score], title: str) -> None:
    """Print one table of quality."""
    full = scores[FULL.name]
    rows = []
    for name, score in scores.items():
        both = sum(one and other for one, other in zip(full.right, score.right, strict=True))
        kept, right = both / max(1, sum(full.right)), statistics.mean(score.right)
        means = (right, kept, statistics.mean(score.divergences), statistics.mean(score.same))
        rows.append([name, *(f"{value:.3f}" for value in means)])
    print(f"\n{title}, {len(full.right)} questions\n")
    table(["", "right", "kept", "KL", "top-1"], rows)


async def cost(folder: Path, sizes: tuple[int, ...], rounds: int) -> None:
    """Measure the first token behind four parts, and what a moved token costs."""
    config = folder / "baton.toml"
    config.write_text(CONFIG.format(folder=folder))
    port = free_port()
    command = [str(Path(sys.executable).parent / "baton"), "serve", "--config", str(config)]
    with Server("joins", [*command, "--port", str(port)], f"http://127.0.0.1:{port}") as server:
        client = Client(server.url)
        for rules in (RULES, ""):
            for size in sizes:
                await _cost_of(client, size, rounds, rules)


async def _cost_of(client: Client, size: int, rounds: int, rules: str) -> None:
    took: Rows = defaultdict(list)
    costs: list[float] = []
    for number in track(range(rounds), f"{PARTS} x {size}"):
        names = [await _left(client, rules, size, number * PARTS + part) for part in range(PARTS)]
        ahead = await client.join_ahead(MODEL, names)
        asked: dict[str, dict[str, Any]] = {
            "exact": {"from": names},
            "moved": {"from": names, "join": "moved"},
            "joined ahead": {"from": ahead},
        }
        whole, _ = await client.ask(MODEL, "So", handoff=asked["exact"])
        ways = ("computed", *asked)
        for name in ways if number % 2 else ways[::-1]:
            if name == "computed":
                took[name].append((await client.ask(MODEL, whole["choices"][0]["prompt_token_ids"]))[1])
                continue
            answer, ms = await client.ask(MODEL, "So", handoff=asked[name])
            took[name].append(ms)
            if name == "moved":
                source = answer["handoff"]["source"]
                assert not source["exact"], "the planner let it be computed"
                costs.append(source["load_ms"] / (source["loaded_tokens"] + source["moved_tokens"]))
        for each in (*names, ahead):
            await client.forget(each)
    found = medians(took)
    rows = [[name, f"{ms:.0f}", f"{ms / found['computed']:.3f}"] for name, ms in found.items()]
    shared = "behind the same rules" if rules else "each computed alone"
    print(f"\nFirst token behind {PARTS} x {size} tokens, {shared}\n")
    table(["", "ms", "of computing it"], rows)
    print(f"A moved join takes {statistics.median(costs):.3f} ms for each of its tokens.")


async def _left(client: Client, rules: str, size: int, seed: int) -> str:
    """The id of what an agent leaves: rules that all have, or none, and a report like no other."""
    chance, words = random.Random(seed), 0
    lines = [f"Report {seed}."]
    while words < size * 0.8:
        line = " ".join(chance.sample((*WORDS, *THINGS, *CITIES), 9))
        lines.append(f"{line}.")
        words += 10
    answer, _ = await client.ask(MODEL, rules + " ".join(lines), handoff={"save": True})
    return str(answer["handoff"]["id"])


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=("quality", "cost"), help="one of both parts")
    parser.add_argument("--questions", type=int, default=200, help="questions of each table (200)")
    parser.add_argument("--alone", action="store_true", help="of quality the reports computed alone only")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each length (5)")
    given = parser.parse_args()
    print(f"{datetime.date.today()}, {machine()}")
    if given.only != "quality":
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(cost(Path(folder), (200, 1500), given.rounds))
    if given.only != "cost":
        model = Model(ModelStore(load_settings().models_folder).resolve(MODEL))
        tables = ((True, "Behind the same rules"), (False, "Each report computed alone"))
        for shared, title in tables[given.alone :]:
            show_quality(quality(model, given.questions, 200, shared=shared), title)


if __name__ == "__main__":
    main()
