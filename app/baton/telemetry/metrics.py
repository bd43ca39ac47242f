"""Every metric the gateway keeps of its own, in one list; `page.py` shows them."""

from __future__ import annotations

import math
import platform
import re
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

from baton import __version__
from baton.telemetry.queues import AdmissionMetrics, QueueMetrics
from baton_kv.contract import Transfer, TransferFailure, TransferOutcome

OTHER = "other"
NOBODY = "none"
"""In a tenant's place: the request came without a valid key."""
"""The label value for what is not in a closed list: labels never grow with traffic."""

FAILURES = tuple(kind for kind in TransferFailure if kind is not TransferFailure.GIVEN_UP)
"""What counts as a failed transfer; a client that went away does not."""

MAX_TENANTS = 256
"""More are counted together, as `other`."""

UNIT = re.compile(r"[a-z][a-z_]{0,31}")
MAX_UNITS = 8
"""What one engine's plugin may count in; more units are not counted."""

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

LAGS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class GatewayMetrics:
    """The `baton_*` series of one gateway, in a registry of their own."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self.registry = registry
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
            "Clients that went away before their answer ended.",
            ("phase",),
            registry=registry,
        )
        self.stripped = Counter(
            "baton_stripped_fields_total",
            "Request fields that would steer the engine past the gateway, dropped.",
            ("field",),
            registry=registry,
        )
        self.engines = FleetMetrics(registry)
        self.admission = AdmissionMetrics(registry)
        self.bodies = Gauge(
            "baton_bodies_bytes",
            "Bytes that the bodies of requests under way hold.",
            ("place",),
            registry=registry,
        )
        self.queues = QueueMetrics(registry)
        self.memory = Gauge(
            "baton_memory_available_bytes",
            "Memory this process can still get; NaN where that cannot be known.",
            registry=registry,
        )
        self.loop_lag = Histogram(
            "baton_event_loop_lag_seconds",
            "How late the event loop came back to a task that had slept.",
            buckets=LAGS,
            registry=registry,
        )
        self.tenants = TenantMetrics(registry)
        self.handoffs = HandoffMetrics(registry)
        self.pooling = PoolingMetrics(registry)
        self.images = ImageMetrics(registry)
        Info("baton_build", "What is running.", registry=registry).info(
            {"version": __version__, "python": platform.python_version()}
        )


class TenantMetrics:
    """The series of who asks. Tenants are the operator's: there are as many as have keys, and at most so many
    are told apart.
    """

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
            "Tokens engines were given as prompts, and generated.",
            ("tenant", "kind"),
            registry=registry,
        )

    def count(self, tenant: str, code_class: str, *, prompt_tokens: int, generated_tokens: int) -> None:
        """One request that is over."""
        if tenant not in self._known:
            if len(self._known) >= MAX_TENANTS:
                tenant = OTHER
            self._known.add(tenant)
        self._requests.labels(tenant, code_class).inc()
        if prompt_tokens or generated_tokens:
            self._tokens.labels(tenant, "prompt").inc(prompt_tokens)
            self._tokens.labels(tenant, "generated").inc(generated_tokens)


class FleetMetrics:
    """The series of the engines' lives."""

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
            "Attempts to start an engine anew, by what it was lost to.",
            ("engine", "reason"),
            registry=registry,
        )
        self.stalled = Gauge(
            "baton_engine_last_progress_seconds",
            "Seconds since an engine with work last got on with it; 0 without work.",
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
    """The relay's series."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.created = Counter("baton_handoff_created_total", "Handoffs left behind.", registry=registry)
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
            "Prefill time that starting from handoffs saved, estimated by each engine's own rate.",
            registry=registry,
        )
        self.decisions = Counter(
            "baton_handoff_decisions_total",
            "What the planner decided about a handoff's KV.",
            ("decision",),
            registry=registry,
        )
        self.expired = Counter(
            "baton_handoff_expired_total", "Handoffs whose time was over.", registry=registry
        )
        self.kept = Gauge("baton_handoffs", "Handoffs there are.", registry=registry)
        self.store_bytes = Gauge(
            "baton_store_bytes", "Bytes all entries, images and records take.", registry=registry
        )
        self.store_budget = Gauge(
            "baton_store_budget_bytes", "Bytes that all entries may take.", registry=registry
        )


class ImageMetrics:
    """The series of images in requests."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.images = Counter(
            "baton_images_total",
            "Images in requests, by whether they could be read, and as what they were refused.",
            ("outcome",),
            registry=registry,
        )
        for outcome in ("read", "invalid_image", "image_too_large", "image_fetch_failed", OTHER):
            self.images.labels(outcome)
        self.rewritten = Counter(
            "baton_images_rewritten_total",
            "Images that were turned upright or given another mode; the others go on as they came.",
            registry=registry,
        )
        self.bytes = Counter("baton_image_bytes_total", "Bytes of the images read.", registry=registry)
        self.seconds = Histogram(
            "baton_image_read_seconds",
            "Seconds from an image's turn until it was read or refused, fetching included.",
            buckets=SECONDS,
            registry=registry,
        )


class PoolingMetrics:
    """The series of requests that go through an IO processor plugin."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "baton_pooling_requests_total",
            "Requests through an IO processor plugin, by how they ended.",
            ("engine", "outcome"),
            registry=registry,
        )
        self.running = Gauge(
            "baton_pooling_requests_running",
            "Requests a plugin works on now.",
            ("engine",),
            registry=registry,
        )
        self.seconds = Histogram(
            "baton_pooling_step_duration_seconds",
            "Seconds a request spent in one step; encode is with what the plugin does to outputs.",
            ("engine", "step"),
            buckets=SECONDS,
            registry=registry,
        )
        self.prompts = Counter(
            "baton_pooling_prompts_total",
            "Prompts that plugins made of requests.",
            ("engine",),
            registry=registry,
        )
        self._units: dict[str, set[str]] = {}
        self._amounts = Counter(
            "baton_pooling_amounts_total",
            "What answers amounted to, as their plugin counts it; pixels, for scenes.",
            ("engine", "unit"),
            registry=registry,
        )
        self.left_behind = Gauge(
            "baton_pooling_threads_left_behind",
            "Threads still in a plugin's code though their request is over.",
            ("engine",),
            registry=registry,
        )

    def count_amounts(self, engine: str, amounts: Mapping[str, float]) -> None:
        """Add what one answer amounts to.

        Raises:
            ValueError: a unit that is no plain word, one too many, or an amount that is no size.
        """
        units = self._units.setdefault(engine, set())
        for unit, amount in amounts.items():
            if not UNIT.fullmatch(unit) or not math.isfinite(amount) or amount < 0:
                raise ValueError("an amount is not a plain word and a number from zero up")
            if unit not in units and len(units) >= MAX_UNITS:
                raise ValueError(f"amounts in more than {MAX_UNITS} units")
            units.add(unit)
            self._amounts.labels(engine, unit).inc(amount)


class TransferMetrics:
    """What one engine moves to and from the store, as its connector reports it."""

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
            "Loads whose request was gone before they ended.",
            ("engine",),
            registry=registry,
        )
        self._errors = Counter(
            "baton_store_errors_total",
            "Loads and saves that failed; what they were for was computed instead.",
            ("engine", "op", "kind"),
            registry=registry,
        )
        for operation in Transfer:  # from zero: a first failure is a rise then, and seen
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
        """So many images more went through the model's encoder: they were in no cache, and not loaded."""
        self._encoded.labels(self._engine).inc(images)

    def thought(self, steps: int, seconds: float) -> None:
        """Latent steps that were computed, of several requests at once too, and how long they took."""
        self._latent_steps.labels(self._engine).inc(steps)
        self._latent_seconds.labels(self._engine).inc(seconds)

    def count(self, outcome: TransferOutcome) -> None:
        """Count how one transfer ended."""
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
