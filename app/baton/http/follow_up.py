"""Carry out `follow_up` of `POST /pooling`: send a plugin's result to a chat model and add its answer.

One request, two results. The plugin describes its result in text and, if it likes, with a picture; a model
that takes no images gets the text alone.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request

from baton.engines.backend import Json, Operation
from baton.engines.engine import Engine
from baton.errors import BatonError, GenerationFailed, InvalidRequest, OperationUnsupported
from baton.http.answer import ask, engage
from baton.http.error_body import error_body
from baton.http.request import allowed, gateway_of, in_a_thread, state_of
from baton.pooling.plugin import Description

FIELD = "follow_up"
OLD_FIELD = "then"


@dataclass(frozen=True)
class FollowUp:
    """A chat request that is sent when the plugin is done.

    Attributes:
        engine: the chat model's engine.
        body: the chat request, without the description of the plugin's result.
    """

    engine: Engine
    body: Json


@dataclass(frozen=True)
class FollowUpAnswer:
    """The answer to a follow-up.

    Attributes:
        body: the chat's answer, or its error.
    """

    body: Json
    headers: Mapping[str, str]


def refuse_old_name(body: Json) -> None:
    """Refuse a body that uses the field's former name.

    Raises:
        InvalidRequest: the body has `then`.
    """
    if body.pop(OLD_FIELD, None) is not None:
        raise InvalidRequest(f"'{OLD_FIELD}' is called '{FIELD}' now: rename the field.", param=OLD_FIELD)


def take_follow_up(request: Request, body: Json) -> FollowUp | None:
    """Remove the `follow_up` field from a body and check it.

    Returns:
        The follow-up; None where the body has none.

    Raises:
        InvalidRequest: the field is no chat request, which `param` places, or has its former name.
        ModelNotFound: no engine has the name that `follow_up.model` gives.
        OperationUnsupported: the model of the follow-up belongs to a plugin.
    """
    refuse_old_name(body)
    given = body.pop(FIELD, None)
    if given is None:
        return None
    if not isinstance(given, dict):
        raise InvalidRequest(f"'{FIELD}' must be an object: the body of a chat request.", param=FIELD)
    _require_chat(given)
    fleet = gateway_of(request).fleet
    choices = allowed(request, given["model"], fleet.choices(given["model"]))
    engine = choices[0][0].engine if fleet.comes(choices) else fleet.pick(given["model"])
    if engine.forwarding is None and engine.plugin is not None:
        raise OperationUnsupported(
            f"'{FIELD}.model' must name a chat model: '{engine.name}' belongs to the plugin "
            f"'{engine.plugin.name}'.",
            param=f"{FIELD}.model",
        )
    return FollowUp(engine, given)


def _require_chat(given: Json) -> None:
    if given.get("stream"):
        raise InvalidRequest(
            f"'{FIELD}' cannot stream, because both results come back in one answer: leave "
            f"'{FIELD}.stream' out.",
            param=f"{FIELD}.stream",
        )
    if _first_of_user(given) is None:
        raise InvalidRequest(
            f"'{FIELD}.messages' must be a list with at least one message of the role 'user'.",
            param=f"{FIELD}.messages",
        )
    _require_content(given["messages"])
    if not isinstance(given.get("model"), str):
        raise InvalidRequest(f"'{FIELD}.model' must name the model to ask.", param=f"{FIELD}.model")


async def ask_follow_up(request: Request, follow_up: FollowUp, description: Description) -> FollowUpAnswer:
    """Ask the chat model about the plugin's result.

    A chat that fails does not fail the request: its error comes back beside the plugin's result.
    """
    try:
        # The plugin's engine may have to make room for the chat's.
        state = state_of(request.scope)
        state.ticket.let_go()
        own = state.model
        engine = await engage(request, follow_up.body["model"])
        state.model = own  # the chat's own usage is counted apart
        takes_images = engine.images.limit > 0
        body = await in_a_thread(
            request, partial(with_description, follow_up.body, description, takes_images=takes_images)
        )
        response = await ask(request, engine, Operation.CHAT, body)
    except BatonError as error:
        return FollowUpAnswer(error_body(error, request.scope), {})
    try:
        answer: Json = json.loads(bytes(response.body))
    except RecursionError:  # a server elsewhere may nest as deep as was just possible where it was checked
        return FollowUpAnswer(error_body(GenerationFailed(), request.scope), {})
    headers = {name: value for name, value in response.headers.items() if name.startswith("x-")}
    return FollowUpAnswer(answer, headers)


def with_description(body: Json, description: Description, *, takes_images: bool) -> Json:
    """Return the chat request with the description before the user's first message.

    Args:
        body: the chat request; not changed.
        takes_images: whether the chat model takes images; its picture is left out otherwise.
    """
    place = _first_of_user(body)
    assert place is not None  # `take_follow_up` has checked it
    messages = list(body["messages"])
    content = _described(messages[place].get("content"), description, takes_images=takes_images)
    messages[place] = messages[place] | {"content": content}
    return body | {"messages": messages}


def _described(content: Any, description: Description, *, takes_images: bool) -> Any:
    text = description.text + "\n"
    picture = description.picture if takes_images else None
    if picture is None and not isinstance(content, list):
        return text + (content or "")
    parts = content if isinstance(content, list) else [{"type": "text", "text": text + (content or "")}]
    if isinstance(content, list):
        parts = [{"type": "text", "text": text}, *parts]
    if picture is not None:
        media_type, data = picture
        url = f"data:{media_type};base64,{base64.b64encode(data).decode('ascii')}"
        parts = [{"type": "image_url", "image_url": {"url": url}}, *parts]
    return parts


def _require_content(messages: list[Any]) -> None:
    for number, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else 0
        if not isinstance(content, str | list | None):
            where = f"{FIELD}.messages[{number}]"
            raise InvalidRequest(
                f"'{where}' must be a message whose content is text or a list of parts.", param=where
            )


def _first_of_user(body: Json) -> int | None:
    messages = body.get("messages")
    if not isinstance(messages, list):
        return None
    of_user = (n for n, each in enumerate(messages) if isinstance(each, dict) and each.get("role") == "user")
    return next(of_user, None)
