"""Two nodes of Ray on this machine, in a process of their own: `ray_cluster.py APP ARGUMENTS NODES`, all JSON.

Prints a line of JSON for each command that it reads: `run`, `replicas N`, `kill` (the second node), `end`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

TESTS = Path(__file__).parents[1]
CORES = 8
"""Of each node, as Ray counts them."""


class RayCluster:
    """Two nodes of Ray with Ray Serve's HAProxy on the first.

    Attributes:
        url: of the HAProxy.
    """

    def __init__(self, process: subprocess.Popen[str], url: str, log: Path) -> None:
        self._process = process
        self.url = url
        self._log = log

    def tell(self, *command: Any) -> Any:
        """Give a command, and return what came of it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):
                answer = json.loads(line)
                assert "error" not in answer, answer["error"] + "\n" + self.log
                return answer["value"]
        raise AssertionError(f"the cluster's process ended:\n{self.log}")

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, **({"timeout": 60} | options))
