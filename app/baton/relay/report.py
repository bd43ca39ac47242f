"""Write what became of a request's handoffs into its answer."""

from __future__ import annotations

import json
from typing import Any

from baton.engines.backend import Json
from baton.engines.transfers import TransferReport
from baton.library.handoff import Handoff
from baton.relay.cost import Choice, Decision
from baton_kv.contract import TransferFailure

# Report where the KV of a handoff's tokens came from: loaded, resident in the engine, or recomputed.


KV_IS_GONE = (TransferFailure.MISSING, TransferFailure.CORRUPT)
"""Reasons after which a handoff has its token ids only, and is prefilled."""
REASONS = {
    TransferFailure.MISSING: "kv_gone",
    TransferFailure.CORRUPT: "kv_corrupt",
    TransferFailure.INCOMPATIBLE: "kv_incompatible",
    TransferFailure.DEVICE: "store_unreadable",
}
"""`handoff.source.reason` by why the entry could not be used."""


def source_outcome(source: Handoff, report: TransferReport, decision: Decision | None) -> dict[str, Any]:
    """Return `handoff.source`: how many of its tokens were loaded, resident or recomputed, and why."""
    loaded = report.in_place
    resident = max(0, prefix_hits(report) - (report.loaded or 0))
    recompute = decision is not None and decision.choice is Choice.RECOMPUTE
    outcome = "recomputed"
    reason = "not_used" if source.bytes else "kv_gone"
    if report.miss is not None:
        reason = REASONS.get(report.miss, reason)
    if report.lost:
        reason = "load_failed"
    elif loaded and not recompute:
        outcome, reason = "loaded", ""
    elif resident:
        outcome, reason = "resident", ""
    elif recompute:
        reason = "slower_to_load"
    return {
        "id": source.id,
        "tokens": len(source.tokens),
        "loaded_tokens": loaded,
        "moved_tokens": report.moved,
        "resident_tokens": resident,
        "outcome": outcome,
        "reason": reason or None,
        "load_ms": round(report.load_ms, 1),
    } | (decision.public() if decision is not None else {})


# Read and rewrite an engine's replies to requests with handoffs.


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
