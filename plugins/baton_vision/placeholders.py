"""Token ids that stand for images: how many there are, and prompts in which they are written out already.

A prompt comes in one of two forms: as a user writes it (LLaVA: a token an image; Fuyu: none), or *expanded*,
as the model sees it and as vLLM's answers and handoffs have it, with a token for every embedding of an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby


def collapse_runs(prompt: Sequence[int], token: int, length: int) -> list[int]:
    """An expanded prompt as it was before: `length` image tokens in a row become one, what is over stays.

    So a prompt may be expanded in part: a context that was handed over, and behind it what is new.
    """
    bare: list[int] = []
    for found, run in groupby(prompt):
        count = len(list(run))
        bare.extend([found] * (sum(divmod(count, length)) if found == token else count))
    return bare


def drop_leading_grid(prompt: Sequence[int], token: int, newline: int, end: int) -> list[int]:
    """An expanded prompt without the image it begins with: rows of `token` and `newline`, then `end`.

    Raises:
        ValueError: image tokens are elsewhere, or nothing ends them.
    """
    length = next((at for at, found in enumerate(prompt) if found not in (token, newline)), len(prompt))
    bare = list(prompt[length + 1 :])
    if length == 0 or list(prompt[length : length + 1]) != [end] or token in bare:
        raise ValueError("image tokens may only stand at the beginning of a prompt, where its image is")
    return bare
