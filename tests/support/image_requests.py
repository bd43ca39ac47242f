"""Requests with an image in the forms of every API, and what becomes of them at a gateway with a fake engine."""

from __future__ import annotations

import base64
from typing import Any

from httpx import Response

from baton.engines.backend import ImageInput
from support import image_files
from support.gateways import FakeGateway

PNG = image_files.file_of(image_files.image())
URL = image_files.url_of(PNG)
LOOKS = ImageInput(limit=3, tokens=frozenset({9}), texts=("<image>", "[IMG]"))


def chat(*parts: Any, model: str = "look", **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": [*parts]}], "max_tokens": 2} | fields


def block(data: bytes = PNG, **source: Any) -> dict[str, Any]:
    """As Anthropic's clients send an image."""
    told = {"type": "base64", "media_type": "image/jpeg", "data": base64.b64encode(data).decode()}
    return {"type": "image", "source": told | source}


def post(gateway: FakeGateway, body: dict[str, Any], path: str = "/v1/chat/completions") -> Response:
    with gateway.client() as client:
        return client.post(path, json=body)


def refused(gateway: FakeGateway, body: dict[str, Any], path: str = "/v1/chat/completions") -> dict[str, Any]:
    """The error; no engine may have seen the request."""
    response = post(gateway, body, path)
    assert response.status_code == 400, response.text
    assert all(gateway.engine(name).bodies == [] for name in ("look", "text"))
    error: dict[str, Any] = response.json()["error"]
    return error


def seen(gateway: FakeGateway) -> dict[str, Any]:
    return gateway.engine("look").bodies[-1]
