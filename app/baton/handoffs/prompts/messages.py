"""Convert a chat request's messages into the conversation that a handoff's record stores."""

from __future__ import annotations

from collections.abc import Mapping

from baton.engines.port import Json
from baton.handoffs.records.record import Conversation

TEMPLATE_FIELDS = (
    "tools",
    "tool_choice",
    "documents",
    "chat_template_kwargs",
    "reasoning_effort",
)
"""Fields of a chat request that decide how the template writes its messages."""
AFTER_THE_PROMPT = 0
"""Value of `Conversation.answer_from` while the prompt's tokens are not known yet."""
MAX_BYTES = 1024 * 1024
"""Largest conversation that is stored; a handoff with a larger one can only be continued as plain text."""


def template_of(body: Json) -> Json:
    """Return the fields of a chat request that decide how its messages are written."""
    return {field: body[field] for field in TEMPLATE_FIELDS if body.get(field) is not None}


def conversation_of(body: Json, answer_from: int | None) -> Conversation | None:
    """Return a chat request as a conversation; None: its messages are invalid, and the engine refuses."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return None
    return conversation_from(messages, template_of(body), answer_from)


def conversation_from(
    messages: list[Json],
    template: Json,
    answer_from: int | None,
    fingerprints: Mapping[int, str] | None = None,
) -> Conversation:
    """Return messages as a conversation; one that is too large is marked as `text_only`.

    Args:
        messages: the messages, without the answer that may follow.
        template: from `template_of`.
        answer_from: index of the answer's first token; None: no answer follows.
        fingerprints: of the answers among the messages, as their clients received them.
    """
    weight = _weight([messages, template])
    if weight > MAX_BYTES:
        return Conversation(messages=[], text_only=True)
    return Conversation(
        messages=messages,
        template=template,
        answer_from=answer_from,
        answer_fingerprints=dict(fingerprints or {}),
        weight=weight,
    )


def with_text(past: Conversation | None) -> Conversation | None:
    """Return a conversation after plain text was added: to its open answer, or after its last turn."""
    if past is None:
        return None
    if past.answer_from is not None and not past.ended:  # the answer is longer than what its client received
        fingerprints = {
            index: found for index, found in past.answer_fingerprints.items() if index < len(past.messages)
        }
        return past.model_copy(update={"answer_fingerprints": fingerprints})
    return past.model_copy(update={"text_only": True})


def _weight(value: object) -> int:
    """Return about how many bytes a JSON value takes; counting stops above `MAX_BYTES`."""
    weight, open_values = 0, [value]
    while open_values and weight <= MAX_BYTES:
        current = open_values.pop()
        weight += 16 + (len(current) if isinstance(current, str) else 0)
        if isinstance(current, dict):
            open_values += [*current.keys(), *current.values()]
        elif isinstance(current, list):
            open_values += current
    return weight
