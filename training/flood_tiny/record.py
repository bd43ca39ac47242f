"""Write training.json: how the model was trained, and its accuracy beside the baselines'."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from training.flood_scenes.scenes import make_scene
from training.flood_tiny.baselines import all_baselines, print_figures
from training.flood_tiny.measure import Figures, Method, ScenesBySeed, draw_scenes, figures
from training.flood_tiny.predict import Predictor
from training.flood_tiny.seeds import HELD_OUT_SEEDS, VALIDATION_SEEDS

if TYPE_CHECKING:
    from training.flood_tiny.train import Recipe

DIGEST_SEEDS = range(16)  # between them these scenes show every phenomenon
LOSS_EVERY = 20  # steps; each loss of the record is their mean


def digest(path: Path) -> str:
    """Return the SHA-256 of a file, hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def generator_digest() -> str:
    """Return the SHA-256 over pixels and labels of the scenes of `DIGEST_SEEDS`, 96 x 128 pixels each.

    It tells whether the generator still draws the scenes that the model was trained on.
    """
    found = hashlib.sha256()
    for seed in DIGEST_SEEDS:
        scene = make_scene(seed, 96, 128)
        found.update(scene.pixels.tobytes())
        found.update(scene.label.tobytes())
    return found.hexdigest()


def measured(folder: Path, training: ScenesBySeed) -> dict[str, Figures]:
    """Measure the model in a folder, and the baselines, on the held-out scenes."""
    held_out = draw_scenes(HELD_OUT_SEEDS)
    methods: dict[str, Method] = {"flood-tiny": Predictor.of_folder(folder), **all_baselines(training)}
    return {name: figures(method, held_out) for name, method in methods.items()}


def write_record(
    folder: Path, recipe: Recipe, training: ScenesBySeed, losses: Sequence[float], seconds: float
) -> None:
    """Measure the model in a folder and write training.json beside it."""
    validation = figures(Predictor.of_folder(folder), draw_scenes(VALIDATION_SEEDS))
    rows = measured(folder, training)
    print_figures(rows)
    weights = folder / "model.safetensors"
    record: dict[str, Any] = {
        "command": f"python -m training.flood_tiny.train --seed {recipe.seed} --steps {recipe.steps}",
        "recipe": asdict(recipe),
        "seeds": {
            "training": list(training),
            "validation": list(VALIDATION_SEEDS),
            "held_out": list(HELD_OUT_SEEDS),
        },
        "scenes_sha256": generator_digest(),
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("torch", "numpy", "safetensors")},
        "seconds": round(seconds, 1),
        "losses": [
            round(float(np.mean(losses[i : i + LOSS_EVERY])), 5) for i in range(0, len(losses), LOSS_EVERY)
        ],
        "weights": {"sha256": digest(weights), "bytes": weights.stat().st_size, "dtype": "float16"},
        "validation": asdict(validation),
        "held_out": {name: asdict(row) for name, row in rows.items()},
    }
    (folder / "training.json").write_text(json.dumps(record, indent=1) + "\n")
