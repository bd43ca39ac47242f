"""Agents with a tool, of unmodified frameworks, on the gateway that `make serve` starts, without a setting."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from agents import Agent as OpenAIAgent
from agents import ModelSettings as OpenAISettings
from agents import OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from anthropic import Anthropic
from anthropic.types import MessageParam, ToolParam
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent
from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from support.gateways import RealGateway

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

Place = Literal["shore", "wood"]
QUESTION = "Which birds are at the shore?"
FOUND = "Two herons and a gull."


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealGateway]:
    folder = tmp_path_factory.mktemp("served")
    store = {"BATON_HANDOFFS__STORE": f"file:{folder / 'handoffs'}"}
    with RealGateway([], folder, store, forked=True) as running:
        running.wait_until_ready()
        yield running


def test_cards_let_a_picker_leave_the_model_of_maps_out(gateway: RealGateway) -> None:
    with gateway.client() as client:
        cards = {card["id"]: card["capabilities"] for card in client.get("/v1/models").json()["data"]}
        told = client.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    assert cards == {"smollm2": ["generate", "tools", "handoffs"], "flood-tiny": ["pooling"]}
    assert [card["id"] for card in told["data"]] == ["smollm2"]


@pytest.mark.parametrize("choice", ["auto", "any"])
def test_a_langgraph_agent_calls_its_tool(gateway: RealGateway, choice: str) -> None:
    asked: list[str] = []

    @tool
    def look(place: Place) -> str:
        """Look which birds are at a place."""
        asked.append(place)
        return FOUND

    model = ChatOpenAI(
        base_url=f"{gateway.url}/v1",
        api_key="none",
        model="smollm2",
        temperature=0,
        max_tokens=96,
        stream_usage=True,
    )
    bound: Any = model if choice == "auto" else model.bind_tools([look], tool_choice="any", strict=True)
    if choice == "auto":  # a small model may answer by itself
        with pytest.warns(match="create_react_agent has been moved"):  # to a package that is not needed here
            agent = create_react_agent(bound, [look])
        said = agent.invoke({"messages": QUESTION}, {"recursion_limit": 9})["messages"]
        assert isinstance(said[-1], AIMessage | ToolMessage)
        assert said[1].response_metadata["model_name"] == "smollm2"
    else:
        (call,) = bound.invoke(QUESTION).tool_calls[:1]
        assert look.invoke(call).content == FOUND
        assert asked == [call["args"]["place"]]


class Sighting(BaseModel):
    """Birds that were seen."""

    place: Place
    birds: int


async def test_pydantic_ai_gets_an_output_of_its_type(gateway: RealGateway) -> None:
    async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none") as client:
        agent = Agent(
            OpenAIChatModel("smollm2", provider=OpenAIProvider(openai_client=client)),
            output_type=Sighting,
            model_settings={"temperature": 0, "max_tokens": 96},
        )
        answer = await agent.run("Two herons were seen at the shore.")
    assert isinstance(answer.output, Sighting)


async def test_openai_agents_call_their_tool(gateway: RealGateway) -> None:
    asked: list[str] = []

    @function_tool
    def look(place: Place) -> str:
        """Look which birds are at a place."""
        asked.append(place)
        return FOUND

    set_tracing_disabled(True)
    async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none") as client:
        agent = OpenAIAgent(
            name="watcher",
            model=OpenAIResponsesModel("smollm2", client),
            tools=[look],
            tool_use_behavior="stop_on_first_tool",
            model_settings=OpenAISettings(temperature=0, max_tokens=96, tool_choice="required"),
        )
        assert (await Runner.run(agent, QUESTION)).final_output == FOUND
    assert asked[0] in ("shore", "wood")


def test_the_anthropic_sdk_calls_a_tool_and_sends_its_result(gateway: RealGateway) -> None:
    look: ToolParam = {
        "name": "look",
        "description": "Look which birds are at a place.",
        "input_schema": {
            "type": "object",
            "properties": {"place": {"type": "string", "enum": ["shore", "wood"]}},
            "required": ["place"],
            "additionalProperties": False,
        },
        "strict": True,
    }
    messages: list[MessageParam] = [{"role": "user", "content": QUESTION}]
    with Anthropic(base_url=gateway.url, api_key="none") as client:
        answer = client.messages.create(
            model="smollm2", messages=messages, tools=[look], tool_choice={"type": "any"}, max_tokens=96
        )
        assert answer.id.startswith("msg_")
        block = next(block for block in answer.content if block.type == "tool_use")
        assert json.dumps(block.input) in ('{"place": "shore"}', '{"place": "wood"}')
        result: Any = {"type": "tool_result", "tool_use_id": block.id, "content": FOUND}
        messages += [
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": [result]},
        ]
        with client.messages.stream(
            model="smollm2", messages=messages, tools=[look], max_tokens=32
        ) as stream:
            last = stream.get_final_message()
        assert (last.model, last.role) == ("smollm2", "assistant")
        assert last.usage.output_tokens > 0
