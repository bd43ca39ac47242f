"""Read and rewrite an engine's replies to requests with handoffs."""

from __future__ import annotations

import json

from baton.engines.kv_transfer import TransferReport
from baton.engines.port import Json

DONE = "data: [DONE]\n\n"


def without_keys(answer: Json) -> bool:
    """Drop the engine's transfer parameters from an answer, or a chunk of one; return whether there were any.

    They hold the store's key, which clients must not see.
    """
    return answer.pop("kv_transfer_params", None) is not None


def prefix_hits(report: TransferReport) -> int:
    """Return how many tokens came from the cache and were not prefilled."""
    return max(0, report.cached - report.lost)


def chunk_of(event: str) -> tuple[Json, str]:
    """Return a server-sent event's chunk as an object, and the event as it is sent on."""
    if not event.startswith("data: {"):
        return {}, event
    chunk = json.loads(event.removeprefix("data: "))
    if without_keys(chunk):
        return chunk, event_of(chunk)
    return chunk, event


def event_of(chunk: Json) -> str:
    """Return a chunk as a server-sent event."""
    return f"data: {json.dumps(chunk)}\n\n"


def head_of(chunk: Json) -> Json:
    """Return the fields that all chunks of an answer share."""
    return {key: chunk[key] for key in ("id", "object", "created", "model") if key in chunk}
