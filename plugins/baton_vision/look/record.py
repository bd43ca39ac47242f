"""The model's card, `training.json`: what was run, on what, and what came of it."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from baton_vision.look.pictures import HELD_OUT_SEEDS, TRAINING_START, VALIDATION_SEEDS, make_sample

SHIPPED: Final = Path(__file__).parents[1] / "look_tiny"
CARD: Final = "training.json"
PACKAGES: Final = ("torch", "transformers", "numpy", "pillow", "safetensors")


def digest(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def pictures_digest(seeds: Sequence[int]) -> str:
    """SHA-256 over the pixels and the questions of some seeds: what the generator draws."""
    told = hashlib.sha256()
    for seed in seeds:
        sample = make_sample(seed)
        told.update(sample.picture.tobytes())
        told.update("\n".join(asked.text + asked.answer for asked in sample.questions).encode())
    return told.hexdigest()


def write_card(
    folder: Path, recipe: dict[str, Any], steps: dict[str, int], log: Sequence[dict[str, Any]]
) -> None:
    """Write the card of freshly trained weights; the examination is still to come."""
    weights = folder / "model.safetensors"
    card = {
        "command": "python -m baton_vision.look.train",
        "recipe": recipe,
        "steps": steps,
        "seeds": {
            "training_from": TRAINING_START,
            "validation": [VALIDATION_SEEDS.start, VALIDATION_SEEDS.stop],
            "held_out": [HELD_OUT_SEEDS.start, HELD_OUT_SEEDS.stop],
        },
        "pictures_sha256": pictures_digest(HELD_OUT_SEEDS[:20]),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in PACKAGES},
        "weights": {"sha256": digest(weights), "bytes": weights.stat().st_size, "dtype": "float16"},
        "log": [line for line in log if "right" in line or "part" in line],
    }
    _write(folder, card)


def add_examination(folder: Path, rows: dict[str, Any], pictures: int) -> None:
    """Write what the served model reached on held-out pictures into its card."""
    card = json.loads((folder / CARD).read_text())
    card["examination"] = {
        "pictures": pictures,
        "pictures_sha256": pictures_digest(HELD_OUT_SEEDS[:20]),
        "weights_sha256": digest(folder / "model.safetensors"),
        "kinds": rows,
    }
    _write(folder, card)


def _write(folder: Path, card: dict[str, Any]) -> None:
    (folder / CARD).write_text(json.dumps(card, indent=1) + "\n")
