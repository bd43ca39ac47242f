"""What crosses a process: from who asks to the engine, and back in its answer.

Pure: the standard library and pydantic. A request carries `kv_transfer_params = {"baton_kv": {...}}`;
the answer to one that saved carries the same key with what the next request sends to load it.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

PARAMS_KEY = "baton_kv"
LOCAL_TENANT = "local"

EntryKey = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,63}/[A-Za-z0-9_-]{16,64}$", max_length=129)]
"""`scope/id`: whose entry it is, and at least 96 random bits."""


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
