"""An agent with one tool in LangGraph: each turn sends the whole conversation, little of it is prefilled.

Run it with `pip install langgraph langchain-openai`, after `baton serve --config examples/agents.toml`:
python agent_langgraph.py [BASE_URL [MODEL [KEY]]]
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any, Literal

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from openai import DefaultAsyncHttpxClient
from pydantic import SecretStr

SYSTEM = "You watch birds. " + " ".join(f"Nest {n} has {n * 37 % 101} eggs." for n in range(90))


@tool
def look(place: Literal["shore", "wood", "hill"]) -> str:
    """Look which birds are at a place."""
    return f"{place}: " + " ".join(f"Bird {n} sings {n * 7 % 11} songs." for n in range(16))


def graph(model: ChatOpenAI) -> Any:
    """The model and its tool, in turns, until it calls none; the checkpointer keeps the conversation."""

    async def agent(state: MessagesState) -> MessagesState:
        # A small model calls tools if it must, and then again and again. Yours may do with "auto" always.
        asked = isinstance(state["messages"][-1], HumanMessage)
        able = model.bind_tools([look], tool_choice="required" if asked else "none")
        answer = await able.ainvoke([SystemMessage(SYSTEM), *state["messages"]])
        return {"messages": [answer]}

    nodes = StateGraph(MessagesState)
    nodes.add_node("agent", agent)
    nodes.add_node("tools", ToolNode([look]))
    nodes.add_edge(START, "agent")
    nodes.add_conditional_edges("agent", tools_condition)
    nodes.add_edge("tools", "agent")
    return nodes.compile(checkpointer=InMemorySaver())


def used(answer: AIMessage) -> tuple[int, int]:
    """The number of the prompt's tokens, and of those that were cached."""
    usage = answer.usage_metadata
    assert usage is not None
    return usage["input_tokens"], usage.get("input_token_details", {}).get("cache_read", 0)


async def converse(base_url: str, model: str, key: str, turns: int) -> AsyncIterator[list[tuple[int, int]]]:
    """Hold a conversation; of each turn's requests, the number of prompt tokens and of cached ones."""
    known = 0
    async with DefaultAsyncHttpxClient() as client:
        chat = ChatOpenAI(
            base_url=base_url,
            api_key=SecretStr(key),
            model=model,
            temperature=0,
            max_completion_tokens=64,
            http_async_client=client,
        )
        agent = graph(chat)
        for turn in range(turns):
            question = HumanMessage(f"Turn {turn}: which birds are there?")
            state = await agent.ainvoke({"messages": [question]}, {"configurable": {"thread_id": "birds"}})
            new, known = state["messages"][known:], len(state["messages"])
            yield [used(message) for message in new if isinstance(message, AIMessage)]


async def main(base_url: str = "http://127.0.0.1:8000/v1", model: str = "smollm2", key: str = "none") -> None:
    """Print what was cached, turn by turn."""
    async for requests in converse(base_url, model, key, turns=4):
        print(", ".join(f"{cached} of {prompt} prompt tokens cached" for prompt, cached in requests))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
