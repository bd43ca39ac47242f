"""Limit the fields of a request by one table, `FIELD_LIMITS`, before an engine sees the request.

Values of the wrong type are not checked here: vLLM refuses them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from baton.admission.fair_queue import Order
from baton.config.groups import LimitSettings
from baton.errors import InvalidRequest
from baton.http.body.schemas import check_schema, tool_holders

# Remove request fields that would bypass the gateway's control of an engine.


STEERING_KEYS = (
    "kv_transfer_params",
    "ec_transfer_params",
    "cache_salt",
    "mm_processor_kwargs",
    "media_io_kwargs",
    "priority",
)
"""Fields of vLLM's requests that steer its caches, its scheduler or its image reading past the gateway."""
ARGUMENTS = "vllm_xargs"
"""Arguments for extensions of an engine: a connector, a logits processor, a model."""


def strip_steering(body: dict[str, Any]) -> list[str]:
    """Drop the fields that would steer the engine, also inside `vllm_xargs`; returns their names."""
    stripped = [key for key in STEERING_KEYS if body.pop(key, None) is not None]
    extra = body.get(ARGUMENTS)
    if isinstance(extra, dict):
        stripped += [key for key in STEERING_KEYS if extra.pop(key, None) is not None]
    return stripped


TIERS = {"priority": -1, "flex": 1}
"""Values of `service_tier` by which a request goes before its tenant's other requests, or after them."""


def order_of(body: Mapping[str, Any]) -> Order:
    """Return where a request stands among its tenant's own, by `service_tier` and then by vLLM's `priority`.

    Raises:
        InvalidRequest: `priority` is no whole number of 64 bits.
    """
    tier, priority = body.get("service_tier"), body.get("priority")
    if priority is None:
        priority = 0
    if isinstance(priority, bool) or not isinstance(priority, int) or not -(2**63) <= priority < 2**63:
        raise InvalidRequest("'priority' must be a whole number of 64 bits.", param="priority")
    return TIERS.get(tier, 0) if isinstance(tier, str) else 0, priority


def strip_arguments(body: dict[str, Any], allowed: Collection[str]) -> int:
    """Drop the arguments that clients may not set in `vllm_xargs`; returns their number."""
    extra = body.get(ARGUMENTS)
    if not isinstance(extra, dict):
        return 0
    kept = {name: value for name, value in extra.items() if name in allowed}
    if kept:
        body[ARGUMENTS] = kept
    else:
        del body[ARGUMENTS]
    return len(extra) - len(kept)


Check = Callable[[str, Any, LimitSettings], None]

STRING_CHARS = 1024
"""Longest stop string or bad word."""
TOKEN_IDS = 1024
VOCABULARY = 262_144
"""More tokens than any model's vocabulary has."""
ENTRIES = 1024
TOOLS = 512
NAME_CHARS = 128
"""Longest name of a tool: Anthropic's limit; OpenAI's is 64."""
UNWRITABLE = re.compile(r"[\"'`\\<>\x00-\x1f\x7f-\x9f\u2028\u2029]")
"""What would end the place in which grammars, templates and parsers write a tool's name."""
MOST_ARGUMENTS = 64
REPEATED_TOKENS = 1024
RENDERER_ARGUMENTS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "conversations",
        "max_length",
        "messages",
        "model_config",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "self",
        "tokenize",
        "tokenizer",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""Arguments of vLLM's and transformers' renderers, which a template's own variables must not override."""
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
UNSAID_TOKENS = 4096
"""Length that is assumed for an answer without a limit."""
BEYOND = 2**63
"""Stands for a number that is too large for a float."""


def check_field_limits(body: Mapping[str, Any], limits: LimitSettings) -> None:
    """Refuse a request with a field above its limit.

    Raises:
        InvalidRequest: a field is above its limit; `param` names it, and the message names the limit.
    """
    for name, value in body.items():
        if value is not None and (check := FIELD_LIMITS.get(name)) is not None:
            check(name, value, limits)
    _check_answers(body, limits)
    _check_values(body, limits)


def _check_values(body: Mapping[str, Any], limits: LimitSettings) -> None:
    """Limit the log probabilities of all tokens of all answers together."""
    per_token = [field for field in ("logprobs", "top_logprobs") if _as_number(body.get(field))]
    if not per_token:
        return
    lengths = [field for field in LENGTHS if _as_number(body.get(field)) is not None]
    prompts = body.get("prompt")
    listed = isinstance(prompts, list) and not _is_tokens(prompts)
    several = len(prompts or ()) if listed else 1
    tokens = max((_as_number(body[field]) or 1 for field in lengths), default=UNSAID_TOKENS)
    answers = several * max(_as_number(body.get("n")) or 1, 1)
    values = answers * tokens * max(_as_number(body[field]) or 0 for field in per_token)
    if values > limits.logprob_values:
        fields = ["prompt"] * (several > 1) + ["n"] * ("n" in body) + lengths + per_token
        raise InvalidRequest(
            f"{' times '.join(map(repr, fields))} make {values} log probabilities; at most "
            f"{limits.logprob_values} are allowed (setting limits.logprob_values). Lower one of them.",
            param=per_token[-1],
        )


def _check_answers(body: Mapping[str, Any], limits: LimitSettings) -> None:
    prompts, n = body.get("prompt"), _as_number(body.get("n"))
    if isinstance(prompts, list) and not _is_tokens(prompts) and n is not None:
        phrase = "makes {} answers to all prompts together"
        _refuse_above(len(prompts) * n, limits.prompts, "n", "prompts", phrase)


def _refuse_above(given: int, most: int, name: str, setting: str | None, phrase: str = "is {}") -> None:
    if given > most:
        where = f" (setting limits.{setting})" if setting else ""
        raise InvalidRequest(
            f"'{name}' {phrase.format(given)}; at most {most} are allowed{where}.", param=name
        )


def _as_number(value: Any) -> int | None:
    """Return a whole number as vLLM reads it, which takes strings of digits too."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return int(float(value)) if isinstance(value, str) else int(value)
    except ValueError:
        return None
    except OverflowError:
        return BEYOND


def _number(setting: str) -> Check:
    def check(name: str, value: Any, limits: LimitSettings) -> None:
        number = _as_number(value)
        if number is not None:
            _refuse_above(number, getattr(limits, setting), name, setting)

    return check


def _logprobs(name: str, value: Any, limits: LimitSettings) -> None:
    if _as_number(value) == -1:
        raise InvalidRequest(
            f"'{name}' is -1, which stands for all; at most {limits.logprobs} are allowed "
            "(setting limits.logprobs).",
            param=name,
        )
    _number("logprobs")(name, value, limits)


def _strings(name: str, value: Any, limits: LimitSettings) -> None:
    strings = value if isinstance(value, list) else [value]
    _refuse_above(len(strings), limits.stop, name, "stop", "has {} strings")
    for string in strings:
        if isinstance(string, str):
            _refuse_above(len(string), STRING_CHARS, name, None, "has {} characters in one string")


def _entries(most: int, what: str) -> Check:
    """Return a check for a list or an object of at most `most` entries."""

    def check(name: str, value: Any, limits: LimitSettings) -> None:
        if isinstance(value, list | dict):
            _refuse_above(len(value), most, name, None, f"has {{}} {what}")

    return check


def _arguments(name: str, value: Any, limits: LimitSettings) -> None:
    if isinstance(value, dict):
        _refuse_above(len(value), MOST_ARGUMENTS, name, None, "has {} arguments")
        for inner in value.values():
            if isinstance(inner, list):
                _refuse_above(len(inner), MOST_ARGUMENTS, name, None, "has {} values in one argument")


def _template_arguments(name: str, value: Any, limits: LimitSettings) -> None:
    """Check a chat template's variables, which must not override the renderer's own arguments."""
    _entries(MOST_ARGUMENTS, "arguments")(name, value, limits)
    taken = sorted(RENDERER_ARGUMENTS & value.keys()) if isinstance(value, dict) else ()
    for inner in taken:
        raise InvalidRequest(
            f"'{name}.{inner}' is an argument of the renderer, not a variable of a chat template: leave it "
            "out. A request may set it only where it has a field for it.",
            param=f"{name}.{inner}",
        )


def _is_tokens(value: list[Any]) -> bool:
    return set(map(type, value)) == {int}


def _prompts(name: str, value: Any, limits: LimitSettings) -> None:
    """Check prompts: texts, token ids, or lists of them; a list of token ids is one prompt."""
    if isinstance(value, list) and not _is_tokens(value):
        _refuse_above(len(value), limits.prompts, name, "prompts", "has {} prompts")
    elif isinstance(value, dict):
        _messages(name, value.get("content"), limits)


def _messages(name: str, value: Any, limits: LimitSettings) -> None:
    """Check one or several conversations, token ids, or prompts: `input` may be any of these."""
    if not isinstance(value, list) or _is_tokens(value):
        return
    if not any(isinstance(item, dict) for item in value):
        _refuse_above(len(value), limits.prompts, name, "prompts", "has {} prompts")
        for item in value:
            if isinstance(item, list) and not _is_tokens(item):
                _conversation(name, item, limits)
        return
    _conversation(name, value, limits)


def _conversation(name: str, messages: list[Any], limits: LimitSettings) -> None:
    _refuse_above(len(messages), limits.messages, name, "messages", "has {} messages or items")
    for message in messages:
        if not isinstance(message, dict):
            continue
        content = message.get("content")
        if isinstance(content, list):
            _refuse_above(len(content), limits.messages, name, "messages", "has {} parts in one message")
            for part in content:
                if isinstance(part, dict) and isinstance(part.get("tool"), dict):
                    check_schema(name, part["tool"], limits)  # Anthropic's messages may define tools
                    _tool_name(f"{name}.tool.definition", part["tool"].get("definition"))
        for key in ("tool_calls", "tools"):
            _entries(TOOLS, f"{key} in one message")(name, message.get(key), limits)


def _tools(name: str, value: Any, limits: LimitSettings) -> None:
    if isinstance(value, list):
        _refuse_above(len(value), TOOLS, name, None, "has {} tools")
        for at, tool in enumerate(value):
            check_schema(name, tool, limits)
            _tool_name(f"{name}[{at}]", tool)


def _tool_name(place: str, tool: Any) -> None:
    """Check the name of a tool, and of those within a namespace; `check_schema` has bounded its depth."""
    if not isinstance(tool, dict):
        return
    for holder, path in tool_holders(tool):
        text, param = holder.get("name"), f"{place}{path}.name"
        if isinstance(text, str):
            _refuse_above(len(text), NAME_CHARS, param, None, "has {} characters")
            if found := UNWRITABLE.search(text):
                raise InvalidRequest(
                    f"'{param}' holds {found[0]!a}: the name of a tool has at most {NAME_CHARS} characters, "
                    "no quotes, backslashes, angle brackets and control characters.",
                    param=param,
                )
    inner = tool.get("tools")
    for at, one in enumerate(inner if isinstance(inner, list) else ()):
        _tool_name(f"{place}.tools[{at}]", one)


def _repetition(name: str, value: Any, limits: LimitSettings) -> None:
    if isinstance(value, dict):
        for key in ("max_pattern_size", "min_count"):
            number = _as_number(value.get(key)) or 0
            _refuse_above(number, REPEATED_TOKENS, f"{name}.{key}", None)


FIELD_LIMITS: Mapping[str, Check] = {
    "n": _number("n"),
    "best_of": _number("n"),
    "max_tokens": _number("max_tokens"),
    "max_completion_tokens": _number("max_tokens"),
    "max_output_tokens": _number("max_tokens"),
    "min_tokens": _number("max_tokens"),
    "thinking_token_budget": _number("max_tokens"),
    "truncate_prompt_tokens": _number("max_tokens"),
    "max_tokens_per_doc": _number("max_tokens"),
    "max_tokens_per_query": _number("max_tokens"),
    "logprobs": _logprobs,
    "top_logprobs": _logprobs,
    "prompt_logprobs": _logprobs,
    "repetition_detection": _repetition,
    "stop": _strings,
    "stop_sequences": _strings,
    "bad_words": _strings,
    "stop_token_ids": _entries(TOKEN_IDS, "token ids"),
    "logprob_token_ids": _entries(TOKEN_IDS, "token ids"),
    "allowed_token_ids": _entries(VOCABULARY, "token ids"),
    "logit_bias": _entries(ENTRIES, "entries"),
    "include": _entries(MOST_ARGUMENTS, "entries"),
    "metadata": _entries(MOST_ARGUMENTS, "entries"),
    "vllm_xargs": _arguments,
    "chat_template_kwargs": _template_arguments,
    "messages": _messages,
    "input": _messages,
    "previous_input_messages": _messages,
    "system": _messages,
    "prompt": _prompts,
    "prompt_embeds": _prompts,
    "documents": _prompts,
    "query": _prompts,
    "queries": _prompts,
    "items": _prompts,
    "data_1": _prompts,
    "data_2": _prompts,
    "text_1": _prompts,
    "text_2": _prompts,
    "tools": _tools,
    "functions": _tools,
} | dict.fromkeys(
    (
        "tool_choice",
        "response_format",
        "structured_outputs",
        "text",
        "output_config",
        "structural_tag",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "guided_whitespace_pattern",
    ),
    check_schema,
)
"""The check of each field, for all operations."""
