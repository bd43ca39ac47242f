"""The process that engine cores are forked from: what it gives a child, and its end."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import connection
from pathlib import Path
from typing import Any

import psutil
import pytest

from baton.engines.process import fork_server
from baton.engines.process.fork_server import (
    CURRENT,
    KILLED,
    REST_S,
    ForkContext,
    ForkServer,
    ForkServerLost,
    Launch,
)

TIMEOUT = 60


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    modules = ("no_such_module", "colorsys", __name__)  # each child imports this one otherwise
    with ForkServer(modules, {"OF_THE_SERVER": "1"}) as running:
        yield running


def started(server: ForkServer, target: Callable[..., None], *args: Any) -> tuple[Any, list[int]]:
    """A process that the server forked, and what its launch was told."""
    launched: list[int] = []
    token = CURRENT.set(Launch(server, lambda: None, launched.append))
    try:
        process = ForkContext().Process(target=target, args=args)
        process.start()
    finally:
        CURRENT.reset(token)
    return process, launched


def leave(path: str) -> None:
    """Write what a child sees into a file."""
    seen = (
        os.environ.get("OF_THE_SERVER"),
        os.environ.get("SET_LATER"),
        "colorsys" in sys.modules,
        os.getppid(),
        signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    )
    Path(path).write_text(repr(seen))
    raise SystemExit(7)


def wait_for_signal(path: str) -> None:
    Path(path).write_text("here")
    signal.pause()


def own_pid(path: str) -> None:
    Path(path).write_text(str(os.getpid()))


def fork_and_wait(path: str) -> None:
    if child := os.fork():
        Path(path).write_text(str(child))
    signal.pause()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_child_has_the_modules_and_this_environment_and_its_exit_code_is_told(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server.usable()
    monkeypatch.setenv("SET_LATER", "2")
    process, launched = started(server, leave, str(tmp_path / "seen"))
    process.join(TIMEOUT)
    assert (tmp_path / "seen").read_text() == repr(("1", "2", True, server.pid, True))
    assert "OF_THE_SERVER" not in os.environ
    assert process.exitcode == 7
    assert launched == [process.pid]
    assert process not in multiprocessing.active_children()


def test_a_killed_child_is_told_by_its_sentinel(server: ForkServer, tmp_path: Path) -> None:
    process, _ = started(server, wait_for_signal, str(tmp_path / "here"))
    until((tmp_path / "here").exists)
    assert process in multiprocessing.active_children()
    assert connection.wait([process.sentinel], 0) == []
    os.kill(process.pid, signal.SIGKILL)
    assert connection.wait([process.sentinel], TIMEOUT) == [process.sentinel]
    assert process.exitcode == KILLED


@pytest.mark.fault("A12")
def test_a_killed_server_is_replaced_and_its_children_go_on(server: ForkServer, tmp_path: Path) -> None:
    process, _ = started(server, wait_for_signal, str(tmp_path / "first"))
    until((tmp_path / "first").exists)
    old = server.pid
    assert old is not None
    os.kill(old, signal.SIGKILL)
    until(lambda: server.pid != old)
    assert connection.wait([process.sentinel], 0) == []
    assert process.is_alive()
    other, _ = started(server, leave, str(tmp_path / "second"))
    other.join(TIMEOUT)
    assert other.exitcode == 7
    process.kill()
    process.join(TIMEOUT)
    assert process.exitcode == KILLED


def test_a_server_that_cannot_start_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "ends_its_process.py").write_text("import os; os._exit(3)")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    with ForkServer(("ends_its_process",), {}) as server:
        assert not server.usable()
        assert "exit code 3" in str(server.unusable)
        with pytest.raises(ForkServerLost):
            server.fork([])


def test_a_server_that_opened_a_gpu_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No fork can use it, and the server would hold its memory."""
    (tmp_path / "opens_a_gpu.py").write_text(
        "import sys, types\n"
        "cuda = types.SimpleNamespace(is_initialized=lambda: True)\n"
        "sys.modules['torch'] = types.SimpleNamespace(cuda=cuda)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    with ForkServer(("opens_a_gpu",), {}) as server:
        opened = server.pid
        assert opened is not None
        assert not server.usable()
        assert "opened a GPU" in str(server.unusable)
        until(lambda: not psutil.pid_exists(opened))
        assert server.pid == opened  # it is not replaced


def test_a_replacement_that_cannot_start_is_replaced_after_a_rest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Else a machine without memory would start one interpreter after the other, as fast as it can."""
    module = tmp_path / "may_end_its_process.py"
    module.write_text("")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    rests: list[float | None] = []
    with ForkServer((module.stem,), {}) as server:
        assert server.usable()

        def wait(timeout: float | None = None) -> bool:
            rests.append(timeout)
            module.write_text("")
            return False

        monkeypatch.setattr(server._closed, "wait", wait)
        module.write_text("import os; os._exit(3)  # and no compiled file has this length")
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        until(lambda: rests)
        until(lambda: server.pid is not None and psutil.pid_exists(server.pid) and server.usable())
        process, _ = started(server, leave, str(tmp_path / "seen"))
        process.join(TIMEOUT)
        assert process.exitcode == 7
        assert rests == [REST_S]


def test_an_interrupted_fork_answers_nobody_else(server: ForkServer, tmp_path: Path) -> None:
    def interrupted(*_: object) -> bytes:
        raise SystemExit

    assert server.usable()
    old = server.pid
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fork_server, "_read", interrupted)
        with pytest.raises(SystemExit):
            started(server, leave, str(tmp_path / "first"))
    until(lambda: server.pid != old)
    process, _ = started(server, own_pid, str(tmp_path / "second"))
    process.join(TIMEOUT)
    assert (tmp_path / "second").read_text() == str(process.pid)


def test_an_exit_code_is_not_waited_for_where_the_child_s_own_child_lives_on(
    server: ForkServer, tmp_path: Path
) -> None:
    process, _ = started(server, fork_and_wait, str(tmp_path / "grandchild"))
    until(lambda: (tmp_path / "grandchild").exists() and (tmp_path / "grandchild").read_text())
    process.kill()
    assert connection.wait([process.sentinel], TIMEOUT) == [process.sentinel]
    try:
        assert process.exitcode == KILLED
    finally:
        os.kill(int((tmp_path / "grandchild").read_text()), signal.SIGKILL)


def test_children_are_forked_from_several_threads(server: ForkServer, tmp_path: Path) -> None:
    codes: list[int] = []

    def run(number: int) -> None:
        process, _ = started(server, leave, str(tmp_path / str(number)))
        process.join(TIMEOUT)
        codes.append(process.exitcode)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [7] * 8


def test_a_server_without_its_gateway_lingers_so_that_the_reaper_finds_its_children(
    server: ForkServer,
) -> None:
    assert server.usable()
    process = psutil.Process(server.pid)
    with contextlib.suppress(psutil.TimeoutExpired):
        server._control.close()  # type: ignore[union-attr]  # as when the gateway is killed
        assert process.wait(0.5) is None


def test_forking_leaves_no_descriptor_and_no_memory_behind(server: ForkServer, tmp_path: Path) -> None:
    def fork() -> None:
        process, _ = started(server, leave, str(tmp_path / "seen"))
        process.join(TIMEOUT)
        process.close()

    fork()
    theirs, ours = psutil.Process(server.pid), psutil.Process()
    before = (theirs.num_fds(), ours.num_fds())
    memory = theirs.memory_info().rss
    for _ in range(50):
        fork()
    assert (theirs.num_fds(), ours.num_fds()) == before
    assert theirs.memory_info().rss - memory < 4 * 2**20
