"""An image in a prompt of token ids: which image, and which tokens stand for it."""

from __future__ import annotations

from dataclasses import dataclass

from baton.images.client_image import ClientImage


@dataclass(frozen=True)
class PlacedImage:
    """An image, and the placeholder tokens that stand for it in a prompt.

    Attributes:
        image: the image.
        digest: its SHA-256 in hex, by which engines identify it.
        offset: index of its first placeholder token in the prompt.
        length: number of its placeholder tokens.
        target: the tokens that the placeholders replaced; empty where the model inserts images by itself.
    """

    image: ClientImage
    digest: str
    offset: int
    length: int
    target: tuple[int, ...]
