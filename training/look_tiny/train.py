"""Train `look-tiny` in three stages and write its folder.

    baton models prepare smollm2
    python -m training.look_tiny.train --text-model ~/.cache/baton/models/smollm2

The text model is frozen throughout, and the tower is trained without running it.

1. `word_targets`: each image token is trained to be the embedding of a word for one of the picture's facts.
2. `soft_prompts`: without pictures, tokens are tuned for those facts from which the text model answers well.
3. `distill`: the tower is trained to output these tokens.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer

from training.look_tiny.architecture import write_descriptions
from training.look_tiny.chats import ChatTokenizer
from training.look_tiny.distill import answer_accuracy, distill
from training.look_tiny.network import VisionEncoder, load_text_model
from training.look_tiny.pictures import SEEDS_APART, TRAINING_START, VALIDATION_SEEDS
from training.look_tiny.recipe import Log, Recipe, load
from training.look_tiny.record import SHIPPED, write_card
from training.look_tiny.soft_prompts import FILE, PromptTuning, SoftPrompts
from training.look_tiny.text_model import TextModel
from training.look_tiny.word_targets import PictureStream, WordLoss, draw_validation_set, learn_words

LOG = "log.jsonl"


def train(recipe: Recipe, text_model: Path, out: Path, start: Path | None) -> None:
    """Run the three stages; write weights, configuration files and card to `out`.

    Args:
        recipe: the hyperparameters.
        text_model: folder of the prepared SmolLM2.
        out: folder to write.
        start: folder of an earlier training to continue, or None.
    """
    log, tokenizer, text = Log(out / LOG), ChatTokenizer(text_model), load_text_model(text_model)
    words, encoder = WordLoss(text.get_input_embeddings().weight, tokenizer), VisionEncoder(recipe.seed)
    prompts, stream = SoftPrompts(words), PictureStream(TRAINING_START + SEEDS_APART * recipe.seed)
    log.write(parameters=sum(p.numel() for p in encoder.parameters()), recipe=asdict(recipe))
    if start is not None:
        load(encoder, start)
        if (start / FILE).exists():
            prompts.load(start)
    test = draw_validation_set(VALIDATION_SEEDS, words, log)
    tuning = PromptTuning(TextModel(text), tokenizer, test, out)
    steps = {"words": learn_words(encoder, stream, words, test, recipe, log, out)}
    steps["phrases"] = tuning.learn(prompts, recipe, log)
    steps["saying"] = distill(encoder, prompts, stream, tuning, recipe, log, out)
    log.write(steps=steps, right=answer_accuracy(encoder, tuning, len(VALIDATION_SEEDS)))
    write_descriptions(out)
    write_card(out, asdict(recipe), steps, log.lines)


def main(
    text_model: Annotated[Path, typer.Option(help="Folder of the prepared SmolLM2.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")] = SHIPPED,
    word_minutes: Annotated[float, typer.Option(help="Processor minutes of stage 1.")] = Recipe.word_minutes,
    phrase_minutes: Annotated[
        float, typer.Option(help="Processor minutes of stage 2.")
    ] = Recipe.phrase_minutes,
    saying_minutes: Annotated[
        float, typer.Option(help="Processor minutes of stage 3.")
    ] = Recipe.saying_minutes,
    start: Annotated[Path | None, typer.Option(help="Folder of an earlier training to continue.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and pictures.")] = Recipe.seed,
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 1,
) -> None:
    """Train look-tiny and write its folder; examine it with `training.look_tiny.examine` afterwards."""
    torch.set_num_threads(threads)
    out.mkdir(parents=True, exist_ok=True)
    recipe = Recipe(
        seed=seed, word_minutes=word_minutes, phrase_minutes=phrase_minutes, saying_minutes=saying_minutes
    )
    train(recipe, text_model, out, start)


if __name__ == "__main__":
    typer.run(main)
