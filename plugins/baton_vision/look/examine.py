"""Examines a served `look-tiny` on pictures it was not trained on.

    baton serve look-tiny --port 8000
    python -m baton_vision.look.examine --url http://127.0.0.1:8000 --record

Any server with OpenAI's chat API will do, `vllm serve` too. Answers are decoded greedily; when one is right
is said at `questions.is_right`.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from PIL import Image
from rich.console import Console
from rich.table import Table

from baton_vision.look.pictures import HELD_OUT_SEEDS, make_sample
from baton_vision.look.questions import CHANCE, Question, is_right
from baton_vision.look.record import SHIPPED, add_examination

LONGEST_ANSWER = 72  # tokens; of a description of three shapes
ANSWER_WITHIN_S = 120.0


@dataclass(frozen=True)
class Mark:
    """How one kind of question went.

    Attributes:
        right: answers that were right.
        asked: questions.
        chance: share that a guess without the picture gets; None for descriptions.
    """

    right: int
    asked: int
    chance: float | None

    @property
    def share(self) -> float:
        """Right answers of all."""
        return self.right / self.asked


@dataclass(frozen=True)
class Examiner:
    """Asks a served model.

    Attributes:
        client: of the server.
        model: its name there.
        at_once: requests under way.
    """

    client: httpx.Client
    model: str
    at_once: int = 8

    def answer(self, picture: str, question: str) -> str:
        """What the model says to a question about a picture (a data URL).

        Raises:
            httpx.HTTPError: no answer.
        """
        content = [{"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": question}]
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": LONGEST_ANSWER,
        }
        response = self.client.post("/v1/chat/completions", json=body)
        response.raise_for_status()
        return str(response.json()["choices"][0]["message"]["content"])

    def marks(self, seeds: Sequence[int]) -> dict[str, Mark]:
        """Ask every question about the pictures of some seeds."""
        with ThreadPoolExecutor(self.at_once) as pool:
            results = [result for of_one in pool.map(self._results, seeds) for result in of_one]
        kinds = [*CHANCE, "description"]
        by_kind = {kind: [right for asked, right in results if asked.kind == kind] for kind in kinds}
        return {
            kind: Mark(sum(right), len(right), CHANCE.get(kind)) for kind, right in by_kind.items() if right
        }

    def _results(self, seed: int) -> list[tuple[Question, bool]]:
        sample = make_sample(seed)
        picture = data_url(sample.picture)
        return [(asked, is_right(asked, self.answer(picture, asked.text))) for asked in sample.questions]


def data_url(picture: Image.Image) -> str:
    """A picture as a request carries it: PNG."""
    file = io.BytesIO()
    picture.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def print_marks(marks: dict[str, Mark]) -> None:
    """A table on the terminal."""
    table = Table("question", "right", "of", "share", "chance")
    for kind, mark in marks.items():
        chance = "-" if mark.chance is None else f"{mark.chance:.1%}"
        table.add_row(kind, str(mark.right), str(mark.asked), f"{mark.share:.1%}", chance)
    Console().print(table)


def main(
    url: Annotated[str, typer.Option(help="The server.")] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="The model's name there.")] = "look-tiny",
    key: Annotated[str, typer.Option(help="The API key, if the server wants one.")] = "",
    pictures: Annotated[int, typer.Option(min=1, max=len(HELD_OUT_SEEDS))] = len(HELD_OUT_SEEDS),
    record: Annotated[
        bool, typer.Option("--record", help="Write the figures into the model's card.")
    ] = False,
    folder: Annotated[Path, typer.Option(help="The model's folder, for --record.")] = SHIPPED,
) -> None:
    """Ask every held-out question and print how many answers are right."""
    headers: dict[str, str] = {"Authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=url, headers=headers, timeout=ANSWER_WITHIN_S, trust_env=False) as client:
        marks = Examiner(client, model).marks(HELD_OUT_SEEDS[:pictures])
    print_marks(marks)
    if record:
        rows: dict[str, Any] = {
            kind: asdict(mark) | {"share": round(mark.share, 4)} for kind, mark in marks.items()
        }
        add_examination(folder, rows, pictures)


if __name__ == "__main__":
    typer.run(main)
