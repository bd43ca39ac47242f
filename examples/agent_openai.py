"""An agent with one tool on the OpenAI SDK: each turn sends all that was said, little of it is prefilled.

Run it with `pip install openai`, after `baton serve --config examples/agents.toml`:
python agent_openai.py [BASE_URL [MODEL [KEY]]]
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any, Literal

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionFunctionToolParam

PLACES = ("shore", "wood", "hill")
SYSTEM = "You watch birds. " + " ".join(f"Nest {n} has {n * 37 % 101} eggs." for n in range(90))
LOOK: ChatCompletionFunctionToolParam = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look which birds are at a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "enum": PLACES}},
            "required": ["place"],
            "additionalProperties": False,
        },
    },
}
CHOICES: tuple[Literal["required", "auto"], ...] = ("required", "auto")
"""A small model calls tools only if it must. Yours may do with "auto", until it calls none."""


def look(arguments: str) -> str:
    """Say which birds are at a place; the arguments are as the model wrote them, JSON or not."""
    return f"{arguments}: " + " ".join(f"Bird {n} sings {n * 7 % 11} songs." for n in range(16))


async def converse(base_url: str, model: str, key: str, turns: int) -> AsyncIterator[list[tuple[int, int]]]:
    """Hold a conversation; of each turn's requests, the number of prompt tokens and of cached ones."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    async with AsyncOpenAI(base_url=base_url, api_key=key) as client:
        for turn in range(turns):
            messages.append({"role": "user", "content": f"Turn {turn}: which birds are there?"})
            used = []
            for choice in CHOICES:
                answer = await client.chat.completions.create(
                    model=model,
                    messages=messages,
                    tools=[LOOK],
                    tool_choice=choice,
                    max_tokens=64,
                    temperature=0,
                )
                said, usage = answer.choices[0].message, answer.usage
                assert usage is not None
                details = usage.prompt_tokens_details
                used.append((usage.prompt_tokens, (details and details.cached_tokens) or 0))
                messages.append(said.model_dump(exclude_none=True))
                for call in said.tool_calls or ():
                    assert call.type == "function"
                    result = look(call.function.arguments)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
                if not said.tool_calls:
                    break
            yield used


async def main(base_url: str = "http://127.0.0.1:8000/v1", model: str = "smollm2", key: str = "none") -> None:
    """Print what was cached, turn by turn."""
    async for used in converse(base_url, model, key, turns=4):
        print(", ".join(f"{cached} of {prompt} prompt tokens cached" for prompt, cached in used))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
