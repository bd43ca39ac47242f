"""Write the calls of the gateway's routes: what is sent, and how the answer is read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import quote

from baton_client.call import Call, Reply, Report, Upload
from baton_client.values import Answer, Handoff, Json, SceneAnswer

PAGE_ROWS = 100
"""Most handoffs of a page."""
Messages: TypeAlias = str | Sequence[Mapping[str, Any]]
"""A chat's messages, or the text of a single one of the user's."""
Start: TypeAlias = Handoff | str
"""A handoff or its id."""
Starts: TypeAlias = Start | list[Start] | tuple[Start, ...]
"""A handoff, or several whose contexts are joined."""
Parameter: TypeAlias = str | float | Sequence[str | float]
"""A parameter of a plugin; several values are joined with commas."""
MEDIA_TYPES = {
    ".tif": "image/tiff",
    ".tiff": "image/tiff",
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".webp": "image/webp",
}


class Page(NamedTuple):
    """A page of handoffs, the newest first.

    Attributes:
        handoffs: of this page.
        after: id from which the next page goes on; None: this is the last one.
    """

    handoffs: tuple[Handoff, ...]
    after: str | None


def id_of(start: Start) -> str:
    """Return a handoff's id."""
    return start.id if isinstance(start, Handoff) else start


def ids_of(starts: Starts) -> str | list[str]:
    """Return a handoff's id, or those of several."""
    return [id_of(each) for each in starts] if isinstance(starts, list | tuple) else id_of(starts)


def messages_of(messages: Messages) -> list[Mapping[str, Any]]:
    """Return a chat's messages; a text is one message of the user."""
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)


def chosen(fields: Mapping[str, Any]) -> Json:
    """Return the fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def given(**fields: Any) -> Json:
    """Return the fields that are neither None, False nor 0, which all are the API's defaults."""
    return {name: value for name, value in fields.items() if value not in (None, False, 0)}


def chat(
    model: str,
    messages: Messages,
    *,
    start: Starts | None = None,
    starting: Mapping[str, Any] = MappingProxyType({}),
    save: bool = False,
    saving: Mapping[str, Any],
    fields: Mapping[str, Any],
) -> Call[Answer]:
    """Return the call of a chat.

    Args:
        model: name of the engine.
        messages: of the chat; those that follow the handoff, if it starts from one.
        start: the handoff that it starts from, or several that are joined.
        starting: how: `join`, `order`, `translate`.
        save: whether it saves a handoff.
        saving: how: `label`, `ttl_s`, `pin`, `latent_steps`; any of them means `save`.
        fields: further fields of the body, such as `max_tokens`.

    Raises:
        ValueError: `stream` is set.
    """
    if fields.get("stream"):
        raise ValueError("This client does not stream: use an OpenAI client with a HandoffTransport.")
    how = given(**saving)
    handoff = given(save=how or save)
    if start is not None:
        handoff |= {"from": ids_of(start)} | chosen(starting)
    body: Json = {**fields, "model": model, "messages": messages_of(messages)}
    if handoff:
        body["handoff"] = handoff
    return Call("POST", "/v1/chat/completions", lambda reply: Answer.of(_json(reply)), body)


def create_handoff(
    model: str,
    messages: Messages | None,
    prompt: str | Sequence[int] | None,
    start: Starts | None,
    starting: Mapping[str, Any],
    saving: Mapping[str, Any],
    fields: Mapping[str, Any],
) -> Call[Handoff]:
    """Return the call that computes a context and saves it, without an answer.

    Raises:
        ValueError: `messages` and `prompt` are both given, or both left out where no contexts are joined and
            none is translated.
    """
    whole = isinstance(start, list | tuple) or (start is not None and starting.get("translate"))
    if (messages is None) is (prompt is None) and not (whole and messages is None):
        raise ValueError(
            "Give either 'messages' or 'prompt', or several handoffs as 'start', or one with 'translate'."
        )
    body: Json = {**fields, "model": model, **given(**saving)}
    if messages is not None:
        body["messages"] = messages_of(messages)
    if prompt is not None:
        body["prompt"] = prompt if isinstance(prompt, str) else list(prompt)
    if start is not None:
        body |= {"from": ids_of(start)} | chosen(starting)
    return Call("POST", "/v1/handoffs", _handoff, body)


def get_handoff(handoff: Start) -> Call[Handoff]:
    """Return the call that shows a handoff."""
    return Call("GET", _path(handoff), _handoff)


def change_handoff(handoff: Start, changes: Mapping[str, Any]) -> Call[Handoff]:
    """Return the call that sets a handoff's `label`, `ttl_s` or `pin`; what is None stays."""
    body = {name: value for name, value in changes.items() if value is not None}
    return Call("PATCH", _path(handoff), _handoff, body)


def delete_handoff(handoff: Start) -> Call[None]:
    """Return the call that deletes a handoff."""
    return Call("DELETE", _path(handoff), lambda _reply: None)


def list_handoffs(after: str | None = None) -> Call[Page]:
    """Return the call for a page of handoffs, the newest first."""
    params = {"limit": str(PAGE_ROWS)} | ({"after": after} if after else {})
    return Call("GET", "/v1/handoffs", _page, params=params)


def scene(
    model: str,
    source: str | Path | bytes,
    *,
    accept: str,
    media_type: str | None,
    target: str | Path | None,
    report: Report | None,
    parameters: Mapping[str, Parameter],
) -> Call[SceneAnswer]:
    """Return the call that sends a file to a model's plugin.

    Raises:
        FileNotFoundError: there is no such file, or no folder for `target`.
    """
    body = Upload(source if isinstance(source, bytes) else Path(source), report)
    path = None if target is None else Path(target)
    if path is not None and not path.parent.is_dir():
        raise FileNotFoundError(f"The answer cannot be written: there is no folder {path.parent}.")
    headers = {
        "Accept": accept,
        "Content-Type": media_type or _media_type(source),
        "Content-Length": str(body.size),
    }
    return Call(
        "POST",
        "/pooling",
        lambda reply: SceneAnswer(reply.media_type, reply.content, path),
        body,
        {"model": model} | {name: _joined(value) for name, value in parameters.items()},
        headers,
        path,
        report,
    )


def _joined(value: Parameter) -> str:
    several = isinstance(value, Iterable) and not isinstance(value, str)
    return ",".join(map(str, value)) if several else str(value)  # type: ignore[arg-type]  # `several` says so


def _media_type(source: str | Path | bytes) -> str:
    suffix = ".tif" if isinstance(source, bytes) else Path(source).suffix.lower()
    return MEDIA_TYPES.get(suffix, "application/octet-stream")


def _path(handoff: Start) -> str:
    return f"/v1/handoffs/{quote(id_of(handoff), safe='')}"


def _json(reply: Reply) -> Json:
    body: Json = json.loads(reply.content)
    return body


def _handoff(reply: Reply) -> Handoff:
    return Handoff.of(_json(reply))


def _page(reply: Reply) -> Page:
    body = _json(reply)
    return Page(tuple(map(Handoff.of, body["data"])), body["last_id"] if body["has_more"] else None)
