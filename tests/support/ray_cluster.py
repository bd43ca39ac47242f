"""Two nodes of Ray on this machine, with Ray Serve's HAProxy on the first. As a script: their process.

The script reads commands as lines of JSON, `[NAME, ARGUMENT ...]`, and answers each with a line `{"value": ...}`.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from support.gateways import free_port

TESTS = Path(__file__).parents[1]
NEED = os.environ.get("TESTS_NEED", "").split(",")
with_ray = pytest.mark.skipif(
    find_spec("ray") is None and "ray" not in NEED, reason="Ray is not installed: make ray"
)
FOLDERS = {
    "CONFIG_FILE_LOC": "haproxy.cfg",
    "SOCKET_PATH": "admin.sock",
    "METRICS_SOCKET_PATH": "metrics.sock",
    "SERVER_STATE_BASE": "",
    "SERVER_STATE_FILE": "state",
}
"""Variables `RAY_SERVE_HAPROXY_...`, and what of this cluster they name."""


class RayCluster:
    """Two nodes of Ray in a process of their own.

    Args:
        log: where its output goes.
        environment: of both nodes.

    Attributes:
        url: of the HAProxy.
        metrics_url: of the page of all replicas.
        closed: ports of the HAProxy that only this machine may reach.
    """

    def __init__(self, log: Path, environment: dict[str, str]) -> None:
        self._log = log
        self._folder = Path(tempfile.mkdtemp(prefix="r-"))  # short: sockets lie in it
        port, metrics, *closed, fallback = (free_port() for _ in range(5))
        self.url, self.metrics_url = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{metrics}"
        self.closed = tuple(closed)
        named = {f"RAY_SERVE_HAPROXY_{key}": str(self._folder / value) for key, value in FOLDERS.items()}
        self._environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "BATON_"))},
            **shipped_environment(),
            "RAY_TMPDIR": str(self._folder),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(closed[0]),
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(closed[1]),
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback),
            **named,
            "PYTHONPATH": str(TESTS),
            "BATON_METRICS__PORT": str(metrics),
            **environment,
        }
        self._port = port

    def __enter__(self) -> RayCluster:
        self._stream = open(self._log, "w")  # closed in __exit__
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(self._port), str(self._folder)],
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stream,
            text=True,
        )
        self.tell("begin")
        return self

    def __exit__(self, *_: object) -> None:
        """End it; no process of it may be left."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        started = psutil.Process(self._process.pid).children(recursive=True)
        try:
            self._process.stdin.close()
            self._process.wait(90)
        finally:
            _gone, left = psutil.wait_procs(started, 10)
            for process in (*left, self._process):
                process.kill()
            self._process.wait()
            self._process.stdout.close()
            self._stream.close()
            shutil.rmtree(self._folder, ignore_errors=True)
        assert not left, left

    def tell(self, *command: Any) -> Any:
        """Give a command, and return its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith('{"value"'):
                return json.loads(line)["value"]
            self._stream.write(line)
        raise AssertionError(f"the cluster's process ended:\n{self.log}")

    def run(self, app: str, **arguments: Any) -> None:
        """Run an application with these arguments, or change the one that runs to them."""
        self.tell("run", app, arguments)

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def written(self) -> list[str]:
        """The lines that the gateways have written, where Ray keeps them on each node."""
        files = self._folder.glob("ray/session_2*/logs/worker-*.err")
        return [line for file in files for line in file.read_text(errors="replace").splitlines()]

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, **({"timeout": 60} | options))


def shipped_environment() -> dict[str, str]:
    """The environment that `deploy/ray/environment.sh` makes."""
    file = TESTS.parent / "deploy/ray/environment.sh"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["bash", "-ec", f". {file}; env -0"]
    done = subprocess.run(command, env={"PATH": path}, capture_output=True, check=True)
    pairs = (pair.partition("=") for pair in done.stdout.decode().split("\0") if pair)
    return {name: value for name, _, value in pairs if name.startswith("RAY_")} | {"PATH": path}


class Commands:
    """The script's side: what each command does."""

    def __init__(self, port: int, folder: Path) -> None:
        self._port = port
        self._folder = folder

    def begin(self) -> None:
        import ray
        from ray import serve
        from ray.cluster_utils import Cluster

        options: dict[str, Any] = {"num_cpus": 4, "include_dashboard": False, "object_store_memory": 80 << 20}
        self._cluster = Cluster(True, head_node_args=options | {"env_vars": self._own("one")})
        del options["include_dashboard"]
        self._second = self._cluster.add_node(**options, env_vars=self._own("two"))
        ray.init(address=self._cluster.address, namespace="serve", log_to_driver=True)
        serve.start(proxy_location="HeadOnly", http_options={"port": self._port})

    def _own(self, name: str) -> dict[str, str]:
        """What the nodes do not share: the store in their memory, and a name that answers show."""
        return {"BATON_HANDOFFS__STORE": f"file:{self._folder / name}", "TESTS_NODE": name}

    def run(self, app: str, arguments: dict[str, Any]) -> None:
        from ray import serve

        module, _, name = app.partition(":")
        build = getattr(importlib.import_module(module), name)
        serve.run(build(arguments), name="baton")

    def running(self) -> int:
        """The number of gateways that run, those that drain left out."""
        from ray import serve

        found = serve.status().applications["baton"].deployments["gateway"].replica_states
        return found.get("RUNNING", 0)

    def of_second(self) -> list[int]:
        """The ids of the second node's processes."""
        raylet = psutil.Process(self._raylet())
        return [raylet.pid, *(child.pid for child in raylet.children(recursive=True))]

    def kill_second(self) -> None:
        """Kill the second node's Ray at once; what its actors started is left to itself."""
        raylet = psutil.Process(self._raylet())
        victims = [raylet, *raylet.children()]
        for victim in victims:
            victim.kill()
        psutil.wait_procs(victims[1:], 10)
        self._cluster.remove_node(self._second, allow_graceful=False)

    def _raylet(self) -> int:
        (raylet,) = self._second.all_processes["raylet"]
        return int(raylet.process.pid)

    def end(self) -> None:
        import ray
        from ray import serve

        serve.shutdown()
        ray.shutdown()
        self._cluster.shutdown()


def main() -> None:
    commands = Commands(int(sys.argv[1]), Path(sys.argv[2]))
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        method: Callable[..., Any] = getattr(commands, name)
        value = method(*arguments)
        print(json.dumps({"value": value}), flush=True)
    commands.end()


if __name__ == "__main__":
    main()
