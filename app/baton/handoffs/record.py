"""What is known of one handoff."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import sys
from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator, PrivateAttr

from baton.engines.port import PlacedImage
from baton.handoffs.public import HandoffObject
from baton.handoffs.state import HandoffState


def _token_ids(value: Any) -> array[int]:
    if isinstance(value, array):
        return value
    try:
        return array("i", value)
    except (TypeError, OverflowError):  # of a damaged record, or another version's
        raise ValueError("token ids are a list of 32-bit integers") from None


if TYPE_CHECKING:
    Ids = array[int]
else:
    Ids = array  # of Python 3.11 takes no parameter
TokenIds = Annotated[Ids, PlainValidator(_token_ids), PlainSerializer(list)]
"""Four bytes a token: a gateway remembers many long contexts."""


Bytes = bytes
"""A record has a field of that name."""
Size = int


MAX_CONVERSATION_BYTES = 2 * 1024 * 1024
"""Of a conversation as UTF-8 JSON; a handoff with more is gone on from as plain text only."""


class Holding(NamedTuple):
    """What a handoff holds of the store.

    Attributes:
        tenant: whose it is.
        pin: its KV stays when others' goes for the budget.
        bytes: of its KV, its images and its record.
        beside: of these, bytes of its images and its record.
    """

    tenant: str
    pin: bool
    bytes: int
    beside: int = 0


class Conversation(BaseModel):
    """The messages that a handoff's token ids are, so that a chat can go on from them.

    Attributes:
        messages: as the requests sent them, the assistant's answers between them.
        template: the requests' fields that decide how the model's template writes them.
        answer_from: index of the first token of the assistant's last answer, which is not among the
            messages yet; None: the last message is over.
        ended: the last answer's last token is one that ends answers.
        told: fingerprints of the assistant's answers as their clients were given them, by their index among
            the messages; that of the last answer is the number of messages.
        weight: bytes of the messages and the template's fields as JSON.
        torn: text follows that is no message, or the messages were too large to keep: none can follow.
    """

    model_config = ConfigDict(extra="ignore")  # another version's record may know more

    messages: list[dict[str, Any]]
    template: dict[str, Any] = {}
    answer_from: int | None = None
    ended: bool = False
    told: dict[int, str] = {}
    torn: bool = False
    weight: int = 0


class StoredImage(BaseModel):
    """One image of a handoff's context; see `baton.engines.port.PlacedImage`.

    Attributes:
        digest: SHA-256 of its bytes, which lie in a file of their own.
        media_type: of the file.
        width: pixels.
        height: pixels.
        bytes: size of the file.
        offset: index of the first of the tokens that stand for it.
        length: how many there are.
        target: the tokens that the template had in their place.
    """

    model_config = ConfigDict(extra="ignore")  # as above

    digest: str = Field(pattern=r"^[0-9a-f]{64}$")  # it names a file
    media_type: str
    width: int
    height: int
    bytes: int
    offset: int
    length: int
    target: list[int]


class HandoffRecord(BaseModel):
    """One handoff: its token ids are the truth, its KV may or may not still be there.

    Attributes:
        id: what clients call it; 192 random bits, no meaning.
        tenant: whose it is.
        model: the engine that left it behind.
        weights: that engine's; engines of the same weights understand it.
        tokens: every token id of its context, in order.
        images: the images that they stand for, in order.
        conversation: what they are as messages; None: they were never a chat.
        latent_steps: how many of its tokens stand for latent steps.
        placeholder: the token id that does; None where there are none.
        state: pending until the request that leaves it behind is over.
        bytes: size of its entry; 0: there is none, and who starts from it prefills.
        created_at: seconds since the epoch.
        ttl_s: seconds it lives.
        expires_at: seconds since the epoch.
        pin: its KV stays when others' goes for the budget.
        parent: the handoff it started from.
        label: the client's own words.
        revision: how often it was written; of two versions the one with more is the later.
    """

    model_config = ConfigDict(extra="ignore")  # as above

    id: str = Field(default_factory=lambda: secrets.token_urlsafe(24))
    tenant: str
    model: str
    weights: str
    tokens: TokenIds = Field(default_factory=lambda: array("i"))
    images: list[StoredImage] = []
    conversation: Conversation | None = None
    latent_steps: int = 0
    placeholder: int | None = None
    state: HandoffState = HandoffState.PENDING
    bytes: int = 0
    created_at: float
    ttl_s: float
    expires_at: float
    pin: bool = False
    parent: str | None = None
    label: str | None = None
    revision: int = 0
    _kept: bool = PrivateAttr(False)
    _stamp: tuple[int, int, int] | None = PrivateAttr(None)
    _disk_bytes: Size = PrivateAttr(0)
    _said_bytes: Size = PrivateAttr(0)
    _guard: asyncio.Lock = PrivateAttr(default_factory=asyncio.Lock)
    _image_data: dict[str, Bytes] = PrivateAttr(default_factory=dict)

    def steps_within(self, count: int) -> int:
        """How many of its first so many tokens stand for latent steps."""
        return self.tokens[:count].count(self.placeholder) if self.placeholder is not None else 0

    @property
    def kept(self) -> bool:
        """Whether it lies on disk, where other gateways see it."""
        return self._kept

    @kept.setter
    def kept(self, kept: bool) -> None:
        self._kept = kept

    @property
    def image_data(self) -> dict[str, Bytes]:
        """The bytes of its images by digest, until they lie on disk."""
        return self._image_data

    @property
    def image_bytes(self) -> int:
        """Bytes its images take on disk, each once."""
        return sum({image.digest: image.bytes for image in self.images}.values())

    @property
    def stamp(self) -> tuple[int, int, int] | None:
        """What tells the file it was read from or written to from a later one; None: there is none."""
        return self._stamp

    @stamp.setter
    def stamp(self, stamp: tuple[int, int, int]) -> None:
        self._stamp = stamp

    @property
    def disk_bytes(self) -> int:
        """Size of its file; of one that is not kept yet, what it will be."""
        return self._disk_bytes

    @disk_bytes.setter
    def disk_bytes(self, size: int) -> None:
        self._disk_bytes = size

    @property
    def guard(self) -> asyncio.Lock:
        """Held in this process by who changes it."""
        return self._guard

    @property
    def holding(self) -> Holding:
        """What it holds of the store."""
        beside = self.image_bytes + self._disk_bytes
        return Holding(self.tenant, self.pin, self.bytes + beside, beside)

    @property
    def weight(self) -> int:
        """Bytes it takes in memory, about."""
        said = self.conversation.weight if self.conversation else 0
        return (
            1024
            + 4 * len(self.tokens)
            + max(said, self._said_bytes)
            + sum(map(len, self._image_data.values()))
        )

    def measure(self) -> None:
        """Count what its messages take in memory."""
        if self.conversation is not None:
            self._said_bytes = _memory_of([self.conversation.messages, self.conversation.template])

    def prepare(self) -> None:
        """Count what it will take on disk; of messages that take too much only their being is kept."""
        if self.conversation is not None:
            try:
                written = len(self.conversation.model_dump_json().encode())
            except ValueError:  # half of a surrogate pair is no text
                written = MAX_CONVERSATION_BYTES + 1
            if written > MAX_CONVERSATION_BYTES:
                self.conversation = Conversation(messages=[], torn=True)
        self.measure()
        self._disk_bytes = len(self.model_dump_json().encode())

    def show(self, images: Iterable[PlacedImage]) -> None:
        """Take in the images of its context."""
        for image in images:
            client_image = image.image
            self._image_data[image.digest] = client_image.data
            self.images.append(
                StoredImage(
                    digest=image.digest,
                    media_type=client_image.media_type,
                    width=client_image.width,
                    height=client_image.height,
                    bytes=len(client_image.data),
                    offset=image.offset,
                    length=image.length,
                    target=list(image.target),
                )
            )

    @property
    def key(self) -> str:
        """The key of its entry."""
        return f"{scope_of(self.tenant)}/{self.id}"

    def public(self) -> dict[str, object]:
        """Return what its owner is shown."""
        shown = HandoffObject(
            id=self.id,
            state=self.state,
            model=self.model,
            tokens=len(self.tokens),
            images=len(self.images),
            latent_steps=self.latent_steps,
            bytes=self.bytes,
            pin=self.pin,
            created_at=int(self.created_at),
            expires_at=int(self.expires_at),
            parent=self.parent,
            label=self.label,
        )
        return shown.model_dump(mode="json")


def _memory_of(value: object) -> int:
    """Bytes a JSON value takes in memory, with the values in it."""
    total, waiting = 0, [value]
    while waiting:
        current = waiting.pop()
        total += sys.getsizeof(current)
        if isinstance(current, dict):
            waiting += [*current.keys(), *current.values()]
        elif isinstance(current, list):
            waiting += current
    return total


def scope_of(tenant: str) -> str:
    """A tenant's part of a store's keys."""
    return hashlib.sha256(tenant.encode()).hexdigest()[:SCOPE_LENGTH]


def is_ours(key: str) -> bool:
    """Whether a store's key is of a handoff, not of an engine that somebody runs without a gateway."""
    return len(key.partition("/")[0]) == SCOPE_LENGTH


SCOPE_LENGTH = 32
