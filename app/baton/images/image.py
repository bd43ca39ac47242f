"""An image of a client, its place in a prompt of token ids, and prompts that tell images apart."""

from __future__ import annotations

import base64
import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from baton_kv.format import ImageRef


@dataclass(frozen=True)
class ClientImage:
    """One image of a client, decoded, checked and upright.

    Attributes:
        data: the file's bytes, as the engine gets them.
        media_type: `image/png`, `image/jpeg`, `image/webp` or `image/gif`.
        width: pixels.
        height: pixels.
        digest: SHA-256 of `data` in hexadecimal, which names it in caches, stores and handoffs. Computed
            where it is not known: a tenth of a second for 128 MiB, so not on the event loop.
    """

    data: bytes
    media_type: str
    width: int
    height: int
    digest: str = ""

    def __post_init__(self) -> None:
        if not self.digest:
            object.__setattr__(self, "digest", hashlib.sha256(self.data).hexdigest())

    @property
    def base64(self) -> str:
        """The file in base64."""
        return base64.b64encode(self.data).decode("ascii")

    @property
    def url(self) -> str:
        """The file as a `data:` URL."""
        return f"data:{self.media_type};base64,{self.base64}"


@dataclass(frozen=True)
class PlacedImage:
    """An image, and the placeholder tokens that stand for it in a prompt.

    Attributes:
        offset: index of its first placeholder token in the prompt.
        length: number of its placeholder tokens.
        target: the tokens that the placeholders replaced; empty where the model inserts images by itself.
    """

    image: ClientImage
    offset: int
    length: int
    target: tuple[int, ...]

    @property
    def ref(self) -> ImageRef:
        """Its name and place, without its pixels."""
        return ImageRef(self.image.digest, self.offset, self.length)


def with_distinct_images(tokens: Sequence[int], images: Sequence[ImageRef]) -> Sequence[int]:
    """Replace the placeholders of each image by numbers of its own.

    All images have the same placeholders, so token ids alone do not tell two prompts apart. The numbers are
    the output of SHAKE128 (FIPS 202) for the image's identifier, 32 bits a placeholder.

    Raises:
        OverflowError: a token id does not fit into 32 bits.
    """
    if not images:
        return tokens
    distinct = array("i", tokens)
    for image in images:
        end = min(image.offset + image.length, len(distinct))
        size = distinct.itemsize * max(0, end - image.offset)
        distinct[image.offset : end] = array("i", hashlib.shake_128(image.identifier.encode()).digest(size))
    return distinct
