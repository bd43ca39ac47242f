"""Find how much of an entry a prompt can use: the longest prefix with equal token ids and equal images."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import numpy

from baton_kv.entry_format import ImageRef, Tokens


def common_prefix(tokens: Tokens, prompt: Sequence[int]) -> int:
    """Return the length of the longest common prefix of two sequences of token ids.

    Args:
        tokens: an entry's token ids, int32 (tokens,).
        prompt: the prompt's token ids.
    """
    length = min(len(tokens), len(prompt))
    different = numpy.flatnonzero(tokens[:length] != numpy.asarray(prompt[:length], dtype=numpy.int64))
    return int(different[0]) if len(different) else length


def trim_to_equal_images(ours: Sequence[ImageRef], theirs: Sequence[ImageRef], shared: int) -> int:
    """Shorten a common prefix of token ids so that it also contains the same images.

    Args:
        ours: the images of one context, in order.
        theirs: the images of the other context, in order.
        shared: length of the common prefix of their token ids.

    Returns:
        `shared`, or the offset of the first image that differs before it. The prefix never ends within an
        image, of which a model must see either all tokens or none.
    """
    for mine, other in zip_longest(ours, theirs):
        if mine is None or other is None or mine != other:
            return min([shared, *(image.offset for image in (mine, other) if image is not None)])
        if mine.offset < shared < mine.end:
            return mine.offset
    return shared
