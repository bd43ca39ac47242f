"""What deploy/ hands out is valid by the tools that will read it, and agrees with the gateway's own settings."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from baton.config.settings import load_settings
from baton.http.middleware.frame import ERROR_WITHIN_S

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
MANIFESTS = sorted(path for path in KUBERNETES.glob("*.yaml") if path.name != "kustomization.yaml")
CRDS = Path(__file__).parent / "crds"
FOLDERS = sorted(path.name for path in DEPLOY.iterdir() if path.is_dir())
ENGINES_END_S = 10
"""What the gateway's engines are given to end, at least."""


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def of_kind(kind: str) -> dict[str, Any]:
    (found,) = [one for path in MANIFESTS for one in documents(path) if one["kind"] == kind]
    return found


def compose() -> dict[str, Any]:
    (found,) = documents(DEPLOY / "compose/compose.yaml")
    return found


def drain_s(config: Path) -> float:
    settings = load_settings(config)
    return settings.drain_delay_s + settings.drain_timeout_s + ERROR_WITHIN_S + ENGINES_END_S


def seconds(text: str) -> int:
    found = re.fullmatch(r"(\d+)s", text)
    assert found, text
    return int(found[1])


# Compose


def test_the_compose_file_is_one() -> None:
    """By the published schema of compose files."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    subprocess.run([*command, DEPLOY / "compose/compose.yaml"], check=True)


def test_a_wrong_compose_file_is_refused(tmp_path: Path) -> None:
    """The test of the test."""
    wrong = tmp_path / "compose.yaml"
    wrong.write_text(
        (DEPLOY / "compose/compose.yaml").read_text().replace("read_only: true", "read_onyl: true")
    )
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", wrong]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 1


def test_everything_the_compose_file_mounts_is_there_or_a_volume() -> None:
    named = set(compose()["volumes"])
    for service in compose()["services"].values():
        for mount in service["volumes"]:
            source = mount.split(":")[0]
            assert source in named or (DEPLOY / "compose" / source).exists(), source
    assert (DEPLOY / "compose" / compose()["services"]["baton"]["build"]["context"]).resolve() == ROOT


def test_compose_waits_for_the_drain_and_publishes_to_this_machine_only() -> None:
    services = compose()["services"]
    assert seconds(services["baton"]["stop_grace_period"]) >= drain_s(DEPLOY / "compose/baton.toml")
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert len(ports) == 3
    assert all(port.startswith("127.0.0.1:") for port in ports)
    (target,) = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["scrape_configs"]
    port = load_settings(DEPLOY / "compose/baton.toml").metrics.port
    assert target["static_configs"] == [{"targets": [f"baton:{port}"]}]


def test_compose_has_room_for_the_handoffs() -> None:
    budget = load_settings(DEPLOY / "compose/baton.toml").handoffs.budget
    shared = int(compose()["services"]["baton"]["shm_size"].removesuffix("gb")) << 30
    assert shared >= budget + (512 << 20)


def test_grafana_is_provisioned_with_the_dashboard_and_where_its_figures_are() -> None:
    (source,) = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text())[
        "datasources"
    ]
    scraped = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["global"]["scrape_interval"]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    assert source["jsonData"]["timeInterval"] == scraped
    (provider,) = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/baton.yaml").read_text())[
        "providers"
    ]
    mounts = dict(mount.split(":")[:2] for mount in compose()["services"]["grafana"]["volumes"])
    assert mounts["../grafana/baton.json"] == provider["options"]["path"] + "/baton.json"


# Kubernetes


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_a_manifest_is_valid_by_the_published_schemas(path: Path) -> None:
    """Kubernetes' own, strictly, and the operator's for its two kinds."""
    for document in documents(path):
        if document["apiVersion"] == "monitoring.coreos.com/v1":
            schema = json.loads((CRDS / f"{document['kind']}.json").read_text())
            jsonschema.validate(document, _closed(schema))
        else:
            kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def _closed(schema: Any) -> Any:
    """A structural schema drops the fields it does not know; here they are errors."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    properties = schema.get("properties")
    if isinstance(properties, dict) and schema.get("type") == "object":
        closed["additionalProperties"] = False
    return closed


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        ("Deployment", "terminationGracePeriodSeconds", "terminationGraceSeconds"),
        ("ServiceMonitor", "endpoints", "endpionts"),
        ("PrometheusRule", "expr", "expression"),
    ],
)
def test_a_wrong_manifest_is_refused(kind: str, right: str, wrong: str) -> None:
    """The test of the test."""
    document = json.loads(json.dumps(of_kind(kind)).replace(f'"{right}"', f'"{wrong}"'))
    if kind == "Deployment":
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    else:
        schema = json.loads((CRDS / f"{kind}.json").read_text())
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(document, _closed(schema))


def test_every_manifest_is_in_the_kustomization() -> None:
    (listed,) = documents(KUBERNETES / "kustomization.yaml")
    assert sorted(listed["resources"]) == [path.name for path in MANIFESTS]
    assert all((KUBERNETES / name).is_file() for name in listed["configMapGenerator"][0]["files"])


def test_a_pod_is_given_the_time_that_its_drain_takes() -> None:
    """preStop runs within the grace, before SIGTERM."""
    pod = of_kind("Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    waits = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] >= waits + drain_s(KUBERNETES / "baton.toml")
    readiness = container["readinessProbe"]
    noticed = readiness["periodSeconds"] * readiness["failureThreshold"]
    assert waits + load_settings(KUBERNETES / "baton.toml").drain_delay_s >= noticed


def test_probes_ask_what_they_are_for() -> None:
    (container,) = of_kind("Deployment")["spec"]["template"]["spec"]["containers"]
    asked = {name: container[name]["httpGet"]["path"] for name in container if name.endswith("Probe")}
    assert asked == {"startupProbe": "/readyz", "readinessProbe": "/readyz", "livenessProbe": "/livez"}


def test_a_pod_is_as_tight_as_the_restricted_standard_and_the_image_allow() -> None:
    spec = of_kind("Deployment")["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    user = re.search(r"^USER (\d+):(\d+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert user
    assert (spec["securityContext"]["runAsUser"], spec["securityContext"]["runAsGroup"]) == tuple(
        map(int, user.groups())
    )
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert spec["enableServiceLinks"] is False, "BATON_PORT would be read as a setting"


def test_the_operator_finds_the_metrics_port_alone() -> None:
    monitor = of_kind("ServiceMonitor")["spec"]
    wanted = monitor["selector"]["matchLabels"]
    services = [one for one in documents(KUBERNETES / "service.yaml") if one["kind"] == "Service"]
    found = [one for one in services if wanted.items() <= one["metadata"]["labels"].items()]
    assert [one["metadata"]["name"] for one in found] == ["baton-metrics"]
    assert monitor["endpoints"][0]["port"] in {port["name"] for port in found[0]["spec"]["ports"]}
    assert found[0]["metadata"]["labels"][monitor["jobLabel"]] == "baton"


def test_the_operators_rules_are_prometheus_rules() -> None:
    rules = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())
    assert of_kind("PrometheusRule")["spec"] == rules


# systemd


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_the_unit_is_one_and_keeps_much_out(tmp_path: Path) -> None:
    """As systemd reads it; with a program that is there in place of the gateway, which need not be installed."""
    unit = tmp_path / "baton.service"
    text = (DEPLOY / "systemd/baton.service").read_text()
    unit.write_text(text.replace("/opt/baton/bin/baton", "/bin/true"))
    verified = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, check=False
    )
    assert (verified.returncode, verified.stderr) == (0, "")
    security = ["systemd-analyze", "security", "--offline=yes", "--threshold=40", unit]
    done = subprocess.run(security, capture_output=True, text=True, check=False)
    print(done.stdout.splitlines()[-1])
    assert done.returncode == 0, done.stdout


def test_systemd_waits_for_the_drain_and_starts_no_wrong_settings_again() -> None:
    text = (DEPLOY / "systemd/baton.service").read_text()
    unit = dict(re.findall(r"^(\w+)=(.+)$", text, re.MULTILINE))
    assert int(unit["TimeoutStopSec"]) >= drain_s(DEPLOY / "baton.toml")
    assert (unit["KillMode"], unit["RestartPreventExitStatus"]) == ("mixed", "2")
    assert int(unit["LimitNOFILE"]) > load_settings(DEPLOY / "baton.toml").edge.connections


# All of them


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_target_has_a_page_that_names_its_files(folder: str) -> None:
    page = (DEPLOY / folder / "README.md").read_text()
    assert f"({folder}/README.md)" in (DEPLOY / "README.md").read_text()
    for path in (DEPLOY / folder).iterdir():
        assert path.name == "README.md" or path.name in page, path.name


@pytest.mark.parametrize(
    "path", sorted(DEPLOY.rglob("*.toml")), ids=lambda path: str(path.relative_to(DEPLOY))
)
def test_settings_handed_out_are_settings(path: Path) -> None:
    assert load_settings(path).engines
