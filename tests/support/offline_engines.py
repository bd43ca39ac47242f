"""Plain vLLM engines with the connector, each in a process of its own, for tests to ask."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from baton.config.settings import load_settings
from baton.models.store import ModelStore
from baton_kv.contract import PARAMS_KEY

OWN = [4093, 282, 260, 1517]
"""What B adds to A's context, in token ids."""
SAVED_WITHIN_S = 20
Answer = dict[str, Any]


class OfflineEngine:
    """Plain vLLM with the connector, in a process of its own."""

    def __init__(self, store: Path, *, model: str | None = None, **args: object) -> None:
        model = model or ModelStore(load_settings().models_folder).resolve("smollm2")
        script = str(Path(__file__).parents[1] / "connector" / "offline.py")
        self._store = store
        self.model = model
        self.computed = self.preempted = self.accepted = 0
        given = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 16, "block_size": 32} | args
        self._command = [sys.executable, script, model, str(store), json.dumps(given)]
        self._log = store.parent / f"engine-{id(self)}.log"

    def __enter__(self) -> OfflineEngine:
        self._stderr = open(self._log, "w")  # closed in __exit__
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},  # the extension is there
        )
        self._line("READY")
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

    def ask(self, *asked: tuple[list[int], int, dict[str, Any] | None]) -> list[Answer]:
        """Prompts, tokens to generate, transfer parameters; one batch.

        Afterwards `computed` is how many prompt tokens the scheduler says it prefilled for it, `preempted`
        how often it took a running request's blocks away,
        `accepted` how many tokens that were guessed ahead it has accepted so far.
        """
        assert self._process.stdin is not None
        rows = [
            {"prompt": prompt, "max_tokens": count, "params": params, "salt": self._salt_of(params)}
            for prompt, count, params in asked
        ]
        self._process.stdin.write(json.dumps(rows) + "\n")
        self._process.stdin.flush()
        told = json.loads(self._line("ANSWER"))
        self.computed, self.preempted = told["computed"], told["preempted"]
        self.accepted += told["accepted"]
        answers: list[Answer] = told["answers"]
        return answers

    @staticmethod
    def _salt_of(params: dict[str, Any] | None) -> str | None:
        """The salt that a request names which uses moved KV."""
        return params[PARAMS_KEY].get("apart") if params else None

    def forget_prefixes(self) -> None:
        """Empty the engine's own prefix cache."""
        assert self._process.stdin is not None
        self._process.stdin.write("null\n")
        self._process.stdin.flush()
        self._line("ANSWER")

    def call(self, name: str, *args: str) -> None:
        """Call a method of the worker's extension."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"call": name, "args": args}) + "\n")
        self._process.stdin.flush()
        self._line("ANSWER")

    def saved(self, params: dict[str, Any]) -> Path:
        """Wait until what an answer's parameters name is in the store."""
        path = self._store / "entries" / f"{params[PARAMS_KEY]['load']}.kv"
        deadline = time.monotonic() + SAVED_WITHIN_S
        while not path.exists():
            assert time.monotonic() < deadline, f"not saved:\n{self._log.read_text()[-3000:]}"
            time.sleep(0.005)
        return path

    def _line(self, mark: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(mark):
                return line.removeprefix(mark).strip()
        raise AssertionError(f"the engine ended:\n{self._log.read_text()[-3000:]}")


def prompt(length: int, seed: int = 0) -> list[int]:
    return [1 + (index * 7919 + seed * 104729 + index * index * 31) % 40000 for index in range(length)]


def same(one: Answer, other: Answer) -> None:
    assert one["tokens"] == other["tokens"]
    assert one["logprobs"] == pytest.approx(other["logprobs"], abs=2e-3)
