"""Calls that a model writes in JSON are found as they are written, however the answer is cut into pieces, and at any end."""

from __future__ import annotations

import json
import random
import re

import pytest

from baton.engines.vllm.calls import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    GRANITE_THOUGHTS,
    LFM,
    LLAMA,
    OLMO_THOUGHTS,
    PYTHON,
    TAGGED,
    Block,
    BlockReader,
    CallReader,
    Form,
    Piece,
    ThoughtReader,
)

CLOSING = '{"text": "a </tool_call> <｜tool▁call▁end｜> ``` ; { \\" \\\\"}'
"""Arguments that hold every mark that ends a call."""
NESTED = '{"list": [1, {"a": null}, "é🌊"], "n": -1.5e3}'
Call = tuple[str, str]
FORMS = {"tagged": TAGGED, "llama": LLAMA, "deepseek v3": DEEPSEEK_V3, "deepseek v3.1": DEEPSEEK_V31}
MARKS = ("tool_call", "｜", "python_tag", '"name"', "```")


def written(form: str, *calls: Call) -> str:
    """Calls as models of a family write them."""
    match form:
        case "tagged":
            return "\n".join(
                f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
                for name, arguments in calls
            )
        case "llama":
            return "; ".join(f'{{"name": "{name}", "parameters": {arguments}}}' for name, arguments in calls)
        case "deepseek v3":
            each = [
                f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
                for name, arguments in calls
            ]
        case _:
            each = [
                f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"
                for name, arguments in calls
            ]
    return f"<｜tool▁calls▁begin｜>{chr(10).join(each)}<｜tool▁calls▁end｜>"


def joined(pieces: list[Piece]) -> tuple[str, list[Call]]:
    """The text of an answer, and its calls."""
    text, calls = "", list[Call]()
    for kind, piece in pieces:
        if kind == "text":
            text += piece
        elif kind == "name":
            calls.append((piece, ""))
        else:
            calls[-1] = (calls[-1][0], calls[-1][1] + piece)
    return text, calls


def read(form: Form, pieces: list[str], *, cut: bool = False) -> tuple[str, list[Call]]:
    reader = CallReader(form)
    found = [piece for text in pieces for piece in reader.feed(text)]
    return joined([*found, *reader.finish(cut=cut)])


def cuts(text: str) -> list[list[str]]:
    """A text in one piece, in two at every place, in characters, and in pieces of many sizes."""
    chance = random.Random(text)
    several = []
    for _ in range(20):
        rest, pieces = text, []
        while rest:
            size = chance.randint(1, 9)
            pieces.append(rest[:size])
            rest = rest[size:]
        several.append(pieces)
    halves = [[text[:at], text[at:]] for at in range(1, len(text))]
    return [[text], list(text), *halves, *several]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("before", ["", "I look. ", "\n\n", "a < b and b <t\n"])
@pytest.mark.parametrize(
    "calls", [[("look", CLOSING)], [("look", "{}"), ("find.it", NESTED)], [("look", CLOSING)] * 3], ids=len
)
def test_calls_are_found_as_they_are_written(form: str, before: str, calls: list[Call]) -> None:
    text = before + written(form, *calls)
    for pieces in cuts(text):
        assert read(FORMS[form], pieces) == (before.rstrip(), calls), pieces


@pytest.mark.parametrize("form", FORMS)
def test_a_cut_keeps_whole_calls_and_what_was_written_of_the_last(form: str) -> None:
    calls = [("look", CLOSING), ("find", NESTED)]
    text = "I look. " + written(form, *calls)
    for at in range(len("I look. "), len(text)):
        said, found = read(FORMS[form], [text[:at]], cut=True)
        assert read(FORMS[form], list(text[:at]), cut=True) == (said, found)
        assert said in ("I look.", "I look. ")
        assert [name for name, _ in found] == ["look", "find"][: len(found)]
        for (_, arguments), (_, whole) in zip(found, calls, strict=False):
            assert whole.startswith(arguments)
        assert [arguments for _, arguments in found[:-1]] == [whole for _, whole in calls][: len(found[:-1])]


@pytest.mark.parametrize(
    ("form", "text", "said", "calls"),
    [
        (
            TAGGED,
            '<tool_call>{"arguments": {"a": 1}, "name": "look"}</tool_call>',
            "",
            [("look", '{"a": 1}')],
        ),
        (TAGGED, '<tool_call>{"name": "look"}</tool_call>Done.', "Done.", [("look", "{}")]),
        (TAGGED, '<tool_call>{"name": "look", "arguments": 7}', "", [("look", "7")]),
        (TAGGED, '<tool_call>{"name": "l", "arguments": {}}}\n</tool_call> x', "\n x", [("l", "{}")]),
        (TAGGED, '<tool_call>{"name": "l", "arguments": {} "x": 2}</tool_call>y', "y", [("l", "{}")]),
        (TAGGED, "<tool_call>look</tool_call>", "<tool_call>look</tool_call>", []),
        (TAGGED, ' A. <tool_call>{"name": "l"}</tool_call>\n B. \n', " A.\n B.", [("l", "{}")]),
        (TAGGED, '<tool_call>{"name": 7, "arguments": {}}', '<tool_call>{"name": 7, "arguments": {}}', []),
        (TAGGED, '<tool_call>{"name": "look"', '<tool_call>{"name": "look"', []),
        (TAGGED, "write `<tool_call>` and <b> <", "write `<tool_call>` and <b> <", []),
        (TAGGED, '<tool_call>{"name": "l", "arguments": 1, "arguments": 2}</tool_call>', "", [("l", "1")]),
        (TAGGED, '<tool_call>{"name": "\\ud800"}', '<tool_call>{"name": "\\ud800"}', []),
        (LLAMA, '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
        (LLAMA, '{"a": 1} {}{{ {"', '{"a": 1} {}{{ {"', []),
        (LLAMA, '<|python_tag|>{"name": "look", "parameters": {}}', "", [("look", "{}")]),
        (LLAMA, '{"type": "function", "name": "l", "arguments": {}}', "", [("l", "{}")]),
        (LLAMA, "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        (DEEPSEEK_V31, "<｜tool▁call▁begin｜>l<｜tool▁sep｜><｜tool▁call▁end｜>", "", [("l", "{}")]),
        (DEEPSEEK_V31, "<｜tool▁call▁begin｜>" + "x" * 400, "<｜tool▁call▁begin｜>" + "x" * 400, []),
    ],
)
def test_what_is_nearly_a_call(form: Form, text: str, said: str, calls: list[Call]) -> None:
    for pieces in cuts(text):
        assert read(form, pieces) == (said, calls), pieces


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", range(8))
def test_any_words_read_the_same_in_any_pieces(form: str, seed: int) -> None:
    chance = random.Random(f"{form} {seed}")
    whole = written(form, ("look", NESTED), ("find", CLOSING))
    parts = [whole[at : at + 7] for at in range(0, len(whole), 7)]
    text = "".join(chance.choices([*parts, "{", '"name": "', "}", " ", ";", "\\", *FORMS[form].opens], k=40))
    for cut in (False, True):
        found = {json.dumps(read(FORMS[form], pieces, cut=cut)) for pieces in cuts(text)}
        assert len(found) == 1, text


@pytest.mark.fault("E14")
@pytest.mark.parametrize(
    "hostile",
    ['<tool_call>{"name": {', "{" * 7, '{"type": ', '<tool_call>{"name": "', "<tool_call>\n\n", " "],
)
def test_reading_costs_no_more_than_the_answer_is_long(hostile: str) -> None:
    """Each character is looked at a bounded number of times, however the answer goes on."""

    class Counted(CallReader):
        looked = 0

        def _take(self, count: int) -> str:
            Counted.looked += len(self._rest)
            return super()._take(count)

    for form in FORMS.values():
        Counted.looked = 0
        text = hostile * (40_000 // len(hostile))
        Counted(form).feed(text)
        assert Counted.looked < 1_000 * len(text)


def block(block: Block, pieces: list[str], *, cut: bool = False) -> tuple[str, list[Call]]:
    """Text and calls of an answer whose calls a reader knows that finds `name(key=...)`."""

    def known(whole: str) -> list[tuple[str, str]]:
        return re.findall(r"(\w+)\((\w+=[^()]*(?:\([^()]*\)[^()]*)*)\)", whole)

    reader = BlockReader(block, known)
    found = [piece for text in pieces for piece in reader.feed(text)]
    return joined([*found, *reader.finish(cut=cut)])


@pytest.mark.parametrize(
    "text", ["[1, 2]", "[a](b) c", "[look(1)] x", "[look] x", "see [look(a=1)]", "[", "[look(a="]
)
def test_what_is_no_call_in_python_stays_text(text: str) -> None:
    for pieces in ([text], list(text)):
        assert block(PYTHON, pieces) == (text, [])


@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_calls_in_python_end_with_their_last_bracket(at_once: int) -> None:
    text = """ [look(a='[x)\\'', b=(1)), find_it(c=")]")] and more"""
    pieces = [text[at : at + at_once] for at in range(0, len(text), at_once)]
    said, calls = block(PYTHON, pieces)
    assert [name for name, _ in calls] == ["look", "find_it"]
    assert said.strip() == "and more"


def test_white_space_may_stand_before_the_bracket_of_calls() -> None:
    for text in (
        "<|tool_call_start|>\n[look(a=1)]<|tool_call_end|>x",
        "<|tool_call_start|>[look(a=1)] <|tool_call_end|>x",
    ):
        for pieces in ([text], list(text)):
            assert block(LFM, pieces) == ("x", [("look", "a=1")]), text


@pytest.mark.parametrize("at_once", [1, 4, 100])
def test_thoughts_in_text_end_at_their_mark(at_once: int) -> None:
    for marks, text, meant in (
        (OLMO_THOUGHTS, "<think>a </th b</think>c", ("a </th b", "c")),
        (OLMO_THOUGHTS, "a</think>c", ("a", "c")),
        (GRANITE_THOUGHTS, "Here is my thought process:a Here b Here is my response:c", ("a Here b ", "c")),
        (GRANITE_THOUGHTS, "Here is an answer", ("", "Here is an answer")),
        (GRANITE_THOUGHTS, "Here", ("", "Here")),
        (OLMO_THOUGHTS, "a</thi", ("a</thi", None)),
    ):
        reader, thoughts, rest = ThoughtReader(marks), "", None
        for at in range(0, len(text), at_once):
            piece, last = text[at : at + at_once], at + at_once >= len(text)
            if rest is None:
                told, rest = reader.feed(piece, finished=last, cut=False)
                thoughts += told
            else:
                rest += piece
        assert (thoughts, rest) == meant, text
