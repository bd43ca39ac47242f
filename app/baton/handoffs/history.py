"""Recognise the conversation of a handoff where a client sends it again before its new messages.

Agent frameworks send the whole conversation with every request. Written after a handoff's context it would
stand there twice, so messages that begin with it are recognised and left out. Those that repeat only a part
of it are refused: nobody can tell which part was meant to be new.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from baton.engines.port import Json
from baton.errors import InvalidRequest
from baton.handoffs.record import Conversation

ANSWER_FIELDS = frozenset({"annotations", "audio", "parsed", "reasoning", "reasoning_content", "refusal"})
"""Fields of an assistant's message that answers and SDKs add; clients send them back or drop them."""
INSTRUCTIONS = frozenset({"developer", "system"})
"""Roles whose messages are no turns: a client may give them anew with every request."""
DIGEST_CHARS = 32


@dataclass(frozen=True)
class Turn:
    """One message, as far as it is compared.

    Attributes:
        role: whose message it is.
        forms: fingerprints it is known by: an answer has one as its client was given it, one as it was read
            back from its tokens.
        says: it has content or calls a tool.
    """

    role: str
    forms: frozenset[str]
    says: bool

    def same_as(self, other: Turn) -> bool:
        """Whether both are the same message: they share a form."""
        return not self.forms.isdisjoint(other.forms)


def fingerprint(message: Json) -> str:
    """The digest of what a message says, the same for every way in which SDKs write it.

    A field that is null or an empty list is left out, one text part is its text; of an assistant's message
    also the fields that only answers have, and white space around its content.
    """
    said = {key: value for key, value in message.items() if value not in (None, [])}
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
    """The same for an answer, to which some frameworks add the `name` of the agent that gave it."""
    return fingerprint({key: value for key, value in message.items() if key != "name"})


def resent(past: Conversation, messages: Sequence[Json], answer: str | None) -> int:
    """How many of the messages are the handoff's own conversation, sent again.

    Args:
        past: the handoff's conversation.
        messages: of the request.
        answer: the last answer of the handoff's context, read back from its tokens; None: there is none, or
            the messages hold no answer.

    Returns:
        All of the conversation's messages and its last answer, or 0.

    Raises:
        InvalidRequest: the messages repeat a part of the conversation, or all of it with changes.
    """
    history, given = _history(past, answer), [_given(message) for message in messages]
    same = _same(history, given)
    if same == len(history):
        return same
    if _repeats_beginning(history, given) or _repeats_exchange(history, given):
        raise _changed(len(history), same if same < len(given) else None)
    return 0


def has_answer(messages: Sequence[Json]) -> bool:
    """Whether any message is an assistant's."""
    return any(message.get("role") == "assistant" for message in messages)


def _history(past: Conversation, answer: str | None) -> list[Turn]:
    turns = [_known(message, past.told.get(index)) for index, message in enumerate(past.messages)]
    if past.answer_from is not None:
        last = {"role": "assistant", "content": answer}
        turns.append(_known(last, past.told.get(len(past.messages))))
    return turns


def _known(message: Json, told: str | None) -> Turn:
    """A message of the history; `told` is the fingerprint that its client was given it by."""
    forms = {fingerprint(message)} | ({told} if told is not None else set())
    return _turn(message, forms)


def _given(message: Json) -> Turn:
    """A message of the request; an answer of the history may have a name here."""
    answers = message.get("role") == "assistant"
    return _turn(message, {fingerprint(message)} | ({answer_fingerprint(message)} if answers else set()))


def _turn(message: Json, forms: set[str]) -> Turn:
    says = bool(message.get("content") or message.get("tool_calls"))
    return Turn(str(message.get("role")), frozenset(forms), says)


def _same(history: Sequence[Turn], given: Sequence[Turn]) -> int:
    """How many turns both begin with."""
    pairs = enumerate(zip(history, given, strict=False))
    shorter = min(len(history), len(given))
    return next((index for index, (one, other) in pairs if not one.same_as(other)), shorter)


def _repeats_beginning(history: Sequence[Turn], given: Sequence[Turn]) -> bool:
    """Whether messages begin like the history, instructions aside, and are more than one turn.

    One turn alone may be a question that is asked a second time.
    """
    past, now = _without_instructions(history), _without_instructions(given)
    same = _same(past, now)
    return len(now) > 1 and any(turn.role == "user" for turn in past[:same])


def _repeats_exchange(history: Sequence[Turn], given: Sequence[Turn]) -> bool:
    """Whether messages hold an answer of the history after the turn that it answered, or at its place; or
    begin with the result of a tool that the history holds.
    """
    past, now = _without_instructions(history), _without_instructions(given)
    if now and _is_answer(now[0]) and any(_is_answer(turn) and turn.same_as(now[0]) for turn in past):
        return True
    if now and now[0].role == "tool" and any(turn.same_as(now[0]) for turn in past):
        return True
    if any(_is_answer(turn) and turn.same_as(was) for was, turn in zip(past, now, strict=False)):
        return True
    return not _exchanges(past).isdisjoint(_exchanges(now))


def _exchanges(turns: Sequence[Turn]) -> set[tuple[str, str]]:
    """Every answer with the turn before it, in all of their forms."""
    pairs = pairwise(turns)
    return {
        (one, other)
        for before, turn in pairs
        if _is_answer(turn)
        for one in before.forms
        for other in turn.forms
    }


def _is_answer(turn: Turn) -> bool:
    return turn.role == "assistant" and turn.says


def _without_instructions(turns: Sequence[Turn]) -> list[Turn]:
    return [turn for turn in turns if turn.role not in INSTRUCTIONS]


def _changed(whole: int, first: int | None) -> InvalidRequest:
    where = f", and differ from it at messages[{first}]" if first is not None else ""
    return InvalidRequest(
        f"messages: they repeat a part of the handoff's conversation{where}. Its context holds that already: "
        f"send the new messages only, or all {whole} messages of the conversation as they were, with the "
        "assistant's last answer as it was given, and the new messages after them.",
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
        return {key: value for key, value in part.items() if value is not None}
    return part


def _calls(calls: object) -> object:
    return [_call(call) for call in calls] if isinstance(calls, list) else calls


def _call(call: object) -> object:
    """A tool's call by its id, name and arguments, however its JSON is spaced."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        return call
    return {
        "id": call.get("id"),
        "name": function.get("name"),
        "arguments": _spaced(function.get("arguments")),
    }


def _spaced(arguments: object) -> object:
    """A call's arguments as JSON with the same spaces and order for all; what is no JSON stays as it is."""
    try:
        return json.dumps(json.loads(arguments) if isinstance(arguments, str) else arguments, sort_keys=True)
    except (ValueError, RecursionError):  # cut short as the answer was, or nested without end
        return arguments
