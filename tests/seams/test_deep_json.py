"""JSON within JSON that is nested too deep is refused by its field, or taken for the broken call that it is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")

from support.vllm_handlers import UnaskedEngine, handlers_on  # after the skip

from baton.config.groups import EngineSettings  # after the skip
from baton.config.settings import load_settings  # after the skip
from baton.engines.backend import Operation  # after the skip
from baton.engines.vllm import handlers  # after the skip
from baton.engines.vllm.client import CURRENT_CALL, Call  # after the skip
from baton.engines.vllm.errors import translate  # after the skip
from baton.errors import BatonError, InvalidRequest  # after the skip
from baton.models.store import ModelStore  # after the skip
from baton.telemetry.ids import RequestContext  # after the skip

pytestmark = pytest.mark.fault("F10")
DEEP = 990


class Gateway:
    """One engine behind vLLM's serving handlers, on an event loop of its own."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner
        model = ModelStore(load_settings().models_folder).resolve("smollm2")
        settings = EngineSettings(name="m", model=str(model))
        self.engine = UnaskedEngine(settings)
        self._handlers = runner.run(handlers_on(self.engine, settings))

    def asked(self, operation: Operation, body: dict[str, Any]) -> BatonError:
        """Ask; return what came of it: the engine refuses what it gets."""
        return self._runner.run(self._asked(operation, body | {"model": "m"}))

    async def _asked(self, operation: Operation, body: dict[str, Any]) -> BatonError:
        call = Call(RequestContext("id"))
        CURRENT_CALL.set(call)
        method = self._handlers.method(operation)
        assert method is not None
        try:
            await method(self._handlers.parse(operation, body), handlers.synthetic_request(call.context))
        except Exception as error:  # noqa: BLE001  # as the engine's own border does
            return translate(error)
        assert call.failure is not None
        return call.failure

    def rendered(self, body: dict[str, Any]) -> str:
        return self._runner.run(self._handlers.render(body | {"model": "m"}))


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with asyncio.Runner() as runner:
        yield Gateway(runner)


def chat(arguments: Any) -> dict[str, Any]:
    """A conversation in which the model made this call."""
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    return {
        "messages": [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "seen"},
            {"role": "user", "content": "And?"},
        ]
    }


def response(arguments: Any) -> dict[str, Any]:
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": arguments}
    output = {"type": "function_call_output", "call_id": "c", "output": "seen"}
    return {"input": [{"role": "user", "content": "Look."}, call, output]}


CALLED = [
    (Operation.CHAT, chat, "messages[1].tool_calls[0].function.arguments"),
    (Operation.TOKENIZE, chat, "messages[1].tool_calls[0].function.arguments"),
    (Operation.RESPONSES, response, "input[1].arguments"),
]
WHOLE = [
    "[" * DEEP + "]" * DEEP,
    '{"a":' * DEEP + "1" + "}" * DEEP,
    '{"a": "]]}}", "b": ' + "[" * DEEP + "]" * DEEP + "}",
]
CUT = ["[" * DEEP, '{"a":' * DEEP, '{"a": "x", "b": ' + "[" * DEEP, "[" * 100_000, '["]",' * DEEP]


@pytest.mark.parametrize("arguments", WHOLE, ids=lambda text: text[:12])
@pytest.mark.parametrize(("operation", "body", "param"), CALLED)
def test_arguments_that_are_nested_too_deep_are_refused_by_their_field(
    gateway: Gateway, operation: Operation, body: Any, param: str, arguments: str
) -> None:
    error = gateway.asked(operation, body(arguments))
    assert (type(error), error.param) == (InvalidRequest, param)
    if body is chat:
        with pytest.raises(InvalidRequest) as refused:
            gateway.rendered(body(arguments))
        assert refused.value.param == param


@pytest.mark.parametrize("arguments", CUT, ids=lambda text: text[:12])
@pytest.mark.parametrize(("operation", "body", "_"), CALLED)
def test_a_call_that_was_cut_off_does_not_end_its_conversation(
    gateway: Gateway, operation: Operation, body: Any, _: str, arguments: str
) -> None:
    """As with arguments that are cut off less deep: vLLM takes them for empty ones."""
    if operation is Operation.TOKENIZE:
        assert gateway.rendered(body(arguments)) == gateway.rendered(body("[1, 2"))
        return
    gateway.engine.prompts.clear()
    for each in (arguments, "[1, 2"):
        assert gateway.asked(operation, body(each)).message == "enough"
    deep, shallow = gateway.engine.prompts
    assert deep["prompt_token_ids"] == shallow["prompt_token_ids"]


@pytest.mark.parametrize("arguments", ['{"a": [1, {"b": "]]["}]}', "[" * 150 + "]" * 150, "", None, '{"a"'])
def test_other_arguments_reach_the_handler_as_they_came(arguments: str | None) -> None:
    from baton.engines.vllm.handlers import readable_calls

    for body in (chat(arguments), response(arguments)):
        before = json.dumps(body)
        assert json.dumps(readable_calls(body)) == before


def test_whatever_else_is_nested_too_deep_is_the_clients_fault() -> None:
    error = translate(RecursionError("maximum recursion depth exceeded"))
    assert type(error) is InvalidRequest
    assert "nested too deep" in error.message
