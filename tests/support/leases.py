"""A value for every field of a lease, so that tests see which of them a place does not keep."""

from __future__ import annotations

import time
from typing import Any

from baton.library.handoff import SAVERS, Handoff, HandoffAudit, HandoffState, Lease
from baton.library.here.records import Edit, Others
from baton.telemetry.metrics import AuditResult

OURS = {"revision", "archived"}
"""Each place counts and notes these by itself."""


def told() -> dict[str, Any]:
    """Another value than a new handoff has for each field that a place keeps as it is told."""
    audit = HandoffAudit(result=AuditResult.MATCH, difference=0.25, same_token=True, at=1_700_000_000)
    values = {
        "label": "another",
        "pin": False,
        "ttl_s": 7200.5,
        "expires_at": time.time() + 7200.5,
        "state": HandoffState.READY,
        "error": "it says why",
        "bytes": 12345,
        "audit": audit,
    }
    assert values.keys() == Lease.model_fields.keys() - OURS, "a new field needs a value here"
    return values


def without_savers(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in SAVERS}


def writing(values: dict[str, Any]) -> Edit:
    """Set these fields, whatever a client may."""

    def edit(record: Handoff, _others: Others) -> None:
        for name, value in values.items():
            setattr(record, name, value)

    return edit
