"""Describe the handoffs that are joined, and the context that they make."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import InvalidRequest
from baton.handoffs.records.record import Conversation, HandoffRecord
from baton.handoffs.source import Translated
from baton.images.placed_image import PlacedImage


@dataclass(frozen=True)
class Part:
    """One of the handoffs that are joined.

    Attributes:
        record: the handoff.
        where: the field that names it.
        images: the images of its context, in order.
        translated: how it came from a handoff of other weights; None: it is of the engine's.
    """

    record: HandoffRecord
    where: str
    images: Sequence[PlacedImage] = ()
    translated: Translated | None = None

    @property
    def named(self) -> str:
        """The id that the client named it by."""
        return self.record.id if self.translated is None else self.translated.source.id

    @property
    def must_be_first(self) -> bool:
        """Whether it can be joined as the first part alone: what it begins with can be nowhere else."""
        conversation = self.record.conversation
        after_text = conversation is not None and conversation.after_text
        return self.record.latent_steps > 0 or after_text or self.begins_with_images

    @property
    def begins_with_images(self) -> bool:
        """Whether its model takes its images at the beginning of a context alone."""
        return any(not image.target for image in self.record.images)

    @property
    def is_chat(self) -> bool:
        """Whether it is a chat whose messages are known."""
        conversation = self.record.conversation
        return conversation is not None and not conversation.text_only

    @property
    def past(self) -> Conversation:
        """The conversation of a part that is a chat."""
        assert self.record.conversation is not None
        return self.record.conversation


@dataclass(frozen=True)
class JoinedContext:
    """Several contexts as one.

    Attributes:
        tokens: every token id.
        images: the images that the tokens stand for, in order.
        conversation: its messages; None: it is no chat.
        ends: for each part the number of tokens up to its end.
    """

    tokens: list[int]
    images: list[PlacedImage]
    conversation: Conversation | None
    ends: list[int]

    def as_record(self, first: HandoffRecord) -> HandoffRecord:
        """Return the context as a record, which was never saved.

        Args:
            first: the first of its parts.
        """
        changed = {"tokens": array("i", self.tokens), "conversation": self.conversation}
        return first.model_copy(update=changed)

    def part_at(self, parts: Sequence[Part], place: int) -> Part:
        """Return the part that a token belongs to.

        Args:
            parts: the handoffs that were joined.
            place: index of the token.
        """
        return next(part for part, end in zip(parts, self.ends, strict=True) if place < end)


def refused(part: Part, why: str) -> InvalidRequest:
    """Return the error that refuses to join a part."""
    return InvalidRequest(f"{part.where}: the handoff cannot be joined: {why}.", param=part.where)
