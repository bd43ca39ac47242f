"""The training record: what was run, on what, and what came of it beside the baselines."""

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

from baton_geo.flood.baselines import all_baselines, print_figures
from baton_geo.flood.measure import Figures, Method, Scenes, draw_scenes, figures
from baton_geo.flood.predict import Predictor
from baton_geo.flood.scenes import HELD_OUT_SEEDS, VALIDATION_SEEDS

if TYPE_CHECKING:
    from baton_geo.flood.train import Recipe

GENERATOR = ("chance", "cover", "ground", "noise", "scenes", "sensor", "sky", "spectra")
LOSS_EVERY = 20  # steps one loss in the record is the mean of


def digest(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def generator_digest() -> str:
    """SHA-256 over the generator's sources, in the order of `GENERATOR`."""
    sources = (Path(__file__).with_name(f"{name}.py").read_bytes() for name in GENERATOR)
    return hashlib.sha256(b"".join(sources)).hexdigest()


def measured(folder: Path, training: Scenes) -> dict[str, Figures]:
    """flood-tiny as written in a folder, and the baselines, on the held-out scenes."""
    held_out = draw_scenes(HELD_OUT_SEEDS)
    methods: dict[str, Method] = {"flood-tiny": Predictor.of_folder(folder), **all_baselines(training)}
    return {name: figures(method, held_out) for name, method in methods.items()}


def write_record(
    folder: Path, recipe: Recipe, training: Scenes, losses: Sequence[float], seconds: float
) -> None:
    """Measures what was written to a folder and writes training.json beside it."""
    validation = figures(Predictor.of_folder(folder), draw_scenes(VALIDATION_SEEDS))
    rows = measured(folder, training)
    print_figures(rows)
    weights = folder / "model.safetensors"
    record: dict[str, Any] = {
        "command": f"python -m baton_geo.flood.train --seed {recipe.seed} --steps {recipe.steps}",
        "recipe": asdict(recipe),
        "seeds": {
            "training": list(training),
            "validation": list(VALIDATION_SEEDS),
            "held_out": list(HELD_OUT_SEEDS),
        },
        "generator_sha256": generator_digest(),
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
