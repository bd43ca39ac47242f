"""What a request may weigh while it comes in, and what of it never reaches an engine."""

from __future__ import annotations

from functools import partial
from typing import Any

from pydantic import ByteSize
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.api.strict_json import off_the_loop, parse_object
from baton.errors import BodyTooLarge, InvalidRequest, UnsupportedMediaType
from baton.setting_groups import LimitSettings

MEDIA_KEYS = ("image_url", "audio_url", "video_url", "file_url", "source")
"""Where OpenAI's, Anthropic's and vLLM's requests name media."""

FREE_JSON = frozenset({"tools", "functions", "metadata", "response_format", "input_schema", "parameters"})
"""Fields whose JSON is the client's own: what looks like media there is not."""

UPLOAD_TYPES = frozenset(
    {
        "application/octet-stream",
        "image/geotiff",
        "image/jpeg",
        "image/png",
        "image/tiff",
        "image/webp",
    }
)
"""Bodies of `POST /pooling` that are a file as it is, not JSON."""
UPLOAD_PATH = "/pooling"

STEERING_KEYS = ("kv_transfer_params", "ec_transfer_params", "cache_salt")
"""Fields of vLLM's requests that steer its KV cache past the gateway."""


class BodyLimitMiddleware:
    """Refuses a body above the limit: by its announced length at once, else when it gets there."""

    def __init__(self, app: ASGIApp, *, body_bytes: ByteSize, upload_bytes: ByteSize) -> None:
        self._app = app
        self._body_bytes = body_bytes
        self._upload_bytes = upload_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        upload = scope["path"] == UPLOAD_PATH and media_type_of(Request(scope)) in UPLOAD_TYPES
        limit = self._upload_bytes if upload else self._body_bytes
        message = f"The request body may hold at most {limit.human_readable()}."
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value) > limit:
                raise BodyTooLarge(message)
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            event = await receive()
            if event["type"] == "http.request":
                seen += len(event.get("body", b""))
                if seen > limit:
                    raise BodyTooLarge(message)
            return event

        await self._app(scope, counted, send)


def media_type_of(request: Request) -> str:
    """The body's media type without its parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def read_json(request: Request, limits: LimitSettings) -> dict[str, Any]:
    """The body as a JSON object.

    Raises:
        UnsupportedMediaType: it is not sent as JSON.
        InvalidJson: it is no JSON by RFC 8259, or no object.
        InvalidRequest: it holds too much, or is nested too deep.
    """
    media_type = media_type_of(request)
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise UnsupportedMediaType()
    body = await request.body()
    return await off_the_loop(body, partial(parse_object, body, limits))


def strip_steering(body: dict[str, Any]) -> list[str]:
    """Drop the fields that would steer the engine, also inside `vllm_xargs`; returns their names."""
    stripped = [key for key in STEERING_KEYS if body.pop(key, None) is not None]
    extra = body.get("vllm_xargs")
    if isinstance(extra, dict):
        stripped += [key for key in STEERING_KEYS if extra.pop(key, None) is not None]
    return stripped


def refuse_remote_media(body: dict[str, Any]) -> None:
    """Let media in as `data:` URLs only: this process fetches nothing a client names.

    Raises:
        InvalidRequest: a media part names any other URL.
    """
    open_values: list[object] = [body]
    while open_values:
        value = open_values.pop()
        if isinstance(value, list):
            open_values += [item for item in value if isinstance(item, dict | list)]
        elif isinstance(value, dict):
            for key in MEDIA_KEYS:
                _refuse_remote(key, value.get(key))
            free = FREE_JSON | ({"input"} if value.get("type") == "tool_use" else set())
            open_values += [item for key, item in value.items() if key not in free]


def _refuse_remote(key: str, media: object) -> None:
    url = media.get("url") if isinstance(media, dict) else media if key != "source" else None
    if isinstance(url, str) and url.lstrip()[:5].lower() != "data:":
        raise InvalidRequest(
            f"'{key}': media are taken as data: URLs only; no address is fetched.", param=key
        )
