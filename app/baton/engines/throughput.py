"""Estimate how fast one engine prefills, computes latent steps and loads KV, from its latest measurements."""

from __future__ import annotations

from collections import deque
from statistics import median

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
