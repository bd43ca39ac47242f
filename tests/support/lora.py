"""Tiny LoRA adapters for the embedded SmolLM2, of random matrices, and requests that mix them."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import httpx
import numpy
from safetensors.numpy import save_file

from support.gateways import RealGateway
from support.watched_streams import cores

TOKENS = 6
DOCUMENTS = 12
LONGEST = 160
"""Contexts of more tokens are not continued, so that prompts stay short."""
RESTARTED_WITHIN_S = 120
PEOPLE = ("Ada", "Boris", "Chen", "Dora", "Emil", "Fatima")

HIDDEN, KV, MLP, LAYERS = 576, 192, 1536, 30
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, KV),
    "self_attn.v_proj": (HIDDEN, KV),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.up_proj": (HIDDEN, MLP),
    "mlp.down_proj": (MLP, HIDDEN),
}
"""Width of what goes in and out, of each projection that an adapter changes."""


def write_adapter(folder: Path, seed: int, *, rank: int = 4, strength: float = 0.25) -> Path:
    """Write an adapter as PEFT does; every layer's keys and values are others with it.

    Args:
        strength: standard deviation of what the second matrix holds.
    """
    draw = numpy.random.default_rng(seed)
    tensors = {}
    for layer in range(LAYERS):
        for name, (wide, out) in SHAPES.items():
            place = f"base_model.model.model.layers.{layer}.{name}"
            first = draw.normal(0, wide**-0.5, (rank, wide))
            tensors[f"{place}.lora_A.weight"] = first.astype(numpy.float32)
            second = draw.normal(0, strength, (out, rank))
            tensors[f"{place}.lora_B.weight"] = second.astype(numpy.float32)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "bias": "none",
        "target_modules": sorted({name.rpartition(".")[2] for name in SHAPES}),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    return folder


@dataclass(frozen=True)
class Asked:
    """A request that was answered.

    Attributes:
        weights: what had to answer: a model's name, with a stroke behind it once its adapter was replaced.
        prompt: token ids of the whole prompt.
        answer: token ids of the answer.
    """

    weights: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def complete(client: httpx.Client, model: str, prompt: object, **more: Any) -> dict[str, Any]:
    """Complete a prompt by the likeliest tokens; tried again while the gateway or an engine restarts."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "return_token_ids": True,
    }
    deadline = time.monotonic() + RESTARTED_WITHIN_S
    while True:
        try:
            response = client.post("/v1/completions", json=body | more)
            if response.status_code != 503:
                break
        except httpx.TransportError:
            pass
        assert time.monotonic() < deadline, f"nothing answers for {model}"
        time.sleep(0.2)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


class MixedRequests:
    """Requests of a base model and adapters on it, which continue handoffs of their own and of each other.

    Attributes:
        asked: all that were answered.
        outcomes: how many handoffs were continued, by whether they were of the same weights, and how.
        weights: what answers for each model now.
    """

    def __init__(self, gateway: RealGateway, models: Sequence[str], seed: int) -> None:
        self._gateway = gateway
        self._seed = seed
        self._left: list[tuple[str, str]] = []
        self._lock = threading.Lock()
        self.asked: list[Asked] = []
        self.outcomes: Counter[tuple[bool, str]] = Counter()
        self.weights = {model: model for model in models}

    def run(self, count: int, *, workers: int = 4, meanwhile: Callable[[], None] | None = None) -> None:
        """Make so many requests, several at a time.

        Args:
            meanwhile: called when a third of them are answered.
        """
        numbers, began = iter(range(len(self.asked), len(self.asked) + count)), len(self.asked)
        with ThreadPoolExecutor(workers + 1) as threads:
            works = [threads.submit(self._work, numbers) for _ in range(workers)]
            if meanwhile is not None:
                while len(self.asked) < began + count // 3 and not all(work.done() for work in works):
                    time.sleep(0.05)
                meanwhile()
            for work in works:
                work.result()

    def _work(self, numbers: Iterator[int]) -> None:
        while True:
            with self._lock:
                number = next(numbers, None)
            if number is None:
                return
            with self._gateway.client() as client:
                self._one(client, random.Random(self._seed * 100_003 + number))

    def _one(self, client: httpx.Client, draw: random.Random) -> None:
        model = draw.choice(list(self.weights))
        weights, handoff = self.weights[model], dict[str, Any]()
        with self._lock:
            source = draw.choice(self._left) if self._left and draw.random() < 0.5 else None
        if source is not None:
            handoff["from"] = source[1]
        if draw.random() < 0.4:
            handoff["save"] = True
        prompt = (
            f" Then {draw.choice(PEOPLE)} asked for"
            if source is not None
            else document(draw.randrange(DOCUMENTS))
        )
        found = complete(client, model, prompt, **({"handoff": handoff} if handoff else {}))
        (choice,), shown = found["choices"], found.get("handoff", {})
        asked = Asked(weights, tuple(choice["prompt_token_ids"]), tuple(choice["token_ids"]))
        with self._lock:
            self.asked.append(asked)
            if "save" in handoff and len(asked.prompt) < LONGEST:
                self._left.append((weights, shown["id"]))
            if source is not None:
                theirs = shown["source"]
                same = source[0] == weights
                assert same or (theirs["loaded_tokens"], theirs["moved_tokens"]) == (0, 0), theirs
                self.outcomes[same, theirs["outcome"]] += 1

    def wrong(self, alone: RealGateway, names: Mapping[str, str]) -> list[tuple[Asked, tuple[int, ...]]]:
        """Return the requests that weights of their own, without handoffs or a cache, answer otherwise.

        Args:
            alone: the gateway that has these.
            names: by which it serves each.
        """
        distinct = sorted({(each.weights, each.prompt) for each in self.asked})

        def answer(of: tuple[str, tuple[int, ...]]) -> tuple[int, ...]:
            with alone.client() as client:
                found = complete(client, names[of[0]], list(of[1]))
            return tuple(found["choices"][0]["token_ids"])

        with ThreadPoolExecutor(4) as threads:
            right = dict(zip(distinct, threads.map(answer, distinct), strict=True))
        pairs = [(each, right[each.weights, each.prompt]) for each in self.asked]
        return [(each, other) for each, other in pairs if each.answer != other]


def document(number: int) -> str:
    """A text of some 50 tokens, of which several begin alike."""
    begin = " ".join(
        f"House {each} of street {number % 4} has {each * 37 % 11} windows." for each in range(3)
    )
    return f"{begin} {PEOPLE[number % len(PEOPLE)]} lives there and"


HERE = Path(__file__).parent
ALONE = {"base": "base", "a": "a", "b": "b", "b'": "another-b"}
"""What answers alone for each of the weights that answer together."""


def write_settings(folder: Path, *, caching: bool) -> Path:
    """Write the settings of a gateway whose models are `base` and `a`; returns the file."""
    settings = (HERE / "adapter_engines.toml").read_text()
    file = folder / "baton.toml"
    file.write_text(settings.format(folder=folder, caching=str(caching).lower()))
    return file


def load_b(gateway: RealGateway, folder: Path, name: str, **more: Any) -> None:
    """Load an adapter as the model `b`, as an operator does."""
    with gateway.client() as client:
        body = {"lora_name": "b", "lora_path": str(folder / name)} | more
        answer = client.post("/v1/load_lora_adapter", json=body)
    assert answer.status_code == 200, answer.text


def kill_engine(gateway: RealGateway) -> None:
    """Kill the engine, and what it knows of adapters with it."""
    (core,) = cores(gateway.process.pid)
    core.kill()


def assert_each_as_alone(mixed: MixedRequests, folder: Path, documents: int = DOCUMENTS) -> None:
    """Compare all answers with those of each adapter alone, by engines that know no other.

    Args:
        documents: how many must be gone on with otherwise by each two, by half of them at least.
    """
    settings = folder / "alone.toml"
    settings.write_text((HERE / "adapters_alone.toml").read_text().format(folder=folder))
    (folder / "of-alone").mkdir(exist_ok=True)
    with RealGateway(["--config", str(settings)], folder / "of-alone", forked=True) as alone:
        alone.wait_until_ready()
        wrong = mixed.wrong(alone, ALONE)
        differing = _differing(alone, documents)
    print(
        f"{len(wrong)} of {len(mixed.asked)} wrong; handoffs (of the same weights, outcome): {mixed.outcomes}"
    )
    assert wrong == []
    assert mixed.outcomes[True, "loaded"] > 0, mixed.outcomes
    assert mixed.outcomes[False, "recomputed"] > 0, mixed.outcomes
    assert min(differing.values()) >= documents // 2, f"adapters answer alike: {differing}"


def _differing(alone: RealGateway, documents: int) -> Counter[tuple[str, str]]:
    """Count the documents on which each two of the weights go on otherwise."""
    found: Counter[tuple[str, str]] = Counter(dict.fromkeys(combinations(ALONE, 2), 0))
    with alone.client() as client:
        for number in range(documents):
            said = {
                weights: complete(client, name, document(number))["choices"][0]["token_ids"]
                for weights, name in ALONE.items()
            }
            found.update(pair for pair in found if said[pair[0]] != said[pair[1]])
    return found
