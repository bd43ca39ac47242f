"""Compare answers after a load with those of the engine's own prefix cache. `make bench-exactness`.

One gateway, two engines of the same weights. The first computes a context and saves it. The continuation is
asked of the second engine, which loads the context's KV, and of the first, which still has it in its prefix
cache. Both compute the same tokens in batches of the same shape, so tokens and log probabilities must be
equal to the last bit. Then the same beside other traffic, where batches differ and so may the last bits, and
after a restart.

On a GPU the two engines share it. The exit status is 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from handoff import Client, prompt, said
from rich.console import Console
from rich.progress import track
from servers import Server, free_port, machine

CONFIG = """
[handoffs]
auto = "off"
store = "file:{folder}/store"
unproven_devices = true
"""
ENGINE = """
[[engines]]
name = "{name}"
model = "{model}"
handoff = true
{memory}
args = {{ {args} }}
"""
FIRST, SECOND = "first", "second"
OWN_TOKENS = 32
ANSWER = {"max_tokens": 24, "logprobs": 1}
ROUNDS = 8
AT_ONCE = 16
STREAMS = 8
FAR = 0.5
"""Nats: more than another order of sums explains in bfloat16."""
Answer = dict[str, Any]


@dataclass(frozen=True)
class Saved:
    """A handoff, and the token ids that a continuation has before its own."""

    name: str
    tokens: list[int]


async def save(client: Client, context: list[int]) -> Saved:
    """Compute a context and one token on the first engine."""
    answer, _ = await client.ask(FIRST, context, handoff={"save": True})
    return Saved(answer["handoff"]["id"], said(answer))


async def continued(client: Client, saved: Saved, own: list[int]) -> Answer:
    """Ask the second engine to continue a handoff."""
    answer, _ = await client.ask(SECOND, own, handoff={"from": saved.name}, **ANSWER)
    return answer


async def computed(client: Client, saved: Saved, own: list[int]) -> Answer:
    """Ask the first engine for the same by its tokens; it uses what its prefix cache has."""
    answer, _ = await client.ask(FIRST, saved.tokens + own, **ANSWER)
    return answer


def output(answer: Answer) -> tuple[list[int], list[float]]:
    """Return an answer's token ids and their log probabilities."""
    choice = answer["choices"][0]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def is_loaded(answer: Answer) -> bool:
    """Return whether a continuation started from loaded KV."""
    return bool(answer["handoff"]["source"]["outcome"] == "loaded")


def is_far(one: Answer, other: Answer) -> bool:
    """Return whether the first token is the same and its log probability is not nearly so."""
    (tokens, logprobs), (others, other_logprobs) = output(one), output(other)
    return tokens[0] == others[0] and abs(logprobs[0] - other_logprobs[0]) > FAR


async def alone(client: Client, length: int) -> int:
    """Continue contexts one at a time; print and return how many were not loaded or said something else."""
    missed = differing = 0
    for number in track(range(ROUNDS), f"{length} tokens", console=Console(stderr=True)):
        own = prompt(OWN_TOKENS, number)
        saved = await save(client, prompt(length, length * 100 + number))
        loaded = await continued(client, saved, own)
        missed += not is_loaded(loaded)
        differing += output(loaded) != output(await computed(client, saved, own))
    print(
        f"- {ROUNDS} contexts of {length} tokens: {missed} not loaded, {differing} answers differ", flush=True
    )
    return missed + differing


async def beside_traffic(client: Client, length: int) -> int:
    """Save and load contexts at once beside decoding; print and return how many were wrong."""
    contexts = [prompt(length + number, 70_000 + number) for number in range(AT_ONCE)]
    owns = [prompt(OWN_TOKENS, 80_000 + number) for number in range(AT_ONCE)]
    traffic = [
        asyncio.create_task(client.ask(engine, prompt(200, 90_000 + number), max_tokens=400))
        for number in range(STREAMS)
        for engine in (FIRST, SECOND)
    ]
    saved = await asyncio.gather(*(save(client, context) for context in contexts))
    pairs = list(zip(saved, owns, strict=True))
    loaded = await asyncio.gather(*(continued(client, one, own) for one, own in pairs))
    await asyncio.gather(*traffic)
    others = [await computed(client, one, own) for one, own in pairs]
    loads = sum(is_loaded(answer) for answer in loaded)
    far = sum(is_far(answer, other) for answer, other in zip(loaded, others, strict=True))
    print(
        f"- {AT_ONCE} at once beside {2 * STREAMS} others: {loads} loaded, {far} answers far off",
        flush=True,
    )
    return far + (loads == 0)


async def before_the_restart(url: str, lengths: list[int]) -> tuple[int, Saved, Answer]:
    """Return how much was wrong, and a handoff with what its continuation has to say."""
    client = Client(url)
    wrong = sum([await alone(client, length) for length in lengths])
    wrong += await beside_traffic(client, lengths[0])
    saved = await save(client, prompt(lengths[0], 1))
    return wrong, saved, await computed(client, saved, prompt(OWN_TOKENS, 1))


async def after_the_restart(url: str, saved: Saved, expected: Answer) -> int:
    """Continue the handoff; print and return whether something was wrong."""
    answer = await continued(Client(url), saved, prompt(OWN_TOKENS, 1))
    same = output(answer) == output(expected)
    print(f"- after a restart: {answer['handoff']['source']['outcome']}, {'equal' if same else 'differs'}")
    return not (is_loaded(answer) and same)


def configure(folder: str, options: argparse.Namespace) -> Path:
    """Write the configuration of both engines."""
    memory = f'kv_cache_memory = "{options.kv_cache_memory}"' if options.kv_cache_memory else ""
    given = {"model": options.model, "memory": memory, "args": options.args}
    path = Path(folder) / "bench.toml"
    engines = (ENGINE.format(name=name, **given) for name in (FIRST, SECOND))
    path.write_text(CONFIG.format(folder=folder) + "".join(engines))
    return path


def main() -> None:
    """Compare, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", help="a name, a folder or a name on the Hub")
    parser.add_argument("--args", default="max_num_seqs = 32", help="the engines' `args`, as TOML")
    parser.add_argument("--kv-cache-memory", help="of each engine, in place of Baton's choice")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 7168], help="whole blocks")
    options = parser.parse_args()
    typed = f"make bench-exactness ARGS='{' '.join(sys.argv[1:])}'"
    print(f"`{typed}`, {datetime.date.today()}, {machine()}\n")
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        command = [str(Path(sys.executable).parent / "baton"), "serve"]
        command += ["--config", str(configure(folder, options)), "--port"]
        port = free_port()
        server = Server("exactness", [*command, str(port)], f"http://127.0.0.1:{port}")
        with server:
            wrong, saved, expected = asyncio.run(before_the_restart(server.url, options.lengths))
        with server:
            wrong += asyncio.run(after_the_restart(server.url, saved, expected))
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
