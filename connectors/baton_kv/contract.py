"""What crosses a process: from who asks to the engine, and back in its answer.

Pure: the standard library and pydantic. A request carries `kv_transfer_params = {"baton_kv": {...}}`;
the answer to one that saved carries the same key with what the next request sends to load it.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

PARAMS_KEY = "baton_kv"
LOCAL_TENANT = "local"

EntryKey = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,63}/[A-Za-z0-9_-]{16,64}$", max_length=129)]
"""`scope/id`: whose entry it is, and at least 96 random bits."""


class Transfer(StrEnum):
    """What the connector did for a request.

    Attributes:
        LOOK: read the header of the entry that the request names, to decide what to load.
        LOAD: copied an entry's KV into the engine.
        SAVE: copied a request's KV into an entry.
    """

    LOOK = "look"
    LOAD = "load"
    SAVE = "save"


class TransferFailure(StrEnum):
    """Why a transfer did not happen. The values are labels of the metric `baton_store_errors_total`.

    Attributes:
        MISSING: the store has no such entry.
        CORRUPT: the entry's bytes are not those that were written.
        INCOMPATIBLE: the entry was written by another model, layout, version or scope.
        FULL: the store has no room for the entry.
        DEVICE: the store could not be read or written.
        NOT_WHOLE: the engine no longer holds the KV of the whole context.
        MALFORMED: the request's transfer parameters are not a `TransferParams`.
        GIVEN_UP: the request ended before its load did.
        OTHER: anything else; the engine's log has it.
    """

    MISSING = "missing"
    CORRUPT = "corrupt"
    INCOMPATIBLE = "incompatible"
    FULL = "full"
    DEVICE = "device"
    NOT_WHOLE = "not_whole"
    MALFORMED = "malformed"
    GIVEN_UP = "given_up"
    OTHER = "other"

    @classmethod
    def _missing_(cls, value: object) -> TransferFailure:
        """Read a reason that this version does not know as `OTHER`."""
        return cls.OTHER


class TransferError(Exception):
    """Base of what a store, an entry and a job raise.

    Attributes:
        failure: what is reported of it.
    """

    failure: ClassVar[TransferFailure] = TransferFailure.OTHER


def failure_of(error: BaseException) -> TransferFailure:
    """Return what is reported of an exception that ended a transfer."""
    return error.failure if isinstance(error, TransferError) else TransferFailure.OTHER


@dataclass(frozen=True)
class TransferOutcome:
    """How a transfer ended: worker to scheduler, and both to whoever watches the engine.

    Attributes:
        request_id: the engine's name of the request it was for.
        key: the entry's.
        kind: what was done.
        tag: `TransferParams.tag` of the request.
        failure: why it failed; None: it did not.
        tokens: how many tokens' KV was moved, or was to be.
        bytes: how many bytes of KV were moved, or were to be.
        seconds: how long it took.
    """

    request_id: str
    key: str
    kind: Transfer
    tag: str | None = None
    failure: TransferFailure | None = None
    tokens: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def message(self) -> dict[str, Any]:
        """Return it as plain values, to be sent to another process."""
        failure = None if self.failure is None else self.failure.value
        return asdict(self) | {"kind": self.kind.value, "failure": failure}

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> TransferOutcome:
        """Read what `message` returned.

        Raises:
            ValueError: it is of a kind that this version does not know.
        """
        failure = None if message["failure"] is None else TransferFailure(message["failure"])
        return cls(**{**message, "kind": Transfer(message["kind"]), "failure": failure})


class TransferParams(BaseModel):
    """What one request wants of the connector.

    Attributes:
        version: of this message.
        save: leave the computed KV behind, as this entry; True picks a key.
        scope: what is saved: the whole context, or the prompt alone.
        load: start from this entry.
        limit: load at most so many of its tokens; None: all that can be used.
        tag: names the request in what the connector reports; the gateway's request id.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    version: Literal[1] = 1
    save: EntryKey | bool = False
    scope: Literal["context", "prompt"] = "context"
    load: EntryKey | None = None
    limit: Annotated[int, Field(ge=0)] | None = None
    tag: Annotated[str, Field(max_length=64)] | None = None

    @property
    def save_key(self) -> str | None:
        """The key to save under, if anything is to be saved."""
        return new_key(LOCAL_TENANT) if self.save is True else self.save or None


@dataclass(frozen=True)
class Malformed:
    """Parameters that were meant for the connector and are not its message; the request goes on without."""

    reason: str


def parse(params: object) -> TransferParams | Malformed | None:
    """The connector's part of a request's `kv_transfer_params`; None when there is none. Never raises.

    The parameters come from outside: they may be of any type at all.
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
    tag: str | None = None,
) -> dict[str, Any]:
    """`kv_transfer_params` of a request that leaves an entry behind, starts from one, or both."""
    wanted = {"save": save or None, "scope": scope, "load": load, "limit": limit, "tag": tag}
    return {PARAMS_KEY: {"version": 1} | {name: value for name, value in wanted.items() if value is not None}}


def params_to_save(key: str | None = None, *, load: str | None = None) -> dict[str, Any]:
    """`kv_transfer_params` of a request that leaves an entry behind."""
    return transfer_params(save=key or True, load=load)


def params_to_load(key: str) -> dict[str, Any]:
    """`kv_transfer_params` of a request that starts from an entry."""
    return transfer_params(load=key)


def new_key(scope: str) -> str:
    """A key nobody can guess: 192 random bits."""
    return f"{scope}/{secrets.token_urlsafe(24)}"
