"""Messages between the connector and its callers: transfer parameters, outcomes and failure reasons.

A request carries `kv_transfer_params = {"baton_kv": {...}}`, see `TransferParams`. The answer to a request
that saved carries the same key with the parameters that load the entry:

    {"baton_kv": {"version": 1, "load": "local/3q2-7wAAB..."}}

Pure: this module imports only the standard library and pydantic.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

PARAMS_KEY = "baton_kv"
EXPENDABLE = "auto-"
"""Entries whose ids begin with this are evicted before others of their scope."""
LOCAL_TENANT = "local"
MOST_MIXED = 1024
"""Most tokens of a mixture."""
MOST_MOVED = 16
"""Most entries whose KV is moved into one context."""

EntryKey = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,63}/[A-Za-z0-9_-]{16,64}$", max_length=129)]
"""The key of an entry, `scope/id`: the tenant's scope, and an id of at least 96 random bits."""


class Transfer(StrEnum):
    """An operation of the connector.

    Attributes:
        LOOK: read the header of the entry that the request names, to decide how many tokens to load.
        LOAD: copied an entry's KV into the engine.
        SAVE: copied a request's KV into an entry.
    """

    LOOK = "look"
    LOAD = "load"
    SAVE = "save"


class TransferFailure(StrEnum):
    """The reason why a transfer failed. The values are labels of the metric `baton_store_errors_total`.

    Attributes:
        MISSING: the store has no such entry.
        CORRUPT: the entry's bytes do not match their digests.
        INCOMPATIBLE: the entry was written by another model, layout, version or scope.
        FULL: the store has no room for the entry.
        DEVICE: the store could not be read or written.
        NOT_WHOLE: the engine does not hold the KV of the whole context, or it cannot be compared exactly.
        BUSY: saves hold, or this one would, more of the engine's blocks than they may; try again.
        MALFORMED: the request's transfer parameters are not a `TransferParams`.
        GIVEN_UP: the request ended before its load was finished.
        OTHER: anything else; the engine's log has the exception.
    """

    MISSING = "missing"
    CORRUPT = "corrupt"
    INCOMPATIBLE = "incompatible"
    FULL = "full"
    DEVICE = "device"
    NOT_WHOLE = "not_whole"
    BUSY = "busy"
    MALFORMED = "malformed"
    GIVEN_UP = "given_up"
    OTHER = "other"

    @classmethod
    def _missing_(cls, value: object) -> TransferFailure:
        """Read a reason that this version does not know as `OTHER`."""
        return cls.OTHER


class TransferError(Exception):
    """Base class of the exceptions of stores, entries and jobs.

    Attributes:
        failure: the reason that is reported for this class.
    """

    failure: ClassVar[TransferFailure] = TransferFailure.OTHER


def failure_of(error: BaseException) -> TransferFailure:
    """Return the reason that is reported for an exception that ended a transfer."""
    return error.failure if isinstance(error, TransferError) else TransferFailure.OTHER


@dataclass(frozen=True)
class TransferOutcome:
    """The outcome of one transfer, sent from the worker to the scheduler and from both to the stat loggers.

    Attributes:
        request_id: the engine's id of the request.
        key: key of the entry.
        kind: the operation.
        tag: `TransferParams.tag` of the request.
        failure: why the transfer failed; None if it succeeded.
        tokens: number of tokens whose KV was copied, or was to be.
        bytes: bytes of KV that were copied, or were to be.
        seconds: duration.
        moved: those of the tokens whose KV was loaded to another place than it was saved from.
        computed: those of the tokens that were computed between moved ones.
        resident: those of the bytes that the worker had in memory, proved before.
    """

    request_id: str
    key: str
    kind: Transfer
    tag: str | None = None
    failure: TransferFailure | None = None
    tokens: int = 0
    bytes: int = 0
    seconds: float = 0.0
    moved: int = 0
    computed: int = 0
    resident: int = 0

    def message(self) -> dict[str, Any]:
        """Return the outcome as a dict of plain values, to be sent to another process."""
        failure = None if self.failure is None else self.failure.value
        return asdict(self) | {"kind": self.kind.value, "failure": failure}

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> TransferOutcome:
        """Build an outcome from what `message` returned; fields of another version are left out.

        Raises:
            ValueError: `kind` is not a `Transfer` that this version knows, or a field is missing.
        """
        known = {field.name: message[field.name] for field in fields(cls) if field.name in message}
        try:
            failure = None if known.get("failure") is None else TransferFailure(known["failure"])
            return cls(**{**known, "kind": Transfer(known["kind"]), "failure": failure})
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a transfer's outcome: {error}") from None


@dataclass(frozen=True)
class Warmed:
    """The KV of an entry that is in the worker's memory, proved, from a worker to the gateway.

    Attributes:
        bytes: bytes of it, on all ranks together.
        tokens: number of tokens, from the first, all of whose KV is there.
        whole: whether that is all of the entry.
        memory: bytes of the memory for it, whatever is there; 0: nothing is kept.
        failure: why there is not more; None: there is no room for it, or all is there.
    """

    bytes: int = 0
    tokens: int = 0
    whole: bool = False
    memory: int = 0
    failure: TransferFailure | None = None

    def message(self) -> dict[str, Any]:
        """Return it as a dict of plain values."""
        return asdict(self) | {"failure": None if self.failure is None else self.failure.value}

    @classmethod
    def of_ranks(cls, messages: Sequence[Mapping[str, Any] | None]) -> Warmed | None:
        """Combine what the ranks returned of `message`; None: one of them is still at work."""
        told = [message for message in messages if message is not None]
        if len(told) < len(messages):
            return None
        failures = [TransferFailure(each["failure"]) for each in told if each["failure"] is not None]
        return cls(
            sum(each["bytes"] for each in told),
            min(each["tokens"] for each in told),
            all(each["whole"] for each in told),
            sum(each["memory"] for each in told),
            next(iter(failures), None),
        )


class MovedPart(BaseModel):
    """Tokens of an entry whose KV is loaded to another place of the prompt.

    Attributes:
        key: key of the entry.
        start: index of the first token in the entry's context.
        tokens: number of tokens, which the prompt holds too.
        to: index of the first token in the prompt.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    key: EntryKey
    start: Annotated[int, Field(ge=0)]
    tokens: Annotated[int, Field(ge=1)]
    to: Annotated[int, Field(ge=1)]


class Mixture(BaseModel):
    """A weighted mean of token embeddings, which a model with latent steps takes as its first input.

    Attributes:
        tokens: token ids of the model.
        weights: weight of each of them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, max_length=MOST_MIXED)]
    weights: Annotated[list[Annotated[float, Field(ge=0, le=1)]], Field(min_length=1, max_length=MOST_MIXED)]


class UsedAdapter(BaseModel):
    """The LoRA adapter that a request is computed with, without which its token ids do not determine its KV.

    Attributes:
        name: as vLLM knows it.
        digest: BLAKE3 of its configuration and weights, hexadecimal.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: Annotated[str, Field(min_length=1, max_length=128)]
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class TransferParams(BaseModel):
    """The connector's part of a request's `kv_transfer_params`.

    Attributes:
        version: version of this message.
        save: key to save the computed KV under; True lets the connector choose a key, False saves nothing.
        scope: what is saved: `context` (prompt and answer) or `prompt`.
        load: key of the entry to start from.
        limit: maximum number of tokens to load; None for all that match.
        moved: what follows those, moved from other entries; the tokens between are computed.
        apart: the end of the request's `cache_salt`, which no other request has. Moved KV is not what the
            engine would compute, so `moved`, and entries that hold moved KV, are used with it alone.
        mixture: input of the prompt's first position, which holds the placeholder of a latent step; such a
            request needs a `cache_salt` of its own.
        least: fewest tokens to save beyond those that the entry `load` holds already; with fewer, nothing is
            saved. Above 0 nobody waits for the save: it leaves room for others.
        adapter: the LoRA adapter that the request is computed with. Without it such a request neither loads
            nor saves anything.
        tag: name of the request in outcomes; the gateway sets its request id.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    version: Literal[1] = 1
    save: EntryKey | bool = False
    scope: Literal["context", "prompt"] = "context"
    load: EntryKey | None = None
    limit: Annotated[int, Field(ge=0)] | None = None
    moved: Annotated[list[MovedPart], Field(max_length=MOST_MOVED)] = []
    apart: Annotated[str, Field(min_length=16, max_length=128)] | None = None
    mixture: Mixture | None = None
    least: Annotated[int, Field(ge=0)] = 0
    adapter: UsedAdapter | None = None
    tag: Annotated[str, Field(max_length=64)] | None = None

    @property
    def save_key(self) -> str | None:
        """Return the key to save under, a new one if `save` is True; None if nothing is to be saved."""
        return new_key(LOCAL_TENANT) if self.save is True else self.save or None

    def uses(self, adapter: str | None) -> bool:
        """Return whether a request that vLLM computes with this adapter is the one that they are of."""
        return adapter == (self.adapter.name if self.adapter is not None else None)

    def is_apart(self, salt: str | None) -> bool:
        """Return whether a request with this `cache_salt` shares its KV with no other request."""
        return self.apart is not None and salt is not None and salt.endswith(self.apart)


@dataclass(frozen=True)
class Malformed:
    """Parameters under the connector's key that are no valid `TransferParams`; the request runs without them.

    Attributes:
        reason: the first invalid field and what is wrong with it.
    """

    reason: str


def parse(params: object) -> TransferParams | Malformed | None:
    """Read the connector's part of a request's `kv_transfer_params`; None if there is none. Never raises.

    The parameters come from a client, so they may be of any type.
    """
    if not isinstance(params, dict) or PARAMS_KEY not in params:
        return None
    try:
        return TransferParams.model_validate(params[PARAMS_KEY])
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        return Malformed(f"{'.'.join(map(str, first['loc']))}: {first['msg']}")


def transfer_params(
    *,
    save: str | bool = False,
    scope: str | None = None,
    load: str | None = None,
    limit: int | None = None,
    moved: Sequence[Mapping[str, Any]] = (),
    apart: str | None = None,
    mixture: Mapping[str, Any] | None = None,
    least: int | None = None,
    adapter: Mapping[str, Any] | None = None,
    tag: str | None = None,
) -> dict[str, Any]:
    """Return the `kv_transfer_params` of a request that saves an entry, loads one, or both.

    The arguments are the fields of `TransferParams`; None leaves a field out.
    """
    wanted: dict[str, Any] = {"save": save or None, "scope": scope, "load": load, "limit": limit}
    wanted |= {"moved": list(moved) or None, "apart": apart, "mixture": mixture, "least": least}
    wanted |= {"adapter": adapter, "tag": tag}
    return {PARAMS_KEY: {"version": 1} | {name: value for name, value in wanted.items() if value is not None}}


def params_to_save(key: str | None = None, *, load: str | None = None) -> dict[str, Any]:
    """Return the `kv_transfer_params` of a request that saves its KV, under a new key if none is given."""
    return transfer_params(save=key or True, load=load)


def params_to_load(key: str) -> dict[str, Any]:
    """Return the `kv_transfer_params` of a request that starts from an entry."""
    return transfer_params(load=key)


def new_key(scope: str) -> str:
    """Return a new key under a scope, with 192 random bits that nobody can guess."""
    return f"{scope}/{secrets.token_urlsafe(24)}"
