"""Trains `look-tiny`: first its image tokens learn to be words, then to be looked at by the text model.

    baton models prepare smollm2
    python -m baton_vision.look.train --text-model ~/.cache/baton/models/smollm2

The text model is frozen throughout. In the first part (no text model runs in it, so it is cheap) each image
token is drawn to the embedding of a word: the picture's facts, in fixed places. In the second the text model
is asked questions, and the loss of its answers goes back through it into projector and tower.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer

from baton_vision.look.answers import Lesson, Listener
from baton_vision.look.chats import Speller
from baton_vision.look.design import write_descriptions
from baton_vision.look.first_words import Fresh, WordLoss, learn_words, write_book
from baton_vision.look.network import Eyes, load_text_model
from baton_vision.look.pictures import TRAINING_START, VALIDATION_SEEDS
from baton_vision.look.recipe import Log, Recipe, load, save
from baton_vision.look.record import SHIPPED, write_card

LOG = "log.jsonl"


def train(recipe: Recipe, text_model: Path, out: Path, start: Path | None) -> None:
    """Draw the pictures, train, write weights, descriptions and card to `out`."""
    log, speller, text = Log(out / LOG), Speller(text_model), load_text_model(text_model)
    loss, eyes = WordLoss(text.get_input_embeddings().weight, speller), Eyes(recipe.seed)
    log.say(parameters=sum(p.numel() for p in eyes.parameters()), recipe=asdict(recipe))
    test = write_book(VALIDATION_SEEDS, loss, log)
    fresh = Fresh(loss)
    if start is not None:
        load(eyes, start)
    steps = {"words": learn_words(eyes, fresh, test, recipe, log, out / "words")}
    book = write_book(range(TRAINING_START, TRAINING_START + recipe.pictures), loss, log)
    lesson = Lesson(book, fresh, test, Listener(text), speller, out)
    steps["answers"] = lesson.learn(eyes, recipe, log)
    save(eyes, out)
    log.say(steps=steps, right=lesson.right(eyes, len(VALIDATION_SEEDS)))
    write_descriptions(out)
    write_card(out, asdict(recipe), steps, log.lines)


def main(
    text_model: Annotated[Path, typer.Option(help="Folder of the prepared SmolLM2.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")] = SHIPPED,
    word_minutes: Annotated[float, typer.Option(help="Of the first part.")] = Recipe.word_minutes,
    answer_minutes: Annotated[float, typer.Option(help="Of the second part.")] = Recipe.answer_minutes,
    pictures: Annotated[int, typer.Option(help="To draw.")] = Recipe.pictures,
    start: Annotated[Path | None, typer.Option(help="Folder of weights to go on from.")] = None,
    threads: Annotated[int, typer.Option(help="Of the processor.")] = 1,
) -> None:
    """Train look-tiny and write its folder; then examine it, see baton_vision.look.examine."""
    torch.set_num_threads(threads)
    out.mkdir(parents=True, exist_ok=True)
    recipe = Recipe(word_minutes=word_minutes, answer_minutes=answer_minutes, pictures=pictures)
    train(recipe, text_model, out, start)


if __name__ == "__main__":
    typer.run(main)
