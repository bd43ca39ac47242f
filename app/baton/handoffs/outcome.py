"""Report where the KV of a handoff's tokens came from: loaded, resident in the engine, or recomputed."""

from __future__ import annotations

from typing import Any

from baton.engines.kv_transfer import TransferReport
from baton.handoffs.planner import Choice, Decision
from baton.handoffs.records.record import HandoffRecord
from baton.handoffs.replies import prefix_hits
from baton_kv.contract import TransferFailure

KV_IS_GONE = (TransferFailure.MISSING, TransferFailure.CORRUPT)
"""Reasons after which a handoff has its token ids only, and is prefilled."""
REASONS = {
    TransferFailure.MISSING: "kv_gone",
    TransferFailure.CORRUPT: "kv_corrupt",
    TransferFailure.INCOMPATIBLE: "kv_incompatible",
    TransferFailure.DEVICE: "store_unreadable",
}
"""`handoff.source.reason` by why the entry could not be used."""


def source_outcome(
    source: HandoffRecord, report: TransferReport, decision: Decision | None
) -> dict[str, Any]:
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
