"""What is tried is the grammar that the engine will compile, whatever vLLM's handlers made it of."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

pytest.importorskip("vllm")

from support.vllm_handlers import UnaskedEngine, handlers_on  # after the skip

from baton.config.groups import EngineSettings  # after the skip
from baton.config.settings import load_settings  # after the skip
from baton.engines.backend import Operation  # after the skip
from baton.engines.vllm import handlers  # after the skip
from baton.engines.vllm.client import CURRENT_CALL, Call  # after the skip
from baton.errors import InvalidRequest  # after the skip
from baton.http.body.schemas import doubtful_grammars  # after the skip
from baton.models.store import ModelStore  # after the skip
from baton.telemetry.ids import RequestContext  # after the skip

pytestmark = pytest.mark.fault("E14")


class Gateway:
    """One engine that takes tools behind vLLM's serving handlers, on an event loop of its own."""

    def __init__(self, settings: EngineSettings, runner: asyncio.Runner) -> None:
        self._runner = runner
        self.engine = UnaskedEngine(settings)
        self._handlers = runner.run(handlers_on(self.engine, settings))

    def tried(self, operation: Operation, body: dict[str, Any], *, refused: bool) -> list[Mapping[str, Any]]:
        """Ask; return the grammars that were tried."""
        return self._runner.run(self._tried(operation, body | {"model": "m", "max_tokens": 8}, refused))

    async def _tried(
        self, operation: Operation, body: dict[str, Any], refused: bool
    ) -> list[Mapping[str, Any]]:
        found: list[Mapping[str, Any]] = []

        async def try_grammar(grammar: Mapping[str, Any]) -> None:
            found.append(grammar)
            if refused:
                raise InvalidRequest("takes too long")

        call = Call(RequestContext("id", try_grammar=try_grammar))
        CURRENT_CALL.set(call)
        method = self._handlers.method(operation)
        assert method is not None
        try:
            answer = await method(
                self._handlers.parse(operation, body), handlers.synthetic_request(call.context)
            )
            if body.get("stream"):
                [event async for event in handlers.events(operation, answer)]
        except InvalidRequest:
            pass
        assert call.failure is not None
        return found


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    model = ModelStore(load_settings().models_folder).resolve("smollm2")
    serving = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    with asyncio.Runner() as runner:
        yield Gateway(EngineSettings(name="m", model=str(model), serving=serving), runner)


ASKED: dict[Operation, dict[str, Any]] = {
    Operation.CHAT: {"messages": [{"role": "user", "content": "x"}]},
    Operation.MESSAGES: {"messages": [{"role": "user", "content": "x"}]},
    Operation.RESPONSES: {"input": "x"},
}
FUNCTION = {"type": "function", "function": {"name": "look"}}
STRICT = {"name": "look", "strict": True, "parameters": {"type": "object"}}
MADE = [
    (Operation.CHAT, {"tools": [FUNCTION], "tool_choice": "required"}),
    (Operation.CHAT, {"tools": [FUNCTION], "tool_choice": FUNCTION}),
    (Operation.CHAT, {"tools": [{"type": "function", "function": STRICT}]}),
    (Operation.CHAT, {"tools": [FUNCTION], "parallel_tool_calls": False}),
    (Operation.RESPONSES, {"tools": [{"type": "function", "name": "look"}], "tool_choice": "required"}),
    (Operation.RESPONSES, {"tools": [{"type": "function"} | STRICT]}),
    (Operation.RESPONSES, {"tools": [{"type": "custom", "name": "look"}], "tool_choice": "required"}),
    (
        Operation.MESSAGES,
        {"tools": [{"name": "look", "input_schema": {"type": "object"}}], "tool_choice": {"type": "any"}},
    ),
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("operation", "body"), MADE, ids=str)
def test_what_vllm_makes_of_tools_is_tried_before_the_engine_gets_it(
    gateway: Gateway, operation: Operation, body: dict[str, Any], *, stream: bool
) -> None:
    body = ASKED[operation] | body | {"stream": stream}
    gateway.engine.grammars.clear()
    (tried,) = gateway.tried(operation, body, refused=True)
    assert not gateway.engine.grammars, "the engine got it first"
    (grammar,) = doubtful_grammars(tried, "tools")
    assert "look" in grammar.text
    gateway.tried(operation, body, refused=False)
    assert gateway.engine.grammars[0].structural_tag == tried["structural_tag"]


def test_a_request_without_a_grammar_is_not_held_up(gateway: Gateway) -> None:
    assert gateway.tried(Operation.CHAT, ASKED[Operation.CHAT] | {"tools": [FUNCTION]}, refused=True) == []
