"""Train `flood-tiny` and write `plugins/baton_geo/flood_tiny`: config.json, model.safetensors, training.json.

    python -m training.flood_tiny.train

The held-out scenes are drawn only after the weights are written.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors.torch import save as serialised
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from baton_geo.card import Card
from baton_geo.prithvi import PrithviConfig, PrithviSegmenter
from training.flood_scenes.scenes import UNKNOWN, WATER
from training.flood_scenes.sensor import NODATA, UNIT
from training.flood_tiny.architecture import TILE, card, config_json
from training.flood_tiny.measure import ScenesBySeed, draw_scenes
from training.flood_tiny.predict import SHIPPED, normalised
from training.flood_tiny.record import write_record
from training.flood_tiny.seeds import TRAINING_SEEDS

THREADS = 2


@dataclass(frozen=True)
class Recipe:
    """The settings of a training run.

    Attributes:
        seed: of the initial weights, the crops and their augmentation.
        steps: number of optimiser steps.
        batch: crops per step.
        rate: the highest learning rate; it rises over the first 5 % of the steps, then falls as a cosine.
        matrix_rate: the highest learning rate of the transformer's matrices.
        decay: weight decay.
        memory: decay of the moving average of the weights; the average is what is saved.
        tile: height and width of the crops, pixels.
    """

    seed: int = 11
    steps: int = 750
    batch: int = 4
    rate: float = 1.5e-3
    matrix_rate: float = 2e-3
    decay: float = 0.05
    memory: float = 0.99
    tile: int = TILE


def band_statistics(scenes: ScenesBySeed) -> tuple[list[float], list[float]]:
    """Return each band's mean and standard deviation in reflectance, without nodata, to five places."""
    count, total, squares = 0, np.zeros(6), np.zeros(6)
    for scene in scenes.values():
        values = scene.pixels[:, scene.pixels[0] != NODATA].astype(np.float64) / UNIT
        count += values.shape[1]
        total += values.sum(axis=1)
        squares += (values**2).sum(axis=1)
    mean = total / count
    std = np.sqrt(squares / count - mean**2)
    return [round(float(m), 5) for m in mean], [round(float(s), 5) for s in std]


def crops(scenes: ScenesBySeed, rasters: Card, recipe: Recipe) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches without end: float32 (batch, 6, 1, tile, tile) and int64 (batch, tile, tile).

    Pixels are normalised. Each crop is rotated, mirrored, and made slightly brighter or
    darker, as a whole and by band.
    """
    rng = np.random.default_rng(recipe.seed)
    seeds = list(scenes)
    while True:
        images, labels = [], []
        for _ in range(recipe.batch):
            scene = scenes[seeds[rng.integers(len(seeds))]]
            top, left = (int(rng.integers(size - recipe.tile + 1)) for size in scene.label.shape)
            where = (..., slice(top, top + recipe.tile), slice(left, left + recipe.tile))
            gain = rng.uniform(0.92, 1.08) * rng.normal(1, 0.02, (6, 1, 1))
            pixels, label = scene.pixels[where], scene.label[where]
            brighter = np.where(pixels == NODATA, NODATA, np.rint(pixels * gain)).astype(np.int16)
            quarter, mirrored = int(rng.integers(4)), bool(rng.integers(2))
            images.append(_rotated(normalised(brighter, rasters), quarter, mirrored))
            labels.append(_rotated(torch.from_numpy(label.astype(np.int64)), quarter, mirrored))
        yield torch.stack(images).unsqueeze(2), torch.stack(labels)


def loss_of(scores: Tensor, label: Tensor) -> Tensor:
    """Return cross-entropy plus a soft Dice loss of the water (Milletari et al. 2016) over the known pixels.

    Args:
        scores: (batch, 2, height, width).
        label: int64 (batch, height, width); pixels of 255 are ignored.
    """
    entropy = nn.functional.cross_entropy(scores, label, ignore_index=UNKNOWN)
    known = (label != UNKNOWN).float()
    guess, water = scores.softmax(dim=1)[:, WATER] * known, (label == WATER).float()
    return entropy + 1 - (2 * (guess * water).sum() + 1) / (guess.sum() + water.sum() + 1)


def optimisers(model: PrithviSegmenter, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Return Muon for the transformer's matrices and AdamW for the other parameters.

    Muon is by Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon/), with the step size of Liu et
    al. 2025 (arXiv:2502.16982). In short trials it reached AdamW's loss in about half of the steps.
    """
    inside = model.encoder.blocks.parameters()
    matrices = {id(parameter): parameter for parameter in inside if parameter.ndim == 2}
    others = [parameter for parameter in model.parameters() if id(parameter) not in matrices]
    return [
        torch.optim.Muon(
            list(matrices.values()),
            lr=recipe.matrix_rate,
            weight_decay=recipe.decay,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(others, lr=recipe.rate, weight_decay=recipe.decay, fused=True),
    ]


def train(
    model: PrithviSegmenter, batches: Iterator[tuple[Tensor, Tensor]], recipe: Recipe
) -> tuple[PrithviSegmenter, list[float]]:
    """Train a model, with automatic mixed precision in bfloat16.

    Returns:
        A model with the moving average of the weights, and the loss of each step.
    """
    chosen = optimisers(model, recipe)
    schedules = [LambdaLR(optimiser, lambda step: _rate(step, recipe.steps)) for optimiser in chosen]
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(recipe.memory))
    losses: list[float] = []
    columns = (BarColumn(), TextColumn("{task.completed}/{task.total} loss {task.fields[loss]:.4f}"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn()) as progress:
        task = progress.add_task("training", total=recipe.steps, loss=math.nan)
        for _ in range(recipe.steps):
            losses.append(_step(model, chosen, *next(batches)))
            for schedule in schedules:
                schedule.step()
            average.update_parameters(model)
            progress.update(task, advance=1, loss=float(np.mean(losses[-20:])))
            if len(losses) % 50 == 0:  # a log keeps these lines, but not the progress bar
                progress.console.print(f"step {len(losses)}: loss {np.mean(losses[-50:]):.4f}")
    return average.module, losses


def save(model: PrithviSegmenter, rasters: Card, folder: Path) -> None:
    """Write config.json, and the weights as float16 in model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_json(rasters), indent=1) + "\n")
    weights = {name: tensor.to(torch.float16).contiguous() for name, tensor in model.state_dict().items()}
    # Not `save_file`: it writes files that only their owner may read.
    (folder / "model.safetensors").write_bytes(serialised(weights, metadata={"format": "pt"}))


def main(
    out: Annotated[Path, typer.Option(help="Folder to write.")] = SHIPPED,
    seed: Annotated[int, typer.Option(help="Of the weights and the crops.")] = Recipe.seed,
    steps: Annotated[int, typer.Option(help="Of the optimiser.")] = Recipe.steps,
) -> None:
    """Draw the training scenes, train, write the model, then measure it on the held-out scenes."""
    torch.set_num_threads(THREADS)
    torch.manual_seed(seed)
    recipe = Recipe(seed=seed, steps=steps)
    print(f"drawing {len(TRAINING_SEEDS)} training scenes")
    scenes = draw_scenes(TRAINING_SEEDS)
    rasters = card(*band_statistics(scenes))
    model = PrithviSegmenter(PrithviConfig.from_hf(config_json(rasters)))
    start = time.monotonic()
    kept, losses = train(model, crops(scenes, rasters, recipe), recipe)
    seconds = time.monotonic() - start
    save(kept, rasters, out)
    write_record(out, recipe, scenes, losses, seconds)


def _step(
    model: PrithviSegmenter, chosen: Sequence[torch.optim.Optimizer], pixels: Tensor, label: Tensor
) -> float:
    with torch.autocast("cpu", torch.bfloat16):
        scores = model(pixels)
    loss = loss_of(scores.float(), label)
    model.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimiser in chosen:
        optimiser.step()
    return float(loss.detach())


def _rate(step: int, steps: int) -> float:
    """Return the learning rate of a step as a share of the highest one."""
    rise = max(steps // 20, 1)
    if step < rise:
        return (step + 1) / rise
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (step - rise) / max(steps - rise, 1)))


def _rotated(image: Tensor, quarter: int, mirrored: bool) -> Tensor:
    rotated = torch.rot90(image, quarter, (-2, -1))
    return rotated.flip(-1) if mirrored else rotated


if __name__ == "__main__":
    typer.run(main)
