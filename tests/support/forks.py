"""Processes that are forked from one that has imported vLLM and the gateway, which takes a process of its own ten seconds."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from multiprocessing import resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.forkserver import ensure_running
from pathlib import Path

import pytest

from baton.prepare import FORKED_MODULES

GATEWAY_MODULES = ("baton.cli", "baton.serve", "baton.engines.vllm.build_fleet")


def forks() -> ForkServerContext:
    """Where engines and gateways are forked from: one process for all tests of this one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vllm", "vllm.entrypoints.llm", *FORKED_MODULES, *GATEWAY_MODULES])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))  # the extension is there
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        patch.setenv("VLLM_LOGGING_LEVEL", "WARNING")  # read as vLLM is imported
        ensure_running()
    return context


class ForkedCommand:
    """`baton` in a forked process, with what tests use of `subprocess.Popen`.

    Its engines are forked from its own fork server, as always: only its own imports are spared.

    Args:
        words: of its command line.
        output: where what it prints goes, to the end of the file.
        environment: all of its variables.
    """

    def __init__(self, words: list[str], output: Path, environment: dict[str, str]) -> None:
        self._process: ForkServerProcess = forks().Process(
            target=_run, args=(words, str(output), environment)
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("baton", timeout or 0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


def _run(words: list[str], output: str, environment: dict[str, str]) -> None:
    with open(output, "a") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]  # it has one of its own, as any command
    sys.argv = words
    from baton.cli import main

    main()
