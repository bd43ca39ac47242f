"""Parse request bodies as JSON, strictly by RFC 8259, and without blocking the event loop.

The parser holds the interpreter lock, so the event loop stands still while it works. The size of a body and
its number of values are therefore limited before it is parsed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from typing import Any

from jiter import from_json

from baton.config.groups import LimitSettings
from baton.errors import BatonError, InvalidJson, InvalidRequest

PIECE = 1024 * 1024
SMALL_BYTES = 64 * 1024
SMALL_VALUES = 10_000
"""Bodies up to both limits take a few milliseconds at most, and are parsed on the event loop."""

LOWEST, HIGHEST = -(2**63), 2**63 - 1
BYTE_ORDER_MARKS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")

PLACE = re.compile(r" at line (\d+) column (\d+)$")
DUPLICATE = re.compile(r'Detected duplicate key "(.*)"', re.DOTALL)
NOT_A_NUMBER = re.compile(rb"-?(?:NaN|Infinity)")
MAX_SHOWN = 40
MAX_LINES = 10_000


def is_small(body: bytes) -> bool:
    """Return whether work on a body takes a few milliseconds at most, and needs no thread."""
    return len(body) <= SMALL_BYTES and separators(body, SMALL_VALUES) <= SMALL_VALUES


def separators(body: bytes, limit: int) -> int:
    """Count commas and colons, about as many as a body has values; counting stops above `limit`."""
    found = 0
    for start in range(0, len(body), PIECE):
        piece = body[start : start + PIECE]
        found += piece.count(b",") + piece.count(b":")
        if found > limit:
            break
    return found


def parse_object(body: bytes, limits: LimitSettings) -> dict[str, Any]:
    """Parse a body as a JSON object.

    Raises:
        InvalidJson: the body is not valid JSON, has a key twice, or holds a number that does not fit 64 bits.
        InvalidRequest: the body holds too many values, or is nested too deep.
    """
    if separators(body, limits.body_values) > limits.body_values:
        raise InvalidRequest(
            f"The request body holds too many values: at most {limits.body_values} commas and colons are "
            "allowed, counting those within strings (setting limits.body_values)."
        )
    try:
        parsed = from_json(body, allow_inf_nan=False, catch_duplicate_keys=True, cache_mode="keys")
    except ValueError as error:
        raise _refusal(str(error), body, limits) from None
    if not isinstance(parsed, dict):
        raise InvalidJson("The request body must be a JSON object.")
    _examine(parsed, limits)
    return parsed


def _refusal(said: str, body: bytes, limits: LimitSettings) -> BatonError:
    """Turn the parser's message into an error for the client."""
    if said.startswith("recursion limit"):
        return _too_deep(limits)
    if body.startswith(BYTE_ORDER_MARKS):
        return InvalidJson("The request body begins with a byte order mark: send plain UTF-8 without one.")
    found = PLACE.search(said)
    where, said = (found[0], said[: found.start()]) if found else ("", said)
    if duplicate := DUPLICATE.match(said):
        said = f"an object has the key '{duplicate[1][:MAX_SHOWN]}' twice, the second time"
    elif "hex escape" in said:
        said = "a \\u escape is incomplete, or half of a surrogate pair,"
    elif said == "invalid unicode code point":
        said = "a byte that is not UTF-8, or a lone surrogate,"
    elif said == "number out of range":
        said = "an integer that does not fit 64 bits with a sign"
    elif found and (word := _not_a_number(body, int(found[1]), int(found[2]))):
        said = f"{word} is not a JSON number,"
    return InvalidJson(f"The request body is not valid JSON: {said}{where}.")


def _not_a_number(body: bytes, line: int, column: int) -> str | None:
    """Return `NaN` or `Infinity`, if the parser stopped at one."""
    if line > MAX_LINES:
        return None
    start = 0
    for _ in range(line - 1):
        start = body.index(b"\n", start) + 1
    start += column - 1
    start -= body[start - 1 : start] == b"-"  # the parser stops after the sign
    found = NOT_A_NUMBER.match(body, start)
    return found[0].decode() if found else None


def _too_deep(limits: LimitSettings) -> InvalidRequest:
    return InvalidRequest(
        f"The request body may be nested at most {limits.body_depth} levels deep (setting limits.body_depth)."
    )


def _examine(root: dict[str, Any], limits: LimitSettings) -> None:
    """Check the depth and the numbers of all objects and lists, level by level."""
    level: list[dict[str, Any] | list[Any]] = [root]
    for _ in range(limits.body_depth):
        inner: list[dict[str, Any] | list[Any]] = []
        for container in level:
            values = container.values() if isinstance(container, dict) else container
            kinds = set(map(type, values))
            if (float in kinds or int in kinds) and not _all_fit(values):
                raise _unfit(container)
            if dict in kinds or list in kinds:
                inner += [value for value in values if isinstance(value, dict | list)]
        if not inner:
            return
        level = inner
    raise _too_deep(limits)


def _all_fit(values: Collection[Any]) -> bool:
    return all(
        (LOWEST <= value <= HIGHEST) if type(value) is int else not math.isinf(value)
        for value in values
        if type(value) is int or type(value) is float
    )


def _unfit(container: dict[str, Any] | list[Any]) -> InvalidJson:
    """Return the error for the first number in `container` that does not fit."""
    items = container.items() if isinstance(container, dict) else enumerate(container)
    place, value = next((place, value) for place, value in items if not _all_fit([value]))
    where = f"'{place[:MAX_SHOWN]}'" if isinstance(place, str) else f"item {place} of a list"
    wrong = (
        "an integer that does not fit 64 bits with a sign"
        if type(value) is int
        else "a number too large for a 64-bit float"
    )
    return InvalidJson(f"The request body is not valid JSON: {where} is {wrong}.")
