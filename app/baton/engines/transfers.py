"""Describe the KV that an engine loads and saves beside a request, and measure how fast it does so."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median, median_low
from typing import Protocol
from weakref import WeakValueDictionary

from baton.images.image import PlacedImage, with_distinct_images
from baton.telemetry.metrics import TransferMetrics
from baton_kv.contract import Mixture, MovedPart, Transfer, TransferFailure, TransferOutcome
from baton_kv.format import ImageRef

PREFILLS_KEPT = 5
LATENT_KEPT = 5
LOADS_KEPT = 3
MIN_PREFILL_TOKENS = 64
"""Shorter prefills are not measured: the engine's fixed cost of a step dominates them."""
UNKNOWN_STEP_S = 1.0
"""Seconds assumed for a latent step before the first one was measured."""
OUR_ID = re.compile(r"[0-9a-f]{32}")
"""Baton's request id, which is in the middle of the id that vLLM derives from it."""


@dataclass(eq=False)
class TransferReport:
    """The report of a request with a handoff. Only the engine writes it.

    Attributes:
        prompt_ids: the prompt's token ids, once known.
        output_ids: the token ids generated so far.
        answer_ids: the answer's token ids as its client received it: those that the engine generated, without
            what stopped it; None: no token ids say what the client received. Of a request that saves its
            answer alone.
        images: where images stand in the prompt, once known.
        cached: number of prompt tokens that the engine did not prefill.
        loaded: number of tokens that a load brought, with those moved and those computed between them; None:
            nothing was loaded. Of several, after a preemption or for several answers, the one that moved and
            brought most.
        moved: number of these tokens whose KV was moved from another place.
        computed: number of these tokens that were computed between moved ones.
        lost_entries: the entries named in the request that could not be used, and why.
        lost: number of tokens whose KV is in the entry but could not be loaded.
        load_ms: milliseconds that the load took.
        saves: False once the engine has reported that it saves nothing.
        miss: why the entry could not be used; None: it could, or there was none.
        first_token: raw log probabilities of the likeliest tokens at the first place of the answer, by token
            id; empty unless the request is audited.
        save_over: set when the engine has reported the save's outcome, good or bad.
    """

    prompt_ids: list[int] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    answer_ids: list[int] | None = None
    images: Sequence[ImageRef] = ()
    cached: int = 0
    loaded: int | None = None
    moved: int = 0
    computed: int = 0
    lost_entries: dict[str, TransferFailure] = field(default_factory=dict)
    lost: int = 0
    load_ms: float = 0.0
    saves: bool = True
    miss: TransferFailure | None = None
    first_token: dict[int, float] = field(default_factory=dict)
    save_over: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def distinct_prompt(self) -> Sequence[int]:
        """The prompt's token ids, in which other images are other numbers; see `with_distinct_images`."""
        return with_distinct_images(self.prompt_ids, self.images)

    @property
    def in_place(self) -> int:
        """Number of tokens whose KV was loaded from the entry to the place that it was computed at."""
        return (self.loaded or 0) - self.moved - self.computed


@dataclass(frozen=True, eq=False)
class TransferRequest:
    """A transfer that an engine is asked for beside a request's body: its prompt, KV to load and to save.

    Attributes:
        prompt: token ids of the whole prompt, in place of the body's; None: the body's prompt is used.
        images: the images that the prompt holds, in order.
        save: key of the entry to save the KV as; None: nothing is saved.
        prompt_only: whether to save the prompt's KV without the answer's.
        load: key of the entry to load KV from; None: nothing is loaded.
        limit: most tokens to load; None: all.
        moved: KV of other entries that follows those tokens, each moved to its place.
        salt: sets the engine's prefix cache apart for this request alone; None: that of its tenant is used.
        least: fewest tokens to save beyond those that `load` holds; with fewer, nothing is saved.
        latent_steps: number of latent-step placeholders in the prompt.
        mixture: input of the prompt's first position, which is one of these placeholders; None: none is.
        audited: whether the report needs `first_token`.
        computed: whether all of the prompt is computed, without the engine's prefix cache.
        report: filled in by the engine with what happened.
    """

    prompt: list[int] | None = None
    images: Sequence[PlacedImage] = ()
    save: str | None = None
    prompt_only: bool = False
    load: str | None = None
    limit: int | None = None
    moved: Sequence[MovedPart] = ()
    salt: str | None = None
    least: int = 0
    latent_steps: int = 0
    mixture: Mixture | None = None
    audited: bool = False
    computed: bool = False
    report: TransferReport = field(default_factory=TransferReport)

    @property
    def moves_kv(self) -> bool:
        """True if KV is saved, loaded or mixed, so that the connector is told; else it brings a prompt."""
        return self.save is not None or self.load is not None or self.mixture is not None

    @property
    def saves_answer(self) -> bool:
        """True if the answer is saved behind its prompt."""
        return self.save is not None and not self.prompt_only


class TransferChooser(Protocol):
    """Chooses a transfer for each prompt of one request, when its token ids are known."""

    def choose(
        self, prompt: Sequence[int], images: Sequence[ImageRef] = (), *, loads: bool, saves: bool
    ) -> TransferRequest | None:
        """Choose the KV to load and save beside a prompt; None: none.

        Args:
            prompt: token ids of the whole prompt.
            images: those in it, in order; prompts that hold other media are not asked about.
            loads: whether the engine may start from loaded KV for it.
            saves: whether the engine may save it: not with several answers at once (`n`).
        """
        ...

    def ended(self, transfer: TransferRequest) -> None:
        """Note that the answer is complete, and with it the transfer's report."""
        ...


LEAST_LOADS = 2
"""KV is loaded until so many loads were measured: a single one may have waited for a busy processor."""


class Throughput:
    """Medians of the last few measurements: one outlier changes nothing, a lasting change shows soon.

    Of two loads it is the faster one: outliers are slow, as where a processor was busy elsewhere.

    Attributes:
        loads: number of loads measured so far.
    """

    def __init__(self) -> None:
        self.loads = 0
        self._prefills: deque[float] = deque(maxlen=PREFILLS_KEPT)
        self._loads: deque[float] = deque(maxlen=LOADS_KEPT)
        self._latent: deque[float] = deque(maxlen=LATENT_KEPT)
        self._moves: deque[float] = deque(maxlen=LOADS_KEPT)

    def prefilled(self, tokens: int, seconds: float) -> None:
        """Record a prefill of `tokens` tokens that took `seconds`."""
        if tokens >= MIN_PREFILL_TOKENS and seconds > 0:
            self._prefills.append(seconds / tokens)

    def loaded(self, size: int, seconds: float) -> None:
        """Record a load of `size` bytes of KV that took `seconds`."""
        if size > 0 and seconds > 0:
            self.loads += 1
            self._loads.append(seconds / size)

    def moved(self, tokens: int, seconds: float) -> None:
        """Record a load of `tokens` tokens, most of them moved to another place, that took `seconds`."""
        if tokens >= MIN_PREFILL_TOKENS and seconds > 0:
            self._moves.append(seconds / tokens)

    def move_s(self, tokens: int) -> float | None:
        """Estimate the seconds to move `tokens` tokens, with what is computed between; None: not known."""
        return median_low(self._moves) * tokens if self._moves else None

    def load_failed(self, size: int, seconds: float) -> None:
        """Record a load of `size` bytes that failed after `seconds`, if it was slower than expected.

        A quick failure is no measurement of the store; a slow one is.
        """
        expected = self.load_s(size)
        if expected is None or seconds > expected:
            self.loaded(size, seconds)

    def latent_computed(self, steps: int, seconds: float) -> None:
        """Record `steps` latent steps that took `seconds`."""
        if steps > 0 and seconds > 0:
            self._latent.append(seconds / steps)

    def prefill_s(self, tokens: int, steps: int = 0) -> float | None:
        """Estimate the seconds to compute `tokens` tokens, `steps` of them latent; None: not known yet."""
        latent = self.latent_s(steps) if steps else 0.0
        if latent is None or not self._prefills:
            return None
        return median(self._prefills) * (tokens - steps) + latent

    def latent_s(self, steps: int) -> float | None:
        """Estimate the seconds that `steps` latent steps take; None: not known yet."""
        return median(self._latent) * steps if self._latent else None

    def load_s(self, size: int) -> float | None:
        """Estimate the seconds to load `size` bytes of KV; None: not known yet."""
        return median_low(self._loads) * size if self._loads else None


class TransferWatch:
    """A writer of the engine's reports into the `TransferReport` of the request they belong to.

    It holds requests weakly: a report about a request that nobody else holds is only counted and measured.

    Args:
        throughput: receives how long loads, prefills and latent steps took.
    """

    def __init__(self, throughput: Throughput, transfers: TransferMetrics) -> None:
        self._throughput = throughput
        self._transfers = transfers
        self._requests: WeakValueDictionary[str, TransferRequest] = WeakValueDictionary()

    def add(self, request_id: str, request: TransferRequest) -> None:
        """Expect reports about the request with this id."""
        self._requests[request_id] = request

    def transferred(self, outcomes: Iterable[TransferOutcome]) -> None:
        """Count and measure transfers that ended, and note each in its request's report."""
        for outcome in outcomes:
            self._transfers.count(outcome)
            request = self._requests.get(outcome.tag or "")
            if outcome.moved:
                if outcome.failure is None:
                    self._throughput.moved(outcome.moved + outcome.computed, outcome.seconds)
            elif outcome.kind is Transfer.LOAD and outcome.failure is not TransferFailure.GIVEN_UP:
                failed = outcome.failure is not None
                measured = self._throughput.load_failed if failed else self._throughput.loaded
                measured(outcome.bytes, outcome.seconds)
            if request is not None:
                _note(request, outcome)

    def latent_computed(self, steps: int, seconds: float) -> None:
        """Count and measure latent steps that the engine computed, perhaps for several requests at once."""
        self._transfers.thought(steps, seconds)
        self._throughput.latent_computed(steps, seconds)

    @property
    def saving(self) -> bool:
        """True if a request that somebody holds saves KV, whose end was not reported yet."""
        reports = [request.report for request in self._requests.values() if request.save is not None]
        return any(report.saves and not report.save_over.is_set() for report in reports)

    @property
    def longest_latent_s(self) -> float:
        """Seconds that one engine step may take now because of latent steps: all of a prompt may be in it."""
        most = max((request.latent_steps for request in self._requests.values()), default=0)
        known = self._throughput.latent_s(most)
        return most * UNKNOWN_STEP_S if known is None else known

    def prefilled(self, request_id: str, tokens: int, seconds: float) -> None:
        """Measure a finished request's prefill; not with latent steps, which take longer than tokens."""
        named = OUR_ID.search(request_id)
        request = self._requests.get(named[0]) if named else None
        if request is None or not request.latent_steps:
            self._throughput.prefilled(tokens, seconds)


def _note(request: TransferRequest, outcome: TransferOutcome) -> None:
    report = request.report
    if outcome.kind is Transfer.SAVE:
        report.save_over.set()
        return
    if outcome.failure is not None and outcome.key:
        report.lost_entries[outcome.key] = outcome.failure
    if outcome.kind is Transfer.LOOK:
        if outcome.key in ("", request.load):
            report.miss = outcome.failure
        return
    report.load_ms = outcome.seconds * 1000
    if outcome.failure is not None:
        report.lost = outcome.tokens
    elif report.loaded is None or (outcome.moved, outcome.tokens) >= (report.moved, report.loaded):
        report.loaded, report.moved, report.computed = outcome.tokens, outcome.moved, outcome.computed
