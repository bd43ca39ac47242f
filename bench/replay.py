"""Replay sessions of coding agents: how many tokens each way of serving prefills. `make bench-replay`.

The sessions are generated, from a seed, in the published shape of agents' traffic (AgentX: median 43 turns,
142,000 tokens in and 444 out of a request, 44 % of sessions with sub-agents, more than 96 % of a request's
tokens shared with one before it), all lengths divided by `--scale`; these are at 20:

- A session has so many turns as a log-normal draw with median 43 says (sigma 0.35, 12 to 90).
- Its requests hold all of the conversation: they begin with 1,000 tokens that all sessions have (system
  prompt, tools) and grow evenly from 0.5 to 1.5 times a length of the session's own (log-normal, median
  7,100, sigma 0.15). What a turn adds is the 22 tokens that the model answered, and a tool's output.
- 44 % of the sessions have one to three sub-agents: conversations of 4 to 12 turns that begin with the common
  1,000 tokens and a task of 500, within the session's own; what it says last is added to the session.
- Sessions take turns in a random order, one request at a time, `--pause` seconds apart. Halfway through all
  servers are ended and started again.

All ways have the same engine: a random model of two layers, since tokens are counted, with KV memory for half
of what the sessions hold in the end, or for the longest request and 16 MiB where that is more. What was
prefilled is `prompt_tokens` less `cached_tokens` of each answer's `usage`.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from automatic import stored
from handoff import table
from scale import valkey_server
from servers import Server, free_port, machine, tiny_model

from baton.config.settings import load_settings
from baton.models.store import ModelStore

MEDIAN_TURNS, WITH_SUB_AGENTS = 43, 0.44
BLOCK = 128
"""Tokens in a block of vLLM's on CPUs."""
LEAST_BYTES = 16 << 20
"""The least that Baton takes as `kv_cache_memory`."""
HEAD = 128
"""Numbers in a head: so wide that the least memory holds half of what a few sessions do."""
KV_BYTES_PER_TOKEN = 4096
CONFIG = """
[handoffs]
audit = 0.0
store = "file:{folder}/store"
budget = "{budget}"
{shared}

[[engines]]
name = "bench"
model = "{model}"
handoff = true
kv_cache_memory = {memory}
args = {{ max_model_len = {longest}, max_num_seqs = 4, dtype = "float32" }}
"""
SHARED = """
shared = "{url}"
shared_secret_file = "{folder}/secret"
shared_fetch_s = 30
"""


def ids(chance: random.Random, count: int) -> list[int]:
    """Random token ids."""
    return [chance.randrange(100, 40_000) for _ in range(count)]


@dataclass(frozen=True)
class Lengths:
    """Tokens all sessions begin with, of a sub-agent's task, of an answer, and the median of a prompt."""

    common: int
    task: int
    said: int
    median_in: int


def scaled(scale: int) -> Lengths:
    """AgentX's lengths divided; it does not publish the first two."""
    return Lengths(*(round(length / scale) for length in (20_000, 10_000, 444, 142_000)))


@dataclass
class Agent:
    """A conversation: its first prompt, what each later turn adds, and how long an answer is."""

    first: list[int]
    added: list[list[int]]
    said: int
    helpers: dict[int, Agent] = field(default_factory=dict)
    """Sub-agents, by the turn of this conversation before which each runs."""

    def requests(self) -> int:
        return 1 + len(self.added) + sum(helper.requests() for helper in self.helpers.values())


def session(chance: random.Random, common: list[int], lengths: Lengths) -> Agent:
    """One session as the module says."""
    turns = round(min(90, max(12, chance.lognormvariate(0, 0.35) * MEDIAN_TURNS)))
    length = chance.lognormvariate(0, 0.15) * lengths.median_in
    grows = max(1, round(length / turns) - lengths.said)
    made = Agent(
        common + ids(chance, round(length / 2) - lengths.common),
        [ids(chance, grows) for _ in range(turns - 1)],
        lengths.said,
    )
    if chance.random() < WITH_SUB_AGENTS:
        for turn in chance.sample(range(1, turns), chance.randint(1, 3)):
            added = [ids(chance, grows) for _ in range(chance.randint(3, 11))]
            made.helpers[turn] = Agent(common + ids(chance, lengths.task), added, lengths.said)
    return made


@dataclass
class Conversation:
    """The state of one agent: its context so far, and the next turn."""

    agent: Agent
    context: list[int] = field(default_factory=list)
    turn: int = 0
    helper: Conversation | None = None

    @property
    def done(self) -> bool:
        return self.turn > len(self.agent.added)

    def next(self) -> list[int]:
        """The prompt of the next request: a sub-agent's while there is one."""
        if self.helper is None and self.turn in self.agent.helpers:
            self.helper = Conversation(self.agent.helpers[self.turn])
        if self.helper is not None and not self.helper.done:
            return self.helper.next()
        if self.helper is not None:
            self.context += self.helper.context[-self.agent.said :]
            self.helper = None
            del self.agent.helpers[self.turn]
        self.context += self.agent.added[self.turn - 1] if self.turn else self.agent.first
        return self.context

    def answered(self, tokens: list[int]) -> None:
        """Go on after an answer."""
        if self.helper is not None:
            self.helper.answered(tokens)
        else:
            self.context += tokens
            self.turn += 1


@dataclass(frozen=True)
class Memory:
    """An engine's KV memory: bytes, and tokens of the longest request."""

    bytes: int
    longest: int


@dataclass
class Found:
    """The figures of one way of serving.

    Attributes:
        asked: tokens of all prompts, before the restart and after it.
        prefilled: those of them that were computed.
        first_ms: milliseconds to the first token of each request.
        stored: bytes of the stores' files at the end.
    """

    asked: list[int] = field(default_factory=lambda: [0, 0])
    prefilled: list[int] = field(default_factory=lambda: [0, 0])
    first_ms: list[float] = field(default_factory=list)
    stored: int = 0


@dataclass
class Answer:
    """The end of a stream."""

    tokens: list[int]
    prompt: int
    cached: int
    first_ms: float


async def ask(client: httpx.AsyncClient, prompt: list[int], said: int) -> Answer:
    """Stream one answer."""
    body = {"model": "bench", "prompt": prompt, "max_tokens": said, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True, "stream": True, "stream_options": {"include_usage": True}}
    tokens: list[int] = []
    usage: dict[str, Any] = {}
    began, first_ms = time.perf_counter(), 0.0
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            raise SystemExit(f"{answer.status_code}: {(await answer.aread()).decode()}")
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                for choice in event["choices"]:
                    first_ms = first_ms or (time.perf_counter() - began) * 1000
                    tokens += choice["token_ids"] or []
                usage = event.get("usage") or usage
    details = usage.get("prompt_tokens_details") or {}
    return Answer(tokens, usage["prompt_tokens"], details.get("cached_tokens") or 0, first_ms)


def sessions(count: int, seed: int, lengths: Lengths) -> tuple[list[Conversation], list[int]]:
    """All sessions, and the order in which they take turns."""
    chance = random.Random(seed)
    common = ids(chance, lengths.common)
    made = [session(chance, common, lengths) for _ in range(count)]
    order = [number for number, agent in enumerate(made) for _ in range(agent.requests())]
    chance.shuffle(order)
    return [Conversation(agent) for agent in made], order


async def half(
    urls: list[str],
    conversations: list[Conversation],
    order: list[int],
    found: Found,
    part: int,
    pause: float,
) -> None:
    """The requests before the restart, or after it; several servers are asked in a random order."""
    chance = random.Random(part)
    clients = [httpx.AsyncClient(base_url=url, timeout=300) for url in urls]
    for number in order:
        answer = await ask(
            chance.choice(clients), conversations[number].next(), conversations[number].agent.said
        )
        conversations[number].answered(answer.tokens)
        found.asked[part] += answer.prompt
        found.prefilled[part] += answer.prompt - answer.cached
        found.first_ms.append(answer.first_ms)
        if len(found.first_ms) % 20 == 0:
            told = f"{len(found.first_ms)} requests: asked {found.asked}, prefilled {found.prefilled}"
            print(told, file=sys.stderr, flush=True)
        await asyncio.sleep(pause)
    for client in clients:
        await client.aclose()


def plain(model: Path, memory: Memory) -> Server:
    """vLLM's own server with its prefix cache."""
    port = free_port()
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--served-model-name", "bench", "--host", "127.0.0.1", "--port", str(port)),
        *("--kv-cache-memory-bytes", str(memory.bytes), "--enable-prompt-tokens-details", "--enforce-eager"),
        *("--max-model-len", str(memory.longest), "--max-num-seqs", "4", "--dtype", "float32"),
    ]
    return Server("plain", command, f"http://127.0.0.1:{port}")


def gateway(folder: Path, model: Path, memory: Memory, budget: int, url: str = "") -> Server:
    """Baton with automatic handoffs, as they are unless set."""
    folder.mkdir(exist_ok=True)
    (folder / "secret").write_text("the secret that both gateways of the bench have")
    shared, port = SHARED.format(url=url, folder=folder) if url else "", free_port()
    text = CONFIG.format(
        folder=folder, model=model, memory=memory.bytes, longest=memory.longest, budget=budget, shared=shared
    )
    (folder / "baton.toml").write_text(text)
    command = [str(Path(sys.executable).parent / "baton"), "serve", "--config", str(folder / "baton.toml")]
    return Server("baton", [*command, "--port", str(port)], f"http://127.0.0.1:{port}")


PLAIN, BATON, SMALL, PLAIN_TWO, BATON_TWO = WAYS = (
    "plain",
    "baton",
    "baton-small",
    "plain-two",
    "baton-two",
)
TITLES = {
    PLAIN: "plain vLLM",
    BATON: "Baton",
    SMALL: "Baton, its store half of the sessions' KV too",
    PLAIN_TWO: "plain vLLM twice, asked in turn",
    BATON_TWO: "Baton twice over one shared store, asked in turn",
}


def servers_of(
    way: str, folder: Path, model: Path, memory: Memory, stack: ExitStack
) -> Callable[[], Iterator[Server]]:
    """Make the function that starts the servers of a way, as often as one wants."""
    url = stack.enter_context(valkey_server(folder)) if way == BATON_TWO else ""
    names = ("one", "two") if way in (PLAIN_TWO, BATON_TWO) else ("one",)

    def start() -> Iterator[Server]:
        for name in names:
            if way in (PLAIN, PLAIN_TWO):
                yield plain(model, memory)
            else:
                yield gateway(folder / name, model, memory, memory.bytes if way == SMALL else 2 << 30, url)

    return start


def replay(way: str, model: Path, memory: Memory, options: argparse.Namespace) -> Found:
    """All sessions, one way."""
    conversations, order = sessions(options.sessions, options.seed, scaled(options.scale))
    found, middle = Found(), len(order) // 2
    with ExitStack() as all_of_it:
        shm = "/dev/shm" if os.path.isdir("/dev/shm") else None
        folder = Path(all_of_it.enter_context(tempfile.TemporaryDirectory(dir=shm)))
        start = servers_of(way, folder, model, memory, all_of_it)
        for part, requests in enumerate((order[:middle], order[middle:])):
            with ExitStack() as stack:
                urls = [stack.enter_context(server).url for server in start()]
                asyncio.run(half(urls, conversations, requests, found, part, options.pause))
        found.stored = sum(stored(folder / name) for name in ("one", "two"))
    return found


def least(count: int, seed: int, lengths: Lengths) -> tuple[int, int, int, int]:
    """Tokens that no request before has had, of the sessions' KV at the end, of the longest one; requests."""
    conversations, order = sessions(count, seed, lengths)
    chance, seen, new, longest = random.Random(seed), False, 0, 0
    for number in order:
        conversation = conversations[number]
        active = conversation.helper if conversation.helper and not conversation.helper.done else conversation
        held = len(active.context)
        prompt = conversation.next()
        fresh = conversation.helper is not None and not conversation.helper.turn
        shared = lengths.common if (fresh or not held) and seen else 0 if fresh or not held else held - 1
        new += len(prompt) - shared
        seen = True
        longest = max(longest, len(prompt) + lengths.said)
        conversation.answered(ids(chance, lengths.said))
    return new, sum(len(each.context) for each in conversations), longest, len(order)


def main() -> None:
    """Replay, and print Markdown for docs/results/replay.md."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sessions", type=int, default=6)
    parser.add_argument("--scale", type=int, default=20, help="what AgentX's lengths are divided by")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pause", type=float, default=0.1, help="seconds between two requests")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    options = parser.parse_args()
    new, held, longest, requests = least(options.sessions, options.seed, scaled(options.scale))
    longest = -(-longest // BLOCK) * BLOCK
    tokens = max(longest + BLOCK, held // 2, LEAST_BYTES // KV_BYTES_PER_TOKEN)  # a block is vLLM's own
    memory = Memory(tokens * KV_BYTES_PER_TOKEN, longest)
    print(f"`make bench-replay ARGS='{' '.join(sys.argv[1:])}'`, {datetime.date.today()}, {machine()}\n")
    print(
        f"1:{options.scale}, {options.sessions} sessions, {requests} requests; their KV at the end {held:,} "
        f"tokens, the engine's memory {tokens:,}; {new:,} tokens are new.\n",
        flush=True,
    )
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        store = ModelStore(load_settings(None).models_folder)
        model = tiny_model(Path(store.resolve("smollm2")), Path(folder) / "model", HEAD)
        settings = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": longest}
        (model / "config.json").write_text(json.dumps(settings))
        for way in options.ways:
            found = replay(way, model, memory, options)
            asked, prefilled = sum(found.asked), sum(found.prefilled)
            cells = [TITLES[way], f"{asked:,}", *(f"{each:,}" for each in found.prefilled), f"{prefilled:,}"]
            cells += [
                f"{100 * prefilled / asked:.1f} %",
                f"{prefilled / new:.2f}",
                f"{found.stored / 2**20:.0f}",
            ]
            ranks = statistics.quantiles(found.first_ms, n=100)
            rows.append([*cells, f"{ranks[49]:.0f}", f"{ranks[98]:.0f}"])
            print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    head = "|tokens asked|prefilled before the restart|after it|in all|of those asked|times the new ones"
    table([*head.split("|"), "stored, MiB", "first token p50, ms", "p99"], rows)


if __name__ == "__main__":
    main()
