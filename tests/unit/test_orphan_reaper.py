"""A process that is killed leaves nothing behind that it started, whatever name that took."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

from baton.engines.process.orphan_reaper import LOOK_EVERY_S, MARK, OrphanReaper

PARENT = f"""
import os, pathlib, subprocess, sys, time
from baton.engines.process.orphan_reaper import MARK, OrphanReaper

reaper = OrphanReaper().__enter__()
os.environ[MARK] = reaper.mark
nameless = f"import setproctitle, subprocess, sys, time; setproctitle.setproctitle('X' * 4000); "
nameless += "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); print(flush=True); "
old = subprocess.Popen([sys.executable, "-c", nameless + "time.sleep(600)"], stdout=subprocess.PIPE)
old.stdout.readline()
time.sleep({LOOK_EVERY_S} + 1.5)
new = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
(pathlib.Path(reaper.scratch) / "a-socket").touch()
print(reaper.scratch, old.pid, new.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.fault("A8")
def test_the_children_of_a_killed_process_end_too() -> None:
    """One that was there for long and has lost its environment, its child, one just started; their files."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        folder, *numbers = parent.stdout.readline().split()
        assert (Path(folder) / "a-socket").exists()
        started = [psutil.Process(int(pid)) for pid in numbers]
        started += started[0].children(recursive=True)
        assert len(started) == 3
        parent.kill()
        _gone, left = psutil.wait_procs(started, timeout=30)
    assert left == []
    deadline = time.monotonic() + 20
    while Path(folder).exists():
        assert time.monotonic() < deadline, "the temporary folder is still there"
        time.sleep(0.05)


def test_what_is_not_of_the_family_is_left_alone() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as stranger:
        with OrphanReaper():
            pass
        assert stranger.poll() is None
        stranger.kill()


def test_a_clean_end_takes_the_mark_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was forgotten is ended; the process that held the reaper is not."""
    with OrphanReaper() as reaper:
        monkeypatch.setenv(MARK, reaper.mark)
        with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as forgotten:
            time.sleep(0.2)
            reaper.__exit__()
            assert forgotten.wait(30) == -signal.SIGKILL
    assert Path(f"/proc/{os.getpid()}").exists()


def test_a_clean_end_takes_the_engines_temporary_folder_along(tmp_path: Path) -> None:
    """It is one that sockets may lie in: the kernel takes paths of 107 characters."""
    long = tmp_path / ("x" * 100)
    long.mkdir()
    with OrphanReaper("/tmp") as reaper, OrphanReaper(str(long)) as other:
        for scratch in (reaper.scratch, other.scratch):
            path = Path(scratch) / str(uuid.uuid4())
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(path))
            assert path.exists()
    assert not Path(reaper.scratch).exists()
    assert not Path(other.scratch).exists()
