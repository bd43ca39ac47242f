"""An agent with one tool on the OpenAI Agents SDK, with its default model, on `/v1/responses`.

Run it with `pip install openai-agents`, after `baton serve --config examples/agents.toml`:
python agent_openai_agents.py [BASE_URL [MODEL [KEY]]]
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any, Literal

from agents import (
    Agent,
    AgentHooks,
    ModelSettings,
    Runner,
    Tool,
    TResponseInputItem,
    function_tool,
    set_default_openai_client,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

SYSTEM = "You watch birds. " + " ".join(f"Nest {n} has {n * 37 % 101} eggs." for n in range(90))


@function_tool
def look(place: Literal["shore", "wood", "hill"]) -> str:
    """Look which birds are at a place."""
    return f"{place}: " + " ".join(f"Bird {n} sings {n * 7 % 11} songs." for n in range(16))


class FirstLook(AgentHooks[None]):
    """Make the first answer of a run call the tool, and no other: a small model calls it again and again."""

    async def on_start(self, context: Any, agent: Any) -> None:
        agent.model_settings.tool_choice = "required"

    async def on_tool_end(self, context: Any, agent: Any, tool: Tool, result: object) -> None:
        agent.model_settings.tool_choice = "none"


async def converse(base_url: str, model: str, key: str, turns: int) -> AsyncIterator[list[tuple[int, int]]]:
    """Hold a conversation; of each turn's requests, the number of prompt tokens and of cached ones."""
    set_tracing_disabled(True)  # traces go to OpenAI
    # A small model does not know when to end, and for the SDK an answer that `max_tokens` ends is an error.
    settings = ModelSettings(max_tokens=200, temperature=0, extra_body={"stop": ["."]})
    agent = Agent(
        name="watcher",
        instructions=SYSTEM,
        model=model,
        tools=[look],
        model_settings=settings,
        hooks=FirstLook(),
        reset_tool_choice=False,
    )
    items: list[TResponseInputItem] = []
    async with AsyncOpenAI(base_url=base_url, api_key=key) as client:
        set_default_openai_client(client, use_for_tracing=False)
        for turn in range(turns):
            items.append({"role": "user", "content": f"Turn {turn}: which birds are there?"})
            result = await Runner.run(agent, items)
            items = result.to_input_list()
            yield [
                (answer.usage.input_tokens, answer.usage.input_tokens_details.cached_tokens)
                for answer in result.raw_responses
            ]


async def main(base_url: str = "http://127.0.0.1:8000/v1", model: str = "smollm2", key: str = "none") -> None:
    """Print what was cached, turn by turn."""
    async for used in converse(base_url, model, key, turns=4):
        print(", ".join(f"{cached} of {prompt} prompt tokens cached" for prompt, cached in used))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
