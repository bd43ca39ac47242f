"""The child of `vision_engine.py`, as tests talk to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from PIL import Image

CHILD = Path(__file__).with_name("vision_engine.py")


@dataclass(frozen=True)
class Ask:
    """One prompt: text or token ids, its images, names for them, processor options.

    Attributes:
        whole: with the logprobs of the prompt too; without, what was computed before may be used.
    """

    prompt: str | list[int]
    images: list[Image.Image] = field(default_factory=list)
    uuids: list[str] | None = None
    options: dict[str, Any] | None = None
    max_tokens: int = 6
    whole: bool = True


@dataclass(frozen=True)
class Answer:
    """What came of it: `error`, or the prompt as the model saw it, logprobs `[positions, vocabulary]`, what was said."""

    error: str | None
    ids: list[int] = field(default_factory=list)
    said: list[int] = field(default_factory=list)
    logprobs: Any = None
    cached: int = 0


class VisionEngine:
    """Plain vLLM with nothing of Baton but its plugins; one engine after the other, in one process."""

    def __init__(self, folder: Path, mode: str = "eager") -> None:
        self._folder, self._mode = folder, mode
        self._log = folder / "engine.log"
        self._pictures = 0

    def __enter__(self) -> VisionEngine:
        self._stderr = self._log.open("w")  # closed in __exit__
        self._process = subprocess.Popen(
            [sys.executable, str(CHILD), str(self._folder), self._mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()
        self._stderr.close()

    def start(self, model: Path, **args: object) -> None:
        """End the engine before, and start one."""
        self._send({"engine": {"model": str(model)} | args})

    def ask(self, *asked: Ask) -> list[Answer]:
        """One batch."""
        rows = [
            {
                "prompt": one.prompt,
                "images": [self._saved(image) for image in one.images],
                "uuids": one.uuids,
                "options": one.options,
                "max_tokens": one.max_tokens,
                "whole": one.whole,
            }
            for one in asked
        ]
        return [self._answer(row) for row in self._send(rows)]

    def _answer(self, row: dict[str, Any]) -> Answer:
        if "error" in row:
            return Answer(row["error"])
        return Answer(None, row["ids"], row["said"], np.load(row["logprobs"]), row["cached"])

    def _saved(self, image: Image.Image) -> str:
        self._pictures += 1
        path = self._folder / f"picture-{self._pictures}.png"
        image.save(path)
        return str(path)

    def _send(self, message: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        said: deque[str] = deque(maxlen=400)
        for line in self._process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line.removeprefix("ANSWER "))
            said.append(line)
        raise AssertionError(f"the engine ended:\n{''.join(said)}\n{self._log.read_text()[-4000:]}")
