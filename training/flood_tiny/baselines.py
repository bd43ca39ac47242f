"""Fit and measure the simple methods that `flood-tiny` is compared with.

    python -m training.flood_tiny.baselines

Prints their figures on the held-out scenes and writes baselines.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from training.flood_scenes.scenes import UNKNOWN, WATER
from training.flood_scenes.sensor import UNIT
from training.flood_tiny.measure import Figures, Mask, Method, ScenesBySeed, draw_scenes, figures
from training.flood_tiny.seeds import HELD_OUT_SEEDS, TRAINING_SEEDS

RECORD: Final = Path(__file__).with_name("baselines.json")
FITTED_ON: Final = TRAINING_SEEDS  # as many as flood-tiny has
THRESHOLDS: Final = np.linspace(-1, 1, 401)
PIXELS_A_SCENE: Final = 8_000
SEED: Final = 7

Index = npt.NDArray[np.float64]


def everything(pixels: npt.NDArray[np.int16]) -> Mask:
    """Call every pixel water: the least that a method has to beat."""
    return np.ones(pixels.shape[1:], dtype=np.bool_)


def ndwi(pixels: npt.NDArray[np.int16]) -> Mask:
    """Call NDWI above 0 water: (green - NIR) / (green + NIR).

    McFeeters 1996 (doi:10.1080/01431169608948714).
    """
    return np.asarray(_difference(pixels[1], pixels[3]) > 0)


def tuned_mndwi(scenes: ScenesBySeed) -> tuple[Method, float]:
    """Fit the threshold of MNDWI: (green - SWIR 1) / (green + SWIR 1).

    Xu 2006 (doi:10.1080/01431160600589179).

    Returns:
        The method, and the threshold with the best pooled intersection over union on `scenes`.
    """
    water, land = np.zeros(len(THRESHOLDS) - 1), np.zeros(len(THRESHOLDS) - 1)
    for scene in scenes.values():
        index = np.clip(_difference(scene.pixels[1], scene.pixels[4]), -1, 1)
        water += np.histogram(index[scene.label == WATER], THRESHOLDS)[0]
        land += np.histogram(index[(scene.label != WATER) & (scene.label != UNKNOWN)], THRESHOLDS)[0]
    # Summed from the right: the pixels above each threshold.
    hits, wrong = water[::-1].cumsum()[::-1], land[::-1].cumsum()[::-1]
    threshold = float(THRESHOLDS[np.argmax(hits / (water.sum() + wrong))])
    return lambda pixels: np.asarray(_difference(pixels[1], pixels[4]) >= threshold), threshold


def pixel_mlp(scenes: ScenesBySeed, *, steps: int = 4000, batch: int = 8192) -> Method:
    """Train a perceptron with two hidden layers on single pixels of `scenes`, six bands each."""
    values, truth = _pixels(scenes)
    mean, std = values.mean(dim=0), values.std(dim=0)
    torch.manual_seed(SEED)
    net = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimiser = torch.optim.AdamW(net.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        chosen = torch.randint(len(truth), (batch,))
        guess = net((values[chosen] - mean) / std).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(guess, truth[chosen])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()

    def method(pixels: npt.NDArray[np.int16]) -> Mask:
        flat = torch.from_numpy(pixels.reshape(6, -1).T.astype(np.float32) / UNIT)
        with torch.inference_mode():
            scores = net((flat - mean) / std)
        return np.asarray((scores > 0).numpy().reshape(pixels.shape[1:]))

    return method


def all_baselines(scenes: ScenesBySeed) -> dict[str, Method]:
    """Return every method by name; MNDWI and the perceptron are fitted on `scenes`."""
    mndwi, threshold = tuned_mndwi(scenes)
    return {
        "water everywhere": everything,
        "NDWI > 0": ndwi,
        f"MNDWI >= {threshold:.3f} (tuned)": mndwi,
        "per-pixel MLP": pixel_mlp(scenes),
    }


def print_figures(rows: dict[str, Figures]) -> None:
    """Print a table of figures."""
    table = Table("method", "pooled IoU", "worst scene")
    for name, row in rows.items():
        table.add_row(name, f"{row.pooled:.4f}", f"{row.worst:.4f}")
    Console().print(table)


def main(progress: Callable[[str], None] = print) -> None:
    """Fit on the training scenes, measure on the held-out ones, write baselines.json."""
    torch.set_num_threads(2)
    progress(f"drawing {len(FITTED_ON)} training and {len(HELD_OUT_SEEDS)} held-out scenes")
    methods = all_baselines(draw_scenes(FITTED_ON))
    held_out = draw_scenes(HELD_OUT_SEEDS)
    rows = {name: figures(method, held_out) for name, method in methods.items()}
    print_figures(rows)
    record = {name: asdict(row) for name, row in rows.items()}
    RECORD.write_text(json.dumps({"fitted_on": list(FITTED_ON), "held_out": record}, indent=1) + "\n")


def _difference(one: npt.NDArray[np.int16], other: npt.NDArray[np.int16]) -> Index:
    """Return the normalised difference; 0 where both are 0."""
    a, b = one.astype(np.float64), other.astype(np.float64)
    total = a + b
    return np.asarray((a - b) / np.where(total == 0, 1, total))


def _pixels(scenes: ScenesBySeed) -> tuple[torch.Tensor, torch.Tensor]:
    """Return reflectances (n, 6) and truth (n,), both float32, of random known pixels of each scene."""
    rng = np.random.default_rng(SEED)
    values, truth = [], []
    for scene in scenes.values():
        rows, columns = np.nonzero(scene.label != UNKNOWN)
        chosen = rng.integers(len(rows), size=PIXELS_A_SCENE)
        where = rows[chosen], columns[chosen]
        values.append(scene.pixels[:, *where].T.astype(np.float32) / UNIT)
        truth.append((scene.label[where] == WATER).astype(np.float32))
    return torch.from_numpy(np.concatenate(values)), torch.from_numpy(np.concatenate(truth))


if __name__ == "__main__":
    main()
