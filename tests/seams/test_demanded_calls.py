"""A call that a request demands is held by a grammar, or refused, by every parser that may be chosen."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from support.written_calls import TOKENS, WRITTEN  # after the skip
from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.parser_manager import ParserManager
from vllm.tokenizers.hf import get_cached_tokenizer
from vllm.v1.structured_output.utils import grammar_is_likely_lark
from xgrammar import Grammar, GrammarCompiler, GrammarMatcher, TokenizerInfo, VocabType

from baton.config.settings import load_settings
from baton.engines.vllm.custom_tools import ResponsesRequest
from baton.engines.vllm.handlers import only_allowed_tools
from baton.engines.vllm.parsers import mended
from baton.errors import InvalidRequest
from baton.models.parsers import CALLS
from baton.models.store import ModelStore

PARSERS = sorted({family.parser for family in CALLS})
REFUSED = {
    ("cohere_command3", "chat", "named"),
    ("cohere_command3", "response", "named"),
    *(("mistral", "response", choice) for choice in ("named", "allowed")),
}
"""What is a 400."""
CONFIG = SimpleNamespace(architecture="Cohere2ForCausalLM")
PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
NAMES = ("look", "find_it")
CHOICES: dict[str, Callable[[str], Any]] = {
    "required": lambda _shape: "required",
    "named": lambda shape: (
        {"type": "function"} | ({"function": {"name": "look"}} if shape == "chat" else {"name": "look"})
    ),
    "allowed": lambda shape: {
        "type": "allowed_tools",
        **(
            {
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "look"}}],
                }
            }
            if shape == "chat"
            else {"mode": "required", "tools": [{"type": "function", "name": "look"}]}
        ),
    },
}


ASKED = [("chat", "required"), ("chat", "named"), ("response", "named"), ("response", "allowed")]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    found = AutoTokenizer.from_pretrained(ModelStore(load_settings().models_folder).resolve("smollm2"))
    found.add_tokens(sorted({token for tokens in TOKENS.values() for token in tokens}))
    return get_cached_tokenizer(found)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    """Compiles for a tokenizer whose tokens are bytes, and an end: in no time."""
    letters = [bytes([each]) for each in range(256)]
    return GrammarCompiler(TokenizerInfo([*letters, b"</s>"], VocabType.RAW, stop_token_ids=[256]))


def asked(shape: str, choice: str) -> Any:
    functions = [{"name": name, "parameters": PARAMETERS} for name in NAMES]
    if shape == "chat":
        tools = [{"type": "function", "function": function} for function in functions]
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "tools": tools}
    else:
        body = {"input": "x", "tools": [{"type": "function"} | function for function in functions]}
    body |= {"model": "m", "tool_choice": CHOICES[choice](shape)}
    request_type = ChatCompletionRequest if shape == "chat" else ResponsesRequest
    return request_type.model_validate(only_allowed_tools(body))


def accepts(compiler: GrammarCompiler, made: Any, text: str) -> bool:
    """Whether the constraint lets an answer through."""
    if made.structural_tag is not None:
        compiled = compiler.compile_structural_tag(made.structural_tag)
    elif made.json is not None:
        schema = made.json if isinstance(made.json, str) else json.dumps(made.json)
        compiled = compiler.compile_json_schema(schema)
    else:
        assert grammar_is_likely_lark(made.grammar)
        compiled = compiler.compile_grammar(Grammar.from_lark(made.grammar))
    matcher = GrammarMatcher(compiled)
    return matcher.accept_string(text) and matcher.accept_token(compiled.tokenizer_info.stop_token_ids[0])


@pytest.mark.fault("E28")
@pytest.mark.parametrize(("shape", "choice"), ASKED)
@pytest.mark.parametrize("name", PARSERS)
def test_a_call_that_is_demanded_is_held_or_refused(
    tokenizer: Any, compiler: GrammarCompiler, name: str, shape: str, choice: str
) -> None:
    if name == "cohere_command3":
        pytest.importorskip("cohere_melody")
    found = mended(ParserManager.get_parser(name, None, enable_auto_tools=True, is_harmony=name == "openai"))
    request = asked(shape, choice)
    parser = found(tokenizer, request.tools, model_config=CONFIG)
    if (name, shape, choice) in REFUSED:
        with pytest.raises(InvalidRequest, match="tool_call_parser") as refused:
            parser.adjust_request(request)
        assert refused.value.param == "tool_choice"
        return
    request = parser.adjust_request(request)
    made = request.extract_structured_outputs()
    assert not accepts(compiler, made, "I will not.")
    arguments = {"text": "a b"}
    native = WRITTEN[name]([("look", arguments)])
    in_json = [json.dumps([{"name": "look", key: arguments}]) for key in ("parameters", "arguments")]
    trimmed = (native.strip(), native.replace("\n", ""), native.removeprefix("<|end|><|start|>assistant"))
    forms = (native, *trimmed, *in_json, json.dumps(arguments))
    said = [text for text in forms if accepts(compiler, made, text)][:1]
    assert said
    if name == "openai":
        return  # reads tokens of its own: test_calls.py
    assert not accepts(compiler, made, said[0].replace("look", "other")) or choice == "named"
    ids = tokenizer.encode(said[0], add_special_tokens=False)
    for pieces in ([ids], [[token] for token in ids]):
        reader = found(tokenizer, request.tools, model_config=CONFIG)
        deltas = [
            reader.parse_delta(tokenizer.decode(piece), piece, request, [], finished=at == len(pieces))
            for at, piece in enumerate(pieces, 1)
        ]
        calls = [call for delta in deltas if delta for call in delta.tool_calls]
        assert "".join(call.function.name or "" for call in calls) == "look", pieces
        assert json.loads("".join(call.function.arguments or "" for call in calls)) == arguments
        assert "".join(delta.content or "" for delta in deltas if delta).strip() == ""
