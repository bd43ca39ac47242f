"""Find the field of a body that is wrong, where pydantic names every branch that it might have been."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

Loc = tuple[int | str, ...]
FIELD = re.compile(r"[a-z_][A-Za-z0-9_]*|\d+")
TAGS = frozenset({"str", "int", "float", "bool", "list", "dict", "nullable", "union", "chain"})
"""Parts of a location that look like fields and name types."""
KINDS = frozenset({"type", "role", "author"})
"""Fields that say which branch of a union an object is of."""
LISTS = frozenset({"iterable_type", "is_instance_of"})
OBJECTS = frozenset({"model_type", "dataclass_type", "model_attributes_type", "dict_type"})
QUOTED = re.compile(r"'[^']*'")
MOST_WANTED = 3
"""Most types that a message lists."""
MOST_FAULTS = 20_000
"""More of pydantic's errors are not looked at: they are half a second of the event loop. One item of
`/v1/responses` can have 240 of them, of all the branches that it might have been."""


@dataclass(frozen=True)
class InvalidField:
    """A field of a body that is wrong, and how.

    Attributes:
        path: of the field, with a dot between its parts; empty: the body itself is wrong.
        message: what is wrong with it.
        more: number of further fields that are wrong.
    """

    path: str
    message: str
    more: int

    def __str__(self) -> str:
        text = f"{self.path}: {self.message}" if self.path else self.message
        return f"{text} (and {self.more} more)" if self.more else text


@dataclass(frozen=True)
class _Fault:
    """One of pydantic's errors.

    Attributes:
        loc: where it is: fields, and names of types where a union has several.
        path: the fields alone.
        branch: the beginning of `loc` up to its last type.
    """

    item: dict[str, Any]
    loc: Loc
    path: Loc
    branch: Loc

    @property
    def names_kind(self) -> bool:
        """True if the object says that it is of another branch, or not of which."""
        return (
            bool(self.branch)
            and self.loc[:-1] == self.branch
            and self.loc[-1] in KINDS
            and self.item["type"] in ("literal_error", "missing")
        )


def invalid_field(error: ValidationError, body: Any = None) -> InvalidField:
    """Choose the field to name: the deepest, in the branch that its object says it is of.

    Args:
        body: what was validated. Parts that are validated later than the rest are then named from its root;
            None: it is not known.
    """
    if (found := error.error_count()) > MOST_FAULTS:
        text = f"Almost nothing is as it should be ({found} faults): send less of it to learn what is wrong"
        return InvalidField("", text, 0)
    faults = [_fault(item) for item in error.errors(include_url=False)]
    elsewhere = {fault.branch for fault in faults if fault.names_kind}
    within = [fault for fault in faults if not elsewhere & _beginnings(fault.branch[:-1])] or faults
    here = [fault for fault in within if fault.branch not in elsewhere]
    deepest = max(len(fault.path) for fault in within)
    candidates = [fault for fault in here if len(fault.path) == deepest]
    if not candidates:  # no branch is of the kind that the object says
        candidates = [fault for fault in within if fault.names_kind and len(fault.path) == deepest] or within
    sizes = Counter(loc for fault in within for loc in ((), *_beginnings(fault.loc)))
    chosen = min(candidates, key=lambda fault: (sizes[fault.branch], [-_place(part) for part in fault.path]))
    same = [fault.item for fault in candidates if fault.path == chosen.path]
    others = {fault.path for fault in here if _is_another(fault, chosen)}
    path = (*_root_of(chosen, body), *chosen.path)
    return InvalidField(".".join(map(str, path)), _message(same), len(others))


def _fault(item: Any) -> _Fault:
    loc: Loc = item["loc"]
    fields = [_is_field(part) for part in loc]
    last = max((at for at, is_field in enumerate(fields) if not is_field), default=-1)
    path = tuple(part for part, is_field in zip(loc, fields, strict=True) if is_field)
    return _Fault(item, loc, path, loc[: last + 1])


def _is_field(part: int | str) -> bool:
    """Return whether a part of a location is a name or an index of the client's body."""
    return isinstance(part, int) or (FIELD.fullmatch(part) is not None and part not in TAGS)


def _beginnings(loc: Loc) -> set[Loc]:
    return {loc[:length] for length in range(1, len(loc) + 1)}


def _place(part: int | str) -> int:
    return part if isinstance(part, int) else 0


def _is_another(fault: _Fault, chosen: _Fault) -> bool:
    """Return whether a fault would still be there if the chosen one were not."""
    if chosen.path[:1] != chosen.loc[:1]:
        return False  # bodies of several kinds were tried: the fault may be of another kind
    shorter = min(len(fault.path), len(chosen.path))
    if fault.path[:shorter] == chosen.path[:shorter]:
        return False
    return fault.path[:1] != chosen.path[:1] or chosen.branch[: len(fault.branch)] == fault.branch


def _message(items: list[dict[str, Any]]) -> str:
    """Write what is wrong with one field, of which each branch may want something else."""
    kinds = dict.fromkeys(
        value
        for item in items
        if item["type"] == "literal_error"
        for value in QUOTED.findall(str(item["ctx"]["expected"]))
    )
    if kinds:
        return f"Input should be {_either(list(kinds))}"
    messages = list(dict.fromkeys(_plain(item) for item in items))
    wanted = [message.removeprefix("Input should be ") for message in messages]
    if all(message.startswith("Input should be ") for message in messages) and len(wanted) <= MOST_WANTED:
        return f"Input should be {_either(wanted)}"
    return messages[0]


def _plain(item: dict[str, Any]) -> str:
    if item["type"] in OBJECTS:
        return "Input should be an object"
    if item["type"] in LISTS:  # what an API calls a list may be a tuple or a generator in Python
        return "Input should be a valid list"
    return str(item["msg"]).removeprefix("Value error, ").partition(", unable to parse")[0]


def _either(words: list[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]


def _root_of(fault: _Fault, body: Any) -> Loc:
    """Return the path to the part of a body in which a fault lies, where pydantic got only that part."""
    if body is None or not fault.path or _holds(body, fault):
        return ()
    return next((root for root, part in _parts(body) if _holds(part, fault)), ())


def _holds(part: Any, fault: _Fault) -> bool:
    """Return whether the fault's input is at its path in this part of a body."""
    try:
        for step in fault.path[:-1] if fault.item["type"] == "missing" else fault.path:
            part = part[step]
    except (LookupError, TypeError):
        return False
    given = fault.item["input"]
    return part is given or (type(part) is type(given) and part == given)


def _parts(body: Any) -> Iterator[tuple[Loc, Any]]:
    """Yield every object and list of a body with its path."""
    open_parts: list[tuple[Loc, Any]] = [((), body)]
    for path, part in open_parts:
        inner = part.items() if isinstance(part, dict) else enumerate(part)
        open_parts += [((*path, step), value) for step, value in inner if isinstance(value, dict | list)]
        yield path, part
