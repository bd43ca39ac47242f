"""Find everything in a request that an engine would compile, and limit its cost."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from jiter import from_json
from pydantic_core import to_json

from baton.config.groups import LimitSettings
from baton.errors import InvalidRequest

# Limit the size and the cost of a request's schemas, patterns and grammars.


ENUM = 4096
"""Most values of one `enum` or `choice`."""

PATTERNS = frozenset({"pattern", "regex", "whitespace_pattern", "guided_regex", "guided_whitespace_pattern"})
GRAMMARS = frozenset({"grammar", "guided_grammar", "definition"})
LISTS = frozenset({"enum", "choice", "guided_choice"})
WRITTEN = frozenset({"json", "guided_json", "structural_tag"})
"""Fields that may hold JSON as a string."""


def check_schema(name: str, value: Any, limits: LimitSettings) -> None:
    """Check every schema, pattern and grammar in a field, at any depth.

    Args:
        value: its value: an object that holds schemas, a pattern or a grammar.

    Raises:
        InvalidRequest: a limit is exceeded.
    """
    if isinstance(value, dict | list):
        size = len(to_json(value)) - _grammar_bytes(value)
        if size > limits.schema_bytes:
            raise _too_long(name, f"{size} bytes of JSON", "schema_bytes", limits.schema_bytes, name)
    _walk(name, value, limits)


def _grammar_bytes(value: Any) -> int:
    """Return the bytes of a value's grammars, which have a limit of their own."""
    texts = [value.get(key) for key in GRAMMARS] if isinstance(value, dict) else []
    return sum(len(to_json(text)) for text in texts if isinstance(text, str))


def _too_long(key: str, given: str, setting: str, most: int, name: str) -> InvalidRequest:
    said = f"'{key}' holds {given}; at most {int(most)} are allowed (setting limits.{setting})."
    return InvalidRequest(said, param=name)


def _walk(name: str, root: Any, limits: LimitSettings) -> None:
    open_values: list[tuple[str, Any, int]] = [(name, root, 0)]
    while open_values:
        key, value, depth = open_values.pop()
        if isinstance(value, str):
            value = _check_text(key, value, name, limits, outermost=depth <= 1)
        if not isinstance(value, dict | list):
            continue
        if depth >= limits.schema_depth:
            raise InvalidRequest(
                f"'{name}' is nested more than {limits.schema_depth} levels deep "
                "(setting limits.schema_depth).",
                param=name,
            )
        if isinstance(value, list):
            if key in LISTS and len(value) > ENUM:
                raise InvalidRequest(
                    f"'{key}' has {len(value)} values; at most {ENUM} are allowed.", param=name
                )
            open_values += [("", item, depth + 1) for item in value if isinstance(item, dict | list)]
        else:
            for pattern in _pattern_keys(value):
                _check_pattern("patternProperties", pattern, name, limits)
            open_values += [(inner, item, depth + 1) for inner, item in value.items() if item]


def _pattern_keys(value: dict[str, Any]) -> list[str]:
    found = value.get("patternProperties")
    return list(found) if isinstance(found, dict) else []


def _check_text(key: str, text: str, name: str, limits: LimitSettings, *, outermost: bool) -> Any:
    """Check a string by its key; returns the JSON that is written in it, if there is any."""
    if key in PATTERNS:
        _check_pattern(key, text, name, limits)
    elif key in GRAMMARS:
        size = len(text.encode())
        if size > limits.grammar_bytes:
            raise _too_long(key, f"a grammar of {size} bytes", "grammar_bytes", limits.grammar_bytes, name)
        _check_cost(key, text, name, limits, grammar=True)
    elif key in WRITTEN and outermost:
        size = len(text.encode())
        if size > limits.schema_bytes:
            raise _too_long(key, f"{size} bytes of JSON", "schema_bytes", limits.schema_bytes, name)
        return _written(key, text, name)
    return None


def _written(key: str, text: str, name: str) -> Any:
    try:
        return from_json(text.encode(), allow_inf_nan=False, catch_duplicate_keys=True)
    except ValueError:
        raise InvalidRequest(f"'{key}' is a string that is not valid JSON.", param=name) from None


def _check_pattern(key: str, text: str, name: str, limits: LimitSettings) -> None:
    if len(text) > limits.pattern_bytes:
        given = f"a pattern of {len(text)} characters"
        raise _too_long(key, given, "pattern_bytes", limits.pattern_bytes, name)
    _check_cost(key, text, name, limits, grammar=False)


def _check_cost(key: str, text: str, name: str, limits: LimitSettings, *, grammar: bool) -> None:
    try:
        expanded_size(text, limits.schema_depth, grammar=grammar)
    except TooCostly as error:
        kind = "grammar" if grammar else "pattern"
        raise InvalidRequest(
            f"The {kind} in '{key}' costs too much to compile: {error}.", param=name
        ) from None


# Estimate the cost of compiling a regular expression or a grammar from its text alone.


EXPANDED = 10_000
"""Most elements that bounded repetitions may expand to: `(a{100}){100}` expands to as many."""

TOKEN = re.compile(
    r"\\(?:.|\n)|\[\^?\]?(?:\\(?:.|\n)|[^\]\\])*+(?:\]|\\?\Z)|\((?:\?(?:[:=!>]|<[=!]|P?<\w*+>))?|\)|\||[*+?]"
    r"|\{(?P<low>\d++)(?P<comma>,)?(?P<high>\d++)?\}|\^|\$|(?:.|\n)"
)
"""One element of a pattern. Malformed ones match too, so that no text is read twice."""
GRAMMAR_TOKEN = re.compile(r"[^\\\[()|*+?{^$]++|" + TOKEN.pattern)
"""The same for grammars, where a run of plain text is one element."""
LITERAL = re.compile(r"\"(?:[^\"\\\n]|\\.)*+(?:\"|\\?(?=\n)|\\?\Z)|'(?:[^'\\\n]|\\.)*+(?:'|\\?(?=\n)|\\?\Z)")
"""A string literal in a grammar, whose brackets and stars have no special meaning."""


class TooCostly(Exception):
    """A pattern would cost too much to compile; the message says why."""


@dataclass
class _Element:
    """An element of a pattern, which may be repeated.

    Attributes:
        size: number of elements that its repetitions expand to.
        vague: it repeats without limit, so it may match a text in several ways.
        certain: it matches at least one character.
        repeated: a repetition has been applied to it.
    """

    size: int = 1
    vague: bool = False
    certain: bool = True
    repeated: bool = False


@dataclass
class _Group:
    """The elements between two brackets that were read so far.

    Attributes:
        summed: its size is the sum of its elements; otherwise the largest counts, as in grammars.
    """

    summed: bool = True
    size: int = 0
    vague: bool = False
    open_vague: bool = False
    open_certain: bool = False
    last: _Element | None = field(default=None)

    def add(self, element: _Element) -> None:
        self._settle()
        self.last = element

    def next_alternative(self) -> None:
        self._settle()
        # An unlimited repetition beside nothing certain can match a text in several ways.
        self.vague = self.vague or (self.open_vague and not self.open_certain)
        self.open_vague = self.open_certain = False

    def _settle(self) -> None:
        if self.last is None:
            return
        self.size = self.size + self.last.size if self.summed else max(self.size, self.last.size)
        if self.size > EXPANDED:
            raise TooCostly(f"its repetitions expand to more than {EXPANDED} elements")
        self.open_vague = self.open_vague or self.last.vague
        self.open_certain = self.open_certain or (self.last.certain and not self.last.vague)
        self.last = None

    def closed(self) -> _Element:
        self.next_alternative()
        return _Element(max(self.size, 1), self.vague)


def expanded_size(text: str, depth: int, *, grammar: bool = False) -> int:
    """Estimate the cost of a regular expression, or of all rules of a grammar together.

    Args:
        text: the pattern, in any dialect; its syntax is not checked.
        depth: most groups within one another.
        grammar: the text is a grammar, where repetitions within repetitions are common and harmless.

    Returns:
        The number of elements that its repetitions expand to.

    Raises:
        TooCostly: its groups are nested too deep, it repeats repetitions, or it expands to too much.
    """
    groups = [_Group(not grammar)]
    tokens = GRAMMAR_TOKEN.finditer(LITERAL.sub("x", text)) if grammar else TOKEN.finditer(text)
    for token in tokens:
        first = token[0][0]
        if first == "(":
            if len(groups) > depth:
                raise TooCostly(f"its groups are nested more than {depth} levels deep")
            groups.append(_Group(not grammar))
        elif first == ")":
            if len(groups) > 1:
                inner = groups.pop()
                groups[-1].add(inner.closed())
        elif first == "|":
            groups[-1].next_alternative()
        elif first in "*+?" or (first == "{" and token["low"] is not None):
            _repeat(groups[-1].last, token, strict=not grammar)
        elif first not in "^$":
            groups[-1].add(_Element())
    while len(groups) > 1:
        groups[-2].add(groups.pop().closed())
    return groups[0].closed().size


def _repeat(element: _Element | None, token: re.Match[str], *, strict: bool) -> None:
    if element is None or (token[0] == "?" and element.repeated):  # lazy
        return
    endless = token[0] in ("*", "+") or (token["comma"] is not None and token["high"] is None)
    if endless and element.vague and strict:
        raise TooCostly("it repeats without limit what already repeats without limit, as (a+)+ does")
    element.size *= max(int(token["high"] or token["low"] or 1), 1)
    element.vague = element.vague or endless
    element.certain = element.certain and token[0] not in ("*", "?") and token["low"] != "0"
    element.repeated = True


# Estimate what compiling a JSON schema, a pattern or an enumeration costs an engine.
#
# The cost is counted from the schema, not measured, so that the same request always gets the same answer. One
# unit is about a millisecond of xgrammar's with 16,000 tokens of vocabulary.
#
# A trial alone would not do. Ten schemas of real applications are tried in 9 ms (median; p99 396 ms): seven
# of them in 6 to 12 ms, the others in 39 to 293. Of the twelve hostile requests of `tests/support/schemas.py`
# seven compile within the two seconds of a trial, whose vocabulary is a tenth to a sixtieth of a model's. The
# estimate refuses all twelve within 0.2 s and tries four of the ten; it bounds what all constraints of a
# request cost together, and holds where no compiler is installed or `limits.schema_s` is 0.


CHEAP = 100
"""Cost up to which a constraint needs no trial: it compiles in some tens of milliseconds."""
DOUBTFUL = CHEAP + 1
"""Cost of a constraint whose real cost cannot be seen from its text: more than is cheap, so it is tried."""
CHARACTER = 12
"""Units for each character of a string of limited length, where most tokens of a vocabulary may stand."""
OTHER_LENGTH = 4
"""The same for strings shorter than the longest: compilers share what they have in common."""
LONG = 200
"""Length above which compilers count characters instead of expanding them."""
ELEMENT = 4
"""Units for each element of a pattern, with its repetitions expanded."""
ITEMS_PER_UNIT, LETTERS_PER_UNIT = 40, 200
"""Values of an enumeration, and their characters, that cost one unit."""
NAME_LETTERS_PER_UNIT = 50
"""Characters of tools' names that cost one unit: a grammar holds each more than once, letter by letter."""
OPTIONAL_SQUARED_PER_UNIT = 250
"""Optional properties, squared, that cost one unit: any two of them may follow each other."""
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
REPEATED_BOUND = 4
"""A repeated bound costs this many times less, because compilers share it."""
WORDS = ("title", "description", "$comment")
"""Keywords whose texts are not compiled."""
NOTHING = {"type": "null"}
COMBINING = frozenset({"not", "if", "dependentSchemas", "dependencies", "patternProperties"})
"""Keywords whose cost may be a product of the costs of their schemas."""


def cost_of_schema(root: Any) -> int:
    """Estimate the cost of compiling a JSON schema, or several together, in units."""
    cost, lengths, patterns, open_values = 0.0, set[int](), set[str](), [root]
    bounds = Counter[str]()
    while open_values:
        value = open_values.pop()
        inner = value
        if value == NOTHING:
            continue
        if isinstance(value, dict):
            cost += 1 + _own_cost(value)
            bounds.update(repr(value[key]) for key in BOUNDS if _is_number(value.get(key)))
            lengths |= _lengths(value)
            patterns |= _patterns(value)
            inner = value.values()
        open_values += [item for item in inner if isinstance(item, dict | list)]
    cost += sum(cost_of_pattern(pattern) for pattern in patterns) + (DOUBTFUL if patterns else 0)
    cost += sum(len(bound) * (1 + (count - 1) / REPEATED_BOUND) for bound, count in bounds.items())
    return round(cost + _lengths_cost(lengths))


def _own_cost(schema: dict[str, Any]) -> float:
    """Return the cost of one schema without those within it."""
    properties, required = schema.get("properties"), schema.get("required")
    names = set(properties) if isinstance(properties, dict) else set()
    texts = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    cost = len(names) + len(names - texts) ** 2 / OPTIONAL_SQUARED_PER_UNIT
    counts = [_number(schema.get(key)) for key in ("minProperties", "maxProperties")]
    if any(counts):
        cost += max(len(names), 1) * (max(counts) if counts[1] else max(len(names), counts[0]))
    cost += cost_of_enum(schema["enum"]) if isinstance(schema.get("enum"), list) else 0
    several = schema.get("allOf")
    if COMBINING & schema.keys() or (isinstance(several, list) and len(several) > 1):
        cost += DOUBTFUL
    return cost


def cost_of_enum(values: list[Any]) -> int:
    """Return the cost of an enumeration."""
    letters = sum(len(value) for value in values if isinstance(value, str))
    return len(values) // ITEMS_PER_UNIT + letters // LETTERS_PER_UNIT


def cost_of_names(names: Iterable[Any]) -> int:
    """Return the cost of the names of tools."""
    return sum(len(name) for name in names if isinstance(name, str)) // NAME_LETTERS_PER_UNIT


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: Any) -> int:
    return int(value) if _is_number(value) and value > 0 else 0


def _lengths(schema: dict[str, Any]) -> set[int]:
    """Return the length limit of a schema's strings, if there is one."""
    longest = max(_number(schema.get("minLength")), _number(schema.get("maxLength")))
    return {min(longest, LONG)} if longest else set()


def _lengths_cost(lengths: set[int]) -> int:
    ordered = sorted(lengths, reverse=True)
    return CHARACTER * sum(ordered[:1]) + OTHER_LENGTH * sum(shorter for _, shorter in pairwise(ordered))


def _patterns(schema: dict[str, Any]) -> set[str]:
    pattern, keys = schema.get("pattern"), schema.get("patternProperties")
    found = {pattern} if isinstance(pattern, str) else set()
    return found | (set(keys) if isinstance(keys, dict) else set())


def cost_of_pattern(pattern: str) -> int:
    """Return the cost of a regular expression."""
    try:
        return ELEMENT * expanded_size(pattern, len(pattern))
    except TooCostly:  # patterns are limited elsewhere; this may be a property called `pattern`
        return 0


def cost_of_length(text: str, schema: Any) -> int:
    """Return the cost of the length of a schema's JSON, without descriptions."""
    words, open_values = 0, [schema]
    while open_values:
        value = open_values.pop()
        if isinstance(value, dict):
            words += sum(len(value[key]) for key in WORDS if isinstance(value.get(key), str))
            value = value.values()
        open_values += [item for item in value if isinstance(item, dict | list)]
    return max(0, len(text) - words) // LETTERS_PER_UNIT


TOOLS = ("tools", "functions")
"""Fields whose tools an engine makes one grammar of."""


@dataclass(frozen=True)
class Constraint:
    """A constraint on an answer, which an engine compiles.

    Attributes:
        param: the field that holds it.
        kind: `json`, `regex`, `grammar` or `structural_tag`.
        text: the constraint as the compiler reads it.
        cost: estimated cost, in units.
    """

    param: str
    kind: str
    text: str
    cost: int


def require_moderate(body: Mapping[str, Any], limits: LimitSettings) -> list[Constraint]:
    """Limit the cost of all constraints of a request; returns those that need a trial.

    Raises:
        InvalidRequest: the constraints cost too much; `param` names the field that costs most.
    """
    found = list(constraints_of(body))
    if sum(constraint.cost for constraint in found) > limits.schema_cost:
        raise _too_costly(body, max(found, key=lambda constraint: constraint.cost), found, limits)
    return [constraint for constraint in found if constraint.cost > CHEAP]


def doubtful_grammars(grammar: Mapping[str, Any], param: str) -> list[Constraint]:
    """Find what needs a trial in the grammar that an engine made of a request.

    Args:
        grammar: it, as `structured_outputs` holds one.
    """
    return [constraint for constraint in _structured(grammar, param) if constraint.cost > CHEAP]


def _too_costly(
    body: Mapping[str, Any], costliest: Constraint, found: list[Constraint], limits: LimitSettings
) -> InvalidRequest:
    param = costliest.param
    if param in TOOLS:
        param = next(
            (
                where
                for where, _, schema in _tools(body, param)
                if cost_of_schema(schema) > limits.schema_cost
            ),
            param,
        )
    total = sum(constraint.cost for constraint in found)
    return InvalidRequest(
        f"'{param}' costs too much to compile: all schemas, tools and patterns of the request cost {total} "
        f"together; at most {limits.schema_cost} is allowed (setting limits.schema_cost). "
        "Optional properties, minProperties and maxProperties, ranges of numbers, lengths of texts and "
        "patterns cost most.",
        param=param,
    )


def constraints_of(body: Mapping[str, Any]) -> Iterator[Constraint]:
    """Yield everything in a body that an engine may compile, for all operations."""
    format_ = body.get("response_format")
    if isinstance(format_, dict):
        if format_.get("type") == "structural_tag":
            yield _schema("response_format", format_, "structural_tag")
        yield from _json("response_format", _at(format_, "json_schema", "schema"))
    yield from _json("text", _at(body, "text", "format", "schema"))
    yield from _json("output_config", _at(body, "output_config", "format", "schema"))
    yield from _structured(body.get("structured_outputs"), "structured_outputs")
    for name in TOOLS if body.get("tool_choice") != "none" else ():
        tools = list(_tools(body, name))
        if tools:
            yield _together(name, tools)
        yield from _tool_grammars(body, name)


def _at(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _json(param: str, schema: Any) -> Iterator[Constraint]:
    if isinstance(schema, dict):
        yield _schema(param, schema, "json")


def _schema(param: str, schema: Any, kind: str) -> Constraint:
    text = json.dumps(schema)
    cost = cost_of_schema(schema) + cost_of_length(text, schema)
    if kind == "structural_tag":  # it may hold grammars, and formats that repeat
        cost += DOUBTFUL
    return Constraint(param, kind, text, cost)


def _structured(value: Any, param: str) -> Iterator[Constraint]:
    if not isinstance(value, dict):
        return
    for kind in ("json", "structural_tag"):
        given = value.get(kind)
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except (ValueError, RecursionError):  # refused elsewhere, or by vLLM
                continue
        if isinstance(given, dict):
            yield _schema(param, given, kind)
    pattern, grammar, choices = (value.get(kind) for kind in ("regex", "grammar", "choice"))
    if isinstance(pattern, str):
        yield Constraint(param, "regex", pattern, DOUBTFUL + cost_of_pattern(pattern))
    if isinstance(grammar, str):
        yield Constraint(param, "grammar", grammar, _grammar_cost(grammar))
    if isinstance(choices, list):
        texts = [choice for choice in choices if isinstance(choice, str)]
        yield Constraint(param, "json", json.dumps({"enum": texts}), cost_of_enum(texts))


def _grammar_cost(grammar: str) -> int:
    return DOUBTFUL + len(grammar) // LETTERS_PER_UNIT


def _listed(body: Mapping[str, Any], field: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each tool with its path, also the tools within a namespace."""
    tools = body.get(field)
    for at, tool in enumerate(tools if isinstance(tools, list) else []):
        if isinstance(tool, dict):
            yield f"{field}[{at}]", tool
            for place, inner in _listed(tool, "tools") if field == "tools" else ():
                yield f"{field}[{at}].{place}", inner
    if field == "tools":
        yield from _added(body.get("messages"))


def _added(messages: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each tool that a message of Anthropic's API defines, with its path."""
    for at, message in enumerate(messages if isinstance(messages, list) else []):
        content = message.get("content") if isinstance(message, dict) else None
        for number, block in enumerate(content if isinstance(content, list) else []):
            definition = _at(block, "tool", "definition")
            if isinstance(definition, dict):
                yield f"messages[{at}].content[{number}].tool.definition", definition


def _tool_grammars(body: Mapping[str, Any], field: str) -> Iterator[Constraint]:
    """Yield the grammars of custom tools."""
    for place, tool in _listed(body, field):
        given = _at(tool, "format") or _at(tool, "custom", "format")
        for definition in (_at(given, "definition"), _at(given, "grammar", "definition")):
            if isinstance(definition, str):
                kind = (
                    "regex"
                    if "regex" in (_at(given, "syntax"), _at(given, "grammar", "syntax"))
                    else "grammar"
                )
                cost = _grammar_cost(definition)
                yield Constraint(f"{place}.format", kind, definition, cost)


def _tools(body: Mapping[str, Any], field: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield each tool's path, name and schema, in the shapes of OpenAI and Anthropic.

    A tool without a schema has the empty one: its name is compiled all the same.
    """
    for place, tool in _listed(body, field):
        for holder, path in tool_holders(tool):  # a handler reads only one of them
            schemas = [
                (f".{key}", holder[key])
                for key in ("parameters", "input_schema")
                if isinstance(holder.get(key), dict)
            ]
            if schemas or isinstance(holder.get("name"), str):
                for key, schema in schemas or [("", {})]:
                    yield f"{place}{path}{key}", holder.get("name"), schema


def tool_holders(tool: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], str]]:
    """List the objects that may hold a tool's name and schema, each with its path within the tool."""
    inner = [(tool[key], f".{key}") for key in ("function", "custom") if isinstance(tool.get(key), dict)]
    return [(tool, ""), *inner]


def _together(field: str, tools: list[tuple[str, Any, Any]]) -> Constraint:
    """Build the schema that vLLM makes from all tools when a call of one is required."""
    options: list[Any] = []
    definitions: dict[str, Any] = {}
    for _, name, schema in tools:
        parameters = {key: value for key, value in schema.items() if key != "$defs"}
        definitions |= schema["$defs"] if isinstance(schema.get("$defs"), dict) else {}
        options.append(
            {
                "properties": {"name": {"type": "string", "enum": [str(name)]}, "parameters": parameters},
                "required": ["name", "parameters"],
            }
        )
    whole = {"type": "array", "minItems": 1, "items": {"type": "object", "anyOf": options}}
    text = json.dumps(whole | ({"$defs": definitions} if definitions else {}))
    schemas = [schema for _, _, schema in tools]
    cost = (
        cost_of_schema(schemas) + cost_of_length(text, schemas) + cost_of_names(name for _, name, _ in tools)
    )
    return Constraint(field, "json", text, cost)
