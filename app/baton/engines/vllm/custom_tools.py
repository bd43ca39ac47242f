"""Take tools of `/v1/responses` that vLLM does not, and hold what is said to custom ones to their grammars.

vLLM shows a custom tool to the model as a function with one text, `input`, and refuses its grammar. Here the
grammar is written anew for a JSON string and put where the function's schema would stand in the grammar of
calls, so that the model can say nothing else. Where that cannot be done, the model is free, and what it said
is checked afterwards.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import xgrammar
from llguidance import LLMatcher
from openai.types.responses import CustomTool, FunctionTool, ResponseToolSearchCall
from pydantic import PrivateAttr, model_validator
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest as VllmResponsesRequest
from vllm.parser.abstract_parser import Parser
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.tool_parsers.structural_tag_registry import get_model_structural_tag, limit_to_single_tool_call
from vllm.tool_parsers.utils import flat_namespace_tool_name

from baton.engines.backend import Json
from baton.engines.vllm.client import CURRENT_CALL, Call
from baton.errors import BatonError, InvalidRequest

SHOWN = "{description}\n\nIts input must be of this grammar ({syntax}):\n{definition}"
"""The description of a tool with a grammar, as the model reads it."""


@dataclass(frozen=True)
class InputGrammar:
    """The grammar of what is said to one custom tool."""

    syntax: Literal["lark", "regex"]
    definition: str

    def of_call(self) -> str | None:
        """Write the grammar of a call's arguments, `{"input": "..."}`, for xgrammar.

        Returns:
            None: xgrammar does not read it, or not as plain rules.
        """
        try:
            if self.syntax == "regex":
                found = str(xgrammar.Grammar.from_regex(self.definition))
            else:
                found = str(xgrammar.Grammar.from_lark(self.definition))
            return _as_arguments(found)
        except (RuntimeError, ValueError):  # of xgrammar; a rule of another kind
            return None

    def refusal(self) -> str:
        """Return why llguidance, which checks inputs, does not read it; empty: it does."""
        made = LLMatcher.grammar_from_regex if self.syntax == "regex" else LLMatcher.grammar_from_lark
        return str(LLMatcher.validate_grammar(made(self.definition), None)).partition("\n")[0]


def input_grammars(tools: Sequence[Any]) -> dict[str, InputGrammar]:
    """Return the grammar of each custom tool that has one, by the tool's name."""
    custom = [tool for tool in tools if isinstance(tool, CustomTool)]
    return {
        tool.name: InputGrammar(tool.format.syntax, tool.format.definition)
        for tool in custom
        if tool.format is not None and tool.format.type == "grammar"
    }


class ResponsesRequest(VllmResponsesRequest):  # type: ignore[misc]  # vLLM has no types
    """A request to `/v1/responses`."""

    _parser: Any = PrivateAttr(None)
    _free: bool = PrivateAttr(True)

    @model_validator(mode="before")
    @classmethod
    def check_custom_tool_format(cls, data: Any) -> Any:
        """Take the grammars that vLLM's method of this name refuses."""
        return data

    def take_grammars(self, parser: Any) -> None:
        """Read the grammars of the custom tools, and show them to the model.

        Args:
            parser: vLLM's class that parses this engine's answers; None: calls of tools are not found.

        Raises:
            InvalidRequest: `param` names a grammar that cannot be read.
        """
        self._parser, self._free = parser, self.extract_structured_outputs() is None
        grammars = input_grammars(self.tools) if self.tool_choice != "none" else {}
        for at, tool in enumerate(self.tools):
            if not isinstance(tool, CustomTool) or (grammar := grammars.get(tool.name)) is None:
                continue
            if reason := grammar.refusal():
                place = f"tools[{at}].format.definition"
                raise InvalidRequest(
                    f"'{place}' is no grammar in the syntax '{grammar.syntax}': {reason}.", param=place
                )
            tool.description = SHOWN.format(
                description=tool.description or "", syntax=grammar.syntax, definition=grammar.definition
            ).strip()

    def to_sampling_params(self, *args: Any, **kwargs: Any) -> SamplingParams:
        """Constrain the calls of custom tools that have a grammar, or note that they are to be checked."""
        params = super().to_sampling_params(*args, **kwargs)
        grammars = input_grammars(self.tools) if self.tool_choice != "none" else {}
        if grammars:
            tag = self._tag({name: grammar.of_call() for name, grammar in grammars.items()})
            if tag is not None:
                params.structured_outputs = StructuredOutputsParams(structural_tag=tag)
            else:
                CURRENT_CALL.get().grammars = grammars
        return params

    def _tag(self, grammars: dict[str, str | None]) -> str | None:
        """Write the structural tag of all tools' calls, with the grammars of custom ones in it.

        Returns:
            None: the client constrains the answer itself, vLLM has no structural tag for this model's calls,
                or the tag has no place for a grammar.
        """
        tool_parser: Any = getattr(self._parser, "tool_parser_cls", None)
        model = getattr(tool_parser, "structural_tag_model", None)
        if model is None or not self._free or None in grammars.values():
            return None
        level, of_model = self._parser.tool_strict_level, tool_parser.default_tool_strict_level
        if level == Parser.tool_strict_level and of_model is not None:  # nobody chose one
            level = of_model
        shown = [_marked(tool) if getattr(tool, "name", None) in grammars else tool for tool in self.tools]
        tag = get_model_structural_tag(model, shown, self.tool_choice, reasoning=False, strict_level=level)
        if tag is None:
            return None
        if self.parallel_tool_calls is False:
            limit_to_single_tool_call(tag)
        found = tag.model_dump()
        placed = _place(found, grammars)
        return json.dumps(found) if grammars.keys() <= placed else None


def _marked(tool: Any) -> FunctionTool:
    """Return the function that a custom tool is shown as, with a schema that marks where its input goes."""
    return FunctionTool(type="function", name=tool.name, parameters={"const": tool.name}, strict=True)


def _place(tag: Any, grammars: dict[str, str | None]) -> set[str]:
    """Put each grammar where its mark is; return the tools whose every mark stood where JSON is expected."""
    placed, missed, left = set[str](), set[str](), [tag]
    while left:
        part = left.pop()
        if not isinstance(part, dict):
            left += part if isinstance(part, list) else []
            continue
        schema = part.get("json_schema")
        name = schema.get("const") if isinstance(schema, dict) and schema.keys() == {"const"} else None
        if part.get("type") != "json_schema" or not isinstance(name, str) or name not in grammars:
            left += part.values()
        elif part.get("style", "json") != "json":
            missed.add(name)
        else:
            placed.add(name)
            part.clear()
            part |= {"type": "grammar", "grammar": grammars[name]}
    return placed - missed


# Write a grammar anew for a text that stands in a JSON string.

RULES = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]', re.DOTALL)
"""What a grammar that xgrammar writes holds of characters: texts and classes."""
CHARACTER = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))|(.)", re.DOTALL)
NAMED = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "b": "\b", "a": "\a", "e": "\x1b", "0": "\0"}
ESCAPED = {ord(each): json.dumps(each)[1:-1] for each in '"\\\n\r\t\b\f'}
"""The characters that a JSON string holds by a backslash and a letter."""
CONTROL = 0x20
"""The first character that a JSON string may hold as it is."""


def _as_arguments(rules: str) -> str:
    """Return the grammar of `{"input": "..."}` for a text of these rules.

    Args:
        rules: as xgrammar writes a grammar.

    Raises:
        ValueError: they hold more than texts, classes, names and repetitions.
    """
    if re.search(r"\w\(", RULES.sub("", rules)):  # a rule that xgrammar computes, such as Regex(...)
        raise ValueError(rules)
    text = "input_text"
    while text in rules:
        text += "_"
    inner = re.sub(r"\broot\b", text, RULES.sub(_in_a_string, rules))
    whole = 'root ::= "{\\"input\\": \\"" ' + text + ' "\\"}"'  # as vLLM writes it in a history
    return f"{whole}\n{inner}"


def _in_a_string(found: re.Match[str]) -> str:
    characters = [_character(each) for each in CHARACTER.finditer(found[0][1:-1])]
    if found[0][0] == '"':
        return _quoted(json.dumps("".join(chr(point) for point, _ in characters), ensure_ascii=False)[1:-1])
    return _class(characters)


def _character(found: re.Match[str]) -> tuple[int, bool]:
    """Return a character, and whether it was written as itself, so that it may be a sign of a class."""
    if digits := found[1] or found[2] or found[3]:
        return int(digits, 16), False
    if found[4] is not None:
        return ord(NAMED.get(found[4], found[4])), False
    return ord(found[5]), True


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _class(characters: list[tuple[int, bool]]) -> str:
    """Return the choice between the characters of a class, as a JSON string holds them."""
    negated = characters[:1] == [(ord("^"), True)]
    ranges = _ranges(characters[negated:])
    escaped = [point for point in ESCAPED if any(low <= point <= high for low, high in ranges) is not negated]
    raw = [(0, CONTROL - 1), *((point, point) for point in ESCAPED if point >= CONTROL)]
    if negated:
        bare = f"[^{_written([*ranges, *raw])}]"
    else:
        left = [piece for each in ranges for piece in _without(each, raw)]
        bare = f"[{_written(left)}]" if left else ""
    choices = [*([bare] if bare else []), *(_quoted(ESCAPED[point]) for point in escaped)]
    if not choices:
        raise ValueError(characters)  # control characters alone
    return f"({' | '.join(choices)})"


def _ranges(characters: list[tuple[int, bool]]) -> list[tuple[int, int]]:
    found, at = list[tuple[int, int]](), 0
    while at < len(characters):
        low = characters[at][0]
        if characters[at + 1 : at + 2] == [(ord("-"), True)] and at + 2 < len(characters):
            found.append((low, characters[at + 2][0]))
            at += 3
        else:
            found.append((low, low))
            at += 1
    return found


def _without(each: tuple[int, int], raw: list[tuple[int, int]]) -> list[tuple[int, int]]:
    left = [each]
    for low, high in raw:
        left = [
            piece
            for start, end in left
            for piece in ((start, min(end, low - 1)), (max(start, high + 1), end))
            if piece[0] <= piece[1]
        ]
    return left


def _written(ranges: list[tuple[int, int]]) -> str:
    return "".join(f"\\U{low:08x}-\\U{high:08x}" for low, high in ranges)


# Tools under the names and types that vLLM knows, and back.

SEARCH = "tool_search"
"""The tool by which a client finds further tools of its own, and the name of the function that vLLM gets."""


@dataclass(frozen=True)
class ToolNames:
    """The client's names of tools that vLLM gets under another name or type.

    Attributes:
        nested: namespace and name of the custom tools of namespaces, by the name that each has on its own.
        searches: whether the client runs `tool_search`.
    """

    nested: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    searches: bool = False

    def item(self, item: Any) -> Any:
        """Return an item of an answer as the client knows it."""
        if item.type == "custom_tool_call" and item.name in self.nested:
            item.namespace, item.name = self.nested[item.name]
        if not self.searches or item.type != "function_call" or item.name != SEARCH:
            return item
        try:
            arguments = json.loads(item.arguments or "{}")
        except (ValueError, RecursionError):  # an answer that was cut
            arguments = item.arguments
        return ResponseToolSearchCall.model_construct(
            type="tool_search_call",
            id=item.id,
            call_id=item.call_id,
            arguments=arguments,
            execution="client",
            status=item.status,
        )


def readable_tools(body: Json) -> tuple[Json, ToolNames]:
    """Write a body's tools, and the items of calls of them, as vLLM reads them.

    A custom tool of a namespace, which vLLM would not show to the model, stands on its own; a search for
    tools that the client carries out is a function.
    """
    tools, nested, searches = list[Any](), dict[str, tuple[str, str]](), False
    given = body.get("tools")
    for tool in given if isinstance(given, list) else ():
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind == SEARCH and tool.get("execution") == "client":
            searches = True
            tools.append(tool | {"type": "function", "name": SEARCH, "strict": False})
        elif kind == "namespace" and isinstance(tool.get("tools"), list):
            custom = [each for each in tool["tools"] if _is_custom(each)]
            flat = {flat_namespace_tool_name(tool["name"], each["name"]): each for each in custom}
            nested |= {name: (tool["name"], each["name"]) for name, each in flat.items()}
            rest = [each for each in tool["tools"] if not _is_custom(each)]
            tools += [tool | {"tools": rest}] if rest or not custom else []
            tools += [each | {"name": name} for name, each in flat.items()]
        else:
            tools.append(tool)
    items = body.get("input")
    changed: Json = {"tools": tools} if nested or searches else {}
    if isinstance(items, list) and any(map(_is_of_another_shape, items)):
        changed["input"] = [_readable_item(item) if _is_of_another_shape(item) else item for item in items]
    return body | changed, ToolNames(nested, searches)


def _is_custom(tool: Any) -> bool:
    return isinstance(tool, dict) and tool.get("type") == "custom" and isinstance(tool.get("name"), str)


def _is_of_another_shape(item: Any) -> bool:
    if not isinstance(item, dict):
        return False
    if item.get("type") == "custom_tool_call":
        return isinstance(item.get("namespace"), str) and isinstance(item.get("name"), str)
    return item.get("type") in ("tool_search_call", "tool_search_output")


def _readable_item(item: Json) -> Json:
    if item["type"] == "custom_tool_call":
        name = flat_namespace_tool_name(item["namespace"], item["name"])
        return {key: value for key, value in item.items() if key != "namespace"} | {"name": name}
    call_id = str(item.get("call_id") or SEARCH)
    if item["type"] == "tool_search_call":
        arguments = json.dumps(item.get("arguments") or {})
        return {"type": "function_call", "name": SEARCH, "call_id": call_id, "arguments": arguments}
    found = [each for each in item.get("tools") or () if isinstance(each, dict)]
    lines = [f"{each.get('name')}: {each.get('description') or ''}".strip() for each in found]
    output = "\n".join(lines) or "No tool was found."
    return {"type": "function_call_output", "call_id": call_id, "output": output}


# Check what a model that was free said to a custom tool.

INCOMPLETE = "incomplete"
"""The `status` of a call whose input is not, or could not be shown to be, of its tool's grammar."""


async def check_inputs(call: Call, items: Sequence[Any]) -> None:
    """Mark the calls of custom tools whose input their grammar does not allow."""
    for item in items:
        if item.type != "custom_tool_call" or (grammar := call.grammars.get(item.name)) is None:
            continue
        item.status = "completed" if await _fits(call, grammar, item.input) else INCOMPLETE


async def _fits(call: Call, grammar: InputGrammar, text: str) -> bool:
    if call.context.fits is None:
        return False
    try:
        return await call.context.fits(text, grammar.syntax, grammar.definition)
    except BatonError:  # too many are being checked
        return False
