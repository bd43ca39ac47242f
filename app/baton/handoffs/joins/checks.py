"""Refuse handoffs that cannot be joined, or that make more than their model takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton.engines.port import Engine
from baton.errors import ContextTooLong, InvalidRequest
from baton.handoffs.joins.parts import JoinedContext, Part, refused
from baton.handoffs.records.prefix_index import shared_tokens


def require_joinable(engine: Engine, parts: Sequence[Part], continued: Mapping[str, str]) -> None:
    """Refuse handoffs that cannot be joined, before anything of them is read.

    Args:
        engine: the engine that will compute the context.
        parts: at least two handoffs that the engine can continue, in the order in which they are joined.
        continued: from `continued_parts`; of these nothing is written.

    Raises:
        InvalidRequest: of one of them; `param` names it.
        ContextTooLong: all of them together are longer than the model's context.
    """
    first = parts[0]
    if first.where in continued:
        raise refused(first, f"'{continued[first.where]}' continues it: name that one first, or alone")
    written = [part for part in parts if part.where not in continued]
    for part in written[1:]:
        if part.record.latent_steps:
            raise refused(
                part, "it holds latent steps, which were computed behind its own context: put it first"
            )
        if (part.record.conversation is None) is not (first.record.conversation is None):
            raise refused(part, f"of it and '{first.where}' one is a chat and one a plain text")
        if part.begins_with_images:
            raise refused(part, "its model takes images only at the beginning of a context")
    for part in written if first.record.conversation is not None else ():
        if part.past.text_only:
            raise refused(part, "it is no chat that messages can follow")
        if part.past.after_text and part is not first:
            raise refused(part, "a text stands before its messages: put it first")
    _require_short(engine, written)


def _require_short(engine: Engine, parts: Sequence[Part]) -> None:
    """Refuse what is too much whatever the parts share: these are the least that the joined context holds."""
    images, tokens, first = set[str](), 0, parts[0].record.distinct_tokens
    for part in parts:
        images |= {image.digest for image in part.record.images}
        if len(images) > engine.images.limit:
            raise _too_many_images(engine, len(images), part)
        own = part.record.distinct_tokens
        tokens += len(own) - (shared_tokens(first, own) if part is not parts[0] else 0)
        if max(tokens, len(own)) >= _context_tokens(engine):
            raise _too_long(engine, part)


def require_fit(engine: Engine, parts: Sequence[Part], joined: JoinedContext) -> None:
    """Refuse a joined context that is more than its model takes.

    Args:
        engine: the engine that will compute it.
        parts: the handoffs, in the order in which they were joined.
        joined: the context.

    Raises:
        InvalidRequest: it holds too many images; `param` names the part that brings the first one too many.
        ContextTooLong: it is too long; `param` names the part that passes the end.
    """
    if len(joined.images) > (most := engine.images.limit):
        raise _too_many_images(engine, len(joined.images), joined.part_at(parts, joined.images[most].offset))
    if len(joined.tokens) >= _context_tokens(engine):  # a token of an answer must fit too
        raise _too_long(engine, joined.part_at(parts, _context_tokens(engine) - 1))


def _context_tokens(engine: Engine) -> int:
    return int(engine.cards()[0]["max_model_len"])


def _too_long(engine: Engine, part: Part) -> ContextTooLong:
    return ContextTooLong(
        f"{part.where}: the joined contexts fill this model's context of {_context_tokens(engine)} tokens; "
        "join fewer.",
        param=part.where,
    )


def _too_many_images(engine: Engine, images: int, part: Part) -> InvalidRequest:
    return InvalidRequest(
        f"{part.where}: the joined contexts hold at least {images} images; the model '{engine.name}' takes "
        f"at most {engine.images.limit}.",
        param=part.where,
    )
