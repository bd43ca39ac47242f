"""Define every metric of the gateway."""

from __future__ import annotations

import math
import platform
import re
from collections.abc import Mapping
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

from baton import __version__
from baton_kv.contract import Transfer, TransferFailure, TransferOutcome

OTHER = "other"
"""The label value for what is not in a closed list: the number of series never grows with traffic."""
NOBODY = "none"
"""The tenant label of requests without a valid key."""

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper bounds of the buckets of durations."""


class AdmissionMetrics:
    """The series of the queues for engines."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.waiting = Gauge(
            "baton_admission_waiting", "Requests that wait for the engine.", ("engine",), registry=registry
        )
        self.running = Gauge(
            "baton_admission_running", "Requests that the engine works on.", ("engine",), registry=registry
        )
        self.seconds = Histogram(
            "baton_admission_wait_seconds",
            "Seconds that requests waited for the engine, of those that it took.",
            ("engine",),
            buckets=SECONDS,
            registry=registry,
        )


class QueueMetrics:
    """The series of all other queues: plugins, uploads, images, large bodies.

    The label `engine` is empty for a queue that all engines share.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("queue", "engine")
        self.waiting = Gauge(
            "baton_queue_waiting",
            "Requests, or parts of them, that wait for a place.",
            labels,
            registry=registry,
        )
        self.running = Gauge("baton_queue_running", "Places that are taken.", labels, registry=registry)
        self.seconds = Histogram(
            "baton_queue_wait_seconds",
            "Seconds waited for a place, of those that got one.",
            labels,
            buckets=SECONDS,
            registry=registry,
        )


class FarStoreMetrics:
    """The series of one store.

    Args:
        store: what the store is called in their descriptions.
        kinds: the kinds of errors, each with what it means; an empty text needs none.
    """

    def __init__(self, registry: CollectorRegistry, prefix: str, store: str, kinds: dict[str, str]) -> None:
        self._seconds = Histogram(
            f"{prefix}_op_duration_seconds",
            f"Seconds that an exchange with {store} took.",
            ("op",),
            buckets=SECONDS,
            registry=registry,
        )
        told = "; ".join(f"`{kind}`: {text}" if text else f"`{kind}`" for kind, text in kinds.items())
        self._errors = Counter(
            f"{prefix}_errors_total",
            f"Exchanges with {store} that failed, or were not used: {told}.",
            ("kind",),
            registry=registry,
        )
        for kind in kinds:
            self._errors.labels(kind)
        self._bytes = Counter(
            f"{prefix}_bytes_total",
            f"Bytes of KV and images that went to {store} (`push`) or came from it (`fetch`).",
            ("direction",),
            registry=registry,
        )
        for direction in ("push", "fetch"):
            self._bytes.labels(direction)
        self._up = Gauge(
            f"{prefix}_up",
            f"1 after an exchange with {store} that succeeded, 0 after one that failed, else NaN.",
            registry=registry,
        )
        self._up.set(math.nan)

    def count(self, operation: str, seconds: float) -> None:
        """Count an exchange that succeeded."""
        self._seconds.labels(operation).observe(seconds)
        self._up.set(1)

    def failed(self, kind: str) -> None:
        """Count an exchange that failed."""
        self._errors.labels(kind).inc()
        self._up.set(0)

    def not_used(self, kind: str) -> None:
        """Count an exchange that was not tried, or whose answer was not used."""
        self._errors.labels(kind).inc()

    def moved(self, direction: str, size: int) -> None:
        """Count bytes that were pushed or fetched."""
        self._bytes.labels(direction).inc(size)


ARCHIVE_ERRORS = {
    "timeout": "",
    "error": "",
    "refused": "its credentials do not allow it",
    "tampered": "an object is not what a gateway wrote",
    "resting": "it was left alone after failures",
}


class ArchiveMetrics(FarStoreMetrics):
    """The series of the archive.

    Attributes:
        waiting: handoffs that are to be written.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry, "baton_archive", "the archive", ARCHIVE_ERRORS)
        self._handoffs = Counter(
            "baton_archive_handoffs_total",
            "Handoffs that were `written` to the archive, `found` there, `deleted` or `expired` there, or "
            "not written for now (`failed`).",
            ("what",),
            registry=registry,
        )
        for what in ("written", "found", "deleted", "expired", "failed"):
            self._handoffs.labels(what)
        self.waiting = Gauge(
            "baton_archive_waiting", "Handoffs that are to be written to the archive.", registry=registry
        )

    def handoff(self, what: str) -> None:
        """Count what became of a handoff."""
        self._handoffs.labels(what).inc()


STORE_ERRORS = {
    "timeout": "",
    "full": "",
    "error": "",
    "resting": "it was left alone after failures",
    "unreadable": "a value that no gateway of the pool wrote, which was left out",
}


class SharedStoreMetrics(FarStoreMetrics):
    """The series of the shared store."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry, "baton_shared_store", "the shared store", STORE_ERRORS)


NATS = (1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Upper bounds of the buckets of a log probability's difference, in nats."""


class AuditResult(StrEnum):
    """The result of an audit."""

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


class ImageMetrics:
    """The series of images in requests."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.images = Counter(
            "baton_images_total",
            "Images in requests: read, or the error code they were refused with.",
            ("outcome",),
            registry=registry,
        )
        for outcome in ("read", "invalid_image", "image_too_large", "image_fetch_failed", OTHER):
            self.images.labels(outcome)
        self.rewritten = Counter(
            "baton_images_rewritten_total",
            "Images that were turned upright or given another mode before an engine got them.",
            registry=registry,
        )
        self.bytes = Counter("baton_image_bytes_total", "Bytes of the images read.", registry=registry)
        self.seconds = Histogram(
            "baton_image_read_seconds",
            "Seconds until an image was read or refused, with waiting and fetching.",
            buckets=SECONDS,
            registry=registry,
        )


UNIT = re.compile(r"[a-z][a-z_]{0,31}")
MAX_UNITS = 8
"""Units that one engine's plugin may count in; further units are an error."""


class PoolingMetrics:
    """The series of plugin requests."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "baton_pooling_requests_total",
            "Requests through an IO processor plugin, by how they ended.",
            ("engine", "outcome"),
            registry=registry,
        )
        self.running = Gauge(
            "baton_pooling_requests_running",
            "Requests that a plugin works on now.",
            ("engine",),
            registry=registry,
        )
        self.seconds = Histogram(
            "baton_pooling_step_duration_seconds",
            "Seconds that requests spent in a step; `encode` includes the plugin's work on outputs.",
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
            "Amounts of answers, in the plugin's own units: pixels, for scenes.",
            ("engine", "unit"),
            registry=registry,
        )
        self.left_behind = Gauge(
            "baton_pooling_threads_left_behind",
            "Threads that still run a plugin's code though their request is over.",
            ("engine",),
            registry=registry,
        )

    def count_amounts(self, engine: str, amounts: Mapping[str, float]) -> None:
        """Add the amounts of one answer.

        Raises:
            ValueError: a unit is no plain word, there are more than `MAX_UNITS`, or an amount is negative or
                infinite.
        """
        units = self._units.setdefault(engine, set())
        for unit, amount in amounts.items():
            if not UNIT.fullmatch(unit) or not math.isfinite(amount) or amount < 0:
                raise ValueError("an amount is not a plain word and a number from zero up")
            if unit not in units and len(units) >= MAX_UNITS:
                raise ValueError(f"amounts in more than {MAX_UNITS} units")
            units.add(unit)
            self._amounts.labels(engine, unit).inc(amount)


OUTCOMES = ("answered", "refused", "busy", "failed", "unreachable", "timeout", "cancelled")


class RemoteMetrics:
    """The series of one engine that is a server elsewhere."""

    def __init__(self, registry: CollectorRegistry, engine: str) -> None:
        self._engine = engine
        self._requests = Counter(
            "baton_remote_requests_total",
            "Requests that were sent on to the server at an engine's `url`.",
            ("engine", "outcome"),
            registry=registry,
        )
        for outcome in OUTCOMES:
            self._requests.labels(engine, outcome)
        self._first_byte = Histogram(
            "baton_remote_first_byte_seconds",
            "Seconds until that server's answer began.",
            ("engine",),
            buckets=SECONDS,
            registry=registry,
        )
        self._first_byte.labels(engine)

    def count(self, outcome: str) -> None:
        """Count a request that is over."""
        self._requests.labels(self._engine, outcome).inc()

    def began(self, seconds: float) -> None:
        """Count an answer that has begun."""
        self._first_byte.labels(self._engine).observe(seconds)


class ResponseMetrics:
    """The series of stored responses."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.stored = Counter(
            "baton_responses_stored_total",
            "Answers of `/v1/responses` that were to be stored: `stored`, or `not_stored` for want of room.",
            ("result",),
            registry=registry,
        )
        for result in ("stored", "not_stored"):
            self.stored.labels(result)
        self.number = Gauge("baton_responses", "Stored responses.", registry=registry)
        self.bytes = Gauge("baton_responses_bytes", "Bytes that stored responses take.", registry=registry)


class BatchMetrics:
    """The series of files and batches."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.ended = Counter(
            "baton_batches_ended_total",
            "Batches that ended, by the status they ended with.",
            ("status",),
            registry=registry,
        )
        for status in ("completed", "failed", "expired", "cancelled"):
            self.ended.labels(status)
        self.running = Gauge(
            "baton_batches_running", "Batches that this gateway reads, runs or writes out.", registry=registry
        )
        self.lines = Counter(
            "baton_batch_lines_total",
            "Lines of batches: `completed`, `failed`; or begun and ended without an answer, to begin again "
            "later: `gave_way` to a client's request, `put_off` because the engine refused them for now.",
            ("result",),
            registry=registry,
        )
        for result in ("completed", "failed", "gave_way", "put_off"):
            self.lines.labels(result)
        self.files = Gauge("baton_files", "Files that are kept for clients.", registry=registry)
        self.bytes = Gauge(
            "baton_files_bytes",
            "Bytes of these files, and of answers that are in no file yet.",
            registry=registry,
        )


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
            "baton_http_requests_in_flight", "Requests being answered now.", ("route",), registry=registry
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
        self.on_demand = OnDemandMetrics(registry)
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
        self.usage = UsageMetrics(registry)
        self.handoffs = HandoffMetrics(registry)
        self.audits = AuditMetrics(registry)
        self.shared_store = SharedStoreMetrics(registry)
        self.archive = ArchiveMetrics(registry)
        self.responses = ResponseMetrics(registry)
        self.batches = BatchMetrics(registry)
        self.events = EventMetrics(registry)
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


class UsageMetrics:
    """The series of what is done with usage and settings."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.unwritten = Gauge(
            "baton_usage_unwritten",
            "Rows of usage that are counted and not in the file yet; it stays up while the file cannot be "
            "written.",
            registry=registry,
        )
        self.reloads = Counter(
            "baton_settings_reloads_total",
            "Times that the settings were read again, by what came of it.",
            ("outcome",),
            registry=registry,
        )
        self.unaudited = Counter(
            "baton_audit_lines_lost_total",
            "Lines that could not be written to the audit log.",
            registry=registry,
        )


class FleetMetrics:
    """The series of the engines' states, starts and restarts."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.up = Gauge(
            "baton_engine_up",
            "1 while the engine answers, or would be loaded for a request.",
            ("engine",),
            registry=registry,
        )
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
        self.acts = Counter(
            "baton_operator_acts_total",
            "Starts, stops and restarts of an engine that operators asked for.",
            ("engine", "act"),
            registry=registry,
        )

    def forget(self, engine: str) -> None:
        """Show an engine no longer that was removed; what was counted stays."""
        for gauge in (self.up, self.state, self.stalled, self.start):
            gauge.remove_by_labels({"engine": engine})


class OnDemandMetrics:
    """The series of engines that come and go, and of requests that went elsewhere.

    Those of memory are there once an engine is on demand.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.loads = Counter(
            "baton_engine_loads_total",
            "Starts of engines on demand that ended: `ready`, `failed`.",
            ("engine", "outcome"),
            registry=registry,
        )
        self.unloads = Counter(
            "baton_engine_unloads_total",
            "Engines on demand that were unloaded: `idle`, for another's `room`, or because engines took "
            "more than the `budget`.",
            ("engine", "reason"),
            registry=registry,
        )
        self.wait = Histogram(
            "baton_engine_load_wait_seconds",
            "Seconds that requests waited for their engine to be loaded, of those that got it.",
            ("engine",),
            buckets=SECONDS,
            registry=registry,
        )
        self.waiting = Gauge(
            "baton_engine_load_waiting",
            "Requests that wait for their engine to be loaded.",
            ("engine",),
            registry=registry,
        )
        self.budget = Gauge(
            "baton_memory_budget_bytes",
            "Bytes that all engines may take together: of `memory`, or of each GPU.",
            ("place",),
            registry=registry,
        )
        self.memory = Gauge(
            "baton_memory_budget_held_bytes",
            "Bytes of the budget that the engine holds.",
            ("engine",),
            registry=registry,
        )
        self.fallbacks = Counter(
            "baton_fallbacks_total",
            "Requests that another engine answered by `engines.fallback`, by the reason.",
            ("engine", "to", "reason"),
            registry=registry,
        )

    def forget(self, engine: str) -> None:
        """Show an engine no longer that is not on demand any more; what was counted stays."""
        for gauge in (self.memory, self.waiting):
            gauge.remove_by_labels({"engine": engine})


class EventMetrics:
    """The series of `/v1/events`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.streams = Gauge("baton_event_streams", "Streams of events that are open.", registry=registry)
        self.events = Counter(
            "baton_events_total",
            "Events that tenants who listen were told of, by their type.",
            ("type",),
            registry=registry,
        )
        self.dropped = Counter(
            "baton_event_streams_dropped_total",
            "Streams of events that ended because their client read too slowly.",
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
        self.streams_handed_on = Counter(
            "baton_streams_handed_on_total",
            "Streams that a drain ended: `left` as a handoff, or `inexact` or `not_kept` and not; and "
            "answers that went on with one (`went_on`).",
            ("outcome",),
            registry=registry,
        )
        for outcome in ("left", "inexact", "not_kept", "went_on"):
            self.streams_handed_on.labels(outcome)
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
    """The series of one engine's loads and saves, as its connector reports them, and of what went on."""

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
        self._resident = Counter(
            "baton_handoff_resident_bytes_total",
            "Bytes of loaded KV that the engine had in memory, verified before.",
            ("engine",),
            registry=registry,
        )
        self._resident.labels(engine)
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

        self._resumed = Counter(
            "baton_requests_resumed_total",
            "Requests that went on, at another engine or at this one, after this engine was lost under them.",
            ("engine",),
            registry=registry,
        )
        self._resumed.labels(engine)

    def resumed(self) -> None:
        """Count a request that went on after its engine was lost."""
        self._resumed.labels(self._engine).inc()

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
            self._resident.labels(self._engine).inc(outcome.resident)
