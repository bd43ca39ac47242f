"""Trains `look-tiny`: first its image tokens learn to be words, then to be looked at by the text model.

    python -m baton_vision.look.train --text-model ~/.cache/baton/models/smollm2

The text model is frozen throughout. In the first part (no text model runs in it, so it is cheap) each image
token is drawn to the embedding of a word: the picture's facts, in fixed places. In the second the text model
is asked questions, and the loss of its answers goes back through it into projector and tower.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import numpy.typing as npt
import torch
import typer
from safetensors.torch import load_file
from safetensors.torch import save as serialised
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from baton_vision.look.chats import IGNORED, Chats, Speller
from baton_vision.look.design import IMAGE_TOKENS
from baton_vision.look.facts import COLOURS, FEATURES, NUMBERS, SHAPES, words
from baton_vision.look.network import Eyes, load_text_model, normalised, shrunk
from baton_vision.look.pictures import TRAINING_START, VALIDATION_SEEDS, Sample, make_sample
from baton_vision.look.questions import Question

VOCABULARY: Final = (
    *COLOURS, *SHAPES, *NUMBERS, *FEATURES,
    "shapes", "overhead", "scene", "yes", "no", "top", "middle", "bottom", "left", "right",
)  # fmt: skip
FILLER: Final = "\n"
SHARPNESS: Final = 24.0  # how sure a token that is one word's embedding is of that word, in log odds


@dataclass(frozen=True)
class Recipe:
    """How to train.

    Attributes:
        seed: of the weights, the pictures' order and the choice of questions.
        pictures: kept in memory; every batch is drawn from them.
        word_minutes: how long the first part runs, of the processor's time: what else the machine does then
            makes no difference.
        answer_minutes: the same of the second part.
        word_batch: pictures a step.
        answer_batch: chats a step.
        word_rate: the highest learning rate of the first part; rises, then falls as a cosine.
        answer_rate: the same of the second part.
        matrix_factor: how much higher the rate of the tower's matrices is (Muon).
        decay: weight decay.
        word_share: how much the first part's loss counts in the second; falls to 0.
        memory: of the moving average of the weights, which is what is kept.
    """

    seed: int = 4
    pictures: int = 12_000
    word_minutes: float = 12.0
    answer_minutes: float = 40.0
    word_batch: int = 64
    answer_batch: int = 8
    word_rate: float = 1e-3
    answer_rate: float = 4e-4
    matrix_factor: float = 2.0
    decay: float = 0.02
    word_share: float = 0.3
    memory: float = 0.98


@dataclass
class Book:
    """The training pictures: pixels uint8 (count, side, side, 3), their words, their questions."""

    pixels: npt.NDArray[np.uint8]
    words: Tensor
    questions: list[tuple[Question, ...]]


@dataclass
class Log:
    """What happened, for the record and the terminal."""

    file: Path
    lines: list[dict[str, Any]] = field(default_factory=list)

    def say(self, **facts: Any) -> None:
        """Keep and print one line."""
        line = {"seconds": round(time.process_time()), **facts}
        self.lines.append(line)
        print(json.dumps(line), flush=True)
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")


class WordLoss:
    """How far image tokens are from the words they are to be.

    Args:
        embedding: the text model's, (vocabulary, width).
        speller: for the words' ids.
    """

    def __init__(self, embedding: Tensor, speller: Speller) -> None:
        ids = [self._one(speller, " " + word) for word in VOCABULARY] + speller.ids(FILLER)
        self.table = embedding[ids].float()
        apart = torch.cdist(self.table, self.table).square()
        self.scale = SHARPNESS / float(apart[apart > 0].mean())
        self.numbers = {word: n for n, word in enumerate((*VOCABULARY, FILLER))}

    @staticmethod
    def _one(speller: Speller, word: str) -> int:
        (token,) = speller.ids(word)
        return token

    def target(self, sample: Sample) -> list[int]:
        """Numbers of the words of a picture, one for each image token."""
        said = words(sample.facts)
        return [self.numbers[word] for word in said] + [self.numbers[FILLER]] * (IMAGE_TOKENS - len(said))

    def scores(self, tokens: Tensor) -> Tensor:
        """Log odds of each word, (batch, tokens, words): the nearer, the likelier."""
        return -self.scale * torch.cdist(tokens.float(), self.table.expand(len(tokens), -1, -1)).square()

    def __call__(self, tokens: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy, the filler counting little."""
        weight = torch.ones(len(self.numbers))
        weight[-1] = 0.05
        return nn.functional.cross_entropy(self.scores(tokens).flatten(0, 1), target.flatten(), weight)


def write_book(seeds: range, loss: WordLoss, log: Log) -> Book:
    """Draw the pictures of some seeds."""
    pixels, target, asked = [], [], []
    for seed in seeds:
        sample = make_sample(seed)
        pixels.append(shrunk(sample.picture))
        target.append(loss.target(sample))
        asked.append(sample.questions)
    log.say(drawn=len(seeds))
    return Book(np.stack(pixels), torch.tensor(target), asked)


class Trainer:
    """Optimisers, schedule and moving average around the network.

    Args:
        eyes: what learns.
        rate: the highest learning rate.
        minutes: how long the schedule is.
        recipe: the rest.
    """

    def __init__(self, eyes: Eyes, rate: float, minutes: float, recipe: Recipe) -> None:
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
        self.highest = [rate * recipe.matrix_factor, rate]
        self.average = AveragedModel(eyes, multi_avg_fn=get_ema_multi_avg_fn(recipe.memory))
        self.seconds, self.start, self.steps = 60 * minutes, time.process_time(), 0

    @property
    def done(self) -> float:
        """Share of the processor's time that is gone."""
        return (time.process_time() - self.start) / self.seconds

    def step(self, loss: Tensor) -> None:
        """One step of the optimisers; the rate follows the processor's clock."""
        rise = min(1.0, (self.steps + 1) / 30)
        share = rise * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, self.done))))
        self.eyes.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.eyes.parameters(), 1.0)
        for optimiser, highest in zip(self.optimisers, self.highest, strict=True):
            optimiser.param_groups[0]["lr"] = highest * share
            optimiser.step()
        self.average.update_parameters(self.eyes)
        self.steps += 1

    def keep(self) -> None:
        """Go on from the moving average."""
        self.eyes.load_state_dict(self.average.module.state_dict())


def learn_words(eyes: Eyes, book: Book, test: Book, loss: WordLoss, recipe: Recipe, log: Log) -> int:
    """The first part; returns its steps."""
    trainer = Trainer(eyes, recipe.word_rate, recipe.word_minutes, recipe)
    rng = np.random.default_rng(recipe.seed)
    recent: list[float] = []
    while trainer.done < 1:
        chosen = rng.integers(len(book.pixels), size=recipe.word_batch)
        with torch.autocast("cpu", torch.bfloat16):
            tokens = eyes(normalised(book.pixels[chosen]))
        now = loss(tokens, book.words[chosen])
        trainer.step(now)
        recent.append(float(now.detach()))
        if trainer.steps % 50 == 0:
            right = word_accuracy(trainer.average.module, test, loss)
            log.say(part="words", step=trainer.steps, loss=round(float(np.mean(recent[-50:])), 4), right=right)
    trainer.keep()
    return trainer.steps


def word_accuracy(eyes: nn.Module, book: Book, loss: WordLoss) -> float:
    """Share of the words (filler apart) that are right."""
    with torch.inference_mode():
        guess = loss.scores(eyes(normalised(book.pixels[:256]))).argmax(-1)
    target = book.words[:256]
    counts = target != len(loss.numbers) - 1
    return round(float((guess == target)[counts].float().mean()), 4)


class Listener:
    """The frozen text model, hearing image tokens.

    Args:
        model: HuggingFace's.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    def scores(self, chats: Chats, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits (answer tokens, vocabulary) with their labels and weights."""
        embedded = self.model.get_input_embeddings()(chats.ids)
        rows = torch.arange(len(chats.ids))[:, None]
        columns = torch.tensor(chats.places)[:, None] + torch.arange(IMAGE_TOKENS)
        embedded = embedded.index_put((rows, columns), tokens.to(embedded.dtype))
        hidden = self.model.model(inputs_embeds=embedded, use_cache=False).last_hidden_state
        wanted = chats.labels[:, 1:] != IGNORED
        logits = self.model.lm_head(hidden[:, :-1][wanted]).float()
        return logits, chats.labels[:, 1:][wanted], chats.weights[:, 1:][wanted]


def learn_answers(
    eyes: Eyes, book: Book, test: Book, loss: WordLoss, listener: Listener, speller: Speller, recipe: Recipe,
    log: Log, out: Path,
) -> int:  # fmt: skip
    """The second part; returns its steps."""
    trainer = Trainer(eyes, recipe.answer_rate, recipe.answer_minutes, recipe)
    recent: list[float] = []
    for chosen, chats in chats_of(book, speller, recipe):
        with torch.autocast("cpu", torch.bfloat16):
            tokens = eyes(normalised(book.pixels[chosen]))
        logits, labels, weights = listener.scores(chats, tokens)
        each = nn.functional.cross_entropy(logits, labels, reduction="none")
        now = (each * weights).sum() / weights.sum()
        share = recipe.word_share * max(0.0, 1 - trainer.done / 0.8)
        trainer.step(now + share * loss(tokens, book.words[chosen]))
        recent.append(float(now.detach()))
        if trainer.steps % 25 == 0:
            log.say(part="answers", step=trainer.steps, loss=round(float(np.mean(recent[-25:])), 4))
        if trainer.steps % 250 == 0:
            log.say(step=trainer.steps, right=answer_accuracy(trainer.average.module, test, listener, speller))
            save(trainer.average.module, out)
        if trainer.done >= 1:
            break
    trainer.keep()
    return trainer.steps


def chats_of(book: Book, speller: Speller, recipe: Recipe) -> Iterator[tuple[npt.NDArray[np.int64], Chats]]:
    """Batches without end: numbers of the pictures, and chats of one to four questions about each."""
    rng = np.random.default_rng(recipe.seed + 1)
    while True:
        chosen = rng.integers(len(book.pixels), size=recipe.answer_batch)
        asked = []
        for number in chosen:
            every = book.questions[number]
            order = rng.permutation(len(every))[: int(rng.integers(2, 5))]
            asked.append([every[place] for place in order])
        last = [bool(rng.random() < 0.1) for _ in chosen]
        yield chosen, speller.chats(asked, picture_last=last)


def answer_accuracy(
    eyes: nn.Module, book: Book, listener: Listener, speller: Speller, most: int = 50
) -> dict[str, float]:
    """Share of right answers by kind of question: an answer is right if greedy decoding gives each token."""
    asked = [(n, question) for n in range(most) for question in book.questions[n][:2]]
    right: dict[str, list[bool]] = {}
    for start in range(0, len(asked), 16):
        part = asked[start : start + 16]
        chats = speller.chats([[question] for _, question in part], picture_last=[False] * len(part))
        with torch.inference_mode():
            tokens = eyes(normalised(book.pixels[[n for n, _ in part]]))
            logits, labels, _ = listener.scores(chats, tokens)
        hits = (logits.argmax(-1) == labels).split((chats.labels != IGNORED).sum(1).tolist())
        for (_, question), hit in zip(part, hits, strict=True):
            right.setdefault(question.kind, []).append(bool(hit.all()))
    return {kind: round(float(np.mean(hits)), 3) for kind, hits in sorted(right.items())}


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


def main(
    text_model: Annotated[Path, typer.Option(help="Folder of the prepared SmolLM2.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    word_minutes: Annotated[float, typer.Option(help="Of the first part.")] = Recipe.word_minutes,
    answer_minutes: Annotated[float, typer.Option(help="Of the second part.")] = Recipe.answer_minutes,
    pictures: Annotated[int, typer.Option(help="To draw.")] = Recipe.pictures,
    start: Annotated[Path | None, typer.Option(help="Folder of weights whose words are learnt.")] = None,
    threads: Annotated[int, typer.Option(help="Of the processor.")] = 1,
) -> None:
    """Draw the pictures, train, write the weights and the record."""
    torch.set_num_threads(threads)
    out.mkdir(parents=True, exist_ok=True)
    recipe = Recipe(word_minutes=word_minutes, answer_minutes=answer_minutes, pictures=pictures)
    log, speller, text = Log(out / "log.jsonl"), Speller(text_model), load_text_model(text_model)
    loss, listener, eyes = WordLoss(text.get_input_embeddings().weight, speller), Listener(text), Eyes(recipe.seed)
    log.say(parameters=sum(p.numel() for p in eyes.parameters()), recipe=asdict(recipe))
    test = write_book(VALIDATION_SEEDS, loss, log)
    seeds = range(TRAINING_START, TRAINING_START + recipe.pictures)
    book = write_book(seeds, loss, log)
    if start is None:
        steps = {"words": learn_words(eyes, book, test, loss, recipe, log)}
        save(eyes, out / "words")
    else:
        load(eyes, start)
        steps = {"words": 0}
    steps["answers"] = learn_answers(eyes, book, test, loss, listener, speller, recipe, log, out)
    save(eyes, out)
    right = answer_accuracy(eyes, test, listener, speller, most=len(VALIDATION_SEEDS))
    log.say(steps=steps, right=right)


if __name__ == "__main__":
    typer.run(main)
