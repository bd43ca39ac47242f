"""Chats with images for the model `look` of a real gateway, and what it answers."""

from __future__ import annotations

import re
from typing import Any

import httpx

from support import image_files
from support.gateways import RealGateway


def file(seed: int) -> bytes:
    """Draw a picture like no other: bands of colours in an order of their own."""
    made = image_files.image(32, 32)
    for row in range(32):
        made.paste(tuple((seed * 37 + row * step) % 256 for step in (7, 31, 101)), (0, row, 32, row + 1))
    return image_files.file_of(made)


def image(seed: int) -> dict[str, Any]:
    return image_files.part_of(file(seed))


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def body_of(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    told = {"model": "look", "messages": [{"role": "user", "content": [*parts]}], "max_tokens": 6}
    return told | {"temperature": 0, "logprobs": True} | fields


def ask(gateway: RealGateway, *parts: dict[str, Any], **fields: Any) -> httpx.Response:
    with gateway.client() as client:
        return client.post("/v1/chat/completions", json=body_of(*parts, **fields))


def said(answer: httpx.Response) -> list[float]:
    """Return an answer's log probabilities; random weights give bytes that are no text."""
    assert answer.status_code == 200, answer.text
    return [token["logprob"] for token in answer.json()["choices"][0]["logprobs"]["content"]]


def refused(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def metric(gateway: RealGateway, name: str) -> float:
    """Sum what the engine `look` counts under a name."""
    with gateway.client() as client:
        page = client.get("/metrics").text
    found = re.findall(rf'^{re.escape(name)}{{[^}}]*"look"[^}}]*}} (\S+)$', page, re.MULTILINE)
    return sum(map(float, found))


def filler(gateway: RealGateway, tokens: int) -> dict[str, Any]:
    """Return a text that makes a chat of so many tokens, without images."""
    with gateway.client() as client:
        for words in range(tokens):
            part = text("z" * words)
            if client.post("/tokenize", json=body_of(part)).json()["count"] >= tokens:
                return part
    raise AssertionError("no text is so long")
