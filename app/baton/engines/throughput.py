"""How fast one engine computes and loads, told by what it did lately."""

from __future__ import annotations

from collections import deque
from statistics import median

PREFILLS_KEPT = 5
THOUGHTS_KEPT = 5
LOADS_KEPT = 3
MIN_PREFILL_TOKENS = 64
"""Shorter prefills are mostly the engine's own step."""


class Throughput:
    """Medians of the last few measurements: one odd one changes nothing, a lasting change shows soon."""

    def __init__(self) -> None:
        self._prefills: deque[float] = deque(maxlen=PREFILLS_KEPT)
        self._loads: deque[float] = deque(maxlen=LOADS_KEPT)
        self._thoughts: deque[float] = deque(maxlen=THOUGHTS_KEPT)

    def prefilled(self, tokens: int, seconds: float) -> None:
        """The engine computed so many tokens of a prompt in so long."""
        if tokens >= MIN_PREFILL_TOKENS and seconds > 0:
            self._prefills.append(seconds / tokens)

    def loaded(self, size: int, seconds: float) -> None:
        """The engine loaded so many bytes of KV in so long."""
        if size > 0 and seconds > 0:
            self._loads.append(seconds / size)

    def load_failed(self, size: int, seconds: float) -> None:
        """A load of so many bytes failed after so long: a quick failure tells nothing, a slow one does."""
        expected = self.load_s(size)
        if expected is None or seconds > expected:
            self.loaded(size, seconds)

    def thought(self, steps: int, seconds: float) -> None:
        """The engine computed so many latent steps in so long."""
        if steps > 0 and seconds > 0:
            self._thoughts.append(seconds / steps)

    def prefill_s(self, tokens: int, steps: int = 0) -> float | None:
        """Seconds that computing so many tokens takes, of which `steps` are latent; None: not known yet."""
        thinking = self.think_s(steps) if steps else 0.0
        if thinking is None or not self._prefills:
            return None
        return median(self._prefills) * (tokens - steps) + thinking

    def think_s(self, steps: int) -> float | None:
        """Seconds that so many latent steps take; None: not known yet."""
        return median(self._thoughts) * steps if self._thoughts else None

    def load_s(self, size: int) -> float | None:
        """Seconds that loading so many bytes takes; None: not known yet."""
        return median(self._loads) * size if self._loads else None
