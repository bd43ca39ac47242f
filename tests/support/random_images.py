"""Small pictures made up for tests, as files and as parts of messages."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from PIL import Image

from baton.images.image import ClientImage


def picture(number: int, width: int = 8, height: int = 8) -> ClientImage:
    """A picture of noise, another one for each number."""
    pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return ClientImage(stream.getvalue(), "image/png", width, height)


def part(given: ClientImage) -> dict[str, Any]:
    """A picture as clients send it."""
    url = f"data:image/png;base64,{base64.b64encode(given.data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*parts: dict[str, Any] | str) -> dict[str, Any]:
    """What a person says, of texts and pictures."""
    return {"role": "user", "content": [text(each) if isinstance(each, str) else each for each in parts]}
