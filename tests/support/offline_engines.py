"""Plain vLLM engines, each in a process of its own, for tests to ask."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from baton.config.settings import load_settings
from baton.models.store import ModelStore
from baton_kv.contract import PARAMS_KEY
from support import offline_vllm
from support.forks import forks

OWN = [4093, 282, 260, 1517]
"""What B adds to A's context, in token ids."""
SAVED_WITHIN_S = 20
Answer = dict[str, Any]


class OfflineEngine:
    """Plain vLLM with the connector, in a process of its own."""

    def __init__(self, store: Path, *, model: str | None = None, **args: object) -> None:
        self.model = model or ModelStore(load_settings().models_folder).resolve("smollm2")
        self._store = store
        self.computed = self.preempted = self.accepted = 0
        self._args = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 16, "block_size": 32} | args
        self._log = store.parent / f"engine-{id(self)}.log"

    def __enter__(self) -> OfflineEngine:
        eager = self._args.get("enforce_eager", True)
        context = forks() if eager else multiprocessing.get_context("spawn")
        self._questions, theirs = multiprocessing.Pipe()
        self._process = context.Process(
            target=offline_vllm.serve, args=(theirs, str(self._log), self.model, str(self._store), self._args)
        )
        self._process.start()
        theirs.close()
        self._told()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._questions.close()
        self._process.join(60)
        assert self._process.exitcode is not None, "the engine goes on"
        self._process.close()

    def ask(self, *asked: tuple[list[int], int, dict[str, Any] | None]) -> list[Answer]:
        """Prompts, tokens to generate, transfer parameters; one batch.

        Afterwards `computed` is how many prompt tokens the scheduler says it prefilled for it, `preempted`
        how often it took a running request's blocks away,
        `accepted` how many tokens that were guessed ahead it has accepted so far.
        """
        rows = [
            {"prompt": prompt, "max_tokens": count, "params": params, "salt": self._salt_of(params)}
            for prompt, count, params in asked
        ]
        self._questions.send(rows)
        told = self._told()
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
        self._questions.send(None)
        self._told()

    def call(self, name: str, *args: str) -> None:
        """Call a method of the worker's extension."""
        self._questions.send({"call": name, "args": args})
        self._told()

    def saved(self, params: dict[str, Any]) -> Path:
        """Wait until what an answer's parameters name is in the store."""
        path = self._store / "entries" / f"{params[PARAMS_KEY]['load']}.kv"
        deadline = time.monotonic() + SAVED_WITHIN_S
        while not path.exists():
            assert time.monotonic() < deadline, f"not saved:\n{self._log.read_text()[-3000:]}"
            time.sleep(0.005)
        return path

    def _told(self) -> Any:
        try:
            return self._questions.recv()
        except EOFError:
            raise AssertionError(f"the engine ended:\n{self._log.read_text()[-3000:]}") from None


def completed(model: str, prompts: list[str]) -> list[tuple[str, list[int]]]:
    """What plain vLLM, without anything of Baton's, says after prompts: texts and token ids."""
    answers, theirs = multiprocessing.Pipe(duplex=False)
    process = forks().Process(target=offline_vllm.complete, args=(theirs, model, prompts))
    process.start()
    theirs.close()
    said: list[tuple[str, list[int]]] = answers.recv()
    process.join(60)
    assert process.exitcode == 0
    return said


def prompt(length: int, seed: int = 0) -> list[int]:
    return [1 + (index * 7919 + seed * 104729 + index * index * 31) % 40000 for index in range(length)]


def same(one: Answer, other: Answer) -> None:
    assert one["tokens"] == other["tokens"]
    assert one["logprobs"] == pytest.approx(other["logprobs"], abs=2e-3)
