"""Metrics of audits, which compute some answers again without stored KV."""

from __future__ import annotations

from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Histogram

NATS = (1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Upper bounds of the buckets of a log probability's difference, in nats."""


class AuditResult(StrEnum):
    """How an audit ended."""

    MATCH = "match"
    MISMATCH = "mismatch"
    DROPPED = "dropped"


class AuditMetrics:
    """The series of audits."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._audits = Counter(
            "baton_handoff_audits_total",
            "Answers from loaded KV that were computed again without it: `match`, `mismatch`, or `dropped`, "
            "because the engine was never idle, or failed.",
            ("result",),
            registry=registry,
        )
        for result in AuditResult:  # at zero, so that the first mismatch is an increase that alerts see
            self._audits.labels(result.value)
        self.difference = Histogram(
            "baton_handoff_audit_difference",
            "Largest difference between the log probabilities of an answer's first token, in nats.",
            buckets=NATS,
            registry=registry,
        )

    def count(self, result: AuditResult, number: int = 1) -> None:
        """Count audits."""
        self._audits.labels(result.value).inc(number)
