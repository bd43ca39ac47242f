"""A relay in LangGraph: a reader, two specialists in parallel, an editor; handoff ids travel in the state.

Run it with `pip install langgraph langchain-openai`, then: python relay_langgraph.py [BASE_URL [MODEL]]
"""

import operator
import sys
from typing import Annotated, TypedDict

from langchain_core.messages import AIMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph

BASE_URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
MODEL = sys.argv[2] if len(sys.argv) > 2 else "smollm2"
EVENTS = {
    5: "Jun broke the compass on the rocks.",
    12: "Mirela saw a white owl on the beacon.",
    28: "Ilka named the island at the end of the sound Lantern Island.",
}
LOG = "\n".join(
    f"Day {day}. We made {4 + day * 7 % 19} miles under sail. {EVENTS.get(day, '')}" for day in range(1, 33)
)


class State(TypedDict, total=False):
    """What the nodes pass on: ids instead of the text, and what was said."""

    log: str
    read: str
    sighted: str
    said: Annotated[list[str], operator.add]


def ask(question: str, handoff: dict[str, str | bool]) -> AIMessage:
    """Ask one thing; only the new message is sent, what was said before comes with the handoff."""
    model = ChatOpenAI(
        base_url=BASE_URL,
        api_key="none",
        model=MODEL,
        temperature=0,
        max_tokens=24,
        extra_body={"handoff": handoff},
        include_response_headers=True,
    )
    return model.invoke([("user", question)])


def left_by(answer: AIMessage) -> str:
    """The id of the handoff an answer leaves behind; LangChain drops fields it does not know, not headers."""
    return answer.response_metadata["headers"]["x-handoff-id"]


def line(node: str, answer: AIMessage) -> str:
    """What a node got, and how much of its prompt was computed already."""
    usage = answer.usage_metadata
    cached = usage.get("input_token_details", {}).get("cache_read", 0)
    return f"{node}: {answer.content}\n    {cached} of {usage['input_tokens']} prompt tokens cached"


def reader(state: State) -> State:
    """Read the log."""
    answer = ask(f"{state['log']}\n\nWhat is the name of the island?", {"save": True})
    return {"read": left_by(answer), "said": [line("reader", answer)]}


def navigator(state: State) -> State:
    """Ask one thing of what the reader read."""
    answer = ask("What did Jun break?", {"from": state["read"]})
    return {"said": [line("navigator", answer)]}


def naturalist(state: State) -> State:
    """Ask another, and leave a handoff for the editor."""
    answer = ask("What did Mirela see on the beacon?", {"from": state["read"], "save": True})
    return {"sighted": left_by(answer), "said": [line("naturalist", answer)]}


def editor(state: State) -> State:
    """Go on from the naturalist's context."""
    answer = ask("Write one sentence about the whole voyage.", {"from": state["sighted"]})
    return {"said": [line("editor", answer)]}


def graph() -> StateGraph:
    """The reader, then both specialists, then the editor."""
    nodes = StateGraph(State)
    for node in (reader, navigator, naturalist, editor):
        nodes.add_node(node.__name__, node)
    nodes.add_edge(START, "reader")
    nodes.add_edge("reader", "navigator")
    nodes.add_edge("reader", "naturalist")
    nodes.add_edge(["navigator", "naturalist"], "editor")
    nodes.add_edge("editor", END)
    return nodes


if __name__ == "__main__":
    for said in graph().compile().invoke({"log": LOG})["said"]:
        print(said)
