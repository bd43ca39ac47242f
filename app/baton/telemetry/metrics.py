"""The metrics of one gateway: requests, tenants, engines, handoffs and their transfers.

Those of images, plugins and queues stand in files of their own; `page.py` writes the page for all.
"""

from __future__ import annotations

import platform

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

from baton import __version__
from baton.telemetry.archive_metrics import ArchiveMetrics
from baton.telemetry.audit_metrics import AuditMetrics
from baton.telemetry.image_metrics import ImageMetrics
from baton.telemetry.pooling_metrics import PoolingMetrics
from baton.telemetry.queues import AdmissionMetrics, QueueMetrics
from baton.telemetry.response_metrics import ResponseMetrics
from baton.telemetry.series import OTHER, SECONDS
from baton.telemetry.shared_store_metrics import SharedStoreMetrics
from baton_kv.contract import Transfer, TransferFailure, TransferOutcome

FAILURES = tuple(kind for kind in TransferFailure if kind is not TransferFailure.GIVEN_UP)
"""Failures that are counted as errors; a client that disconnected is none."""

MAX_TENANTS = 256
"""Tenants above this number are counted together, as `other`."""

LAGS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
"""Upper bounds of the buckets of event loop lag, in seconds."""


class RequestMetrics:
    """The series of requests over HTTP."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "baton_http_requests_total",
            "Requests answered, by route template and class of status.",
            ("route", "method", "code_class"),
            registry=registry,
        )
        self.duration = Histogram(
            "baton_http_request_duration_seconds",
            "Seconds from a request's first byte to its answer's last.",
            ("route",),
            buckets=SECONDS,
            registry=registry,
        )
        self.in_flight = Gauge(
            "baton_http_requests_in_flight",
            "Requests being answered now.",
            ("route",),
            registry=registry,
        )
        self.rejections = Counter(
            "baton_rejections_total",
            "Requests refused before or by an engine, by error code.",
            ("reason",),
            registry=registry,
        )
        self.disconnects = Counter(
            "baton_client_disconnects_total",
            "Clients that disconnected before their answer ended.",
            ("phase",),
            registry=registry,
        )
        self.stripped = Counter(
            "baton_stripped_fields_total",
            "Request fields that would steer the engine past the gateway, dropped.",
            ("field",),
            registry=registry,
        )


class GatewayMetrics(RequestMetrics):
    """The `baton_*` series of one gateway, in a registry of their own."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        super().__init__(registry)
        self.registry = registry
        self.engines = FleetMetrics(registry)
        self.admission = AdmissionMetrics(registry)
        self.bodies = Gauge(
            "baton_bodies_bytes",
            "Bytes that the bodies of running requests hold, and answers of servers elsewhere.",
            ("place",),
            registry=registry,
        )
        self.queues = QueueMetrics(registry)
        self.memory = Gauge(
            "baton_memory_available_bytes",
            "Memory that this process can still get; NaN where that is unknown.",
            registry=registry,
        )
        self.loop_lag = Histogram(
            "baton_event_loop_lag_seconds",
            "Seconds that the event loop was late to resume a sleeping task.",
            buckets=LAGS,
            registry=registry,
        )
        self.tenants = TenantMetrics(registry)
        self.handoffs = HandoffMetrics(registry)
        self.audits = AuditMetrics(registry)
        self.shared_store = SharedStoreMetrics(registry)
        self.archive = ArchiveMetrics(registry)
        self.responses = ResponseMetrics(registry)
        self.pooling = PoolingMetrics(registry)
        self.images = ImageMetrics(registry)
        Info("baton_build", "Version of Baton and of Python.", registry=registry).info(
            {"version": __version__, "python": platform.python_version()}
        )


class TenantMetrics:
    """The series by tenant, for at most `MAX_TENANTS` of them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._known: set[str] = set()
        self._requests = Counter(
            "baton_tenant_requests_total",
            "Requests answered, by the tenant whose key they came with; probes are not counted.",
            ("tenant", "code_class"),
            registry=registry,
        )
        self._tokens = Counter(
            "baton_tenant_tokens_total",
            "Prompt tokens and generated tokens.",
            ("tenant", "kind"),
            registry=registry,
        )

    def count(self, tenant: str, code_class: str, *, prompt_tokens: int, generated_tokens: int) -> None:
        """Count a request that is over."""
        if tenant not in self._known:
            if len(self._known) >= MAX_TENANTS:
                tenant = OTHER
            self._known.add(tenant)
        self._requests.labels(tenant, code_class).inc()
        if prompt_tokens or generated_tokens:
            self._tokens.labels(tenant, "prompt").inc(prompt_tokens)
            self._tokens.labels(tenant, "generated").inc(generated_tokens)


class FleetMetrics:
    """The series of the engines' states, starts and restarts."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.up = Gauge("baton_engine_up", "1 while the engine answers.", ("engine",), registry=registry)
        self.state = Gauge(
            "baton_engine_state",
            "1 for the state the engine is in, 0 for the others.",
            ("engine", "state"),
            registry=registry,
        )
        self.restarts = Counter(
            "baton_engine_restarts_total",
            "Attempts to restart an engine, by the reason it was lost.",
            ("engine", "reason"),
            registry=registry,
        )
        self.stalled = Gauge(
            "baton_engine_last_progress_seconds",
            "Seconds since an engine with work last made progress; 0 without work.",
            ("engine",),
            registry=registry,
        )
        self.start = Gauge(
            "baton_engine_start_seconds",
            "Seconds the engine's last start took.",
            ("engine",),
            registry=registry,
        )


class HandoffMetrics:
    """The series of handoffs."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.created = Counter("baton_handoff_created_total", "Handoffs created.", registry=registry)
        self.consumed = Counter(
            "baton_handoff_consumed_total",
            "Requests that started from a handoff, by where its KV came from.",
            ("outcome",),
            registry=registry,
        )
        self.tokens_reused = Counter(
            "baton_handoff_tokens_reused_total",
            "Tokens whose KV was loaded, not prefilled.",
            registry=registry,
        )
        self.saved_prefill = Counter(
            "baton_handoff_saved_prefill_seconds_total",
            "Prefill time that handoffs saved, estimated by each engine's own prefill rate.",
            registry=registry,
        )
        self.decisions = Counter(
            "baton_handoff_decisions_total",
            "Decisions of the planner to load or recompute a handoff's KV.",
            ("decision",),
            registry=registry,
        )
        self.automatic_lookups = Counter(
            "baton_automatic_lookups_total",
            "Prompts for which a stored context was looked up automatically: `found`, `none` or `failed`.",
            ("result",),
            registry=registry,
        )
        self.automatic_saves = Counter(
            "baton_automatic_saves_total", "Contexts that were saved automatically.", registry=registry
        )
        self.fetches = Counter(
            "baton_handoff_fetches_total",
            "Handoffs whose KV was needed and not on this machine: `fetched` from the shared store "
            "or the archive, `missing` there, `failed`, or not fetched because computing is faster "
            "(`slower`).",
            ("result",),
            registry=registry,
        )
        self.expired = Counter("baton_handoff_expired_total", "Handoffs that expired.", registry=registry)
        self.kept = Gauge("baton_handoffs", "Handoffs that exist now.", registry=registry)
        self.store_bytes = Gauge(
            "baton_store_bytes", "Bytes that all entries, images and records take.", registry=registry
        )
        self.store_budget = Gauge(
            "baton_store_budget_bytes", "Bytes that all entries may take.", registry=registry
        )


class TransferMetrics:
    """The series of one engine's loads and saves, as its connector reports them."""

    def __init__(self, registry: CollectorRegistry, engine: str) -> None:
        self._engine = engine
        self._seconds = Histogram(
            "baton_store_op_duration_seconds",
            "Seconds a load or a save took.",
            ("engine", "op"),
            buckets=SECONDS,
            registry=registry,
        )
        self._bytes = Counter(
            "baton_handoff_bytes_total", "Bytes of KV moved.", ("engine", "direction"), registry=registry
        )
        self._given_up = Counter(
            "baton_handoff_loads_given_up_total",
            "Loads whose request was aborted before they ended.",
            ("engine",),
            registry=registry,
        )
        self._errors = Counter(
            "baton_store_errors_total",
            "Loads and saves that failed; the KV of a failed load is recomputed.",
            ("engine", "op", "kind"),
            registry=registry,
        )
        for operation in Transfer:  # at zero, so that the first failure is an increase that alerts see
            for kind in FAILURES:
                self._errors.labels(engine, operation.value, kind.value)

        self._latent_steps = Counter(
            "baton_latent_steps_total", "Latent steps computed.", ("engine",), registry=registry
        )
        self._latent_seconds = Counter(
            "baton_latent_seconds_total", "Seconds latent steps took.", ("engine",), registry=registry
        )

        self._encoded = Counter(
            "baton_images_encoded_total",
            "Images that the vision encoder of an engine with handoffs ran for.",
            ("engine",),
            registry=registry,
        )
        self._encoded.labels(engine)

    def encoded(self, images: int) -> None:
        """Count images that the model's encoder ran for, as they were neither cached nor loaded."""
        self._encoded.labels(self._engine).inc(images)

    def thought(self, steps: int, seconds: float) -> None:
        """Count computed latent steps, possibly of several requests, and the seconds they took."""
        self._latent_steps.labels(self._engine).inc(steps)
        self._latent_seconds.labels(self._engine).inc(seconds)

    def count(self, outcome: TransferOutcome) -> None:
        """Count the outcome of one transfer."""
        operation = outcome.kind.value
        if outcome.failure is TransferFailure.GIVEN_UP:
            self._given_up.labels(self._engine).inc()
            return
        if outcome.kind is not Transfer.LOOK:
            self._seconds.labels(self._engine, operation).observe(outcome.seconds)
        if outcome.failure is not None:
            self._errors.labels(self._engine, operation, outcome.failure.value).inc()
        elif outcome.kind is not Transfer.LOOK:
            self._bytes.labels(self._engine, operation).inc(outcome.bytes)
