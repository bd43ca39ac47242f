"""An agent with one tool on the Anthropic SDK: its `cache_control` marks say what Baton keeps, for how long.

Run it with `pip install anthropic`, after `baton serve --config examples/agents.toml`:
python agent_anthropic.py [BASE_URL [MODEL [KEY]]]
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

from anthropic import AsyncAnthropic
from anthropic.types import CacheControlEphemeralParam, ToolChoiceParam, ToolParam

PLACES = ("shore", "wood", "hill")
SYSTEM = "You watch birds. " + " ".join(f"Nest {n} has {n * 37 % 101} eggs." for n in range(90))
MARK: CacheControlEphemeralParam = {"type": "ephemeral", "ttl": "1h"}
LOOK: ToolParam = {
    "name": "look",
    "description": "Look which birds are at a place.",
    "input_schema": {
        "type": "object",
        "properties": {"place": {"type": "string", "enum": PLACES}},
        "required": ["place"],
        "additionalProperties": False,
    },
}
CHOICES: tuple[ToolChoiceParam, ...] = ({"type": "any"}, {"type": "auto"})
"""A small model calls tools only if it must. Yours may do with "auto", until it calls none."""


def look(arguments: object) -> str:
    """Say which birds are at a place."""
    return f"{arguments}: " + " ".join(f"Bird {n} sings {n * 7 % 11} songs." for n in range(16))


async def converse(base_url: str, model: str, key: str, turns: int) -> AsyncIterator[list[tuple[int, int]]]:
    """Hold a conversation; of each turn's requests, the number of prompt tokens and of cached ones."""
    messages: list[Any] = []
    async with AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=key) as client:
        for turn in range(turns):
            question: dict[str, object] = {"type": "text", "text": f"Turn {turn}: which birds are there?"}
            question["cache_control"] = MARK
            messages.append({"role": "user", "content": [question]})
            used = []
            for choice in CHOICES:
                answer = await client.messages.create(
                    model=model,
                    system=[{"type": "text", "text": SYSTEM, "cache_control": MARK}],
                    messages=messages,
                    tools=[LOOK],
                    tool_choice=choice,
                    max_tokens=64,
                    extra_body={"temperature": 0},  # the SDK has no argument for it
                )
                cached = answer.usage.cache_read_input_tokens or 0  # `input_tokens` leaves these out
                used.append((answer.usage.input_tokens + cached, cached))
                messages.append({"role": "assistant", "content": answer.content})
                results = [
                    {"type": "tool_result", "tool_use_id": block.id, "content": look(block.input)}
                    for block in answer.content
                    if block.type == "tool_use"
                ]
                if not results:
                    break
                messages.append({"role": "user", "content": results})
            del question["cache_control"]  # Anthropic allows four marks a request
            yield used


async def main(base_url: str = "http://127.0.0.1:8000/v1", model: str = "smollm2", key: str = "none") -> None:
    """Print what was cached, turn by turn."""
    async for used in converse(base_url, model, key, turns=4):
        print(", ".join(f"{cached} of {prompt} prompt tokens cached" for prompt, cached in used))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
