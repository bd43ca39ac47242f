"""Measure how well a served `look-tiny` answers questions about held-out pictures.

    baton serve look-tiny --port 8000
    python -m training.look_tiny.examine --url http://127.0.0.1:8000 --record

Any server with OpenAI's chat API will do, `vllm serve` too. Answers are decoded greedily and compared by
`questions.is_right`.
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

from training.look_tiny.pictures import HELD_OUT_SEEDS, make_sample
from training.look_tiny.questions import CHANCE, Question, is_right
from training.look_tiny.record import SHIPPED, add_examination

LONGEST_ANSWER = 72  # tokens; a description of three shapes takes this many
ANSWER_WITHIN_S = 120.0


@dataclass(frozen=True)
class Score:
    """The score of one kind of question.

    Attributes:
        right: number of right answers.
        asked: number of questions.
        chance: expected share of right guesses without the picture; None for descriptions.
    """

    right: int
    asked: int
    chance: float | None

    @property
    def share(self) -> float:
        """Return the share of right answers, 0 to 1."""
        return self.right / self.asked


@dataclass(frozen=True)
class Examiner:
    """Sends questions to a served model and scores the answers.

    Attributes:
        client: an HTTP client whose base URL is the server.
        model: the model's name on the server.
        at_once: number of concurrent requests.
    """

    client: httpx.Client
    model: str
    at_once: int = 8

    def answer(self, picture: str, question: str) -> str:
        """Return the model's answer to a question about a picture, which is given as a data URL.

        Raises:
            httpx.HTTPError: the server cannot be reached or answers with an error.
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

    def scores(self, seeds: Sequence[int]) -> dict[str, Score]:
        """Ask every question about the pictures of these seeds; return the scores by kind of question."""
        with ThreadPoolExecutor(self.at_once) as pool:
            results = [result for of_one in pool.map(self._results, seeds) for result in of_one]
        kinds = [*CHANCE, "description"]
        by_kind = {kind: [right for asked, right in results if asked.kind == kind] for kind in kinds}
        return {
            kind: Score(sum(right), len(right), CHANCE.get(kind)) for kind, right in by_kind.items() if right
        }

    def _results(self, seed: int) -> list[tuple[Question, bool]]:
        sample = make_sample(seed)
        picture = data_url(sample.picture)
        return [(asked, is_right(asked, self.answer(picture, asked.text))) for asked in sample.questions]


def data_url(picture: Image.Image) -> str:
    """Encode a picture as a data URL (PNG)."""
    file = io.BytesIO()
    picture.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def print_scores(scores: dict[str, Score]) -> None:
    """Print the scores as a table."""
    table = Table("question", "right", "of", "share", "chance")
    for kind, score in scores.items():
        chance = "-" if score.chance is None else f"{score.chance:.1%}"
        table.add_row(kind, str(score.right), str(score.asked), f"{score.share:.1%}", chance)
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
        scores = Examiner(client, model).scores(HELD_OUT_SEEDS[:pictures])
    print_scores(scores)
    if record:
        rows: dict[str, Any] = {
            kind: asdict(score) | {"share": round(score.share, 4)} for kind, score in scores.items()
        }
        add_examination(folder, rows, pictures)


if __name__ == "__main__":
    typer.run(main)
