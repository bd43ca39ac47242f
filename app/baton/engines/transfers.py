"""Match an engine's reports of loads and saves to the requests they are about."""

from __future__ import annotations

import re
from collections.abc import Iterable
from weakref import WeakValueDictionary

from baton.engines.port import TransferReport, TransferRequest
from baton.engines.throughput import Throughput
from baton.telemetry.metrics import TransferMetrics
from baton_kv.contract import Transfer, TransferFailure, TransferOutcome

UNKNOWN_STEP_S = 1.0
"""A latent step is thought to take so long until the first ones have been seen."""
OUR_ID = re.compile(r"[0-9a-f]{32}")
"""A request's id of ours, in the middle of the one that vLLM makes of it."""


class TransferWatch:
    """Writes reports into the `TransferRequest` they are about, for as long as anyone else holds it.

    Args:
        throughput: told how long loads and prefills took.
        transfers: where they are counted.
    """

    def __init__(self, throughput: Throughput, transfers: TransferMetrics) -> None:
        self._throughput = throughput
        self._transfers = transfers
        self._requests: WeakValueDictionary[str, TransferRequest] = WeakValueDictionary()

    def add(self, request_id: str, request: TransferRequest) -> None:
        """Expect reports about a request of ours."""
        self._requests[request_id] = request

    def transferred(self, outcomes: Iterable[TransferOutcome]) -> None:
        """Take what the connector reported of transfers that ended."""
        for outcome in outcomes:
            self._transfers.count(outcome)
            request = self._requests.get(outcome.tag or "")
            if outcome.kind is Transfer.LOAD and outcome.failure is not TransferFailure.GIVEN_UP:
                failed = outcome.failure is not None
                measured = self._throughput.load_failed if failed else self._throughput.loaded
                measured(outcome.bytes, outcome.seconds)
            if request is not None:
                _note(request.report, outcome)

    def thought(self, steps: int, seconds: float) -> None:
        """Latent steps that were computed, of several requests at once too."""
        self._transfers.thought(steps, seconds)
        self._throughput.thought(steps, seconds)

    @property
    def longest_thought_s(self) -> float:
        """Seconds that one step of the engine may take now: all latent steps of a prompt may be in it."""
        most = max((request.latent_steps for request in self._requests.values()), default=0)
        known = self._throughput.think_s(most)
        return most * UNKNOWN_STEP_S if known is None else known

    def prefilled(self, request_id: str, tokens: int, seconds: float) -> None:
        """What a finished request's prefill took; one that thought took longer than its tokens tell."""
        named = OUR_ID.search(request_id)
        request = self._requests.get(named[0]) if named else None
        if request is None or not request.latent_steps:
            self._throughput.prefilled(tokens, seconds)


def _note(report: TransferReport, outcome: TransferOutcome) -> None:
    if outcome.kind is Transfer.SAVE:
        report.save_over.set()
        return
    if outcome.kind is Transfer.LOOK:
        report.miss = outcome.failure
        return
    report.load_ms = outcome.seconds * 1000
    if outcome.failure is None:
        report.loaded = outcome.tokens
    else:
        report.lost = outcome.tokens
