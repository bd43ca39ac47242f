"""Write the model's card, `training.json`: hyperparameters, seeds, versions, log, examination."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from training.look_tiny.pictures import HELD_OUT_SEEDS, TRAINING_START, VALIDATION_SEEDS, make_sample

SHIPPED: Final = Path(__file__).parents[2] / "plugins" / "baton_vision" / "look_tiny"
CARD: Final = "training.json"
PACKAGES: Final = ("torch", "transformers", "numpy", "pillow", "safetensors")


def digest(path: Path) -> str:
    """Return the SHA-256 of a file, hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def pictures_digest(seeds: Sequence[int]) -> str:
    """Return the SHA-256 over the pixels and questions of these seeds, which pins the generator."""
    state = hashlib.sha256()
    for seed in seeds:
        sample = make_sample(seed)
        state.update(sample.picture.tobytes())
        state.update("\n".join(asked.text + asked.answer for asked in sample.questions).encode())
    return state.hexdigest()


def write_card(
    folder: Path, recipe: dict[str, Any], steps: dict[str, int], log: Sequence[dict[str, Any]]
) -> None:
    """Write the card of freshly trained weights; `add_examination` completes it."""
    weights = folder / "model.safetensors"
    card = {
        "command": "python -m training.look_tiny.train",
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
    """Add the served model's scores on held-out pictures to its card."""
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
