"""The parsers that are chosen exist in vLLM, work on the tokenizers they are chosen for, and reach its handlers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import structlog

pytest.importorskip("vllm")

from support.vllm_handlers import UnaskedEngine, handlers_on  # after the skip
from transformers import AutoTokenizer
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from baton.config.groups import EngineSettings  # after the skip
from baton.config.settings import load_settings  # after the skip
from baton.engines.backend import Operation  # after the skip
from baton.engines.vllm import arguments, handlers  # after the skip
from baton.engines.vllm.client import CURRENT_CALL, Call  # after the skip
from baton.engines.vllm.engine import VllmEngine  # after the skip
from baton.engines.vllm.engine_thread import Starts  # after the skip
from baton.errors import InvalidRequest
from baton.models.catalog import SMOLLM2_TEMPLATE
from baton.models.parsers import CALLS, THOUGHTS, Family
from baton.models.store import ModelStore  # after the skip
from baton.telemetry.ids import RequestContext  # after the skip

LOOK = {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at": "é\\"x"}'}}
CHAT_TOOLS = [{"type": "function", "function": LOOK}]
USER = {"role": "user", "content": " Hi\n"}
SYSTEM = {"role": "system", "content": "Be brief. "}
PLAIN: list[list[dict[str, Any]]] = [
    [USER],
    [SYSTEM, USER],
    [USER, {"role": "assistant", "content": "Yes?"}, USER],
    [USER, SYSTEM, USER],
    [USER, {"role": "assistant", "content": ""}, {"role": "tool", "content": "7", "tool_call_id": "c"}],
    [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
]


@pytest.fixture(scope="module")
def folder() -> str:
    return ModelStore(load_settings().models_folder).resolve("smollm2")


@pytest.mark.parametrize("family", CALLS + THOUGHTS, ids=lambda family: family.name)
def test_every_parser_of_the_tables_works_with_the_tokens_it_asks_for(folder: str, family: Family) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(list(family.tokens))
    manager = (
        ToolParserManager.get_tool_parser if family in CALLS else ReasoningParserManager.get_reasoning_parser
    )
    manager(family.parser)(tokenizer)  # vLLM ends the start where this fails


def prompts_of(folder: str, conversations: list[list[dict[str, Any]]], **given: Any) -> list[str]:
    """The prompts that an engine gets for conversations."""
    body = {"model": "m"} | given.pop("body", {})
    settings = EngineSettings(name="m", model=folder, serving=given)

    async def ask() -> list[str]:
        engine = UnaskedEngine(settings)
        serving = await handlers_on(engine, settings)
        for messages in conversations:
            CURRENT_CALL.set(Call(RequestContext("id")))
            request = serving.parse(Operation.CHAT, body | {"messages": messages})
            method = serving.method(Operation.CHAT)
            assert method is not None
            with pytest.raises(InvalidRequest, match="enough"):
                await method(request, handlers.synthetic_request(RequestContext("id")))
        return [engine.renderer.tokenizer.decode(prompt["prompt_token_ids"]) for prompt in engine.prompts]

    return asyncio.run(ask())


def test_chats_without_tools_have_the_prompts_of_the_model_s_own_template(folder: str) -> None:
    own = prompts_of(folder, PLAIN)
    assert len(own) == len(PLAIN)
    assert prompts_of(folder, PLAIN, chat_template=SMOLLM2_TEMPLATE) == own


def test_the_embedded_model_s_template_writes_tools_and_calls_as_its_parser_reads_them(folder: str) -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]}
    result = {"role": "tool", "content": "7", "tool_call_id": "c"}
    body = {"tools": CHAT_TOOLS, "tool_choice": "auto"}
    (first, second) = prompts_of(
        folder, [[USER, called, result], [SYSTEM, USER]], chat_template=SMOLLM2_TEMPLATE, body=body
    )
    assert first.count('"description": "Looks."') == second.count('"description": "Looks."') == 1
    assert second.startswith("<|im_start|>system\nBe brief. \n\n")
    written = first.partition("<|im_start|>assistant\n")[2].partition("<|im_end|>")[0]
    parser = ToolParserManager.get_tool_parser("hermes")(AutoTokenizer.from_pretrained(folder))
    read = parser.extract_tool_calls(written, None)  # type: ignore[arg-type]  # not looked at
    assert [call.function.name for call in read.tool_calls] == ["look", "look"]
    assert [call.function.arguments for call in read.tool_calls] == ['{"at": "é\\"x"}'] * 2


def test_the_choice_reaches_vllm_and_off_keeps_it_out(folder: str) -> None:
    def namespace(**serving: Any) -> tuple[Any, Any]:
        built = arguments.serving_namespace(
            EngineSettings(name="a", model="smollm2", serving=serving), folder
        )
        return built.tool_call_parser, built.enable_auto_tool_choice

    assert namespace() == namespace(tool_call_parser="auto") == ("hermes", True)
    assert namespace(tool_call_parser="off") == (None, False)
    assert namespace(tool_call_parser="xlam") == ("xlam", True)
    assert namespace(enable_auto_tool_choice=False) == ("hermes", False)


@pytest.mark.fault("E24")
def test_a_parser_whose_template_writes_no_tools_is_told_at_the_start(folder: str) -> None:
    def told(**serving: Any) -> list[Any]:
        settings = EngineSettings(name="a", model=folder, serving=serving)
        with structlog.testing.capture_logs() as lines:
            VllmEngine(settings, folder, salt=lambda _tenant: None, starts=Starts())
        return [line["reason"] for line in lines if line["log_level"] == "warning"]

    (reason,) = told(tool_call_parser="hermes")
    assert "writes no tools" in reason
    assert told() == told(tool_call_parser="hermes", chat_template=SMOLLM2_TEMPLATE) == []


def test_the_reasoning_parser_that_is_chosen_is_the_engine_s(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}')
    tokens = '{"added_tokens_decoder": {"1": {"content": "<think>"}, "2": {"content": "</think>"}}}'
    (tmp_path / "tokenizer_config.json").write_text(tokens)
    (tmp_path / "chat_template.jinja").write_text("{% if add_generation_prompt %}<think>{% endif %}")

    def built(**args: Any) -> str:
        settings = EngineSettings(name="a", model=str(tmp_path), args=args)
        return (
            arguments.engine_args(settings, str(tmp_path)).create_structured_outputs_config().reasoning_parser
        )

    assert built() == built(reasoning_parser="auto") == "qwen3"
    assert built(reasoning_parser="off") == ""
    assert built(reasoning_parser="olmo3") == "olmo3"
