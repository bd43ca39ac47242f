"""Define what the client returns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

Json: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Handoff:
    """A stored context that requests can start from.

    Attributes:
        id: what `start` of a chat takes.
        state: `pending` until the request that saves it has ended; `ready` or `failed` then.
        model: name of the engine that saved it.
        tokens: number of tokens in its context.
        images: number of images in its context.
        latent_steps: number of its tokens that stand for latent steps.
        bytes: size of its KV in the store; 0: its KV is not stored and is recomputed.
        pin: whether its KV is exempt from eviction.
        created_at: when it was created, in seconds since the epoch.
        expires_at: when it expires, in seconds since the epoch.
        parent: id of the handoff that it continues.
        parents: ids of all handoffs that it continues; several if they were joined.
        label: the text that the client gave it.
        exact: whether its KV is what the engine would compute; False if any was moved to its place.
        translated_from: id of the handoff of another model whose text it holds; None: it is no translation.
        archived: whether it is in the gateway's archive, and so outlives its machine.
    """

    id: str
    state: str
    model: str
    tokens: int
    images: int
    latent_steps: int
    bytes: int
    pin: bool
    created_at: int
    expires_at: int
    parent: str | None
    parents: tuple[str, ...]
    label: str | None
    exact: bool = True
    translated_from: str | None = None
    archived: bool = False

    @classmethod
    def of(cls, row: Json) -> Handoff:
        """Read a handoff object of the API; fields that are unknown here are ignored."""
        newer = ("parents", "exact", "translated_from", "archived")
        fields = {name: row[name] for name in cls.__dataclass_fields__ if name in row or name not in newer}
        parents = row.get("parents", [row["parent"]] if row["parent"] else [])  # older gateways have one
        return cls(**fields | {"parents": tuple(parents)})


@dataclass(frozen=True)
class ContextMessages:
    """The messages or the text of a handoff's context.

    Attributes:
        data: the messages of a chat in OpenAI's shape, with its last answer; empty: it is no chat.
        text: the whole text of what is no chat, or begins with other text; None: `data` is all.
        complete: whether this is all that it says.
        why: what is missing and why, in a sentence; None: nothing.
    """

    data: tuple[Json, ...]
    text: str | None
    complete: bool
    why: str | None

    @classmethod
    def of(cls, body: Json) -> ContextMessages:
        """Read the answer to `GET /v1/handoffs/{id}/messages`."""
        return cls(tuple(body["data"]), body["text"], body["complete"], body["why"])


@dataclass(frozen=True)
class Engine:
    """An engine of the gateway: its abilities and its state.

    Attributes:
        name: what `model` of a request takes.
        models: its name and its aliases.
        kind: `generate` or `pooling`.
        state: `ready`, or another word while it takes no requests.
        why: why it is not `ready`, in a sentence; None: it is.
        can: words such as `generate`, `handoffs`, `tools`, `vision`, `map`.
        running: number of requests that it works on, of all tenants.
        waiting: number of requests that wait for it.
    """

    name: str
    models: tuple[str, ...]
    kind: str
    state: str
    why: str | None
    can: tuple[str, ...]
    running: int
    waiting: int

    @classmethod
    def of(cls, row: Json) -> Engine:
        """Read a row of `GET /v1/engines`; fields that are unknown here are ignored."""
        lists = {name: tuple(row[name]) for name in ("models", "can")}
        return cls(**{name: row[name] for name in cls.__dataclass_fields__} | lists)


@dataclass(frozen=True)
class Source:
    """The source of the KV of the handoff that a request started from.

    Attributes:
        id: of the handoff.
        outcome: `loaded` from the store, `resident` in the engine, `recomputed`, `blended` where some was
            moved to its place, or `translated` from another model's text.
        reason: why it was recomputed, such as `kv_gone`; None: it was not.
        tokens: number of tokens in the handoff.
        loaded_tokens: number of tokens whose KV came from the store.
        resident_tokens: number of tokens whose KV the engine still had.
        exact: whether that KV is what the engine would compute.
    """

    id: str
    outcome: str
    reason: str | None
    tokens: int
    loaded_tokens: int
    resident_tokens: int
    exact: bool = True

    @classmethod
    def of(cls, row: Json) -> Source:
        """Read `handoff.source` of an answer; fields that are unknown here are ignored."""
        return cls(**{name: row[name] for name in cls.__dataclass_fields__ if name in row or name != "exact"})


@dataclass(frozen=True)
class Answer:
    """The answer to a chat.

    Attributes:
        text: of the first choice; empty where the model called a tool instead.
        calls: the tools that the first choice calls, in OpenAI's shape: `id`, and `function` with `name` and
            `arguments`, a text of JSON. `Conversation.give` takes their results.
        handoff: the handoff that the request saved; None: it saved none.
        source: where the KV of the handoff it started from came from; None: it started from none.
        usage: numbers of tokens, as the API counts them: `prompt_tokens`, `completion_tokens`, ...
        body: the whole answer, as the API sent it.
    """

    text: str
    handoff: Handoff | None
    source: Source | None
    usage: Json
    body: Json
    calls: Sequence[Json] = ()

    @classmethod
    def of(cls, body: Json) -> Answer:
        """Read the body of an answer of `/v1/chat/completions`."""
        handoff = body.get("handoff") or {}
        message = body["choices"][0]["message"]
        return cls(
            text=message.get("content") or "",
            calls=message.get("tool_calls") or (),
            handoff=Handoff.of(handoff) if "id" in handoff else None,
            source=Source.of(handoff["source"]) if "source" in handoff else None,
            usage=body.get("usage") or {},
            body=body,
        )


@dataclass(frozen=True)
class Progress:
    """The progress of a scene's upload, of its work as a job, or of the download of its answer.

    Between the last `sending` and the first `receiving` the gateway computes; it reports nothing meanwhile,
    but of a job (`keep_scene`).

    Attributes:
        stage: `sending` the scene, `computing` it as a job, or `receiving` the answer.
        done: number of bytes so far; while computing, of tiles.
        total: number of bytes or tiles in all; None: the gateway did not say.
    """

    stage: Literal["sending", "computing", "receiving"]
    done: int
    total: int | None


@dataclass(frozen=True)
class KeptScene:
    """A scene as a job, whose files the gateway keeps for a while.

    Attributes:
        id: its name under `/v1/scenes`.
        state: `queued`, `running`, `done` or `failed`.
        percent: 0 to 100.
        tiles: tiles of the scene; None: not known yet.
        tiles_done: of them; None: not known yet.
        bytes_fetched: bytes that the gateway fetched of files by ranges; None: not known.
        error: code and message of a failed one; None: it has not failed.
        files: names of its files.
        expires_at: until when they are kept, seconds since the epoch; None: it is not finished.
        body: all that the gateway says of it.
    """

    id: str
    state: str
    percent: int
    tiles: int | None
    tiles_done: int | None
    bytes_fetched: int | None
    error: Json | None
    files: tuple[str, ...]
    expires_at: int | None
    body: Json = field(repr=False)

    @classmethod
    def of(cls, body: Json) -> KeptScene:
        """Read it from the gateway's answer."""
        return cls(
            id=body["id"],
            state=body["state"],
            percent=body["percent"],
            tiles=body.get("tiles"),
            tiles_done=body.get("tiles_done"),
            bytes_fetched=body.get("bytes_fetched"),
            error=body.get("error"),
            files=tuple(file["name"] for file in body["files"]),
            expires_at=body.get("expires_at"),
            body=body,
        )


@dataclass(frozen=True)
class SceneAnswer:
    """The answer of a plugin to a scene.

    Attributes:
        media_type: of the answer, such as `image/tiff`.
        content: the answer; empty if it was written to `path`.
        path: the file it was written to; None: it is in `content`.
    """

    media_type: str
    content: bytes
    path: Path | None

    def json(self) -> Json:
        """Return the answer to `accept="application/json"`.

        Raises:
            ValueError: the answer is not JSON.
        """
        text = self.path.read_bytes() if self.path is not None else self.content
        try:
            answer: Json = json.loads(text)
        except RecursionError:
            raise ValueError("The answer is nested too deep.") from None
        return answer
