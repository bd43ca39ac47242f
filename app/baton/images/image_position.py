"""Place images in a prompt of token ids, so that prompts with other images differ."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ImagePosition:
    """Where an image stands in a prompt.

    Attributes:
        identifier: the engine's name for the image, which no other image has.
        offset: index of its first placeholder token.
        length: number of its placeholder tokens.
    """

    identifier: str
    offset: int
    length: int


def with_distinct_images(tokens: Sequence[int], images: Sequence[ImagePosition]) -> Sequence[int]:
    """Return token ids with the placeholders of each image replaced by numbers of its own.

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
