"""Seeds of the scenes for training, validation and evaluation; no seed is in two of the sets."""

from __future__ import annotations

from typing import Final

# The scene generator was developed on seeds below 1000: none of these was looked at before.
TRAINING_SEEDS: Final = range(1000, 1240)
VALIDATION_SEEDS: Final = range(5000, 5008)
HELD_OUT_SEEDS: Final = range(9100, 9124)
