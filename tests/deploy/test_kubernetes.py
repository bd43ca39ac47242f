"""Several replicas on Kubernetes: what kustomize and Helm make is valid, and agrees with the single gateway's manifests."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tomllib
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from baton import __version__
from baton.config.settings import load_settings, variables
from baton.http.middleware.frame import ERROR_WITHIN_S

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm/baton"
REPLICAS = DEPLOY / "kubernetes-replicas"
CRDS = Path(__file__).parent / "crds"
SHARED = {"shared": {"url": "valkey://valkey:6379"}, "replicas": 3}
ARCHIVED = {"archive": {"url": "s3://bucket/baton", "region": "eu-central-1", "keySecret": "baton-s3"}}
MONITORED = {"serviceMonitor": {"enabled": True, "labels": {"release": "x"}}}
NEED = os.environ.get("TESTS_NEED", "").split(",")
with_helm = pytest.mark.skipif(
    find_spec("helm_python") is None and "helm" not in NEED, reason="pip install helm-python-sdk"
)
"""Helm's own library, as the wheel `helm-python-sdk` has it."""
with_kubectl = pytest.mark.skipif(
    shutil.which("kubectl") is None and "kubectl" not in NEED, reason="kubectl is not installed"
)

Document = dict[str, Any]


def rendered(values: dict[str, Any] | None = None, name: str = "baton") -> list[Document]:
    """What `helm install` would send."""
    import helm_python

    with helm_python.Chart.load(CHART) as chart:
        made = chart.render(values or {}, name=name, namespace="baton")
    texts = [text for path, text in sorted(made.items()) if path.endswith(".yaml")]
    return [one for text in texts for one in yaml.safe_load_all(text) if one]


def kustomized(folder: Path = REPLICAS) -> list[Document]:
    command = ["kubectl", "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def of(found: Sequence[Document], kind: str, name: str = "baton") -> Document:
    (one,) = [one for one in found if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return one


def pod(found: Sequence[Document], name: str = "baton") -> Document:
    spec: Document = of(found, "Deployment", name)["spec"]["template"]["spec"]
    return spec


def single() -> Document:
    """The pod of the manifests for one gateway."""
    return pod(list(yaml.safe_load_all((DEPLOY / "kubernetes/deployment.yaml").read_text())))


def environment(spec: Document) -> dict[str, str]:
    return {one["name"]: one["value"] for one in spec["containers"][0].get("env", [])}


def check(found: Sequence[Document]) -> None:
    """By the published schemas of Kubernetes' kinds, strictly, and of the operator's."""
    for document in found:
        if document["apiVersion"] == "monitoring.coreos.com/v1":
            jsonschema.validate(document, json.loads((CRDS / f"{document['kind']}.json").read_text()))
        else:
            kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def check_restricted(spec: Document) -> None:
    """What the namespace's standard `restricted` asks of a pod."""
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    for container in spec["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def check_shared(spec: Document) -> None:
    """The settings of the shared store are there, and their files are mounted."""
    names = environment(spec)
    assert {name for name in names if "SHARED" in name} >= {"BATON_HANDOFFS__SHARED"}
    assert {name for name in names if "__SHARED" not in name} <= set(variables())
    mounted = {mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]}
    for name, value in names.items():
        if name.endswith("_FILE"):
            assert value.rpartition("/")[0] in mounted


def secrets(spec: Document) -> dict[str, str]:
    """The secrets of a pod by where they are mounted; each file that a setting names is in one of them."""
    mounts = {each["name"]: each["mountPath"] for each in spec["containers"][0]["volumeMounts"]}
    found = {
        each["secret"]["secretName"]: mounts[each["name"]] for each in spec["volumes"] if "secret" in each
    }
    files = [value for name, value in environment(spec).items() if name.endswith("_FILE")]
    assert {value.rpartition("/")[0] for value in files} <= set(found.values())
    return found


# kustomize


@with_kubectl
def test_the_overlay_is_valid() -> None:
    found = kustomized()
    check(found)
    assert {one["metadata"].get("namespace", "baton") for one in found} == {"baton"}
    for name in ("baton", "baton-envoy", "baton-valkey"):
        check_restricted(pod(found, name))
    check_shared(pod(found))


@with_kubectl
def test_the_overlay_with_an_archive_is_valid(tmp_path: Path) -> None:
    shutil.copytree(REPLICAS, tmp_path / "replicas")
    shutil.copytree(REPLICAS.with_name("kubernetes"), tmp_path / "kubernetes")
    overlay = tmp_path / "replicas/kustomization.yaml"
    overlay.write_text(overlay.read_text().replace("patches:", "patches:\n  - path: archive.yaml", 1))
    found = kustomized(overlay.parent)
    check(found)
    assert secrets(pod(found)) == {"baton-shared": "/etc/baton-shared", "baton-s3": "/etc/baton-archive"}
    assert set(environment(pod(found))) <= set(variables())
    assert environment(pod(kustomized())).items() <= environment(pod(found)).items()


@with_kubectl
def test_the_overlay_changes_nothing_else_of_a_gateway() -> None:
    ours = pod(kustomized())
    for key in (
        "startupProbe",
        "readinessProbe",
        "livenessProbe",
        "lifecycle",
        "resources",
        "securityContext",
    ):
        assert ours["containers"][0][key] == single()["containers"][0][key]
    assert ours["terminationGracePeriodSeconds"] == single()["terminationGracePeriodSeconds"]


@with_kubectl
def test_clients_reach_envoy_and_envoy_the_gateways() -> None:
    found = kustomized()
    front, behind = of(found, "Service"), of(found, "Service", "baton-gateways")
    labels = of(found, "Deployment", "baton-envoy")["spec"]["template"]["metadata"]["labels"]
    assert front["spec"]["selector"].items() <= labels.items()
    gateway = of(found, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert behind["spec"]["selector"].items() <= gateway.items()
    assert behind["spec"]["clusterIP"] == "None"
    config = yaml.safe_load((REPLICAS / "envoy.yaml").read_text())
    for cluster in config["static_resources"]["clusters"][:2]:
        (locality,) = cluster["load_assignment"]["endpoints"]
        (endpoint,) = locality["lb_endpoints"]
        at = endpoint["endpoint"]["address"]["socket_address"]
        assert at == {"address": "baton-gateways", "port_value": behind["spec"]["ports"][0]["port"]}
    address = environment(pod(found))["BATON_HANDOFFS__SHARED"]
    port = of(found, "Service", "baton-valkey")["spec"]["ports"][0]["port"]
    assert address == f"valkey://baton-valkey:{port}"


@with_kubectl
def test_only_gateways_reach_the_store() -> None:
    policy = of(kustomized(), "NetworkPolicy", "baton-valkey")["spec"]
    ((rule),) = policy["ingress"]
    assert rule["from"] == [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "baton"}}}]


@with_kubectl
def test_an_envoy_is_given_the_time_that_its_drain_takes() -> None:
    spec = pod(kustomized(), "baton-envoy")
    script = spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert spec["terminationGracePeriodSeconds"] > int(script[3]) > int(script[4])
    probe = spec["containers"][0]["readinessProbe"]
    assert int(script[4]) > probe["periodSeconds"] * probe["failureThreshold"]


def test_copies_are_copies() -> None:
    """kustomize takes no files from other folders."""
    assert (REPLICAS / "drain.sh").read_text() == (DEPLOY / "envoy/drain.sh").read_text()
    ours, theirs = (
        [line for line in (folder / "valkey.conf").read_text().splitlines() if not line.startswith("#")]
        for folder in (REPLICAS, DEPLOY / "compose")
    )
    assert ours == theirs


# Helm


@with_helm
def test_the_chart_has_nothing_that_helm_s_linter_finds() -> None:
    import helm_python

    report = helm_python.lint(CHART, {}, strict=True)
    assert report["errors"] == []
    assert [one["error"] for one in report["messages"]] == ["icon is recommended"]


@with_helm
@pytest.mark.parametrize(
    "values",
    [
        {},
        SHARED,
        MONITORED,
        ARCHIVED,
        SHARED | ARCHIVED | {"serviceAccount": "mine"},
        SHARED | MONITORED | {"service": {"type": "LoadBalancer"}},
        {"replicas": 2, "service": {"clientIPAffinity": True}},
        {"tolerations": [{"key": "gpu", "operator": "Exists"}], "nodeSelector": {"a": "b"}, "affinity": {}},
        {"networkPolicy": {"enabled": False}, "podLabels": {"x": "y"}, "podAnnotations": {"x": "y"}},
        {"imagePullSecrets": [{"name": "mine"}]},
    ],
    ids=json.dumps,
)
def test_what_the_chart_makes_is_valid(values: dict[str, Any]) -> None:
    found = rendered(values)
    check(found)
    check_restricted(pod(found))
    kinds = {one["kind"] for one in found}
    assert ("PodDisruptionBudget" in kinds) == (values.get("replicas", 1) > 1)
    assert ("ServiceMonitor" in kinds) == ("serviceMonitor" in values)
    assert ("NetworkPolicy" in kinds) == ("networkPolicy" not in values)


@with_helm
def test_engines_elsewhere_get_their_keys_and_a_way_out() -> None:
    """By the values that the README shows; without them nothing is mounted, and nothing kept from leaving."""
    readme = (DEPLOY / "helm/README.md").read_text()
    values = yaml.safe_load(readme.partition("```yaml\n")[2].partition("```")[0])
    found = rendered(values)
    check(found)
    spec = pod(found)
    (volume,) = (each for each in spec["volumes"] if each["name"] == "remote")
    assert volume["secret"]["secretName"] == "baton-remote"
    mounts = {each["name"]: each["mountPath"] for each in spec["containers"][0]["volumeMounts"]}
    (engine,) = tomllib.loads(of(found, "ConfigMap")["data"]["baton.toml"])["engines"]
    assert engine["remote"]["key_file"].startswith(f"{mounts['remote']}/")
    policy = of(found, "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    dns, rule = policy["egress"]
    assert {(each["port"], each["protocol"]) for each in dns["ports"]} == {(53, "UDP"), (53, "TCP")}
    assert rule == values["networkPolicy"]["egress"][0]
    plain = rendered()
    assert of(plain, "NetworkPolicy")["spec"]["policyTypes"] == ["Ingress"]
    assert "remote" not in {each["name"] for each in pod(plain)["volumes"]}


@with_helm
@pytest.mark.parametrize(
    "values",
    [
        {"replicas": 2},
        {"networkPolicy": {"egress": [{}]}},
        {"networkPolicy": {"egress": [{"from": []}]}},
        {"remote": {"key": "a"}},
        {"replica": 2},
        {"shared": {"url": "redis:6379"}},
        {"shared": {"budget": "4 gigs"}},
        {"archive": {"url": "bucket/baton"}},
        {"archive": {"endpoint": "s3.example.org"}},
        {"drain": {"engines": 1}},
        {"image": {"tag": ""}},
    ],
    ids=json.dumps,
)
def test_wrong_values_are_refused(values: dict[str, Any]) -> None:
    import helm_python

    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema({})
        with pytest.raises(helm_python.HelmError):
            chart.validate_schema(values)


@with_helm
def test_the_chart_s_pod_is_the_manifest_s() -> None:
    ours, theirs = pod(rendered()), single()
    for key in ("startupProbe", "readinessProbe", "livenessProbe", "lifecycle", "resources", "ports"):
        assert ours["containers"][0][key] == theirs["containers"][0][key], key
    assert ours["containers"][0]["volumeMounts"] == theirs["containers"][0]["volumeMounts"]
    for key in ("terminationGracePeriodSeconds", "securityContext", "volumes", "enableServiceLinks"):
        assert ours[key] == theirs[key], key


@with_helm
def test_the_chart_s_settings_are_settings_and_its_grace_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drain = {"preStop": 7, "delay": 20, "timeout": 300, "engines": 12}
    found = rendered({"drain": drain})
    (tmp_path / "baton.toml").write_text(of(found, "ConfigMap")["data"]["baton.toml"])
    for name, value in environment(pod(found)).items():
        monkeypatch.setenv(name, value)
    settings = load_settings(tmp_path / "baton.toml")
    assert (settings.drain_delay_s, settings.drain_timeout_s) == (20, 300)
    needed = 7 + settings.drain_delay_s + settings.drain_timeout_s + ERROR_WITHIN_S + 10
    assert pod(found)["terminationGracePeriodSeconds"] >= needed
    assert [engine.name for engine in settings.engines] == ["smollm2", "flood-tiny"]


@with_helm
def test_replicas_over_one_store_have_its_settings() -> None:
    check_shared(pod(rendered(SHARED)))
    assert "BATON_HANDOFFS__SHARED" not in environment(pod(rendered()))


@with_helm
def test_an_archive_has_its_settings_and_its_secrets_with_and_without_a_shared_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = {"baton-shared": "/etc/baton-shared"}
    for values in (ARCHIVED, SHARED | ARCHIVED):
        assert secrets(pod(rendered(values))) == shared | {"baton-s3": "/etc/baton-archive"}
    role = {"archive": {"url": "s3://bucket/baton", "endpoint": "http://minio:9000", "after": 3600}}
    spec = pod(rendered(role | {"serviceAccount": "mine"}))
    assert (secrets(spec), spec["serviceAccountName"]) == (shared, "mine")
    assert "serviceAccountName" not in pod(rendered())
    assert not any("ARCHIVE" in name for name in environment(pod(rendered(SHARED))))
    (tmp_path / "baton.toml").write_text(of(rendered(role), "ConfigMap")["data"]["baton.toml"])
    for name, value in environment(spec).items():
        monkeypatch.setenv(name, value)
    handoffs = load_settings(tmp_path / "baton.toml").handoffs
    assert (handoffs.archive, handoffs.archive_after_s) == ("s3://bucket/baton", 3600)
    assert (handoffs.archive_endpoint, handoffs.archive_key_file) == ("http://minio:9000", None)


@with_helm
def test_two_releases_beside_one_another_do_not_take_each_other_s_pods() -> None:
    one, two = rendered(name="baton"), rendered(name="other")
    first = of(one, "Deployment")["spec"]["selector"]["matchLabels"]
    second = of(two, "Deployment", "other-baton")["spec"]["selector"]["matchLabels"]
    assert first != second
    for found, labels in ((one, first), (two, second)):
        for service in (document for document in found if document["kind"] == "Service"):
            assert service["spec"]["selector"] == labels


@with_helm
def test_other_settings_start_other_pods() -> None:
    sums = {
        of(rendered(values), "Deployment")["spec"]["template"]["metadata"]["annotations"]["checksum/settings"]
        for values in ({}, {"settings": "log_format = 'json'"}, {})
    }
    assert len(sums) == 2


def test_the_chart_is_of_this_version_and_all_its_values_are_in_the_schema_and_the_page() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == __version__
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    jsonschema.validate(values, schema)
    assert set(values) == set(schema["properties"]) - {"global"}
    page = (DEPLOY / "helm/README.md").read_text()
    assert [name for name in values if f"`{name}`" not in page] == []


@pytest.mark.skipif(shutil.which("helm") is None, reason="helm is not installed")
@with_helm
def test_the_command_makes_what_the_library_makes() -> None:
    command = ["helm", "template", "baton", str(CHART), "--namespace", "baton", "--set", "replicas=3"]
    done = subprocess.run(
        [*command, "--set", "shared.url=valkey://valkey:6379"], capture_output=True, text=True, check=True
    )
    made = [one for one in yaml.safe_load_all(done.stdout) if one]
    assert sorted(map(json.dumps, made)) == sorted(map(json.dumps, rendered(SHARED)))
