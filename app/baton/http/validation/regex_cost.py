"""Estimate the cost of compiling a regular expression or a grammar from its text alone."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

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
