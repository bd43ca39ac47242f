"""Images in a chat's messages, as names: what a conversation remembers of them, and its template needs."""

from __future__ import annotations

from dataclasses import replace

from baton.engines.port import Json, PlacedImage


def named(messages: list[Json]) -> list[Json]:
    """Messages whose images are names only: the engine's template writes them like those with pixels."""
    return [
        message | {"content": [_named(part) for part in content]}
        if isinstance(content := message.get("content"), list)
        else message
        for message in messages
    ]


def count_images(messages: list[Json]) -> int:
    """How many images messages hold."""
    parts = (part for message in messages for part in _parts(message))
    return sum(isinstance(part, dict) and part.get("type") == "image_url" for part in parts)


def moved(images: list[PlacedImage], by: int) -> list[PlacedImage]:
    """Images of a prompt that so many tokens have come before."""
    return [replace(image, offset=image.offset + by) for image in images]


def _named(part: object) -> object:
    if not isinstance(part, dict) or part.get("type") != "image_url":
        return part
    return {"type": "image_url", "image_url": None, "uuid": part["uuid"]}


def _parts(message: Json) -> list[object]:
    content = message.get("content")
    return content if isinstance(content, list) else []
