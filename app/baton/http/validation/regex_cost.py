"""What a regular expression or a grammar costs whoever compiles it, read off its text alone."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

UNFOLDED = 10_000
"""Most single matches that bounded repetitions may stand for: `(a{100}){100}` is as many."""

TOKEN = re.compile(
    r"\\(?:.|\n)|\[\^?\]?(?:\\(?:.|\n)|[^\]\\])*+(?:\]|\\?\Z)|\((?:\?(?:[:=!>]|<[=!]|P?<\w*+>))?|\)|\||[*+?]"
    r"|\{(?P<low>\d++)(?P<comma>,)?(?P<high>\d++)?\}|\^|\$|(?:.|\n)"
)
"""What a pattern is made of. Every way of going wrong is an element too, so that no text is read twice."""
GRAMMAR_TOKEN = re.compile(r"[^\\\[()|*+?{^$]++|" + TOKEN.pattern)
"""The same, a stretch of plain text being one element."""
LITERAL = re.compile(r"\"(?:[^\"\\\n]|\\.)*+(?:\"|\\?(?=\n)|\\?\Z)|'(?:[^'\\\n]|\\.)*+(?:'|\\?(?=\n)|\\?\Z)")
"""A text in a grammar; its brackets and stars mean themselves."""


class TooCostly(Exception):
    """A pattern that is not worth its cost; the text says why."""


@dataclass
class _Element:
    """One thing that may be repeated: how many single matches it stands for, and what is certain of it.

    Attributes:
        size: single matches, once its repetitions are written out.
        vague: it may match the same text in several ways, by repeating itself without end.
        certain: it matches at least one character, once.
        repeated: a repetition has been applied to it.
    """

    size: int = 1
    vague: bool = False
    certain: bool = True
    repeated: bool = False


@dataclass
class _Group:
    """What stands between two brackets, as far as it has been read.

    Attributes:
        summed: its elements add up; else the largest counts, as in grammars, which are long in any case.
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
        # What repeats without end, with nothing certain beside it, can be cut into pieces anywhere.
        self.vague = self.vague or (self.open_vague and not self.open_certain)
        self.open_vague = self.open_certain = False

    def _settle(self) -> None:
        if self.last is None:
            return
        self.size = self.size + self.last.size if self.summed else max(self.size, self.last.size)
        if self.size > UNFOLDED:
            raise TooCostly(f"its repetitions, written out, make more than {UNFOLDED} elements")
        self.open_vague = self.open_vague or self.last.vague
        self.open_certain = self.open_certain or (self.last.certain and not self.last.vague)
        self.last = None

    def closed(self) -> _Element:
        self.next_alternative()
        return _Element(max(self.size, 1), self.vague)


def examine(text: str, depth: int, *, grammar: bool = False) -> int:
    """Look at a regular expression, or at a grammar, whose rules are looked at as one.

    Returns:
        how many single matches it stands for, its repetitions written out.

    Args:
        text: in whatever dialect; what is wrong with it is for others to say.
        depth: groups within one another.
        grammar: repetition within repetition is common and harmless there.

    Raises:
        TooCostly: it nests too deep, repeats repetitions, or stands for too much.
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
        raise TooCostly("it repeats without end what already repeats without end, as (a+)+ does")
    element.size *= max(int(token["high"] or token["low"] or 1), 1)
    element.vague = element.vague or endless
    element.certain = element.certain and token[0] not in ("*", "?") and token["low"] != "0"
    element.repeated = True
