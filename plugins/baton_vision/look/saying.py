"""The third part of the training: the tower learns to say of a picture what the text model answers from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

from baton_vision.look.first_words import Fresh
from baton_vision.look.network import Eyes, normalised
from baton_vision.look.phrases import TESTED, Lesson, Phrases, sorts, spreads
from baton_vision.look.recipe import Log, Recipe, Trainer, save

SAY_EVERY, TEST_EVERY = 50, 200  # steps


def learn_to_say(
    eyes: Eyes, phrases: Phrases, fresh: Fresh, lesson: Lesson, recipe: Recipe, log: Log, out: Path
) -> int:
    """Draw each image token to its phrase's; returns the steps.

    By the squared distance, beside how far the tokens of different pictures of its sort lie apart: those of
    scenes differ little, and it is that little which counts.
    """
    trainer = Trainer(eyes, recipe.saying_minutes, recipe)
    phrases.requires_grad_(False)
    apart = spreads(phrases(lesson.test.facts), lesson.test.facts)
    recent: list[float] = []
    while trainer.done < 1:
        pixels, facts = fresh.batch(recipe.picture_batch)
        with torch.autocast("cpu", torch.bfloat16):
            tokens = eyes(pixels)
        off = (tokens.float() - phrases(facts)).square().mean((1, 2))
        loss = (off / apart[sorts(facts)]).mean()
        trainer.step(loss)
        recent.append(float(loss.detach()))
        if trainer.steps % SAY_EVERY == 0:
            mean = round(float(np.mean(recent[-SAY_EVERY:])), 4)
            log.say(part="saying", step=trainer.steps, loss=mean)
        if trainer.steps % TEST_EVERY == 0:
            right = seen_right(trainer.average.module, lesson, TESTED)
            log.say(part="saying", step=trainer.steps, right=right)
            save(trainer.average.module, out)
    trainer.keep()
    save(eyes, out)
    return trainer.steps


def seen_right(eyes: nn.Module, lesson: Lesson, pictures: int) -> dict[str, float]:
    """Share of right answers to questions about the first of the test's pictures."""
    with torch.inference_mode():
        return lesson.right(eyes(normalised(lesson.test.pixels[:pictures])))
