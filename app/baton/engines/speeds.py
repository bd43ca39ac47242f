"""Measure how fast an engine prefills and loads KV."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from statistics import median
from weakref import WeakValueDictionary

from baton.engines.kv_transfer import TransferRequest
from baton.telemetry.metrics import TransferMetrics
from baton_kv.contract import Transfer, TransferFailure, TransferOutcome

# Estimate how fast one engine prefills, computes latent steps and loads KV, from its latest measurements.


PREFILLS_KEPT = 5
LATENT_KEPT = 5
LOADS_KEPT = 3
MIN_PREFILL_TOKENS = 64
"""Shorter prefills are not measured: the engine's fixed cost of a step dominates them."""


class Throughput:
    """Medians of the last few measurements: one outlier changes nothing, a lasting change shows soon.

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
        return median(self._moves) * tokens if self._moves else None

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
        return median(self._loads) * size if self._loads else None


# Match an engine's reports of loads, saves and prefills to the requests they belong to.


UNKNOWN_STEP_S = 1.0
"""Seconds assumed for a latent step before the first one was measured."""
OUR_ID = re.compile(r"[0-9a-f]{32}")
"""Baton's request id, which is in the middle of the id that vLLM derives from it."""


class TransferWatch:
    """A writer of the engine's reports into the `TransferReport` of the request they belong to.

    It holds requests weakly: a report about a request that nobody else holds is only counted and measured.

    Args:
        throughput: receives how long loads, prefills and latent steps took.
        transfers: metrics that count transfers and latent steps.
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
