"""When an engine's process counts as gone: also where nobody else reads how it ended."""

from __future__ import annotations

import subprocess
import sys

import psutil

from baton.engines.process.processes import kill, trees_of, wait_until_gone

FIRST_PROCESS = """
import ctypes, os, subprocess, sys
import psutil
from baton.engines.process.processes import kill, trees_of, wait_until_gone

PR_SET_CHILD_SUBREAPER = 36
assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
spawn = "import subprocess, sys, time; "
spawn += "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); print(flush=True); time.sleep(600)"
core = subprocess.Popen([sys.executable, "-c", spawn], stdout=subprocess.PIPE)
core.stdout.readline()
core_and_worker = trees_of([core.pid])
kill(core_and_worker)
core.wait()
left = wait_until_gone(core_and_worker, 20)
print(len(core_and_worker), len(left), [process.is_running() for process in core_and_worker])
"""
"""Orphans become children of this process, as in a container whose first process is the gateway."""


def test_the_first_process_of_a_container_reaps_the_workers_of_a_core_that_was_killed() -> None:
    done = subprocess.run([sys.executable, "-c", FIRST_PROCESS], capture_output=True, text=True, check=True)
    assert done.stdout == "2 0 [False, False]\n"


def test_a_process_whose_end_its_parent_has_not_read_is_gone_and_one_that_runs_is_not() -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with subprocess.Popen(command) as ended, subprocess.Popen(command) as running:
        both = trees_of([ended.pid, running.pid, None])
        ended.kill()
        assert wait_until_gone(both[:1], 20) == []
        assert wait_until_gone(both, 0) == [psutil.Process(running.pid)]
        kill(both)
        assert wait_until_gone(both, 20) == []
