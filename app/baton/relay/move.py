"""Choose what KV of joined handoffs is moved to its place in the joined context, instead of computed there.

Moved KV is not what the engine would compute: its tokens have not attended to the parts before their own. The
first tokens of each part are computed again, because all others attend to them most. What both mean for
answers is in docs/results/joins.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy

from baton.engines.backend import Json, Operation
from baton.engines.engine import LocalEngine
from baton.errors import InvalidRequest, OperationUnsupported
from baton.library.handoff import Handoff
from baton.relay.asked import WRITTEN_BY_THE_ENGINE
from baton.relay.join import Part
from baton_kv.contract import MovedPart

HEAD_TOKENS = 16
"""Tokens at the beginning of a part that are computed: of one that shares at least as many before them."""
LONE_HEAD_TOKENS = 96
"""The same of a part that shares fewer: its first tokens were attended to in place of a shared beginning."""


def require_movable(engine: LocalEngine, field: str) -> None:
    """Refuse an engine that cannot move KV.

    Args:
        field: the field of the request that asks for it.

    Raises:
        OperationUnsupported: it cannot; the message says why.
    """
    if engine.moves_unsupported is not None:
        raise OperationUnsupported(
            f"The engine '{engine.name}' cannot join handoffs by moving their KV: "
            f'{engine.moves_unsupported}. Use "exact".',
            param=field,
        )


def require_usable_with_moves(operation: Operation, body: Json, steps: int) -> None:
    """Refuse a request that cannot be used with KV that was or will be moved.

    Args:
        steps: number of latent steps that it asks for.

    Raises:
        InvalidRequest: it cannot; the message says why.
    """
    if body.get("prompt_logprobs") is not None:
        raise InvalidRequest(
            "'prompt_logprobs' cannot be used with KV that was moved: leave it out.", param="prompt_logprobs"
        )
    if steps:
        raise InvalidRequest(
            "'latent_steps' cannot follow KV that was moved: no hidden states were moved with it.",
            param="latent_steps",
        )
    if operation in WRITTEN_BY_THE_ENGINE and body.get("stream"):
        raise InvalidRequest(
            "Streams of this route cannot tell that KV was moved: continue this handoff without 'stream', or "
            "by /v1/chat/completions.",
            param="stream",
        )


def moved_parts(tokens: Sequence[int], parts: Sequence[Part], ends: Sequence[int]) -> list[MovedPart | None]:
    """Return for each part what is moved of it; None: it is loaded where it was, or computed.

    Args:
        tokens: token ids of the whole prompt.
        parts: the handoffs, the first of which is loaded where it was.
        ends: for each of them the number of the prompt's tokens up to its end.
    """
    found: list[MovedPart | None] = [None]
    for part, begin, end in zip(parts[1:], ends, ends[1:], strict=False):
        found.append(_moved(tokens, part.record, begin, end))
    return found


def _moved(tokens: Sequence[int], record: Handoff, begin: int, end: int) -> MovedPart | None:
    """Describe the KV of a part that is moved: its context's end, `begin` to `end` in the prompt."""
    # The last token of a context with an answer has no KV: it was sampled, and not computed yet.
    count = _common_suffix(record.tokens, tokens[begin:end]) - 1
    start, end = len(record.tokens) - 1 - count, end - 1
    skipped = _head(record, start)
    if not record.bytes or count <= skipped:
        return None
    return MovedPart(key=record.key, start=start + skipped, tokens=count - skipped, to=end - count + skipped)


def _head(record: Handoff, start: int) -> int:
    """Return how many tokens from `start` on are computed: up to the first image, of which all are moved."""
    images = (image.offset - start for image in record.image_positions if image.offset >= start)
    return min([HEAD_TOKENS if start >= HEAD_TOKENS else LONE_HEAD_TOKENS, *images])


def _common_suffix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of token ids that two contexts end with both."""
    length = min(len(one), len(other))
    if not length:
        return 0
    ours, theirs = numpy.asarray(one[-length:]), numpy.asarray(other[-length:])
    different = numpy.flatnonzero(ours != theirs)
    return length - 1 - int(different[-1]) if len(different) else length
