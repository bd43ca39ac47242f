"""Stage 3 of the training: train the vision encoder to output each picture's soft prompt."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

from training.look_tiny.network import VisionEncoder, normalised
from training.look_tiny.recipe import Log, Recipe, Trainer, save
from training.look_tiny.soft_prompts import TESTED, PromptTuning, SoftPrompts, sorts, spreads
from training.look_tiny.word_targets import PictureStream

LOG_EVERY, TEST_EVERY = 50, 200  # steps


def distill(
    encoder: VisionEncoder,
    prompts: SoftPrompts,
    stream: PictureStream,
    tuning: PromptTuning,
    recipe: Recipe,
    log: Log,
    out: Path,
) -> int:
    """Train the encoder on the soft prompts' tokens and return the number of steps.

    The loss is the squared error divided by the variance among pictures of the same sort: the prompts of
    scenes differ little, and these small differences carry the facts.
    """
    trainer = Trainer(encoder, recipe.saying_minutes, recipe)
    prompts.requires_grad_(False)
    apart = spreads(prompts(tuning.test.facts), tuning.test.facts)
    recent: list[float] = []
    while trainer.done < 1:
        pixels, facts = stream.batch(recipe.picture_batch)
        with torch.autocast("cpu", torch.bfloat16):
            tokens = encoder(pixels)
        off = (tokens.float() - prompts(facts)).square().mean((1, 2))
        loss = (off / apart[sorts(facts)]).mean()
        trainer.step(loss)
        recent.append(float(loss.detach()))
        if trainer.steps % LOG_EVERY == 0:
            mean = round(float(np.mean(recent[-LOG_EVERY:])), 4)
            log.write(part="saying", step=trainer.steps, loss=mean)
        if trainer.steps % TEST_EVERY == 0:
            right = answer_accuracy(trainer.average.module, tuning, TESTED)
            log.write(part="saying", step=trainer.steps, right=right)
            save(trainer.average.module, out)
    trainer.keep()
    save(encoder, out)
    return trainer.steps


def answer_accuracy(encoder: nn.Module, tuning: PromptTuning, pictures: int) -> dict[str, float]:
    """Return the share of right answers about the first test pictures, by kind of question."""
    with torch.inference_mode():
        return tuning.right(encoder(normalised(tuning.test.pixels[:pictures])))
