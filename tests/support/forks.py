"""Processes that are forked from one that has imported vLLM and the gateway, which takes a process of its own ten seconds."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from types import SimpleNamespace

import pytest
import setproctitle

from baton.prepare import FORKED_MODULES

PR_SET_PDEATHSIG = 1
GATEWAY_MODULES = ("baton.cli", "baton.serve", "baton.engines.vllm.build_fleet", "support.fake_serve")


def forks() -> ForkServerContext:
    """Where engines and gateways are forked from: one process for all tests of this one."""
    context = multiprocessing.get_context("forkserver")
    modules = ["vllm", "vllm.entrypoints.llm", *FORKED_MODULES, *GATEWAY_MODULES, "support.frozen"]
    context.set_forkserver_preload(modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))  # the extension is there
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        patch.setenv("VLLM_LOGGING_LEVEL", "WARNING")  # read as vLLM is imported
        ensure_running()
    return context


class ForkedCommand:
    """A command in a forked process, `baton` unless another is named, with what tests use of `subprocess.Popen`.

    Its engines are forked from its own fork server, as always: only imports are spared, its own and this one's. Gateways that
    tests start without `forked` have all of it as users do.

    Args:
        words: of its command line.
        output: where what it prints goes, to the end of the file.
        environment: all of its variables.
        command: what is run; what it returns is the exit status.
    """

    def __init__(
        self,
        words: list[str],
        output: Path,
        environment: dict[str, str],
        command: Callable[[], int | None] | None = None,
    ) -> None:
        self._process: ForkServerProcess = forks().Process(
            target=_run, args=(words, str(output), environment, command or _baton)
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


def _run(
    words: list[str], output: str, environment: dict[str, str], command: Callable[[], int | None]
) -> None:
    os.setsid()  # its threads of low priority give way to its own, not to other tests
    # It ends with these tests also where they are killed.
    assert ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) == 0
    with open(output, "a") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())
    setproctitle.getproctitle()  # finds the title's memory, which lies before the environment
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]  # it has one of its own, as any command
    sys.argv = words
    sys.exit(command())


def _baton() -> None:
    from baton.cli import main
    from baton.engines.process import fork_server

    vars(fork_server)["subprocess"] = SimpleNamespace(Popen=_start_fork_server, DEVNULL=subprocess.DEVNULL)
    main()


class ForkedServer:
    """The first fork server of a forked gateway: forked from it before it has threads, with what a gateway uses of `Popen`."""

    def __init__(self, words: Sequence[str], control: int, environment: Mapping[str, str]) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            # As in a new program: above all pipes, whose end tells that of a process.
            os.closerange(3, control)
            os.closerange(control + 1, os.sysconf("SC_OPEN_MAX"))
            os.environ.clear()
            os.environ.update(environment)
            sys.argv = list(words)
            from baton.engines.process import fork_server

            fork_server.main()
        finally:
            os._exit(1)

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Wait for its end, in two threads of the gateway at once."""
        with contextlib.suppress(ChildProcessError):  # the other thread was told first
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        while self.returncode is None:
            time.sleep(0.001)  # the other thread is about to tell
        return self.returncode


def _start_fork_server(
    words: Sequence[str], *, env: Mapping[str, str], pass_fds: Sequence[int], stdin: int
) -> ForkedServer:
    """Fork the first one; one that is to replace it is started as always, for by then the gateway has threads."""
    from baton.engines.process import fork_server

    vars(fork_server)["subprocess"] = subprocess
    return ForkedServer(words[2:], pass_fds[0], env)
