"""Rewrite an engine's replies to requests with handoffs: correct the usage, drop transfer parameters."""

from __future__ import annotations

import json

from baton.engines.port import Json, TransferReport

DONE = "data: [DONE]\n\n"


def correct_reply(answer: Json, report: TransferReport) -> bool:
    """Correct an answer, or a chunk of one, in place; returns whether anything changed.

    The engine's transfer parameters are dropped: they hold the store's key, which clients must not see.
    """
    stripped = answer.pop("kv_transfer_params", None) is not None
    return correct_usage(answer.get("usage"), report) or stripped


def correct_usage(usage: object, report: TransferReport) -> bool:
    """Correct `cached_tokens`: the engine counts tokens of a failed load as cached, but prefilled them."""
    if not report.lost or not isinstance(usage, dict):
        return False
    details = usage.get("prompt_tokens_details") or {}
    details["cached_tokens"] = prefix_hits(report)
    usage["prompt_tokens_details"] = details
    return True


def prefix_hits(report: TransferReport) -> int:
    """Return how many tokens came from the cache and were not prefilled."""
    return max(0, report.cached - report.lost)


def chunk_of(event: str, report: TransferReport) -> tuple[Json, str]:
    """Return a server-sent event's chunk as an object, and the event as it is sent on."""
    if not event.startswith("data: {"):
        return {}, event
    chunk = json.loads(event.removeprefix("data: "))
    if correct_reply(chunk, report):
        return chunk, event_of(chunk)
    return chunk, event


def event_of(chunk: Json) -> str:
    """Return a chunk as a server-sent event."""
    return f"data: {json.dumps(chunk)}\n\n"


def head_of(chunk: Json) -> Json:
    """Return the fields that all chunks of an answer share."""
    return {key: chunk[key] for key in ("id", "object", "created", "model") if key in chunk}
