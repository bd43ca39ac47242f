"""The hyperparameters of the training, and the optimiser, schedule, log and checkpoints its stages share."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from safetensors.torch import save as serialised
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from training.look_tiny.facts import Facts
from training.look_tiny.network import VisionEncoder
from training.look_tiny.questions import Question

RISE = 30  # steps of warm-up
LOWEST = 0.02  # final rate as a share of the peak


@dataclass(frozen=True)
class Recipe:
    """The hyperparameters of a training; the field names are those of the shipped `training.json`.

    Attributes:
        seed: seed of the weights, the pictures and the choice of questions.
        word_minutes: length of stage 1 in minutes of processor time, so that other load makes no difference.
        phrase_minutes: length of stage 2, likewise.
        saying_minutes: length of stage 3, likewise.
        picture_batch: pictures a step of stages 1 and 3.
        phrase_batch: chats a step of stage 2.
        eye_rate: peak learning rate of tower and projector, with warm-up and cosine decay.
        phrase_rate: peak learning rate of the soft prompts.
        matrix_factor: factor on the rate of the tower's matrices, which Muon trains.
        decay: weight decay.
        memory: decay of the moving average of the weights; the average is what is saved.
    """

    seed: int = 4
    word_minutes: float = 40.0
    phrase_minutes: float = 40.0
    saying_minutes: float = 20.0
    picture_batch: int = 48
    phrase_batch: int = 10
    eye_rate: float = 1.1e-3
    phrase_rate: float = 4e-3
    matrix_factor: float = 2.0
    decay: float = 0.02
    memory: float = 0.98


@dataclass
class ValidationSet:
    """Pictures to validate on.

    Attributes:
        pixels: uint8 (pictures, side, side, 3).
        facts: the facts of each picture.
        words: index of the word for each image token, int64 (pictures, image tokens).
        questions: the questions about each picture.
    """

    pixels: npt.NDArray[np.uint8]
    facts: list[Facts]
    words: Tensor
    questions: list[tuple[Question, ...]]


@dataclass
class Log:
    """The training log, printed and appended to a JSON-lines file; the card quotes it."""

    file: Path
    lines: list[dict[str, Any]] = field(default_factory=list)

    def write(self, **facts: Any) -> None:
        """Write one line with these fields and `seconds`, the processor time so far."""
        line = {"seconds": round(time.process_time()), **facts}
        self.lines.append(line)
        print(json.dumps(line), flush=True)
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")


class Schedule:
    """A learning rate with linear warm-up and cosine decay over processor time.

    Args:
        highest: the peak rate.
        minutes: processor time of the whole schedule.
    """

    def __init__(self, highest: float, minutes: float) -> None:
        self.highest, self.seconds, self.start, self.steps = highest, 60 * minutes, time.process_time(), 0

    @property
    def done(self) -> float:
        """Return the share of the processor time that is used up, from 0."""
        return (time.process_time() - self.start) / self.seconds if self.seconds else 1.0

    def step(self) -> float:
        """Count a step and return its learning rate."""
        self.steps += 1
        rise = min(1.0, self.steps / RISE)
        fall = 0.5 * (1 + math.cos(math.pi * min(1.0, self.done)))
        return self.highest * rise * (LOWEST + (1 - LOWEST) * fall)


class Trainer:
    """Optimisers, schedule and moving average for the vision encoder.

    Muon for the tower's matrices (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/, with the
    step size of Liu et al. 2025, arXiv:2502.16982), AdamW for the rest.

    Args:
        encoder: the network to train.
        minutes: processor time of the training.
        recipe: the hyperparameters.
    """

    def __init__(self, encoder: VisionEncoder, minutes: float, recipe: Recipe) -> None:
        rate = recipe.eye_rate
        inside = encoder.vision_tower.named_parameters()
        matrices = {id(p): p for name, p in inside if p.ndim == 2 and ".layers." in name}
        others = [p for p in encoder.parameters() if id(p) not in matrices]
        self.encoder = encoder
        self.optimisers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                list(matrices.values()),
                lr=rate * recipe.matrix_factor,
                weight_decay=recipe.decay,
                adjust_lr_fn="match_rms_adamw",
            ),
            torch.optim.AdamW(others, lr=rate, weight_decay=recipe.decay, betas=(0.9, 0.98), fused=True),
        ]
        self.factors = [recipe.matrix_factor, 1.0]
        self.average = AveragedModel(encoder, multi_avg_fn=get_ema_multi_avg_fn(recipe.memory))
        self.schedule = Schedule(rate, minutes)

    @property
    def done(self) -> float:
        """Return the share of the processor time that is used up, from 0."""
        return self.schedule.done

    @property
    def steps(self) -> int:
        """Return the number of steps so far."""
        return self.schedule.steps

    def step(self, loss: Tensor) -> None:
        """Backpropagate a loss and take one step of the optimisers."""
        self.encoder.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.encoder.parameters(), 1.0)
        rate = self.schedule.step()
        for optimiser, factor in zip(self.optimisers, self.factors, strict=True):
            optimiser.param_groups[0]["lr"] = rate * factor
            optimiser.step()
        self.average.update_parameters(self.encoder)

    def keep(self) -> None:
        """Replace the weights by their moving average."""
        self.encoder.load_state_dict(self.average.module.state_dict())


def save(encoder: nn.Module, out: Path) -> None:
    """Write the weights as float16, named as in the official LLaVA checkpoints."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {
        official_name(name): t.to(torch.float16).contiguous() for name, t in encoder.state_dict().items()
    }
    (out / "model.safetensors").write_bytes(serialised(weights, metadata={"format": "pt"}))


def load(encoder: nn.Module, folder: Path) -> None:
    """Read the weights that `save` wrote to a folder."""
    found = load_file(folder / "model.safetensors")
    encoder.load_state_dict({name: found[official_name(name)].float() for name in encoder.state_dict()})


def official_name(name: str) -> str:
    """Return a parameter's name in llava-hf's checkpoints, where the tower is nested one level deeper."""
    tower = "vision_tower."
    if name.startswith(tower) and not name.startswith(tower + "vision_model."):
        return tower + "vision_model." + name.removeprefix(tower)
    return name
