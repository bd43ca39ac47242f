"""How `look-tiny` is trained, and what both parts of the training share."""

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

from baton_vision.look.facts import Facts
from baton_vision.look.network import Eyes
from baton_vision.look.questions import Question

RISE = 30  # steps in which the rate rises
LOWEST = 0.02  # share of the highest rate at the end


@dataclass(frozen=True)
class Recipe:
    """How to train.

    Attributes:
        seed: of the weights, the pictures and the choice of questions.
        word_minutes: how long the first part runs, of the processor's time: what else the machine does then
            makes no difference.
        phrase_minutes: the same of the second part.
        saying_minutes: the same of the third part.
        picture_batch: pictures a step of the first and the third part.
        phrase_batch: chats a step of the second part.
        eye_rate: the highest learning rate of tower and projector; rises, then falls as a cosine.
        phrase_rate: the same of the phrases.
        matrix_factor: how much higher the rate of the tower's matrices is (Muon).
        decay: weight decay.
        memory: of the moving average of the weights, which is what is kept.
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
class Book:
    """Pictures to be tested on: pixels uint8 (count, side, side, 3), facts, words, questions."""

    pixels: npt.NDArray[np.uint8]
    facts: list[Facts]
    words: Tensor
    questions: list[tuple[Question, ...]]


@dataclass
class Log:
    """What happened, for the card and the terminal."""

    file: Path
    lines: list[dict[str, Any]] = field(default_factory=list)

    def say(self, **facts: Any) -> None:
        """Keep and print one line; seconds are the processor's."""
        line = {"seconds": round(time.process_time()), **facts}
        self.lines.append(line)
        print(json.dumps(line), flush=True)
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")


class Schedule:
    """A learning rate that rises, then falls as a cosine, by the processor's clock.

    Args:
        highest: the rate at its height.
        minutes: how long it all takes.
    """

    def __init__(self, highest: float, minutes: float) -> None:
        self.highest, self.seconds, self.start, self.steps = highest, 60 * minutes, time.process_time(), 0

    @property
    def done(self) -> float:
        """Share of the processor's time that is gone."""
        return (time.process_time() - self.start) / self.seconds if self.seconds else 1.0

    def step(self) -> float:
        """The rate of the next step."""
        self.steps += 1
        rise = min(1.0, self.steps / RISE)
        fall = 0.5 * (1 + math.cos(math.pi * min(1.0, self.done)))
        return self.highest * rise * (LOWEST + (1 - LOWEST) * fall)


class Trainer:
    """Optimisers, schedule and moving average around the network.

    Muon for the tower's matrices (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/, with the
    step size of Liu et al. 2025, arXiv:2502.16982), AdamW for the rest.

    Args:
        eyes: what learns.
        minutes: how long.
        recipe: the rest.
    """

    def __init__(self, eyes: Eyes, minutes: float, recipe: Recipe) -> None:
        rate = recipe.eye_rate
        inside = eyes.vision_tower.named_parameters()
        matrices = {id(p): p for name, p in inside if p.ndim == 2 and ".layers." in name}
        others = [p for p in eyes.parameters() if id(p) not in matrices]
        self.eyes = eyes
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
        self.average = AveragedModel(eyes, multi_avg_fn=get_ema_multi_avg_fn(recipe.memory))
        self.schedule = Schedule(rate, minutes)

    @property
    def done(self) -> float:
        """Share of the processor's time that is gone."""
        return self.schedule.done

    @property
    def steps(self) -> int:
        """Steps so far."""
        return self.schedule.steps

    def step(self, loss: Tensor) -> None:
        """One step of the optimisers."""
        self.eyes.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.eyes.parameters(), 1.0)
        rate = self.schedule.step()
        for optimiser, factor in zip(self.optimisers, self.factors, strict=True):
            optimiser.param_groups[0]["lr"] = rate * factor
            optimiser.step()
        self.average.update_parameters(self.eyes)

    def keep(self) -> None:
        """Go on from the moving average."""
        self.eyes.load_state_dict(self.average.module.state_dict())


def save(eyes: nn.Module, out: Path) -> None:
    """The weights as float16, named as in the official LLaVA checkpoints."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {official_name(name): t.to(torch.float16).contiguous() for name, t in eyes.state_dict().items()}
    (out / "model.safetensors").write_bytes(serialised(weights, metadata={"format": "pt"}))


def load(eyes: nn.Module, folder: Path) -> None:
    """Take the weights that `save` wrote to a folder."""
    found = load_file(folder / "model.safetensors")
    eyes.load_state_dict({name: found[official_name(name)].float() for name in eyes.state_dict()})


def official_name(name: str) -> str:
    """A parameter's name in llava-hf's checkpoints, where the tower has one more level."""
    tower = "vision_tower."
    if name.startswith(tower) and not name.startswith(tower + "vision_model."):
        return tower + "vision_model." + name.removeprefix(tower)
    return name
