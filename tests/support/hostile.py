"""Requests made to break a gateway: one table of bytes that are no JSON, one of asking for too much."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

MESSAGES = [{"role": "user", "content": "one two"}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "text", "prompt": "one two"},
    "/v1/chat/completions": {"model": "text", "messages": MESSAGES},
    "/v1/responses": {"model": "text", "input": "one two"},
    "/v1/messages": {"model": "text", "messages": MESSAGES, "max_tokens": 4},
    "/v1/messages/count_tokens": {"model": "text", "messages": MESSAGES},
    "/v1/embeddings": {"model": "embed", "input": "one two"},
    "/pooling": {"model": "embed", "input": "one two"},
    "/classify": {"model": "embed", "input": "one two"},
    "/score": {"model": "embed", "queries": "one", "documents": ["two"]},
    "/v1/score": {"model": "embed", "queries": "one", "documents": ["two"]},
    "/rerank": {"model": "embed", "query": "one", "documents": ["two"]},
    "/v1/rerank": {"model": "embed", "query": "one", "documents": ["two"]},
    "/v2/rerank": {"model": "embed", "query": "one", "documents": ["two"]},
    "/tokenize": {"model": "text", "prompt": "one two"},
    "/detokenize": {"model": "text", "tokens": [1, 2]},
    "/v1/handoffs": {"model": "text", "prompt": "one two"},
}
"""Every route that takes JSON and reaches an engine, with a body that it answers."""

VALUES: dict[str, tuple[bytes, str, str]] = {
    "NaN": (b"NaN", "invalid_json", "NaN is not a JSON number"),
    "Infinity": (b"[1, Infinity]", "invalid_json", "Infinity is not a JSON number"),
    "-Infinity": (b'{"y": -Infinity}', "invalid_json", "-Infinity is not a JSON number"),
    "1e400": (b"1e400", "invalid_json", "'x' is a number too large"),
    "-1e400": (b"[0, -1e400]", "invalid_json", "item 1 of a list is a number too large"),
    "a float of 400 digits": (b"1" + b"0" * 400 + b".5", "invalid_json", "a number too large"),
    "2**63": (b"9223372036854775808", "invalid_json", "64 bits with a sign"),
    "-2**63-1": (b"-9223372036854775809", "invalid_json", "64 bits with a sign"),
    "an integer of 4000 digits": (b"9" * 4000, "invalid_json", "64 bits with a sign"),
    "an integer of 10^5 digits": (b"9" * 100_000, "invalid_json", "64 bits with a sign"),
    "half a surrogate pair": (b'"\\ud800"', "invalid_json", "surrogate"),
    "the other half": (b'"\\udc00 x"', "invalid_json", "surrogate"),
    "a surrogate in UTF-8": (b'"\xed\xa0\x80"', "invalid_json", "not UTF-8"),
    "invalid UTF-8": (b'"\xff"', "invalid_json", "not UTF-8"),
    "a duplicate key": (b'1, "x": 2', "invalid_json", "key 'x' twice"),
    "an inner duplicate key": (b'[{"k": 1, "\\u006b": 2}]', "invalid_json", "key 'k' twice"),
    "a control character": (b'"\x00"', "invalid_json", "control character"),
    "a leading zero": (b"01", "invalid_json", "invalid number"),
    "a trailing comma": (b"[1,]", "invalid_json", "trailing comma"),
    "depth 100": (b"[" * 100 + b"]" * 100, "invalid_request", "64 levels"),
    "depth 10^5": (b"[" * 100_000 + b"]" * 100_000, "invalid_request", "64 levels"),
    "10^6 values": (b"[" + b"0," * 1_000_000 + b"0]", "invalid_request", "too many values"),
}
"""What stands as one field's value, the code it is refused with, and what the text says."""


OTHER_FORMS: dict[str, dict[str, Any]] = {
    "/mcp": {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}},
    "/v1/scenes": {"model": "embed", "data": {}},
    "/ogc/processes/{process}/execution": {"inputs": {}},
    "/v1/batches": {"input_file_id": "file-x", "endpoint": "/v1/completions", "completion_window": "24h"},
    "/v1/warm": {"prompt_cache_key": "x"},
    "/v1/load_lora_adapter": {"lora_name": "x", "lora_path": "/nowhere"},
    "/v1/unload_lora_adapter": {"lora_name": "x"},
}
"""Routes whose bodies are no requests to an engine; tests of their own look at their fields."""


def hostile_json(route: str) -> Iterator[tuple[str, bytes, str, str]]:
    """Name, body, code and what the text says, for one route."""
    whole = json.dumps((ROUTES | OTHER_FORMS)[route]).encode()
    for name, (value, code, said) in VALUES.items():
        yield name, whole[:-1] + b', "x": ' + value + b"}", code, said
    for mark, codec in ((b"\xef\xbb\xbf", "utf-8"), (b"\xff\xfe", "utf-16-le")):
        yield f"a mark of {codec}", mark + whole.decode().encode(codec), "invalid_json", "byte order mark"
    yield "trailing data", whole + b" x", "invalid_json", "trailing characters"
    yield "two objects", whole + whole, "invalid_json", "trailing characters"
    yield "nothing", b"", "invalid_json", "EOF"
    yield "half of it", whole[: len(whole) // 2], "invalid_json", "EOF"
    yield "no object", b"[" + whole + b"]", "invalid_json", "must be a JSON object"


def nested(depth: int) -> dict[str, Any]:
    """A schema of arrays of arrays."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def tool(schema: dict[str, Any]) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]}


MUCH = 10**5
TOO_MUCH: dict[str, dict[str, Any]] = {
    "n": {"n": 65},
    "n as a text": {"n": "1000000"},
    "n as a text with a point": {"n": "1000000.0"},
    "n as a text of 400 digits": {"n": "9" * 400},
    "n as a float": {"n": 1e6},
    "best_of": {"best_of": 10**9},
    "n of many prompts": {"n": 64, "prompt": ["x"] * 17},
    "max_tokens": {"max_tokens": 2**62},
    "max_completion_tokens": {"max_completion_tokens": 1_048_577},
    "max_output_tokens": {"max_output_tokens": 2**62},
    "min_tokens": {"min_tokens": 2**62},
    "thinking_token_budget": {"thinking_token_budget": 2**62},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 2**62},
    "logprobs": {"logprobs": 21},
    "all logprobs": {"logprobs": -1},
    "top_logprobs": {"top_logprobs": 10**6},
    "prompt_logprobs": {"prompt_logprobs": -1},
    "logprobs of many tokens": {"n": 64, "max_tokens": 10_000, "logprobs": 20},
    "logprobs of many prompts": {"prompt": ["x"] * 100, "max_tokens": 10_000, "logprobs": 20},
    "logprobs of long answers": {"max_completion_tokens": 1_000_000, "logprobs": True, "top_logprobs": 20},
    "logprobs of answers without end": {"n": 64, "max_tokens": None, "logprobs": 20},
    "stop": {"stop": ["x"] * MUCH},
    "a long stop": {"stop": "x" * 1025},
    "stop_sequences": {"stop_sequences": ["x"] * 17},
    "bad_words": {"bad_words": ["x" * 2000]},
    "stop_token_ids": {"stop_token_ids": list(range(MUCH))},
    "logprob_token_ids": {"logprob_token_ids": list(range(1025))},
    "allowed_token_ids": {"allowed_token_ids": [1] * 262_145},
    "logit_bias": {"logit_bias": {str(number): 1 for number in range(1025)}},
    "vllm_xargs": {"vllm_xargs": {str(number): 1 for number in range(65)}},
    "a renderer's conversation": {"chat_template_kwargs": {"conversation": []}},
    "a renderer's padding": {"chat_template_kwargs": {"padding": "max_length", "max_length": 10**9}},
    "a long vllm_xarg": {"vllm_xargs": {"x": [1] * 65}},
    "repetition_detection": {"repetition_detection": {"max_pattern_size": 10**9, "min_count": 2}},
    "messages": {"messages": MESSAGES * 4097},
    "10^5 messages": {"messages": [{"role": "user"}] * MUCH},
    "parts of a message": {"messages": [{"role": "user", "content": [{"type": "text"}] * 4097}]},
    "items": {"input": [{"role": "user", "content": "x"}] * 4097},
    "conversations": {"messages": [MESSAGES] * 1025},
    "system": {"system": [{"type": "text", "text": "x"}] * 4097},
    "prompts": {"prompt": ["x"] * 1025},
    "prompts of tokens": {"prompt": [[1]] * MUCH},
    "inputs": {"input": ["x"] * 1025},
    "documents": {"documents": ["x"] * 1025},
    "queries": {"queries": ["x"] * 1025},
    "tools": {"tools": [{"type": "function"}] * 513},
    "tools of a message": {"messages": [{"role": "user", "tools": [{}] * 513}]},
    "tool_calls": {"messages": [{"role": "assistant", "tool_calls": [{}] * 513}]},
}
"""E9: fields that ask for too much."""

EVIL: dict[str, dict[str, Any]] = {
    "(a+)+b": {"structured_outputs": {"regex": "(a+)+b"}},
    "(a*)*": {"structured_outputs": {"regex": "(a*)*"}},
    "(a|a+)+": {"structured_outputs": {"regex": "(a|a+)+"}},
    "a guided (a+)+": {"guided_regex": "(a+)+"},
    "a{1000}{1000}": {"structured_outputs": {"regex": "a{1000}{1000}"}},
    "(a{1000}){1000}": {"structured_outputs": {"regex": "((a{1000}){1000}){1000}"}},
    "a{10^18}": {"structured_outputs": {"regex": "a{1000000000000000000}"}},
    "30 000 (": {"structured_outputs": {"regex": "(" * 30_000}},
    "33 (": {"structured_outputs": {"regex": "(" * 33 + "a" + ")" * 33}},
    "a long regex": {"structured_outputs": {"regex": "a" * 1025}},
    "an evil whitespace": {"structured_outputs": {"json": {}, "whitespace_pattern": "(\\s+)+"}},
    "30 000 ( in a grammar": {"structured_outputs": {"grammar": "root ::= " + "(" * 30_000}},
    "a long grammar": {"structured_outputs": {"grammar": "root ::= 'x'\n" * 10_000}},
    "a{1000}{1000} in a grammar": {"structured_outputs": {"grammar": "root ::= ('a'{1000}){1000}"}},
    "an enum of 10^5": json_schema({"enum": list(range(MUCH))}),
    "an enum of 4097": json_schema({"enum": list(range(4097))}),
    "choices": {"structured_outputs": {"choice": ["x"] * 4097}},
    "guided choices": {"guided_choice": ["x"] * 4097},
    "a large schema": json_schema({"properties": {f"key{number}": {} for number in range(10_000)}}),
    "a large schema as text": {"structured_outputs": {"json": json.dumps({"description": "x" * 70_000})}},
    "a deep schema": json_schema(nested(40)),
    "a deep schema as text": {"structured_outputs": {"json": json.dumps(nested(40))}},
    "a schema that is no JSON": {"structured_outputs": {"json": "{" * 1000}},
    "a pattern in a schema": json_schema({"type": "string", "pattern": "^(a+)+$"}),
    "a pattern in a schema's text": {"guided_json": json.dumps({"pattern": "(a+)+"})},
    "a key's pattern": json_schema({"patternProperties": {"(a+)+": {}}}),
    "a long pattern in a schema": json_schema({"items": [{"pattern": "a" * 1025}]}),
    "a pattern in a tool": tool({"properties": {"pattern": {"pattern": "(a+)+"}}}),
    "a deep tool": tool(nested(40)),
    "a large tool": tool({"description": "x" * 70_000}),
    "a large tool of Anthropic's": {"tools": [{"name": "f", "input_schema": {"description": "x" * 70_000}}]},
    "a tool's grammar": {"tools": [{"type": "custom", "format": {"definition": "x: " + "(" * 40}}]},
    "a format of Responses": {"text": {"format": {"type": "json_schema", "schema": nested(40)}}},
    "an output format of Anthropic's": {"output_config": {"format": {"schema": {"pattern": "(a+)+"}}}},
    "a structural tag": {"response_format": {"type": "structural_tag", "format": {"pattern": "(a+)+"}}},
    "a structural tag as text": {"structured_outputs": {"structural_tag": json.dumps({"pattern": "(a+)+"})}},
}
"""E10: schemas, patterns and grammars that cost whoever compiles them."""


def asking(route: str, more: dict[str, Any]) -> bytes:
    return json.dumps(ROUTES[route] | more).encode()
