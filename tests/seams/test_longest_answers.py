"""`max_tokens` is an upper bound: vLLM gets what the prompt leaves of the context, and the answer says so."""

from __future__ import annotations

import asyncio
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
from baton.engines.vllm.handlers import asked_tokens, within_context  # after the skip
from baton.errors import BatonError, ContextTooLong  # after the skip
from baton.models.store import ModelStore  # after the skip
from baton.telemetry.ids import (
    CUT_HEADER,
    RequestContext,  # after the skip
)

LONGEST = 256
MESSAGE = {"messages": [{"role": "user", "content": "x " * 50}]}
ASKED: list[tuple[Operation, str, dict[str, Any]]] = [
    (Operation.COMPLETIONS, "max_tokens", {"prompt": "x " * 50}),
    (Operation.COMPLETIONS, "max_tokens", {"prompt": ["x", "x " * 50]}),
    (Operation.CHAT, "max_tokens", MESSAGE),
    (Operation.CHAT, "max_completion_tokens", MESSAGE | {"max_tokens": 3}),
    (Operation.MESSAGES, "max_tokens", MESSAGE),
    (Operation.RESPONSES, "max_output_tokens", {"input": "x " * 50}),
]


class Gateway:
    """One engine behind vLLM's serving handlers, on an event loop of its own."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner
        model = ModelStore(load_settings().models_folder).resolve("smollm2")
        settings = EngineSettings(name="m", model=str(model), args={"max_model_len": LONGEST})
        self.engine = UnaskedEngine(settings)
        self._handlers = runner.run(handlers_on(self.engine, settings))

    def ask(self, operation: Operation, body: dict[str, Any], *, cuts: bool) -> Call:
        """Ask as the engine does; return the call, whose failure is the error that a client gets."""
        return self._runner.run(self._ask(operation, body | {"model": "m"}, cuts))

    async def _ask(self, operation: Operation, body: dict[str, Any], cuts: bool) -> Call:
        context = RequestContext("id", cuts_max_tokens=cuts)
        call = Call(context, asked=asked_tokens(body))
        CURRENT_CALL.set(call)
        method = self._handlers.method(operation)
        assert method is not None
        body = within_context(body, LONGEST) if cuts else body
        try:
            await method(self._handlers.parse(operation, body), handlers.synthetic_request(context))
        except BatonError:
            assert call.failure is not None
        return call


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with asyncio.Runner() as runner:
        yield Gateway(runner)


@pytest.mark.parametrize("asked", [LONGEST, LONGEST - 1, 32_000])
@pytest.mark.parametrize(("operation", "field", "body"), ASKED, ids=str)
def test_a_longer_answer_is_cut_to_what_the_prompt_leaves(
    gateway: Gateway, operation: Operation, field: str, body: dict[str, Any], asked: int
) -> None:
    gateway.engine.prompts.clear()
    call = gateway.ask(operation, body | {field: asked}, cuts=True)
    assert call.failure is not None
    assert call.failure.message == "enough", "it reached the engine"
    left = LONGEST - max(len(prompt["prompt_token_ids"]) for prompt in gateway.engine.prompts)
    assert call.context.answer_headers == {CUT_HEADER: str(left)}


@pytest.mark.parametrize(("operation", "field", "body"), ASKED, ids=str)
def test_an_answer_that_fits_is_not_cut(
    gateway: Gateway, operation: Operation, field: str, body: dict[str, Any]
) -> None:
    call = gateway.ask(operation, body | {field: 8}, cuts=True)
    assert call.context.answer_headers == {}


def test_where_answers_are_not_cut_a_longer_one_is_refused(gateway: Gateway) -> None:
    for operation, field, body in ASKED:
        call = gateway.ask(operation, body | {field: LONGEST - 1}, cuts=False)
        assert type(call.failure) is ContextTooLong
        assert "limits.cut_max_tokens" in call.failure.message
