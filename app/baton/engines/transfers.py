"""What an engine tells of the requests that are part of a relay, and what it shows of its speed."""

from __future__ import annotations

import re
from weakref import WeakValueDictionary

from baton.engines.port import Json, Relay
from baton.engines.throughput import Speed
from baton.telemetry.metrics import FAILURES, OTHER, TransferMetrics

UNKNOWN_STEP_S = 1.0
"""A latent step is thought to take so long until the first ones have been seen."""
OUR_ID = re.compile(r"[0-9a-f]{32}")
"""A request's id of ours, in the middle of the one that vLLM makes of it."""


class RelayWatch:
    """Finds the relay that an engine's report is about, for as long as anyone else holds it.

    Args:
        speed: told how long loads and prefills took.
        transfers: where they are counted.
    """

    def __init__(self, speed: Speed, transfers: TransferMetrics) -> None:
        self._speed = speed
        self._transfers = transfers
        self._relays: WeakValueDictionary[str, Relay] = WeakValueDictionary()

    def add(self, request_id: str, relay: Relay) -> None:
        """A request of ours is part of a relay."""
        self._relays[request_id] = relay

    def transferred(self, outcomes: list[Json]) -> None:
        """What the connector reported."""
        for outcome in outcomes:
            self._transfers.count(outcome)
            relay = self._relays.get(outcome["tag"] or "")
            if outcome["kind"] == "load" and outcome["failure"] != "GivenUp":
                measured = self._speed.loaded if outcome["failure"] is None else self._speed.load_failed
                measured(outcome["bytes"], outcome["seconds"])
            if relay is not None:
                _note(relay, outcome)

    def thought(self, steps: int, seconds: float) -> None:
        """Latent steps that were computed, of several requests at once too."""
        self._transfers.thought(steps, seconds)
        self._speed.thought(steps, seconds)

    @property
    def longest_thought_s(self) -> float:
        """Seconds that one step of the engine may take now: all latent steps of a prompt may be in it."""
        most = max((relay.latent_steps for relay in self._relays.values()), default=0)
        known = self._speed.think_s(most)
        return most * UNKNOWN_STEP_S if known is None else known

    def prefilled(self, request_id: str, tokens: int, seconds: float) -> None:
        """What a finished request's prefill took; one that thought took longer than its tokens tell."""
        named = OUR_ID.search(request_id)
        relay = self._relays.get(named[0]) if named else None
        if relay is None or not relay.latent_steps:
            self._speed.prefilled(tokens, seconds)


def _note(relay: Relay, outcome: Json) -> None:
    if outcome["kind"] == "save":
        relay.save_over.set()
        return
    if outcome["kind"] == "look":
        relay.miss = FAILURES.get(outcome["failure"], OTHER)
        return
    relay.load_ms = outcome["seconds"] * 1000
    if outcome["failure"] is None:
        relay.loaded = outcome["tokens"]
    else:
        relay.lost = outcome["tokens"]
