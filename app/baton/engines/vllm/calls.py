"""Find the calls of tools that a model writes, in an answer that comes in pieces of any size.

Calls in JSON are followed as they are written: `</tool_call>` within an argument ends no call, what is cut
stays as it was written, and the same answer has the same calls whatever pieces it comes in. Calls in other
languages are found one by one, and read when they are complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal, Protocol

AT_ONCE = 256
"""Characters that are read at once, so that a long answer costs no more than its length."""
NAME_CHARS = 256
"""Longest text before a call's arguments in which its name is looked for."""
MEMBER = re.compile(r',?\s*"([^"\\]{0,64})"\s*:\s*(?=\S)')
"""The key of an object's member, up to its value."""
UNFINISHED = re.compile(r',?\s*(?:"(?P<key>[^"\\]{0,64})(?:"\s*(?::\s*)?)?)?')
"""What may become a key when more is written."""
ARGUMENTS = ("arguments", "parameters")
KEYS = frozenset({"name", "type", "id", *ARGUMENTS})
"""Keys of an object that is a call although no mark says so."""

Kind = Literal["text", "name", "arguments"]
Piece = tuple[Kind, str]
"""A piece of an answer: text; the name of a call, which begins it; or a piece of its arguments."""


@dataclass(frozen=True)
class Form:
    """The form in which a family of models writes calls whose arguments are JSON.

    Attributes:
        opens: the marks of which each begins a call.
        closes: the marks that may stand after a call, and are left out.
        begins: marks that are left out wherever they stand.
        header: what stands between `opens` and the arguments, with a group `name`. None: the call is an
            object with members for its name and its arguments.
        loose: characters that are left out after a call, beside white space.
        listed: whether calls stand in a list.
        keyed: whether a call is an object whose only key is its name.
    """

    opens: tuple[str, ...]
    closes: tuple[str, ...] = ()
    begins: tuple[str, ...] = ()
    header: re.Pattern[str] | None = None
    loose: str = ""
    listed: bool = False
    keyed: bool = False

    @property
    def marked(self) -> bool:
        """Whether a mark says that a call follows; else any object may be one."""
        return "{" not in self.opens


TAGGED = Form(("<tool_call>",), ("</tool_call>",), loose="}")
"""Hermes, Qwen 2.5, Qwen3, SmolLM, Granite 4: `<tool_call>{"name": "look", "arguments": {}}</tool_call>`."""
LLAMA = Form(("<|python_tag|>", "{"), loose=";")
"""Llama 3: `{"name": "look", "parameters": {}}`, several with semicolons between them."""
DEEPSEEK_MARKS = Form(
    ("<｜tool▁call▁begin｜>",), ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"), ("<｜tool▁calls▁begin｜>",)
)
DEEPSEEK_V3 = replace(
    DEEPSEEK_MARKS,
    header=re.compile(r"(?:[^\n<]*<｜tool▁sep｜>)?(?P<name>[^\n]*)\n```(?:json)?\n(?=\S)"),
    loose="`",
)
"""DeepSeek V3 and R1: the name in a line of its own, the arguments fenced as Markdown."""
DEEPSEEK_V31 = replace(DEEPSEEK_MARKS, header=re.compile(r"\s*(?P<name>[^\n<]*?)\s*<｜tool▁sep｜>\s*(?=\S)"))
"""DeepSeek V3.1: name, separator, arguments."""
LONGCAT = replace(TAGGED, opens=("<longcat_tool_call>",), closes=("</longcat_tool_call>",))
ERNIE = replace(TAGGED, begins=("<response>", "</response>"), loose="")
INTERNLM = Form(("<|action_start|><|plugin|>",), ("<|action_end|>",))
PHI = Form(("functools",), loose="]", listed=True)
"""Phi-4-mini: `functools[{"name": "look", "arguments": {}}]`."""
TAGGED_LIST = Form(("<tool_calls>",), ("</tool_calls>",), loose="]", listed=True)
"""Jamba, Hunyuan A13B."""
APERTUS = Form(("<|tools_prefix|>",), ("<|tools_suffix|>",), loose="]", listed=True, keyed=True)
"""Apertus: `<|tools_prefix|>[{"look": {}}]<|tools_suffix|>`."""
REQUIRED = Form(("[",), loose="]", listed=True)
"""What vLLM's grammar holds a model to that must call a tool, where it has no grammar of the family's own."""


class JsonValue:
    """One JSON value in a text that comes in pieces; only its end is looked for."""

    def __init__(self) -> None:
        self.ended = False
        self._depth = 0
        self._quoted = self._escaped = False

    def read(self, text: str) -> int:
        """Return how many characters of the next piece belong to the value."""
        for at, char in enumerate(text):
            if self._quoted:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._quoted = False
                    self.ended = not self._depth
            elif char == '"':
                self._quoted = True
            elif char in "[{":
                self._depth += 1
            elif char in "]}" and self._depth:
                self._depth -= 1
                self.ended = not self._depth
            elif not self._depth and char in "]},` \t\r\n<":  # after a number or a word
                self.ended = True
                return at
            if self.ended:
                return at + 1
        return len(text)


class Reader(Protocol):
    """A reader of the calls in an answer that comes in pieces."""

    def feed(self, text: str) -> list[Piece]:
        """Read the next piece of the answer."""

    def finish(self, *, cut: bool) -> list[Piece]:
        """Read the end of the answer; `cut` says whether something cut it there."""

    @property
    def open(self) -> bool:
        """Whether a call has begun, and is not complete."""


class CallReader:
    """The calls in an answer that comes in pieces of any size.

    What may become a call is held back until it is one, or is text. White space before a call, and between
    calls, is left out.
    """

    def __init__(self, form: Form) -> None:
        self._form = form
        self._step: Callable[[list[Piece]], bool] = self._outside
        self._rest = self._blank = ""
        self._called = False
        self._forget()

    def _forget(self) -> None:
        """Begin anew after a call."""
        self._held = self._name = self._early = self._key = ""
        self._value = JsonValue()
        self._named = self._begun = self._argued = False

    def feed(self, text: str) -> list[Piece]:
        """Read the next piece of the answer."""
        found: list[Piece] = []
        for at in range(0, len(text), AT_ONCE):
            self._rest += text[at : at + AT_ONCE]
            while self._step(found):
                pass
        return found

    def finish(self, *, cut: bool) -> list[Piece]:
        """Read the end of the answer.

        Args:
            cut: whether it was cut: what only began to be a call is left out then, and else is text.
        """
        found: list[Piece] = []
        lost = cut or self._step in (self._after, self._skipping) or self._begun
        self._say(found, "" if lost else self._held + self._rest)
        if self._blank and not self._called:
            found.append(("text", self._blank))
        return found

    @property
    def open(self) -> bool:
        """Whether a call has begun, and is not complete."""
        return self._begun

    def _say(self, found: list[Piece], text: str) -> None:
        """Give text, but for white space at its end, which waits for more."""
        text = self._blank + text
        said = text.rstrip()
        self._blank = text[len(said) :]
        found += [("text", said)] if said else []

    def _take(self, count: int) -> str:
        """Take the next characters, which are given as text if they turn out to be in no call."""
        taken, self._rest = self._rest[:count], self._rest[count:]
        if not self._begun:
            self._held += taken
        return taken

    def _take_space(self) -> None:
        self._take(len(self._rest) - len(self._rest.lstrip()))

    def _outside(self, found: list[Piece]) -> bool:
        """Pass text on until a mark."""
        marks = (*self._form.opens, *self._form.begins)
        places = [(at, mark) for mark in marks if (at := self._rest.find(mark)) >= 0]
        if not places:
            sure = len(self._rest) - _begun(self._rest, marks)
            self._say(found, self._rest[:sure])
            self._rest = self._rest[sure:]
            return False
        at, mark = min(places)
        self._say(found, self._rest[:at])
        self._rest = self._rest[at:]
        if mark in self._form.begins:
            self._rest = self._rest[len(mark) :]
            self._step = self._after
            return True
        self._take(len(mark) if self._form.marked or mark != "{" else 0)
        self._step = self._opening if self._form.header is None else self._heading
        return True

    def _no_call(self, found: list[Piece]) -> bool:
        """Give what was held back as text."""
        self._say(found, self._held)
        self._forget()
        self._step = self._outside
        return True

    def _heading(self, found: list[Piece]) -> bool:
        """Read the name of a call that stands before its arguments."""
        assert self._form.header is not None
        if (match := self._form.header.match(self._rest)) is None:
            return self._no_call(found) if len(self._rest) > NAME_CHARS else False
        after = self._rest[match.end() :]
        ended = after.startswith(self._form.closes)
        if not ended and any(mark.startswith(after) for mark in self._form.closes):
            return False  # perhaps a call without arguments
        self._name = match["name"].strip()
        if not self._name:
            return self._no_call(found)
        self._take(match.end())
        self._begin(found)
        if ended:
            return self._end(found)
        self._key, self._argued, self._step = ARGUMENTS[0], True, self._member
        return True

    def _opening(self, found: list[Piece]) -> bool:
        """Read the bracket that begins an object, and that of a list of them."""
        self._take_space()
        if self._form.listed and self._rest.startswith("["):
            self._take(1)
            self._take_space()
        if not self._rest and len(self._held) < NAME_CHARS:
            return False
        if not self._rest.startswith("{"):
            return self._no_call(found)
        self._take(1)
        self._step = self._next_member
        return True

    def _next_member(self, found: list[Piece]) -> bool:
        """Read a key of the object, or its end."""
        self._take_space()
        if self._rest.startswith("}"):
            self._take(1)
            if not self._named or not (self._argued or self._form.marked):
                return self._no_call(found)
            self._begin(found)
            return self._end(found)
        match = MEMBER.match(self._rest)
        if match is None and self._may_become_a_key():
            return False
        unknown = match is None or (match[1] not in KEYS and not self._form.marked)
        if match is None or unknown or (match[1] == "name" and self._rest[match.end()] != '"'):
            if not self._begun:
                return self._no_call(found)
            self._forget()  # what follows is no JSON
            self._step = self._skipping
            return True
        again = match[1] in ARGUMENTS and self._argued
        self._key = "" if again else match[1]
        if self._form.keyed:
            self._key = "" if self._named else ARGUMENTS[0]
            self._name, self._named = self._name or match[1], True
        self._take(match.end())
        self._value, self._step = JsonValue(), self._member
        if self._key in ARGUMENTS:
            self._argued = True
            if self._named:
                self._begin(found)
        return True

    def _may_become_a_key(self) -> bool:
        begun = UNFINISHED.fullmatch(self._rest) if len(self._rest) <= NAME_CHARS else None
        if begun is None or self._form.marked:
            return begun is not None
        return any(key.startswith(begun["key"] or "") for key in KEYS)

    def _member(self, found: list[Piece]) -> bool:
        """Read a value; that of the arguments is passed on as it is written."""
        piece = self._take(self._value.read(self._rest))
        if self._key in ARGUMENTS and self._begun:
            found += [("arguments", piece)] if piece else []
        elif self._key in ARGUMENTS:
            self._early += piece
        elif self._key == "name" and not self._named:
            self._name += piece
        if not self._value.ended:
            return False
        if self._form.header is not None:
            return self._end(found)
        if self._key == "name" and not self._named:
            try:
                self._name = str(json.loads(self._name, strict=False))
                self._name.encode()  # half a pair of surrogates is no text
            except ValueError:
                return self._no_call(found)
            if not self._name:
                return self._no_call(found)
            self._named = True
            if self._argued:
                self._begin(found)
        self._step = self._next_member
        return True

    def _begin(self, found: list[Piece]) -> None:
        """Give the name of a call that is one for certain."""
        if not self._begun:
            self._begun, self._called, self._held, self._blank = True, True, "", ""
            found.append(("name", self._name))
            found += [("arguments", self._early)] if self._early else []

    def _end(self, found: list[Piece]) -> bool:
        """End a call; one that has no arguments has an empty object."""
        found += [] if self._argued else [("arguments", "{}")]
        self._forget()
        self._step = self._after
        return True

    def _skipping(self, _found: list[Piece]) -> bool:
        """Leave out what is written of a call after its JSON went wrong."""
        places = [at + len(mark) for mark in self._form.closes if (at := self._rest.find(mark)) >= 0]
        if places:
            self._rest, self._step = self._rest[min(places) :], self._after
            return True
        kept = _begun(self._rest, self._form.closes) if self._form.closes else 0
        self._rest = self._rest[len(self._rest) - kept :]
        return False

    def _after(self, _found: list[Piece]) -> bool:
        """Leave out what may stand after a call."""
        marks = (*self._form.closes, *self._form.begins)
        left = self._rest.lstrip(self._form.loose + " \t\r\n")
        self._blank += "".join(char for char in self._rest[: len(self._rest) - len(left)] if char.isspace())
        self._rest = left
        if self._form.listed and left.startswith(","):
            self._rest, self._step = left[1:], self._opening
            return True
        for mark in marks:
            if self._rest.startswith(mark):
                self._rest = self._rest[len(mark) :]
                return True
        if not self._rest or any(mark.startswith(self._rest) for mark in marks):
            return False
        self._step = self._outside
        return True


class NamedReader:
    """The call of an answer that is nothing but the arguments of a tool that the request named."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = False
        self._value = JsonValue()

    def feed(self, text: str) -> list[Piece]:
        """Read the next piece of the arguments; what follows them is left out."""
        text = text if self._begun else text.lstrip()
        if self._value.ended or not text:
            return []
        named: list[Piece] = [] if self._begun else [("name", self._name)]
        self._begun = True
        return [*named, ("arguments", text[: self._value.read(text)])]

    def finish(self, *, cut: bool) -> list[Piece]:
        """Read the end of the answer."""
        del cut
        return []

    @property
    def open(self) -> bool:
        """Whether the arguments have begun, and are not complete."""
        return self._begun and not self._value.ended


@dataclass(frozen=True)
class Block:
    """The form in which a family of models writes calls in a language of its own.

    Attributes:
        opens: the marks of which each begins calls.
        whole: the text of calls as the family's parser reads it, with `{}` where they stand.
        closes: the marks that end the calls, and are left out.
        ends: the mark that ends each call. Empty: a call is Python's, and ends with its last bracket.
        first: whether calls stand at the beginning of an answer only.
    """

    opens: tuple[str, ...]
    whole: str
    closes: tuple[str, ...] = ()
    ends: str = ""
    first: bool = False


PYTHON = Block(("[",), "[{}]", ("]",), first=True)
"""Llama 3.2, ToolACE: `[look(at="x"), find_it()]`."""
LLAMA4 = replace(PYTHON, opens=("<|python_start|>[", "["), closes=("]<|python_end|>", "]"))
OLMO = Block(("<function_calls>",), "<function_calls>{}</function_calls>", ("</function_calls>",))
LFM = Block(("<|tool_call_start|>",), "<|tool_call_start|>[{}]<|tool_call_end|>", ("<|tool_call_end|>",))
STEP = Block(
    ("<｜tool_calls_begin｜>",),
    "<｜tool_calls_begin｜>{}<｜tool_calls_end｜>",
    ("<｜tool_calls_end｜>",),
    ends="<｜tool_call_end｜>",
)
FUNCTION_GEMMA = Block(("<start_function_call>",), "<start_function_call>{}", ends="<end_function_call>")

CALLED = re.compile(r"[A-Za-z_][\w.]*\(")
"""The beginning of a call in Python."""
MAY_BE_CALLED = re.compile(r"(?:[A-Za-z_][\w.]{0,255})?")
"""What may become one when more is written."""


class BlockReader:
    """The calls in an answer that are written one after the other, each of which is read when it is complete.

    Args:
        read: reads the calls, name and arguments, out of a text that holds nothing else.
    """

    def __init__(self, block: Block, read: Callable[[str], list[tuple[str, str]]]) -> None:
        self._block = block
        self._read = read
        self._rest = self._held = ""
        self._inside = self._said = self._called = self._after_calls = False
        self._restart()

    def _restart(self) -> None:
        """Begin a call."""
        self._at = self._depth = 0
        self._quote = self._within = ""

    def feed(self, text: str) -> list[Piece]:
        """Read the next piece of the answer."""
        found: list[Piece] = []
        self._rest += text
        while self._element(found) if self._inside else self._outside(found):
            pass
        return found

    def finish(self, *, cut: bool) -> list[Piece]:
        """Read the end of the answer: what only began is left out if it was cut, else read, or text."""
        found: list[Piece] = []
        if cut:
            return found
        if self._inside and self._rest.strip():
            self._give(found, self._rest)
        else:
            self._say(found, self._held + self._rest)
        return found

    @property
    def open(self) -> bool:
        """Whether a call has begun, and is not complete."""
        return self._inside and bool(self._rest.strip())

    def _say(self, found: list[Piece], text: str) -> None:
        text = text.lstrip() if self._after_calls else text
        self._after_calls = self._after_calls and not text
        self._said = self._said or bool(text.strip())
        found += [("text", text)] if text else []

    def _outside(self, found: list[Piece]) -> bool:
        """Pass text on until a mark; white space waits for what follows."""
        marks = () if self._block.first and (self._said or self._called) else self._block.opens
        places = [(at, -len(mark)) for mark in marks if (at := self._rest.find(mark)) >= 0]
        at, length = min(places, default=(-1, 0))
        if at < 0 or (self._block.first and self._rest[:at].strip()):
            sure = len(self._rest) - (_begun(self._rest, marks) if marks else 0)
            text = self._rest[:sure].rstrip()
            self._rest = self._rest[len(text) :]
            self._say(found, text)
            return bool(text and marks and self._block.first)  # behind text no mark begins calls
        text = self._rest[:at].rstrip()
        self._say(found, text)
        self._held, self._rest = self._rest[len(text) : at - length], self._rest[at - length :]
        self._inside = True
        return True

    def _element(self, found: list[Piece]) -> bool:
        """Read the next call, or what ends them all."""
        block = self._block
        if not self._at:
            if self._called or not block.first:
                self._rest = self._rest.lstrip(" \t\r\n,;" if block.first else " \t\r\n,;[]")
            if any(mark.startswith(self._rest) and mark != self._rest for mark in block.closes):
                return False
            for mark in block.closes:
                if self._rest.startswith(mark) and (self._called or not block.first):
                    self._rest, self._held = self._rest[len(mark) :], ""
                    self._inside = False
                    return True
            if not block.ends and CALLED.match(self._rest) is None:
                if MAY_BE_CALLED.fullmatch(self._rest):
                    return False
                self._inside = False
                text, self._held = self._held, ""
                self._say(found, text)
                return True
        end = self._end()
        if end < 0:
            return False
        text, self._rest = self._rest[:end], self._rest[end:]
        self._restart()
        self._give(found, text)
        self._inside = self._inside and bool(block.closes)
        return True

    def _end(self) -> int:
        """Return where the call ends; -1: further on."""
        block = self._block
        marks = (block.ends,) if block.ends else tuple(mark for mark in block.closes if len(mark) > 1)
        if not block.ends:
            for at in range(self._at, len(self._rest)):
                if self._is_last(self._rest[at]):
                    return at + 1
        since = max(0, self._at - max(map(len, marks), default=0))
        self._at = len(self._rest)
        places = [place for mark in marks if (place := self._rest.find(mark, since)) >= 0]
        if not places:
            return -1
        return min(places) + (len(block.ends) if block.ends else 0)

    def _is_last(self, char: str) -> bool:
        """Follow brackets and quotes; return whether this is a call's last one."""
        if self._quote == "\\":
            self._quote = self._within
        elif self._quote:
            if char == "\\":
                self._within, self._quote = self._quote, char
            elif char == self._quote:
                self._quote = ""
        elif char in "\"'":
            self._quote = char
        elif char in "([{":
            self._depth += 1
        elif char in ")]}":
            self._depth -= 1
            return self._depth <= 0
        return False

    def _give(self, found: list[Piece], text: str) -> None:
        """Give the calls in a text; what is none before any is text, and after one is left out."""
        bare = text if self._block.ends else text.rstrip(" \t\r\n]")
        calls = self._read(self._block.whole.replace("{}", bare))
        for name, arguments in calls:
            found += [("name", name), ("arguments", arguments)]
        self._called = self._called or bool(calls)
        self._after_calls = self._called
        if not self._called:
            self._inside = False
            self._say(found, self._held + text)
        self._held = ""


@dataclass(frozen=True)
class Thoughts:
    """The marks of thoughts that are text.

    Attributes:
        opens: each begins thoughts, at the beginning of an answer.
        closes: each ends them.
        always: whether an answer without a mark begins with thoughts, because its prompt has opened them.
    """

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    always: bool = False


OLMO_THOUGHTS = Thoughts(("<think>",), ("</think>",), always=True)
GRANITE_THOUGHTS = Thoughts(
    ("Here is my thought process:", "Here's my thought process:"),
    ("Here is my response:", "Here's my response:"),
)


class ThoughtReader:
    """The thoughts at the beginning of an answer that comes in pieces of any size."""

    def __init__(self, marks: Thoughts) -> None:
        self._marks = marks
        self._rest = ""
        self._inside = False

    def feed(self, text: str, *, finished: bool, cut: bool) -> tuple[str, str | None]:
        """Read the next piece.

        Args:
            finished: whether it is the last one.
            cut: whether something cut the answer there: what only began to be a mark is left out then.

        Returns:
            thoughts, and what comes after them; None: they go on.
        """
        self._rest += text
        if not self._inside:
            begun = self._rest.lstrip()
            mark = next((mark for mark in self._marks.opens if begun.startswith(mark)), None)
            may_be = any(mark.startswith(begun) for mark in self._marks.opens)
            if mark is None and may_be and (cut or not finished):
                return "", None
            if mark is None and not self._marks.always:
                return "", self._rest
            self._rest, self._inside = begun[len(mark or "") :], True
        places = [(at, mark) for mark in self._marks.closes if (at := self._rest.find(mark)) >= 0]
        if places:
            at, mark = min(places)
            return self._rest[:at], self._rest[at + len(mark) :]
        kept = _begun(self._rest, self._marks.closes) if cut or not finished else 0
        thoughts = self._rest[: len(self._rest) - kept]
        self._rest = self._rest[len(thoughts) :]
        return thoughts, None


def _begun(text: str, marks: Iterable[str]) -> int:
    """Return the length of the text's end with which a mark may begin."""
    longest = max(map(len, marks))
    ends = range(min(longest - 1, len(text)), 0, -1)
    return next((size for size in ends if any(mark.startswith(text[-size:]) for mark in marks)), 0)
