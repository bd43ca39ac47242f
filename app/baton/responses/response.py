"""The stored answer to one request to `/v1/responses`, with the input items of that request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from baton.engines.backend import Json


@dataclass(frozen=True)
class NewResponse:
    """An answer that is about to be stored.

    Attributes:
        id: its public name.
        tenant: the owner.
        previous: id of the response that it continues; None: it begins a conversation.
        created_at: seconds since the epoch.
        input: the items of its own request, a JSON list in ASCII.
        output: the items of the answer as later requests get them, a JSON list in ASCII.
        body: the answer as its client receives it, a JSON object in ASCII.
    """

    id: str
    tenant: str
    previous: str | None
    created_at: float
    input: str
    output: str
    body: str


@dataclass(frozen=True)
class Turn:
    """The items of one stored response, as JSON, which only the one who needs them parses.

    Attributes:
        id: the response.
        input: the items of its own request, a JSON list.
        output: the items of the answer, a JSON list.
    """

    id: str
    input: str
    output: str


def conversation_json(turns: Sequence[Turn]) -> bytes:
    """Return all items of a conversation, answers included, as one JSON list, the oldest first."""
    lists = [text[1:-1] for turn in turns for text in (turn.input, turn.output)]
    return f"[{','.join(text for text in lists if text)}]".encode()


def replayed_items(body: Json) -> list[Json]:
    """Return the items of an answer as a later request gets them.

    Messages without content are left out, which vLLM does not take as input, and log probabilities, which no
    model reads.
    """
    output = body.get("output")
    items = [item for item in output if isinstance(item, dict)] if isinstance(output, list) else []
    return [
        item | {"content": [_without_logprobs(part) for part in item["content"]]}
        if isinstance(item.get("content"), list)
        else item
        for item in items
        if item.get("type") != "message" or item.get("content")
    ]


def _without_logprobs(part: object) -> object:
    return part | {"logprobs": None} if isinstance(part, dict) and part.get("logprobs") else part


def input_items(given: object) -> list[Json]:
    """Return the `input` of a request as a list of items; a text is a message of the user's."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    return [item for item in given if isinstance(item, dict)] if isinstance(given, list) else []


def listed_items(turns: Sequence[Turn]) -> list[Json]:
    """Return the items that a conversation's last answer was computed from, as clients list them.

    Every item has an id of its own, and the content of every message is a list of parts.
    """
    items: dict[str, Json] = {}
    for number, turn in enumerate(turns):
        answer = json.loads(turn.output) if number < len(turns) - 1 else []
        for index, item in enumerate([*json.loads(turn.input), *answer]):
            name = item.get("id")
            if not isinstance(name, str) or name in items:  # clients may give several items one id
                name = f"item_{turn.id}_{index}"
            items[name] = _listed(item) | {"id": name}
    return list(items.values())


def _listed(item: Json) -> Json:
    if item.get("type", "message") != "message":
        return item
    kind = "output_text" if item.get("role") == "assistant" else "input_text"
    content = item.get("content")
    parts = [{"type": kind, "text": content}] if isinstance(content, str) else content
    return {"type": "message", "status": "completed"} | item | {"content": parts}
