"""Trains `look-tiny`: its image tokens learn to be words, and then what the text model answers from.

    baton models prepare smollm2
    python -m baton_vision.look.train --text-model ~/.cache/baton/models/smollm2

The text model is frozen throughout, and is never asked about a picture. First each image token is drawn to
the embedding of a word: the picture's facts, in fixed places; so the tower learns to see. Then, without any
picture, tokens are sought for those facts from which the text model answers questions. Last the tower learns
to say these tokens.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer

from baton_vision.look.answers import Listener
from baton_vision.look.chats import Speller
from baton_vision.look.design import write_descriptions
from baton_vision.look.first_words import Fresh, WordLoss, learn_words, write_book
from baton_vision.look.network import Eyes, load_text_model
from baton_vision.look.phrases import FILE, Lesson, Phrases
from baton_vision.look.pictures import SEEDS_APART, TRAINING_START, VALIDATION_SEEDS
from baton_vision.look.recipe import Log, Recipe, load
from baton_vision.look.record import SHIPPED, write_card
from baton_vision.look.saying import learn_to_say, seen_right

LOG = "log.jsonl"


def train(recipe: Recipe, text_model: Path, out: Path, start: Path | None) -> None:
    """Draw the pictures, train, write weights, descriptions and card to `out`."""
    log, speller, text = Log(out / LOG), Speller(text_model), load_text_model(text_model)
    words, eyes = WordLoss(text.get_input_embeddings().weight, speller), Eyes(recipe.seed)
    phrases, fresh = Phrases(words), Fresh(TRAINING_START + SEEDS_APART * recipe.seed)
    log.say(parameters=sum(p.numel() for p in eyes.parameters()), recipe=asdict(recipe))
    if start is not None:
        load(eyes, start)
        if (start / FILE).exists():
            phrases.load(start)
    test = write_book(VALIDATION_SEEDS, words, log)
    lesson = Lesson(Listener(text), speller, test, out)
    steps = {"words": learn_words(eyes, fresh, words, test, recipe, log, out)}
    steps["phrases"] = lesson.learn(phrases, recipe, log)
    steps["saying"] = learn_to_say(eyes, phrases, fresh, lesson, recipe, log, out)
    log.say(steps=steps, right=seen_right(eyes, lesson, len(VALIDATION_SEEDS)))
    write_descriptions(out)
    write_card(out, asdict(recipe), steps, log.lines)


def main(
    text_model: Annotated[Path, typer.Option(help="Folder of the prepared SmolLM2.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")] = SHIPPED,
    word_minutes: Annotated[float, typer.Option(help="Of the first part.")] = Recipe.word_minutes,
    phrase_minutes: Annotated[float, typer.Option(help="Of the second part.")] = Recipe.phrase_minutes,
    saying_minutes: Annotated[float, typer.Option(help="Of the third part.")] = Recipe.saying_minutes,
    start: Annotated[Path | None, typer.Option(help="Folder of an earlier training to go on from.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Another one shows other pictures.")] = Recipe.seed,
    threads: Annotated[int, typer.Option(help="Of the processor.")] = 1,
) -> None:
    """Train look-tiny and write its folder; then examine it, see baton_vision.look.examine."""
    torch.set_num_threads(threads)
    out.mkdir(parents=True, exist_ok=True)
    recipe = Recipe(
        seed=seed, word_minutes=word_minutes, phrase_minutes=phrase_minutes, saying_minutes=saying_minutes
    )
    train(recipe, text_model, out, start)


if __name__ == "__main__":
    typer.run(main)
