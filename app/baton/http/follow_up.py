"""`then` of `POST /pooling`: a chat model is shown what a plugin made of the data, and asked about it.

One request, two results. The plugin says what there is to see, in words and, if it likes, with a picture; a
model that takes no images gets the words alone.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request

from baton.engines.port import Engine, Json, Operation
from baton.errors import BatonError, InvalidRequest, OperationUnsupported
from baton.http.error_body import error_body
from baton.http.pipeline import ask
from baton.http.request_body import in_a_thread
from baton.http.state import Gateway
from baton.pooling.processor import Exhibit

FIELD = "then"


@dataclass(frozen=True)
class Then:
    """What is to be asked when the plugin is done.

    Attributes:
        engine: of the chat.
        body: of the chat request, without what will be shown.
    """

    engine: Engine
    body: Json


@dataclass(frozen=True)
class Told:
    """What came of it: the chat's answer or its error, and the headers that belong to it."""

    body: Json
    headers: Mapping[str, str]


def take_then(gateway: Gateway, body: Json) -> Then | None:
    """Take the `then` field out of a body.

    Raises:
        InvalidRequest: it is no chat request; `param` names the field.
        ModelNotFound: there is no such model.
        OperationUnsupported: its model belongs to a plugin.
    """
    given = body.pop(FIELD, None)
    if given is None:
        return None
    if not isinstance(given, dict):
        raise InvalidRequest("'then' must be an object: the body of a chat request.", param=FIELD)
    if given.get("stream"):
        raise InvalidRequest("Both results come back as one: 'then' cannot stream.", param="then.stream")
    if _first_of_user(given) is None:
        raise InvalidRequest(
            "'then.messages' must be a list with a message of the user's.", param="then.messages"
        )
    _require_content(given["messages"])
    if not isinstance(given.get("model"), str):
        raise InvalidRequest("'then.model' must name the model to ask.", param="then.model")
    engine = gateway.fleet.pick(given["model"])
    if engine.plugin is not None:
        raise OperationUnsupported(
            f"The model '{engine.name}' belongs to the plugin '{engine.plugin.name}' and chats with nobody.",
            param="then.model",
        )
    return Then(engine, given)


async def tell(request: Request, then: Then, exhibit: Exhibit) -> Told:
    """Ask the chat model about what the plugin shows.

    Its failure is not the plugin's: the result that is there already comes back beside the error.
    """
    body = await in_a_thread(
        request, partial(shown, then.body, exhibit, pictures=then.engine.images.limit > 0)
    )
    try:
        response = await ask(request, then.engine, Operation.CHAT, body)
    except BatonError as error:
        return Told(error_body(error, request.scope), {})
    answer: Json = json.loads(bytes(response.body))
    return Told(answer, {name: value for name, value in response.headers.items() if name.startswith("x-")})


def shown(body: Json, exhibit: Exhibit, *, pictures: bool) -> Json:
    """The chat request with what the plugin shows before the user's first message.

    Args:
        body: of the chat request; not changed.
        exhibit: what is shown.
        pictures: the model takes them.
    """
    place = _first_of_user(body)
    assert place is not None  # `take_then` has seen to it
    messages = list(body["messages"])
    content = messages[place].get("content")
    messages[place] = messages[place] | {"content": _with_exhibit(content, exhibit, pictures=pictures)}
    return body | {"messages": messages}


def _with_exhibit(content: Any, exhibit: Exhibit, *, pictures: bool) -> Any:
    words = exhibit.words + "\n"
    picture = exhibit.picture if pictures else None
    if picture is None and not isinstance(content, list):
        return words + (content or "")
    parts = content if isinstance(content, list) else [{"type": "text", "text": words + (content or "")}]
    if isinstance(content, list):
        parts = [{"type": "text", "text": words}, *parts]
    if picture is not None:
        media_type, data = picture
        url = f"data:{media_type};base64,{base64.b64encode(data).decode('ascii')}"
        parts = [{"type": "image_url", "image_url": {"url": url}}, *parts]
    return parts


def _require_content(messages: list[Any]) -> None:
    for number, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else 0
        if not isinstance(content, str | list | None):
            where = f"then.messages[{number}]"
            raise InvalidRequest(
                f"'{where}' must be a message whose content is text or a list of parts.", param=where
            )


def _first_of_user(body: Json) -> int | None:
    messages = body.get("messages")
    if not isinstance(messages, list):
        return None
    of_user = (n for n, each in enumerate(messages) if isinstance(each, dict) and each.get("role") == "user")
    return next(of_user, None)
