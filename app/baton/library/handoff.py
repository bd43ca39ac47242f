"""The record of one handoff: its token ids, images, conversation and state, as written to disk."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import sys
from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator, PrivateAttr

from baton.images.image import PlacedImage, with_distinct_images
from baton.telemetry.metrics import AuditResult
from baton_kv.contract import EXPENDABLE
from baton_kv.format import ImageRef

if TYPE_CHECKING:
    Ids = array[int]
else:
    Ids = array  # of Python 3.11 takes no parameter


class HandoffState(StrEnum):
    """A state: `pending -> ready` or `pending -> failed`. An expired or deleted handoff has no state."""

    PENDING = "pending"
    READY = "ready"
    FAILED = "failed"


# The handoff object as clients see it. The OpenAPI document and the docs are made from these models.


class HandoffAudit(BaseModel):
    """The last audit of a handoff: an answer from its KV, computed again without it."""

    model_config = ConfigDict(title="BatonHandoffAudit", json_schema_serialization_defaults_required=True)

    result: AuditResult = Field(
        description="`match`, or `mismatch`: then its KV is in quarantine, and is recomputed."
    )
    difference: float = Field(
        description="Largest difference between the log probabilities of the answer's first token, in nats."
    )
    same_token: bool = Field(description="Whether the likeliest first token was the same.")
    at: int = Field(description="When it was audited, in seconds since the epoch.")


class HandoffObject(BaseModel):
    """A handoff. Its token ids are not shown, because they can be long."""

    model_config = ConfigDict(title="BatonHandoffObject", json_schema_serialization_defaults_required=True)

    id: str = Field(description="Identifies the handoff in `handoff.from` and in the path of its routes.")
    object: Literal["handoff"] = Field("handoff", description="The kind of object.")
    state: HandoffState = Field(description="`pending` until the request that saves it has ended.")
    model: str = Field(description="Name of the engine that saved it.")
    tokens: int = Field(description="Number of tokens in its context.")
    images: int = Field(description="Number of images in its context.")
    latent_steps: int = Field(description="Number of those tokens that stand for latent steps.")
    bytes: int = Field(
        description="Size of its KV in the store, with what it shares with other handoffs; 0: its KV is not "
        "stored, and is recomputed."
    )
    pin: bool = Field(description="Whether its KV is exempt from eviction.")
    created_at: int = Field(description="When it was created, in seconds since the epoch.")
    expires_at: int = Field(description="When it expires, in seconds since the epoch.")
    parent: str | None = Field(
        description="Id of the handoff that it continues, or of the first of those that were joined."
    )
    parents: list[str] = Field(description="Ids of all handoffs that it continues.")
    label: str | None = Field(description="The label that the client gave it.")
    exact: bool = Field(
        description="Whether its KV is what the engine would compute of its tokens; `false` if any of it was "
        "moved to its place, or loaded from a handoff that is not exact."
    )
    translated_from: str | None = Field(
        description="Id of the handoff of another model whose text it holds; `null`: it is no translation."
    )
    archived: bool = Field(
        description="Whether it is in the archive, and so outlives this machine. What is pinned or lives "
        "long is, some moments after it was saved; without an archive always `false`."
    )
    error: str | None = Field(description="Why it is `failed`, if it was joined ahead; else `null`.")
    audit: HandoffAudit | None = Field(
        None, description="Its last audit; `null`: none of the requests that loaded its KV was audited."
    )


Place = Literal["here", "shared", "archive"]
"""Where KV lies: in this machine's store, in the store that machines share, in the archive."""


class HandoffRow(HandoffObject):
    """A handoff as its own routes show it: with where its KV lies, and how it was used."""

    model_config = ConfigDict(title="BatonHandoffRow", json_schema_serialization_defaults_required=True)

    tier: Place | None = Field(
        description="The nearest place where its KV lies: `here` on this machine, in the `shared` store, in "
        "the `archive`; `null`: nowhere, it is recomputed."
    )
    uses: int = Field(description="Requests that started from it, at this gateway since its start.")
    last_used_at: int | None = Field(description="When the last of them did, in seconds since the epoch.")
    last_outcome: str | None = Field(
        description="What became of its KV then, as `handoff.source.outcome` of an answer."
    )
    last_reason: str | None = Field(description="Why it was recomputed then; `null`: it was not.")


class HandoffMessages(BaseModel):
    """The messages or the text of a handoff's context."""

    model_config = ConfigDict(title="BatonHandoffMessages", json_schema_serialization_defaults_required=True)

    object: Literal["list"] = Field("list", description="The kind of object.")
    handoff: str = Field(description="Its id.")
    data: list[dict[str, Any]] = Field(
        description="The messages of a chat in OpenAI's shape, the last answer as the model wrote it; of "
        "images only their digests (`uuid`). Empty: it is no chat."
    )
    text: str | None = Field(
        description="The whole text of a context that is no chat, or that begins with other text; `null`: "
        "its messages are all, or see `why`."
    )
    complete: bool = Field(description="Whether this is all that the context says.")
    why: str | None = Field(description="What is missing and why, in a sentence; `null`: nothing.")


class WarmedHandoff(BaseModel):
    """The KV of handoffs that is in one engine's memory, verified."""

    model_config = ConfigDict(title="BatonWarmedHandoff", json_schema_serialization_defaults_required=True)

    engine: str = Field(description="Name of the engine.")
    bytes: int = Field(description="Bytes of the KV in its memory.")
    tokens: int = Field(description="Tokens, from the first, all of whose KV is there.")
    whole: bool = Field(description="Whether that is all of it.")
    reason: str | None = Field(
        description="Why it is not all there: `no_room` beside what others hold, `off` (setting "
        "`handoffs.resident` or `handoffs.verify`), `kv_gone`, `kv_corrupt`, `kv_incompatible`, "
        "`store_unreadable`, `busy` (with other KV: try again), `not_ready` (the engine), `unsupported` (it "
        "has a worker extension of its own)."
    )


class HintResult(BaseModel):
    """The outcome of one action of `kv_hints`."""

    model_config = ConfigDict(title="BatonHintResult", json_schema_serialization_defaults_required=True)

    action_id: str = Field(description="Its `action_id`.")
    status: Literal["done", "pending", "not_found", "unsupported"] = Field(
        description="`done` and `pending`: as `state` of the whole; `not_found`: there is no such context; "
        "`unsupported`: nothing was done."
    )
    reason: str | None = Field(description="Why it is unsupported, in a sentence.")


class HandoffWarm(BaseModel):
    """The KV that is in the engines' memory, or on its way there."""

    model_config = ConfigDict(title="BatonHandoffWarm", json_schema_serialization_defaults_required=True)

    object: Literal["handoff.warm"] = Field("handoff.warm", description="The kind of object.")
    id: str | None = Field(
        description="Id of the handoff; `null`: contexts were named by their key, or hints."
    )
    state: Literal["done", "pending"] = Field(
        description="`pending`: it goes on; ask again to be told how it ended."
    )
    contexts: int = Field(description="Number of contexts; 0: none is stored under this key.")
    data: list[WarmedHandoff] = Field(
        description="What is there, of all these contexts together, for each engine that would load them."
    )
    actions: list[HintResult] | None = Field(
        description="What became of each action of `kv_hints`; `null`: there were none."
    )


class HandoffList(BaseModel):
    """A page of a tenant's handoffs, the newest first."""

    model_config = ConfigDict(title="BatonHandoffList", json_schema_serialization_defaults_required=True)

    object: Literal["list"] = Field("list", description="The kind of object.")
    data: list[HandoffRow] = Field(description="The handoffs of this page.")
    has_more: bool = Field(
        description="Whether older ones follow; request them with `after` set to `last_id`."
    )
    first_id: str | None = Field(description="Id of the first handoff of the page.")
    last_id: str | None = Field(description="Id of the last handoff of the page.")


def _token_ids(value: Any) -> array[int]:
    if isinstance(value, array):
        return value
    try:
        return array("i", value)
    except (TypeError, OverflowError):  # a damaged record, or one of another version
        raise ValueError("token ids are a list of 32-bit integers") from None


TokenIds = Annotated[Ids, PlainValidator(_token_ids), PlainSerializer(list)]
"""Four bytes a token, because a gateway holds many long contexts in memory."""


Bytes = bytes
"""Names the type within `Handoff`, whose field `bytes` hides it."""
MAX_CONVERSATION_BYTES = 2 * 1024 * 1024
"""Largest conversation, as UTF-8 JSON; a handoff with a larger one can only be continued as plain text."""
SCOPE_LENGTH = 32
"""Characters of a tenant in the store's keys."""


def new_id(*, automatic: bool = False) -> str:
    """Return a new handoff's id: 192 random bits, which nobody can guess.

    Args:
        automatic: the gateway saves it by itself; its KV is evicted before that of others.
    """
    return (EXPENDABLE if automatic else "") + secrets.token_urlsafe(24)


PINNED_SHARE = 0.5
"""Share of the budget that may be pinned, divided among the tenants; the rest stays for unpinned handoffs."""


class Footprint(NamedTuple):
    """The share of the store's budget that a handoff takes beside its KV, which handoffs may share.

    Attributes:
        pin: its KV is exempt from eviction.
        non_kv_bytes: size of its images and record.
    """

    tenant: str
    pin: bool
    non_kv_bytes: int


class Conversation(BaseModel):
    """The messages that a handoff's token ids were written from, so that a chat can continue them.

    Attributes:
        messages: the messages of the requests, with the assistant's answers between them.
        template: fields of the requests that decide how the model's template writes the messages.
        answer_from: index of the first token of the assistant's last answer, which is not among the
            messages yet; None: the context ends with a message.
        ended: the last answer ends with the token that ended it, as in older records.
        answer_fingerprints: fingerprints of the assistant's answers as clients received them, by index among
            the messages; the last answer has the number of messages. Older records call it `told`.
        weight: bytes of the messages and the template's fields as JSON.
        after_text: text that is no message stands before the first message.
        text_only: no message can follow, because the context ends with plain text or its messages were too
            large to save. Older records call it `torn`.
    """

    model_config = ConfigDict(extra="ignore")  # a record of another version may have more fields

    messages: list[dict[str, Any]]
    template: dict[str, Any] = {}
    answer_from: int | None = None
    ended: bool = False
    # On disk these two have the names of the first version: gateways of several versions share a store.
    answer_fingerprints: dict[int, str] = Field(
        {}, validation_alias=AliasChoices("answer_fingerprints", "told"), serialization_alias="told"
    )
    text_only: bool = Field(
        False, validation_alias=AliasChoices("text_only", "torn"), serialization_alias="torn"
    )
    after_text: bool = False
    weight: int = 0


class StoredImage(BaseModel):
    """An image of a handoff's context, as its record describes it; see `PlacedImage`.

    Attributes:
        digest: SHA-256 of its bytes, which are in a file of their own.
        width: in pixels.
        height: in pixels.
        offset: index of the first of the tokens that stand for it.
        length: number of these tokens.
        target: the placeholder tokens that the template wrote in their place.
    """

    model_config = ConfigDict(extra="ignore")

    digest: str = Field(pattern=r"^[0-9a-f]{64}$")  # it is part of a file's name
    media_type: str
    width: int
    height: int
    bytes: int
    offset: int
    length: int
    target: list[int]

    @property
    def ref(self) -> ImageRef:
        """Its name and place."""
        return ImageRef(self.digest, self.offset, self.length)


class Lease(BaseModel):
    """The fields of a handoff that may change after it was saved, here or on another machine; no others may.

    A field that is added here is written, read and merged wherever handoffs are kept (`SAVERS` and `UNSAVED`
    name the few that are one machine's own). What never changes stands in `Handoff`, what is known only when
    the request has ended in `Context` too, what clients see in `HandoffObject`.

    Attributes:
        pin: its KV is exempt from eviction.
        ttl_s: lifetime in seconds.
        expires_at: seconds since the epoch.
        state: pending until the request that saves it has ended.
        error: why the request that was to save it failed; None: it did not, or nobody knows.
        bytes: size of its KV in the store, with what it shares with others; 0: its KV is not stored, and is
            prefilled.
        archived: it was written to the archive, which is the last to know whether it exists.
        revision: number of times it was written; the greater of two is the later.
    """

    label: str | None = None
    pin: bool = False
    ttl_s: float
    expires_at: float
    state: HandoffState = HandoffState.PENDING
    error: str | None = None
    bytes: int = 0
    audit: HandoffAudit | None = None
    archived: bool = False
    revision: int = 0

    def take(self, there: Lease, *, but: Collection[str] = ()) -> None:
        """Set all fields but some to what they are elsewhere."""
        for name in Lease.model_fields.keys() - but:
            setattr(self, name, getattr(there, name))


SAVERS = frozenset({"state", "error", "bytes"})
"""Fields of a lease that each machine knows by itself: how it saved the handoff, and what KV it has."""
UNSAVED = SAVERS | {"audit", "archived"}
"""Fields that only the gateway knows which saves the handoff, until it is saved."""


@dataclass
class Use:
    """Uses of a handoff at this gateway since its start; it is written nowhere.

    Attributes:
        count: number of requests that started from it.
        at: when the last of them did, in seconds since the epoch.
        outcome: what became of its KV then.
        reason: why it was recomputed then.
    """

    count: int = 0
    at: int | None = None
    outcome: str | None = None
    reason: str | None = None

    def note(self, at: int, outcome: str, reason: str | None) -> None:
        """Note a request that started from it."""
        self.count += 1
        self.at, self.outcome, self.reason = at, outcome, reason


class Context(NamedTuple):
    """The facts about a context beside its tokens, known when the request that saves it has ended.

    Attributes:
        conversation: the messages that the tokens were written from; None: it was never a chat.
        exact: its KV is what the engine would compute of its tokens; None: as was known at the beginning.
        positions: where images stand in a context that is stored without its images.
        latent_steps: number of its tokens that stand for latent steps.
        placeholder: token id of a latent step; None: it has none.
        cut_off: how often drains ended the answer that it ends with; 0: that is whole.
    """

    conversation: Conversation | None = None
    exact: bool | None = None
    positions: Sequence[ImageRef] = ()
    latent_steps: int = 0
    placeholder: int | None = None
    cut_off: int = 0


class Handoff(Lease):
    """One handoff: its lease, and what never changes. Its token ids define it; its KV may have been evicted.

    What is known only when the request has ended that saves it is set by `fill`, once.

    Attributes:
        id: its public name, 192 random bits.
        model: name of the engine that saved it.
        weights: fingerprint of that engine's weights; engines of the same weights can continue it.
        tokens: every token id of its context, in order.
        images: the images that the tokens stand for, in order.
        conversation: the messages that the tokens were written from; None: it was never a chat.
        latent_steps: number of its tokens that stand for latent steps.
        placeholder: token id of a latent step; None: it has none.
        created_at: seconds since the epoch.
        parent: id of the handoff that it continues, or of the first of those that were joined.
        parents: ids of all handoffs that it continues; records of older versions have `parent` alone.
        automatic: the gateway saved it by itself: it has no messages, and clients do not see it.
        positions: where images stand in a context that is stored without its images, because the handoff is
            automatic or the engine wrote the prompt: requests that continue it send them again.
        cache_key: digest of the `prompt_cache_key` of the request that it was saved for by itself, if any.
        translated_from: id of the handoff of other weights whose text it holds; None: it is no translation.
        exact: its KV is what the engine would compute of its tokens; not so if any was moved to its place.
        cut_off: how often drains ended the answer that it ends with; 0: that is whole.
    """

    model_config = ConfigDict(extra="ignore")

    id: str = Field(default_factory=new_id, frozen=True)
    tenant: str = Field(frozen=True)
    model: str = Field(frozen=True)
    weights: str = Field(frozen=True)
    tokens: TokenIds = Field(default_factory=lambda: array("i"), frozen=True)
    images: list[StoredImage] = Field([], frozen=True)
    conversation: Conversation | None = Field(None, frozen=True)
    latent_steps: int = Field(0, frozen=True)
    placeholder: int | None = Field(None, frozen=True)
    created_at: float = Field(frozen=True)
    parent: str | None = Field(None, frozen=True)
    parents: list[str] = Field([], frozen=True)
    automatic: bool = Field(False, frozen=True)
    positions: list[ImageRef] = Field([], frozen=True)
    exact: bool = Field(True, frozen=True)
    translated_from: str | None = Field(None, frozen=True)
    cache_key: str | None = Field(None, frozen=True)
    cut_off: int = Field(0, frozen=True)
    _on_disk: bool = PrivateAttr(False)
    _announced: bool = PrivateAttr(False)
    _stamp: tuple[int, int, int] | None = PrivateAttr(None)
    _disk_bytes: int = PrivateAttr(0)
    _conversation_bytes: int = PrivateAttr(0)
    _guard: asyncio.Lock = PrivateAttr(default_factory=asyncio.Lock)
    _distinct: Sequence[int] | None = PrivateAttr(None)
    _image_data: dict[str, Bytes] = PrivateAttr(default_factory=dict)
    _use: Use = PrivateAttr(default_factory=Use)

    def fill(self, tokens: Iterable[int], context: Context, images: Iterable[PlacedImage]) -> None:
        """Set what is known now that the request has ended which saves it, past the lock of its fields."""
        placed = list(images)
        self._image_data.update((each.image.digest, each.image.data) for each in placed)
        vars(self).update(
            tokens=array("i", tokens),
            images=[_stored(each) for each in placed],
            conversation=context.conversation,
            exact=self.exact if context.exact is None else context.exact,
            positions=list(context.positions),
            latent_steps=context.latent_steps,
            placeholder=context.placeholder,
            cut_off=context.cut_off,
        )

    def set_parents(self, parents: list[str]) -> None:
        """Set what it continues, in another order than it was begun with, before it is saved."""
        vars(self).update(parents=parents, parent=parents[0])

    def steps_within(self, count: int) -> int:
        """Return how many of its first `count` tokens stand for latent steps."""
        return self.tokens[:count].count(self.placeholder) if self.placeholder is not None else 0

    @property
    def image_positions(self) -> list[ImageRef]:
        """The places of its context's images, in order."""
        return self.positions or [each.ref for each in self.images]

    @property
    def distinct_tokens(self) -> Sequence[int]:
        """Its token ids, in which other images are other numbers; see `with_distinct_images`."""
        if self._distinct is None or len(self._distinct) != len(self.tokens):
            self._distinct = with_distinct_images(self.tokens, self.image_positions)
        return self._distinct

    @property
    def on_disk(self) -> bool:
        """True if it is saved on disk, where other gateways see it."""
        return self._on_disk

    @on_disk.setter
    def on_disk(self, on_disk: bool) -> None:
        self._on_disk = on_disk

    @property
    def announced(self) -> bool:
        """True if other machines know of it, so that it may only be written while it exists there."""
        return self._announced

    @announced.setter
    def announced(self, announced: bool) -> None:
        self._announced = announced

    @property
    def image_data(self) -> dict[str, Bytes]:
        """The bytes of its images by digest, until they are written to disk."""
        return self._image_data

    @property
    def image_bytes(self) -> int:
        """Bytes that its images take on disk, each counted once."""
        return sum({image.digest: image.bytes for image in self.images}.values())

    @property
    def use(self) -> Use:
        """Its uses at this gateway."""
        return self._use

    @property
    def stamp(self) -> tuple[int, int, int] | None:
        """Identifies the version of its file that was last read or written; None: it has no file."""
        return self._stamp

    @stamp.setter
    def stamp(self, stamp: tuple[int, int, int] | None) -> None:
        self._stamp = stamp

    @property
    def disk_bytes(self) -> int:
        """Size of its file, or the size that its file will have."""
        return self._disk_bytes

    @disk_bytes.setter
    def disk_bytes(self, size: int) -> None:
        self._disk_bytes = size

    @property
    def guard(self) -> asyncio.Lock:
        """The lock to hold while changing it in this process."""
        return self._guard

    @property
    def footprint(self) -> Footprint:
        """The share of the store's budget that it takes beside its KV."""
        return Footprint(self.tenant, self.pin, self.image_bytes + self._disk_bytes)

    @property
    def weight(self) -> int:
        """Bytes that it takes in memory, about."""
        messages = self.conversation.weight if self.conversation else 0
        return (
            1024
            + 4 * len(self.tokens)
            + max(messages, self._conversation_bytes)
            + sum(map(len, self._image_data.values()))
        )

    def measure(self) -> None:
        """Measure the memory that its messages take."""
        if self.conversation is not None:
            self._conversation_bytes = _memory_of([self.conversation.messages, self.conversation.template])

    def prepare(self) -> None:
        """Measure the size that its file will have; a conversation that is too large is dropped."""
        if self.conversation is not None:
            try:
                written = len(self.conversation.model_dump_json(by_alias=True).encode())
            except ValueError:  # half of a surrogate pair cannot be written as UTF-8
                written = MAX_CONVERSATION_BYTES + 1
            if written > MAX_CONVERSATION_BYTES:
                vars(self).update(conversation=Conversation(messages=[], text_only=True))
        self.measure()
        self._disk_bytes = len(self.model_dump_json(by_alias=True).encode())

    @property
    def key(self) -> str:
        """The key of its KV in the store."""
        return key_of(self.tenant, self.id)

    def brief(self) -> dict[str, object]:
        """Describe it for events."""
        same = ("id", "automatic", "model", "label", "parent", "bytes")
        return {name: getattr(self, name) for name in same} | {"tokens": len(self.tokens)}

    def row(self, tier: Place | None) -> dict[str, object]:
        """Return the handoff object as its own routes show it, with where its KV lies."""
        used = {
            "uses": self.use.count,
            "last_used_at": self.use.at,
            "last_outcome": self.use.outcome,
            "last_reason": self.use.reason,
        }
        return self.public() | {"tier": tier} | used

    def public(self) -> dict[str, object]:
        """Return the handoff object that clients see."""
        same = HandoffObject.model_fields.keys() & Handoff.model_fields.keys()
        shown = {name: getattr(self, name) for name in same} | {
            "tokens": len(self.tokens),
            "images": len(self.images),
            "created_at": int(self.created_at),
            "expires_at": int(self.expires_at),
            "parents": self.parents or ([self.parent] if self.parent is not None else []),
        }
        return HandoffObject.model_validate(shown).model_dump(mode="json")


def _stored(placed: PlacedImage) -> StoredImage:
    image = placed.image
    return StoredImage(
        digest=image.digest,
        media_type=image.media_type,
        width=image.width,
        height=image.height,
        bytes=len(image.data),
        offset=placed.offset,
        length=placed.length,
        target=list(placed.target),
    )


def _memory_of(value: object) -> int:
    """Return the bytes that a JSON value takes in memory, with the values in it."""
    total, waiting = 0, [value]
    while waiting:
        current = waiting.pop()
        total += sys.getsizeof(current)
        if isinstance(current, dict):
            waiting += [*current.keys(), *current.values()]
        elif isinstance(current, list):
            waiting += current
    return total


def key_of(tenant: str, handoff_id: str) -> str:
    """Return the key of a handoff's KV in the store."""
    return f"{scope_of(tenant)}/{handoff_id}"


def scope_of(tenant: str) -> str:
    """Return the part of a store's keys that stands for a tenant."""
    return hashlib.sha256(tenant.encode()).hexdigest()[:SCOPE_LENGTH]


def is_handoff_key(key: str) -> bool:
    """Return whether a store's key is a handoff's, not that of a plain vLLM without a gateway."""
    return len(key.partition("/")[0]) == SCOPE_LENGTH


BLOCK = 32
"""Tokens that one hash of `prefixes.py` covers beyond the hash before it."""


@dataclass(frozen=True)
class PrefixMatch:
    """A context that shares a prefix with a prompt.

    Attributes:
        tokens: number of tokens, from the first, that they share.
        alone: whether no context shares as many whole blocks with the prompt but others of its conversation:
            those that continue it, and that it continues.
    """

    record: Handoff
    tokens: int
    alone: bool

    @property
    def continues(self) -> bool:
        """True if the prompt goes on after the whole context, but for what a template writes at its end."""
        return self.tokens > len(self.record.tokens) - BLOCK


def common_tokens(tokens: Sequence[int], prompt: Sequence[int], begin: int = 0) -> int:
    """Return the length of the longest common prefix of two sequences of token ids.

    Args:
        begin: so many, from the first, are known to be equal.
    """
    length = min(len(tokens), len(prompt))
    ours, theirs = array("i", tokens[begin:length]), array("i", prompt[begin:length])
    if ours == theirs:
        return length
    low, high = 0, length - begin  # the first difference is in [low, high)
    while high - low > 1:
        middle = (low + high) // 2
        if ours[low:middle] == theirs[low:middle]:
            low = middle
        else:
            high = middle
    return begin + low
