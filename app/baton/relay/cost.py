"""Decide whether to load a handoff's KV or to prefill it again, by the engine's measured throughput."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from baton.engines.engine import LocalEngine
from baton.engines.transfers import LEAST_LOADS
from baton.library.handoff import Handoff

IMAGE_S = 0.05
"""Encoding an image is assumed to take so many seconds; engines do not report how long it takes."""
MEASURE_EVERY = 2
"""Every so many recomputed requests, one loads a little, so that the loading rate stays measured."""
MEASURE_BYTES = 1024 * 1024
"""Bytes of KV that such a request loads."""
MEASURE_TRIES = 3
"""If so many of these brought no measurement, the next one loads all of its KV."""


MEASURE_MOVES_EVERY = 8
"""Every so many joins that were computed because that is faster, one is moved."""


class Choice(StrEnum):
    """The choice to load KV from the store, or to prefill it again."""

    LOAD = "load"
    RECOMPUTE = "recompute"


@dataclass(frozen=True)
class Decision:
    """The decision on one handoff's KV.

    Attributes:
        choice: load it, or prefill it again.
        limit: most tokens to load; None: all.
        load_s: estimated seconds to load all of it; None: not measured yet.
        prefill_s: estimated seconds to prefill all of it; None: not measured yet.
        fetch_s: estimated seconds to fetch it to this machine; None: it is here, or that is not known.
    """

    choice: Choice
    limit: int | None = None
    load_s: float | None = None
    prefill_s: float | None = None
    fetch_s: float | None = None

    @property
    def loads(self) -> bool:
        """True if any tokens are loaded: also of `RECOMPUTE`, a few, to measure how fast that is."""
        return self.limit != 0

    def public(self) -> dict[str, object]:
        """Return the fields of `handoff.source` that show the decision."""
        told: dict[str, object] = {
            "decision": self.choice.value,
            "estimated_load_ms": _ms(self.load_s),
            "estimated_prefill_ms": _ms(self.prefill_s),
        }
        if self.fetch_s is not None:
            told["estimated_fetch_ms"] = _ms(self.fetch_s)
        return told


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)


class LoadCost:
    """Decides for each request. KV that is resident in the engine is used whatever the decision."""

    def __init__(self) -> None:
        self._recomputed: Counter[str] = Counter()
        self._computed: Counter[str] = Counter()
        self._tries: dict[str, tuple[int, int]] = {}

    def decide(
        self,
        engine: LocalEngine,
        record: Handoff,
        tokens: int | None = None,
        fetch_s: float | None = None,
    ) -> Decision:
        """Decide whether an engine loads a handoff's KV or prefills it.

        Args:
            tokens: number of its first tokens that are of use; None: all.
            fetch_s: seconds to fetch its KV, which was not fetched as computing it is faster; None: it was,
                or was here.
        """
        tokens = len(record.tokens) if tokens is None else tokens
        steps = record.latent_steps if tokens == len(record.tokens) else record.steps_within(tokens)
        size = record.bytes * tokens // max(1, len(record.tokens))
        load_s = engine.throughput.load_s(size) if size else None
        prefill_s = engine.throughput.prefill_s(tokens, steps)
        if prefill_s is not None:
            prefill_s += IMAGE_S * sum(image.offset < tokens for image in record.image_positions)
        latent = record.latent_steps > 0  # recomputed latent steps may differ
        if fetch_s is not None:
            return Decision(Choice.RECOMPUTE, 0, load_s, prefill_s, fetch_s)
        if load_s is None or prefill_s is None or latent:
            return Decision(Choice.LOAD, None, load_s, prefill_s)
        if load_s <= prefill_s or engine.throughput.loads < LEAST_LOADS:
            self._recomputed[engine.name] = 0
            return Decision(Choice.LOAD, None, load_s, prefill_s)
        self._recomputed[engine.name] += 1
        limit = self._measure(engine, record) if self._recomputed[engine.name] % MEASURE_EVERY == 0 else 0
        return Decision(Choice.RECOMPUTE, limit, load_s, prefill_s)

    def saving(self, engine: LocalEngine, record: Handoff) -> float:
        """Estimate what loading a handoff's KV saves, to compare handoffs of one engine.

        Returns:
            Seconds; as long as they cannot be estimated, the number of tokens whose KV is stored.
        """
        if not record.bytes:
            return 0.0
        load_s = engine.throughput.load_s(record.bytes)
        prefill_s = engine.throughput.prefill_s(len(record.tokens), record.latent_steps)
        if load_s is None or prefill_s is None:
            return float(len(record.tokens))
        return max(0.0, prefill_s - load_s)

    def moves(self, engine: LocalEngine, tokens: int) -> bool:
        """Decide whether an engine moves KV of joined handoffs to its place or computes it, which is exact.

        Args:
            tokens: number of tokens behind the first handoff's.
        """
        move_s, prefill_s = engine.throughput.move_s(tokens), engine.throughput.prefill_s(tokens)
        if move_s is None or prefill_s is None or move_s <= prefill_s:
            self._computed[engine.name] = 0
            return True
        self._computed[engine.name] += 1
        return self._computed[engine.name] % MEASURE_MOVES_EVERY == 0  # so that the rate stays measured

    def _measure(self, engine: LocalEngine, record: Handoff) -> int | None:
        """Return how many tokens are loaded to measure the rate; None: all, as a few brought no measurement.

        Of a model with sliding windows nothing is loaded unless everything is.
        """
        loads, tries = self._tries.get(engine.name, (-1, 0))
        tries = tries + 1 if loads == engine.throughput.loads else 1
        self._tries[engine.name] = (engine.throughput.loads, tries)
        if tries > MEASURE_TRIES:
            return None
        return max(1, MEASURE_BYTES * len(record.tokens) // record.bytes)
