"""Calls of every family that may be chosen are read alike whole, streamed and cut, wherever the cut is."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("vllm")

from support.written_calls import TOKENS, WRITTEN, Call  # after the skip
from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.parser_manager import ParserManager
from vllm.tokenizers.hf import get_cached_tokenizer

from baton.config.settings import load_settings
from baton.engines.vllm import client
from baton.engines.vllm.parsers import mended
from baton.models.parsers import CALLS
from baton.models.store import ModelStore
from baton.telemetry.ids import RequestContext

PARSERS = sorted({family.parser for family in CALLS} - {"openai"})  # test_calls.py has its tokens
SAID = "I look now."
TEXT = 'a\n"quoted" {x} (y) [z], it\'s'
SPOKEN: list[Call] = [("look", {"text": TEXT, "count": 17}), ("find_it", {"text": "x y"})]
PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}, "count": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name, _ in SPOKEN]
REQUEST = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": TOOLS}
ALONE = frozenset({"pythonic", "llama4_pythonic"})
"""Parsers of calls that are the whole answer."""
LOOSE = frozenset({"cohere_command3"})
"""Parsers that leave out what ends within an escape in JSON, by the pieces in which they get it."""
THOUGHT = "It is late."
THINKING = [
    ("olmo3", "olmo3", "<think>{}</think>"),
    ("hermes", "olmo3", "{}</think>"),
    ("hermes", "granite", "Here is my thought process:{}Here is my response:"),
    ("granite", "granite", "Here's my thought process:{}Here's my response:"),
    ("kimi_k2", "kimi_k2", "<think>{}</think>"),
    ("kimi_k3", "kimi_k3", "{}<|close|>think<|sep|><|open|>response<|sep|>"),
    ("seed_oss", "seed_oss", "<seed:think>{}</seed:think>"),
    *(
        (name, "deepseek_r1", "{}</think>")
        for name in ("granite4", "jamba", "lfm2", "step3", "apertus", "ernie45")
    ),
]
"""Parsers of calls and of thoughts, and what stands around these."""
Read = tuple[str, str, list[tuple[str, str]]]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    found = AutoTokenizer.from_pretrained(ModelStore(load_settings().models_folder).resolve("smollm2"))
    found.add_tokens(sorted({token for tokens in TOKENS.values() for token in tokens}))
    return get_cached_tokenizer(found)


def read(parser: type[Any], tokenizer: Any, tokens: list[int], at_once: int, *, cut: bool) -> Read:
    """Thoughts, text and calls of an answer that comes in pieces of some tokens; 0: in one piece."""
    client.CURRENT_CALL.set(client.Call(RequestContext("id"), cut=cut))
    request = ChatCompletionRequest.model_validate(REQUEST)
    reader = parser(tokenizer, request.tools)
    if not at_once:
        thoughts, content, calls = reader.parse(tokenizer.decode(tokens), request, True, tokens)
        found = [(call.name, call.arguments) for call in calls or ()]
        return (thoughts or "").strip(), (content or "").strip(), found
    told, text, found = "", "", list[tuple[str, str]]()
    for at in range(0, len(tokens), at_once):
        piece = tokens[at : at + at_once]
        last = at + at_once >= len(tokens)
        delta = reader.parse_delta(tokenizer.decode(piece), piece, request, [], finished=last)
        if delta is None:
            continue
        told += delta.reasoning or ""
        text += delta.content or ""
        for call in delta.tool_calls:
            if call.index == len(found):
                found.append((call.function.name, ""))
            name, arguments = found[call.index]
            found[call.index] = (name, arguments + (call.function.arguments or ""))
    return told.strip(), text.strip(), found


def require_alike(
    parser: type[Any], tokenizer: Any, name: str, thought: str, said: str, tokens: list[int]
) -> None:
    """Check an answer that is whole, and one that is cut after each of its tokens."""
    for at_once in (0, 1, 3):
        told, text, calls = read(parser, tokenizer, tokens, at_once, cut=False)
        assert (told, text) == (thought, said), at_once
        assert [(called, json.loads(given)) for called, given in calls] == SPOKEN, at_once
    for most in range(1, len(tokens)):
        whole, *streamed = [read(parser, tokenizer, tokens[:most], each, cut=True) for each in (0, 1, 3)]
        assert name in LOOSE or streamed == [whole, whole], most
        told, text, calls = whole
        assert thought.startswith(told), most
        assert said.startswith(text), most
        assert [called for called, _ in calls] == [called for called, _ in SPOKEN][: len(calls)]
        for at, ((_, written), (_, meant)) in enumerate(zip(calls, SPOKEN, strict=False), 1):
            try:
                assert json.loads(written) == meant, most
            except ValueError:  # the call that was cut has what was written of it
                assert at == len(calls), most
                assert json.dumps(meant).startswith(written), most


@pytest.mark.fault("E23")
@pytest.mark.parametrize("name", PARSERS)
def test_calls_are_read_alike_at_every_cut(tokenizer: Any, name: str) -> None:
    if name == "cohere_command3":
        pytest.importorskip("cohere_melody")
    parser = mended(ParserManager.get_parser(name, None, enable_auto_tools=True))
    said = "" if name in ALONE else SAID
    tokens = tokenizer.encode(said + WRITTEN[name](SPOKEN), add_special_tokens=False)
    require_alike(parser, tokenizer, name, "", said, tokens)


@pytest.mark.fault("E23")
@pytest.mark.parametrize(("name", "thinks", "form"), THINKING)
def test_thoughts_and_calls_after_them_are_read_alike_at_every_cut(
    tokenizer: Any, name: str, thinks: str, form: str
) -> None:
    parser = mended(ParserManager.get_parser(name, thinks, enable_auto_tools=True))
    text = form.replace("{}", THOUGHT) + SAID + WRITTEN[name](SPOKEN)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    require_alike(parser, tokenizer, name, THOUGHT, SAID, tokens)


@pytest.mark.parametrize("text", ["sed -n '1,9p' f.py", "it's so"])
def test_quotes_that_a_model_leaves_bare_end_no_call(tokenizer: Any, text: str) -> None:
    """vLLM's parser mends them once the call is whole."""
    parser = mended(ParserManager.get_parser("lfm2", None, enable_auto_tools=True))
    said = f"<|tool_call_start|>[look(text='{text}')]<|tool_call_end|>ok"
    tokens = tokenizer.encode(said, add_special_tokens=False)
    for at_once in (0, 1, 3):
        told = read(parser, tokenizer, tokens, at_once, cut=False)
        assert told == ("", "ok", [("look", json.dumps({"text": text}))])
