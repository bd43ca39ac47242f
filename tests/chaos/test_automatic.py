"""An agent that knows nothing of handoffs keeps its context through kills of the gateway, and keeps it to itself."""

from __future__ import annotations

import math
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.gateways import RealGateway

from baton.admission.api_keys import create_key

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]
CONFIG = Path(__file__).parent / "automatic.toml"
TURNS = 10
KILLED_BEFORE = (4, 8)
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a place of the map and say which birds are there.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
SYSTEM = "You watch birds. " + " ".join(
    f"Place {number} has {number * 37 % 101} nests." for number in range(40)
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("automatic")


@pytest.fixture(scope="module")
def gateway(folder: Path) -> Iterator[RealGateway]:
    (folder / "baton.toml").write_text(CONFIG.read_text().format(folder=folder))
    keys = {tenant: create_key(folder / "keys.json", tenant) for tenant in ("acme", "globex")}
    with RealGateway(["--config", str(folder / "baton.toml")], folder, forked=True) as running:
        running.keys = keys
        running.wait_until_ready()
        yield running


def ask(gateway: RealGateway, messages: list[Any], tenant: str = "acme", model: str = "first") -> Any:
    """An answer through the SDK, as any agent asks."""
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=gateway.keys[tenant], max_retries=0) as sdk:
        return sdk.chat.completions.create(
            model=model,
            messages=messages,
            tools=[LOOK],  # type: ignore[list-item]  # a plain dict, as people write it
            tool_choice="none",
            max_tokens=24,
            temperature=0,
            extra_body={"return_token_ids": True},
        )


def once_saved(folder: Path, before: int) -> None:
    deadline = time.monotonic() + 60
    while records(folder) == before:
        assert time.monotonic() < deadline, "nothing was saved"
        time.sleep(0.05)


def records(folder: Path) -> int:
    """Number of records ever seen: a superseded one goes when its successor has been there for a while."""
    return max((path.stat().st_mtime_ns for path in (folder / "store" / "records").glob("*.json")), default=0)


def shared(before: list[int], now: list[int]) -> int:
    pairs = zip(before, now, strict=False)
    return next(
        (index for index, (one, other) in enumerate(pairs) if one != other), min(len(before), len(now))
    )


def test_an_agent_of_ten_turns_prefills_what_is_new_through_two_kills(
    gateway: RealGateway, folder: Path
) -> None:
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Which birds?"}]
    context: list[int] = []
    for turn in range(TURNS):
        if turn in KILLED_BEFORE:
            gateway.restart(signal.SIGKILL)
        before = records(folder)
        answer = ask(gateway, messages, model=("first", "second")[turn % 2])
        prompt, usage = answer.prompt_token_ids, answer.usage
        unchanged = shared(context, prompt)
        assert unchanged >= len(context) - 4, "the template writes the past as it was"
        assert usage.prompt_tokens_details.cached_tokens >= 0.9 * unchanged, f"turn {turn}"
        said = answer.choices[0].message.content
        context = [*prompt, *answer.choices[0].token_ids]
        call = {"id": f"call-{turn}", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        result = " ".join(f"Bird {turn}.{number} sings." for number in range(30))
        messages += [
            {"role": "assistant", "content": said, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"call-{turn}", "content": result},
            {"role": "user", "content": f"And at place {turn}?"},
        ]
        once_saved(folder, before)
    other = ask(gateway, messages, tenant="globex")
    assert other.usage.prompt_tokens_details.cached_tokens == 0, "another tenant's context is not its own"
    again = ask(gateway, messages)
    assert again.usage.prompt_tokens_details.cached_tokens >= 0.9 * len(context)
    assert again.choices[0].token_ids == other.choices[0].token_ids


TRIES = 1000
TOKENS = 132
"""Of a stored prompt: a block of 128, and a few."""
CHANCE = 3.9
"""So many standard deviations from even chances come by chance once in ten thousand runs."""


def seconds(client: httpx.Client, prompt: list[int], **more: Any) -> float:
    """Until a prompt of token ids is answered with one token."""
    body = {"model": "first", "prompt": prompt, "max_tokens": 1, "temperature": 0} | more
    begun = time.perf_counter()
    response = client.post("/v1/completions", json=body)
    took = time.perf_counter() - begun
    assert response.status_code == 200, response.text
    return took


def deviation(slower: list[bool]) -> float:
    """How far the share of pairs whose first one was slower is from a half, in standard deviations."""
    return (sum(slower) - len(slower) / 2) / math.sqrt(len(slower) / 4)


@pytest.mark.timeout(1200)
def test_time_does_not_tell_what_another_tenant_has_stored(gateway: RealGateway) -> None:
    owner, stranger = (
        httpx.Client(base_url=gateway.url, headers={"Authorization": f"Bearer {key}"}, timeout=60)
        for key in gateway.keys.values()
    )
    drawn = random.Random(20)

    def pair(who: httpx.Client) -> bool:
        """Whether a prompt that the owner has stored took longer than one that nobody has."""
        known, new = ([drawn.randrange(1000, 40000) for _ in range(TOKENS)] for _ in range(2))
        seconds(owner, known, handoff={"save": True})
        tried = {"known": [*known, 11], "new": [*new, 11]}
        order = drawn.sample(sorted(tried), 2)
        took = {name: seconds(who, tried[name]) for name in order}
        return took["known"] > took["new"]

    with owner, stranger:
        own = [pair(owner) for _ in range(40)]
        others = [pair(stranger) for _ in range(TRIES // 2)]
    assert deviation(own) < -CHANCE, "what the owner has stored must be faster, or this shows nothing"
    assert abs(deviation(others)) < CHANCE
