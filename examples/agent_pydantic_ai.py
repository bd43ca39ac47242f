"""An agent with one tool in Pydantic AI: each turn sends the whole conversation, little of it is prefilled.

Run it with `pip install "pydantic-ai-slim[openai]"`, after `baton serve --config examples/agents.toml`:
python agent_pydantic_ai.py [BASE_URL [MODEL [KEY]]]
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from typing import Literal

from openai import AsyncOpenAI
from pydantic_ai import Agent, ModelMessage, ModelResponse, ModelSettings, RunContext
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

SYSTEM = "You watch birds. " + " ".join(f"Nest {n} has {n * 37 % 101} eggs." for n in range(90))


class FirstLook(AbstractCapability[None]):
    """Make the first step of a run call the tool, and no other: a small model calls it again and again."""

    def get_model_settings(self) -> Callable[[RunContext[None]], ModelSettings]:
        return lambda run: ModelSettings(tool_choice="required" if run.run_step <= 1 else "none")


def look(place: Literal["shore", "wood", "hill"]) -> str:
    """Look which birds are at a place."""
    return f"{place}: " + " ".join(f"Bird {n} sings {n * 7 % 11} songs." for n in range(16))


async def converse(base_url: str, model: str, key: str, turns: int) -> AsyncIterator[list[tuple[int, int]]]:
    """Hold a conversation; of each turn's requests, the number of prompt tokens and of cached ones."""
    said: list[ModelMessage] = []
    async with AsyncOpenAI(base_url=base_url, api_key=key) as client:
        agent = Agent(
            OpenAIChatModel(model, provider=OpenAIProvider(openai_client=client)),
            system_prompt=SYSTEM,
            tools=[look],
            capabilities=[FirstLook()],
            model_settings=ModelSettings(max_tokens=64, temperature=0),
        )
        for turn in range(turns):
            result = await agent.run(f"Turn {turn}: which birds are there?", message_history=said)
            said = result.all_messages()
            answers = [one for one in result.new_messages() if isinstance(one, ModelResponse)]
            yield [(one.usage.input_tokens, one.usage.cache_read_tokens) for one in answers]


async def main(base_url: str = "http://127.0.0.1:8000/v1", model: str = "smollm2", key: str = "none") -> None:
    """Print what was cached, turn by turn."""
    async for used in converse(base_url, model, key, turns=4):
        print(", ".join(f"{cached} of {prompt} prompt tokens cached" for prompt, cached in used))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
