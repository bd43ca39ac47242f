"""Recognise the part of a conversation that a handoff holds already."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from baton.engines.backend import Json
from baton.errors import InvalidRequest
from baton.library.handoff import Conversation

ANSWER_FIELDS = frozenset({"annotations", "audio", "parsed", "reasoning", "reasoning_content", "refusal"})
"""Fields of an assistant's message that servers and SDKs add; clients may send them back or drop them."""
INSTRUCTIONS = frozenset({"developer", "system"})
"""Roles whose messages are not turns: a client may repeat or change them with every request."""
HINTS = frozenset({"cache_control"})
"""Fields of messages and their parts that say nothing to a model; clients move them from turn to turn."""
DIGEST_CHARS = 32


@dataclass(frozen=True)
class Resent:
    """The part of a handoff's conversation that the messages of a request repeat.

    Attributes:
        messages: number of messages, from the first, that repeat it.
        changed: the messages begin like it and then differ: they are a whole conversation of their own.
    """

    messages: int
    changed: bool = False


@dataclass(frozen=True)
class Turn:
    """A message, reduced to what is compared.

    Attributes:
        fingerprints: its fingerprints; an answer has one as its client received it, and one as it was read
            back from its tokens.
        says: it has content or calls a tool.
    """

    role: str
    fingerprints: frozenset[str]
    says: bool

    def same_as(self, other: Turn) -> bool:
        """Return whether both are the same message, because they share a fingerprint."""
        return not self.fingerprints.isdisjoint(other.fingerprints)


def fingerprint(message: Json) -> str:
    """Return a digest of what a message says, the same for every way in which SDKs write it.

    Hints and fields that are null or an empty list are ignored, and a single text part equals its text. Of an
    assistant's message, the fields that only answers have and white space around the content are ignored too.
    """
    said = _said(message)
    said["content"] = _content(message.get("content"))
    if message.get("role") == "assistant":
        said = {key: value for key, value in said.items() if key not in ANSWER_FIELDS}
        if isinstance(said["content"], str):
            said["content"] = said["content"].strip()
        if "tool_calls" in said:
            said["tool_calls"] = _calls(said["tool_calls"])
    text = json.dumps(said, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_CHARS]


def answer_fingerprint(message: Json) -> str:
    """Return the fingerprint of an answer, ignoring the agent's `name` that some frameworks add."""
    return fingerprint({key: value for key, value in message.items() if key != "name"})


def resent(past: Conversation, messages: Sequence[Json], answer: str | None) -> Resent:
    """Compare the messages of a request with the handoff's conversation.

    Args:
        answer: the last answer of the handoff's context, read back from its tokens; None: there is none, or
            the messages hold no answer.

    Raises:
        InvalidRequest: the messages repeat a part from the middle of the conversation.
    """
    history, given = _history(past, answer), [_given(message) for message in messages]
    same = _same(history, given)
    if same == len(history):
        return Resent(same)
    if _repeats_beginning(history, given) or _answers_in_place(history, given):
        return Resent(same, changed=True)
    if _repeats_exchange(history, given):
        raise _changed(len(history), same if same < len(given) else None)
    return Resent(0)


def has_answer(messages: Sequence[Json]) -> bool:
    """Return whether any message is an assistant's."""
    return any(message.get("role") == "assistant" for message in messages)


def _history(past: Conversation, answer: str | None) -> list[Turn]:
    turns = [
        _known(message, past.answer_fingerprints.get(index)) for index, message in enumerate(past.messages)
    ]
    if past.answer_from is not None:
        last = {"role": "assistant", "content": answer}
        turns.append(_known(last, past.answer_fingerprints.get(len(past.messages))))
    return turns


def _known(message: Json, received: str | None) -> Turn:
    """Return a message of the history as a turn.

    Args:
        received: its fingerprint as its client received it, if that is known.
    """
    return _turn(message, {fingerprint(message)} | ({received} if received is not None else set()))


def _given(message: Json) -> Turn:
    """Return a message of the request as a turn; clients may have added a name to an answer."""
    answers = message.get("role") == "assistant"
    return _turn(message, {fingerprint(message)} | ({answer_fingerprint(message)} if answers else set()))


def _turn(message: Json, fingerprints: set[str]) -> Turn:
    says = bool(message.get("content") or message.get("tool_calls"))
    return Turn(str(message.get("role")), frozenset(fingerprints), says)


def _same(history: Sequence[Turn], given: Sequence[Turn]) -> int:
    """Count the turns that both begin with."""
    pairs = enumerate(zip(history, given, strict=False))
    shorter = min(len(history), len(given))
    return next((index for index, (one, other) in pairs if not one.same_as(other)), shorter)


def _repeats_beginning(history: Sequence[Turn], given: Sequence[Turn]) -> bool:
    """Return whether several messages begin like the history, instructions aside.

    A single turn may be a question that is asked a second time.
    """
    past, now = _without_instructions(history), _without_instructions(given)
    same = _same(past, now)
    return len(now) > 1 and any(turn.role == "user" for turn in past[:same])


def _answers_in_place(history: Sequence[Turn], given: Sequence[Turn]) -> bool:
    """Return whether an answer of the history is among the messages in its place, after other messages."""
    past, now = _without_instructions(history), _without_instructions(given)
    return any(_is_answer(turn) and turn.same_as(was) for was, turn in zip(past, now, strict=False))


def _repeats_exchange(history: Sequence[Turn], given: Sequence[Turn]) -> bool:
    """Return whether messages repeat an exchange of the history.

    They do when they begin with an answer of the history, or with a tool's result that it holds, or hold an
    answer after the turn that it answered.
    """
    past, now = _without_instructions(history), _without_instructions(given)
    if now and _is_answer(now[0]) and any(_is_answer(turn) and turn.same_as(now[0]) for turn in past):
        return True
    if now and now[0].role == "tool" and any(turn.same_as(now[0]) for turn in past):
        return True
    return not _exchanges(past).isdisjoint(_exchanges(now))


def _exchanges(turns: Sequence[Turn]) -> set[tuple[str, str]]:
    """Return every answer with the turn before it, as pairs of their fingerprints."""
    pairs = pairwise(turns)
    return {
        (one, other)
        for before, turn in pairs
        if _is_answer(turn)
        for one in before.fingerprints
        for other in turn.fingerprints
    }


def _is_answer(turn: Turn) -> bool:
    return turn.role == "assistant" and turn.says


def _without_instructions(turns: Sequence[Turn]) -> list[Turn]:
    return [turn for turn in turns if turn.role not in INSTRUCTIONS]


def _changed(whole: int, first: int | None) -> InvalidRequest:
    where = f", but differ from it at messages[{first}]" if first is not None else ""
    return InvalidRequest(
        f"messages: they repeat a part of the handoff's conversation{where}. The handoff's context holds "
        f"that already: send only the new messages, or all {whole} messages of the conversation unchanged, "
        "with the assistant's last answer as it was received, and the new messages after them.",
        param="messages",
    )


def _content(content: object) -> object:
    if isinstance(content, list):
        parts = [_part(part) for part in content]
        if len(parts) == 1 and isinstance(parts[0], dict) and parts[0].keys() == {"type", "text"}:
            return parts[0]["text"]
        return parts or ""
    return "" if content is None else content


def _part(part: object) -> object:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, dict):
        return _said(part)
    return part


def _said(given: Json) -> Json:
    """Return the fields of a message or a part that say something."""
    return {key: value for key, value in given.items() if key not in HINTS and value not in (None, [])}


def _calls(calls: object) -> object:
    return [_call(call) for call in calls] if isinstance(calls, list) else calls


def _call(call: object) -> object:
    """Return a tool's call by its id, name and arguments, however its JSON is spaced."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        return call
    return {
        "id": call.get("id"),
        "name": function.get("name"),
        "arguments": _normalized(function.get("arguments")),
    }


def _normalized(arguments: object) -> object:
    """Return a call's arguments as JSON in one form; what is not valid JSON is returned unchanged."""
    try:
        return json.dumps(json.loads(arguments) if isinstance(arguments, str) else arguments, sort_keys=True)
    except (ValueError, RecursionError):  # cut off with the answer, or nested too deep
        return arguments
