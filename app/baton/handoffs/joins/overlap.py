"""Find what the conversations of several handoffs have in common, so that it is written once."""

from __future__ import annotations

from collections.abc import Sequence

from baton.engines.port import Json
from baton.handoffs.joins.parts import Part, refused
from baton.handoffs.prompts.history import INSTRUCTIONS, fingerprint
from baton.handoffs.records.prefix_index import shared_tokens


def shared_messages(parts: Sequence[Part]) -> int:
    """Return the number of messages that all chats begin with.

    Raises:
        InvalidRequest: their system messages differ.
    """
    written = [_marks(part) for part in parts]
    heads = [_head(part.past.messages) for part in parts]
    for part, each, head in zip(parts, written, heads, strict=True):
        if each[:head] != written[0][: heads[0]]:
            raise refused(part, f"its system message is not that of '{parts[0].where}'")
        if any(message.get("role") in INSTRUCTIONS for message in part.past.messages[head:]):
            raise refused(part, "it has a system message behind its first turn")
    places = enumerate(zip(*written, strict=False))
    shared = next((index for index, each in places if len(set(each)) > 1), min(map(len, written)))
    while shared > heads[0] and any(_answers(part.past.messages[shared:]) for part in parts[1:]):
        shared -= 1  # to the question that they answer in different ways
    return shared


def _answers(messages: Sequence[Json]) -> bool:
    """Return whether messages begin with an answer, or a tool's result, to what stands before them."""
    return bool(messages) and messages[0].get("role") != "user"


def _head(messages: Sequence[Json]) -> int:
    """Return the number of system messages that a conversation begins with."""
    roles = enumerate(message.get("role") for message in messages)
    return next((index for index, role in roles if role not in INSTRUCTIONS), len(messages))


def continued_parts(parts: Sequence[Part]) -> dict[str, str]:
    """Return which chats hold nothing that another one does not: the field that names it, by that of each."""
    chats = [(part, _marks(part)) for part in parts if part.is_chat]
    return {
        part.where: other.where
        for part, marks in chats
        for other, others in chats
        if part is not other and _is_within(part, marks, other, others)
    }


def _marks(part: Part) -> list[str]:
    return [fingerprint(message) for message in part.past.messages]


def _is_within(part: Part, marks: list[str], other: Part, others: list[str]) -> bool:
    """Return whether a chat is continued by another one, which has its answer as one of its messages."""
    past, count = part.past, len(marks)
    answered = past.answer_from is not None
    if len(others) < count + answered or marks != others[:count]:
        return False
    if not answered:
        return len(others) > count or other.past.answer_from is not None
    if others[count] == past.answer_fingerprints.get(count):
        return True
    tokens = part.record.distinct_tokens
    return shared_tokens(tokens, other.record.distinct_tokens) >= len(tokens) - past.ended
