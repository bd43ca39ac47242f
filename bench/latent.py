"""Measure what a latent step costs, and whether it helps. `make bench-latent`.

`steps`: plain vLLM in this process, the stock class beside the one that thinks, rounds alternating.
`pipeline` and `tasks`: a gateway over SmolLM2 without a prefix cache, so that nothing but the handoff saves
work. Tasks are made up here; an answer is right when its first word is. `rosetta`: what one vector carries
from a model to another (`--source`, `--target`: folders or embedded models), beside its text, and beside the
vector of another page.
"""

from __future__ import annotations

import argparse
import datetime
import os
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from servers import ENVIRONMENT, Server, free_port, machine

from baton.config.settings import load_settings
from baton.models.store import ModelStore
from baton_latent import latent_overrides, prepare_latent_prompt
from baton_latent.contract import PLACEHOLDER_KEY

CONFIG = """
[handoffs]
auto = "off"
store = "file:{folder}/store"

[[engines]]
name = "thinker"
model = "smollm2"
handoff = true
latent = true
args = {{ enable_prefix_caching = false, max_num_seqs = 16 }}
"""
TWO_MODELS = """
[handoffs]
auto = "off"
store = "file:{folder}/store"
rosetta = true

[[engines]]
name = "thinker"
model = "{source}"
handoff = true
latent = true
args = {{ max_num_seqs = 16 }}

[[engines]]
name = "target"
model = "{target}"
handoff = true
latent = true
args = {{ max_num_seqs = 16 }}
"""
PROMPT_TOKENS = 64
AHEAD_TOKENS = 448
STEPS = 32
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "33554432", "MALLOC_TRIM_THRESHOLD_": "1073741824"}
"""As the gateway sets it for its engines: without it engines differ by what page faults cost them."""
DEPTHS = (5, 10, 20)
LONG = 220
"""Sentences among which the code words are, in the long one."""
COMPUTED = re.compile(r'^vllm:prompt_tokens_by_source_total\{[^}]*source="local_compute"[^}]*\} (\S+)$', re.M)
BATCHES = (1, 4, 8)
WORDS = [
    "apple", "river", "stone", "cloud", "tiger", "lemon", "paper",
    "glass", "smoke", "bread", "piano", "tower", "candle", "garden", "silver",
]  # fmt: skip
OWNERS = [
    "Anna", "Peter", "Maria", "Thomas", "Laura", "Simon", "Clara",
    "Oscar", "Julia", "Victor", "Emma", "David", "Alice", "Martin", "Sarah",
]  # fmt: skip
OTHER_THINGS = (
    "They walked to the market",
    "It rained all day",
    "The train was late again",
    "A dog slept by the door",
    "We talked for an hour",
)
Json = dict[str, Any]


def prompt(length: int, seed: int) -> list[int]:
    """Token ids that no other call shares a prefix with."""
    return [100 + (seed * 104729 + index * 7919 + index * index * 31) % 40000 for index in range(length)]


class Offline:
    """Plain vLLM, timed.

    Args:
        overrides: its `hf_overrides`; None: vLLM's own class.
    """

    def __init__(self, model: str, overrides: Json | None) -> None:
        from vllm import LLM  # after the environment is set

        self._placeholder = (overrides or {}).get(PLACEHOLDER_KEY, 0)
        self._llm = LLM(
            model,
            enforce_eager=True,
            enable_prefix_caching=False,
            max_model_len=512,
            max_num_seqs=16,
            kv_cache_memory_bytes=256 * 1024 * 1024,
            hf_overrides=overrides or {},
        )

    def seconds(self, batch: int, seed: int, *, steps: int = 0, said: int = 1) -> float:
        """How long a batch of fresh prompts takes, behind a prompt that keeps the engine busy meanwhile.

        Without it the first prompt of a batch would be a step of its own, and a batch's thoughts two runs.
        """
        from vllm import SamplingParams

        asked = [
            prepare_latent_prompt(prompt(PROMPT_TOKENS, seed + n), steps, self._placeholder)
            for n in range(batch)
        ]
        prompts = [{"prompt_token_ids": ids} for ids in (prompt(AHEAD_TOKENS, seed + batch), *asked)]
        wanted = [SamplingParams(max_tokens=count, temperature=0, ignore_eos=True) for count in (1, said)]
        began = time.perf_counter()
        self._llm.generate(prompts, [wanted[0], *[wanted[1]] * batch], use_tqdm=False)
        return time.perf_counter() - began

    def step_s(self, batch: int, seed: int, *, thinks: bool = False) -> float:
        """What one step of a batch takes: a latent one, or one that decodes."""
        more = {"steps": STEPS} if thinks else {"said": STEPS + 1}
        return (self.seconds(batch, seed, **more) - self.seconds(batch, seed)) / STEPS

    def close(self) -> None:
        """End its processes, which a second engine of this process would keep from ending by themselves."""
        self._llm.llm_engine.engine_core.shutdown()


def steps_part(options: argparse.Namespace) -> None:
    """A latent step beside a decode step, and a decode step beside the stock class's.

    Of two engines one may be some per cent faster for as long as it lives, so both are started several times.
    """
    os.environ |= ENVIRONMENT | ALLOCATOR | {"VLLM_LOGGING_LEVEL": "ERROR"}
    model = ModelStore(load_settings().models_folder).resolve("smollm2")
    found: dict[int, list[Json]] = {batch: [] for batch in BATCHES}
    for launch in range(options.launches):
        given = {"thinker": latent_overrides(model), "stock": None}
        names = sorted(given, reverse=bool(launch % 2))  # neither class is always the first to start
        engines = {name: Offline(model, given[name]) for name in names}
        for batch in BATCHES:
            seed = 1000 * (10 * launch + batch)
            found[batch].append(one_launch(engines["thinker"], engines["stock"], batch, seed, options.rounds))
        for engine in engines.values():
            engine.close()
    columns = ["latent step, ms", "decode step, ms", "stock class's, ms", "latent / decode", "decode / stock"]
    rows = [
        [str(batch), *(spread([told[name] for told in launches], name) for name in columns)]
        for batch, launches in found.items()
    ]
    table(["batch", *columns], rows)


def one_launch(thinker: Offline, stock: Offline, batch: int, seed: int, rounds: int) -> Json:
    """The medians of one launch's rounds; the first one warms up."""
    latent, decode, stock_decode = [], [], []
    for turn in range(rounds + 1):
        if turn % 2:  # neither class is always the second to be measured
            stock_decode.append(stock.step_s(batch, seed + 20 * turn))
        latent.append(thinker.step_s(batch, seed + 20 * turn, thinks=True))
        decode.append(thinker.step_s(batch, seed + 20 * turn))
        if not turn % 2:
            stock_decode.append(stock.step_s(batch, seed + 20 * turn))
    thought, said, stock_said = (statistics.median(took[1:]) for took in (latent, decode, stock_decode))
    return {
        "latent step, ms": thought * 1000,
        "decode step, ms": said * 1000,
        "stock class's, ms": stock_said * 1000,
        "latent / decode": thought / said,
        "decode / stock": said / stock_said,
    }


def spread(values: list[float], name: str) -> str:
    """The launches' median; of a ratio the least and the most too."""
    middle = statistics.median(values)
    if name.endswith("ms"):
        return f"{middle:.2f}"
    return f"{middle:.3f} ({min(values):.3f} to {max(values):.3f})"


class Agents:
    """Asks one gateway, and counts."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=300)
        self.said = self.thought = 0
        self.options: Json = {}

    def computed(self) -> int:
        """Tokens of prompts that the engine has computed, latent steps among them, by its own count."""
        page = self._http.get("/metrics").text
        return int(sum(float(value) for value in COMPUTED.findall(page)))

    def say(self, text: str, said: int, model: str = "thinker", **handoff: Any) -> tuple[str, Json]:
        """A completion, and what it tells of its handoff."""
        body = {"model": model, "prompt": text, "max_tokens": said, "temperature": 0} | self.options
        answer = self._http.post("/v1/completions", json=body | ({"handoff": handoff} if handoff else {}))
        told: Json = answer.raise_for_status().json()
        self.said += told["usage"]["completion_tokens"]
        return told["choices"][0]["text"], told.get("handoff") or {}

    def think(self, text: str, steps: int, source: str | None = None) -> str:
        """A context left behind without an answer."""
        body = {"model": "thinker", "prompt": text, "latent_steps": steps} | (
            {"from": source} if source else {}
        )
        told = self._http.post("/v1/handoffs", json=body).raise_for_status().json()
        self.thought += steps
        found: str = told["id"]
        return found


def by_text(agents: Agents, document: str, roles: list[str]) -> None:
    """Every agent reads everything again."""
    notes = ""
    for role in roles:
        notes += agents.say(f"{role}\n{document}\n{notes}", 24)[0]


def by_handoff(agents: Agents, document: str, roles: list[str]) -> None:
    """Every agent goes on from the one before it."""
    source: Json = {}
    text = document
    for role in roles:
        _, left = agents.say(f"{text}\n{role}\n", 24, save=True, **source)
        source, text = {"from": left["id"]}, ""


def by_thought(agents: Agents, document: str, roles: list[str]) -> None:
    """All but the last think instead of speaking."""
    source, text = None, document
    for role in roles[:-1]:
        source, text = agents.think(f"{text}\n{role}\n", 8, source), ""
    agents.say(f"\n{roles[-1]}\n", 24, **{"from": source})


def pipeline_part(agents: Agents, options: argparse.Namespace) -> None:
    """Two and four agents, who all say as much; what is passed on is text, a handoff, or a thought."""
    rows = []
    agents.options = {"ignore_eos": True}
    for count in (2, 4):
        roles = [f"You are agent {number}. Write down what matters:" for number in range(count)]
        for name, pass_on in (("text", by_text), ("handoff", by_handoff), ("latent, 8 steps", by_thought)):
            took = []
            for turn in range(3):
                document = " ".join(f"Chapter {n} tells of {n * (37 + turn)} birds." for n in range(60))
                agents.said = agents.thought = 0
                computed = agents.computed()
                began = time.perf_counter()
                pass_on(agents, document, roles)
                took.append(time.perf_counter() - began)
            prefilled = agents.computed() - computed - agents.thought
            counts = (prefilled, agents.said, agents.thought)
            rows.append([str(count), name, f"{statistics.median(took):.2f}", *map(str, counts)])
    agents.options = {}
    table(["agents", "passed on", "wall, s", "tokens prefilled", "tokens said", "latent steps"], rows)


Part = Callable[[Agents, argparse.Namespace], None]


def sums(draw: random.Random) -> tuple[str, str, str]:
    """Sums of two numbers, four of them solved before."""

    def one() -> tuple[int, int]:
        return draw.randint(2, 49), draw.randint(2, 49)

    shown = "".join(f"{a} + {b} = {a + b}\n" for a, b in (one() for _ in range(4)))
    a, b = one()
    return shown, f"{a} + {b} =", str(a + b)


def recall(draw: random.Random, others: int = 36) -> tuple[str, str, str]:
    """One of three code words, among sentences about other things."""
    owners, words = draw.sample(OWNERS, 3), draw.sample(WORDS, 3)
    lines = [f"The code word of {owner} is {word}.\n" for owner, word in zip(owners, words, strict=True)]
    lines += [f"{draw.choice(OTHER_THINGS)}.\n" for _ in range(others)]
    draw.shuffle(lines)
    asked = draw.randrange(3)
    return "".join(lines), f"The code word of {owners[asked]} is", words[asked]


def right(agents: Agents, task: tuple[str, str, str], passed_on: str) -> bool:
    """Whether B's answer begins with the right word, given what A passed on."""
    shown, question, wanted = task
    if passed_on == "direct":
        text, _ = agents.say(shown + question, 6)
    elif passed_on == "text":
        notes, _ = agents.say(f"{shown}In short, what matters of this is:", 48)
        text, _ = agents.say(f"{notes}\n{question}", 6)
    else:
        steps = 0 if passed_on == "handoff" else int(passed_on.split()[1])
        text, _ = agents.say(question, 6, **{"from": agents.think(shown, steps)})
    found = re.match(r"\W*(\w+)", text)
    return found is not None and found[1] == wanted


def tasks_part(agents: Agents, options: argparse.Namespace) -> None:
    """How many of B's answers are right."""
    kinds: dict[str, Callable[[random.Random], tuple[str, str, str]]] = {
        "sums": sums,
        "recall": recall,
        "long recall": partial(recall, others=LONG),
    }
    ways = ("direct", "text", "handoff", *(f"latent {steps}" for steps in DEPTHS))
    rows = []
    for name, make in kinds.items():
        tasks = [make(random.Random(seed)) for seed in range(options.tasks)]
        counts = [sum(right(agents, task, way) for task in tasks) for way in ways]
        rows.append([name, *(f"{count}/{options.tasks}" for count in counts)])
    table(["task", *ways], rows)


def rosetta_part(agents: Agents, options: argparse.Namespace) -> None:
    """How many answers of another model are right, given nothing, one vector, another page's, or the text."""
    steps = (0, 10)
    ways = ("nothing", *(f"vector, {count} latent steps" for count in steps), "another page's vector", "text")
    counts = dict.fromkeys(ways, 0)
    for seed in range(options.tasks):
        (shown, question, wanted), other = (recall(random.Random(each), 8) for each in (seed, 1000 + seed))
        named = f"{shown}{question}"
        asked: dict[str, Json] = {
            f"vector, {count} latent steps": {"from": agents.think(named, count)} for count in steps
        }
        asked["another page's vector"] = {"from": agents.think(f"{other[0]}{other[1]}", 0)}
        asked = {name: given | {"translate": {"via": "rosetta"}} for name, given in asked.items()}
        asked |= {"nothing": {}, "text": {"from": agents.think(shown, 0), "translate": True}}
        for name in ways:
            text, _ = agents.say(question, 6, "target", **asked[name])
            found = re.match(r"\W*(\w+)", text)
            counts[name] += found is not None and found[1] == wanted
    table(list(ways), [[f"{count}/{options.tasks}" for count in counts.values()]])


def table(names: list[str], rows: list[list[str]]) -> None:
    """Print Markdown."""
    out = Console(soft_wrap=True)
    for row in (names, ["---"] * len(names), *rows):
        out.print(f"| {' | '.join(row)} |", markup=False, highlight=False)
    out.print()


def behind_a_gateway(text: str, parts: list[Part], options: argparse.Namespace) -> None:
    """Measure parts with a gateway of these settings."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        config = Path(folder) / "bench.toml"
        config.write_text(text.format(folder=folder, source=options.source, target=options.target))
        port = free_port()
        command = [str(Path(sys.executable).parent / "baton"), "serve", "--config", str(config)]
        with Server("latent", [*command, "--port", str(port)], f"http://127.0.0.1:{port}") as server:
            agents = Agents(server.url)
            for part in parts:
                part(agents, options)


def main() -> None:
    """Measure, and print Markdown for RESULTS.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--tasks", type=int, default=40)
    parser.add_argument("--source", default="smollm2", help="the model that thinks, of the part rosetta")
    parser.add_argument("--target", default="smollm2", help="the model that answers there")
    parts = ("steps", "pipeline", "tasks", "rosetta")
    parser.add_argument("--parts", choices=parts, nargs="+", default=list(parts))
    options = parser.parse_args()
    print(f"`make bench-latent ARGS='{' '.join(sys.argv[1:])}'`, {datetime.date.today()}, {machine()}\n")
    gateways = {
        CONFIG: (("pipeline", pipeline_part), ("tasks", tasks_part)),
        TWO_MODELS: (("rosetta", rosetta_part),),
    }
    for config, measured in gateways.items():
        wanted = [part for name, part in measured if name in options.parts]
        if wanted:
            behind_a_gateway(config, wanted, options)
    if "steps" in options.parts:
        steps_part(options)


if __name__ == "__main__":
    main()
