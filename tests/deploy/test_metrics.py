"""The dashboard and the alert rules ask for nothing that the gateway does not tell."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.gateways import RealGateway, run_fake
from support.prometheus_server import (
    DEPLOY,
    RULES,
    WINDOW_S,
    Prometheus,
    Question,
    dashboard_questions,
    needed,
    panels,
    rule_questions,
)

from baton.engines.fake.engine import FakeEngine
from baton.telemetry.metrics import GatewayMetrics, TransferMetrics

ROWS = ["Overview", "Engines", "Relay", "Pooling", "Tenants"]
MAY_BE_EMPTY = {"What the store failed at"}
"""Nothing fails in a run that goes well."""
PAGE = (DEPLOY / "grafana/README.md").read_text()
ROUNDS = 3


def own_labels() -> dict[str, set[str]]:
    """The labels of every series of the gateway's own, by the names Prometheus knows them by."""
    registry = GatewayMetrics().registry
    TransferMetrics(registry, "engine")
    return {
        name: {*collector._labelnames, "instance", "job", "le", "version", "python"}
        for collector, names in registry._collector_to_names.items()
        for name in names
    }


@pytest.mark.parametrize("question", [*dashboard_questions(), *rule_questions()], ids=lambda one: one.where)
def test_every_series_of_ours_that_is_named_exists_with_the_labels_it_is_asked_by(question: Question) -> None:
    """Also those that a run without failures never has."""
    known = own_labels()
    ours = {name for name in question.names if name.startswith("baton_")}
    assert question.names or question.expression.startswith("up{")
    assert ours <= known.keys()
    asked = set(re.findall(r"(\w+)(?:=~|!~|!=|=)\"", question.expression))
    for group in re.findall(r"by \(([^)]*)\)", question.expression):
        asked |= {label.strip() for label in group.split(",")}
    if ours:
        assert asked <= set.union(*(known[name] for name in ours))


def test_every_series_of_vllms_that_is_named_is_in_its_logger() -> None:
    """Where no engine runs, too; read, because importing it takes seconds."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    source = (Path(spec.origin).parent / "v1/metrics/loggers.py").read_text()
    asked = set().union(*(one.names for one in (*dashboard_questions(), *rule_questions())))
    theirs = {name for name in asked if name.startswith("vllm:")}
    assert len(theirs) >= 8
    for name in theirs:
        assert f'"{name.removesuffix("_bucket").removesuffix("_total")}"' in source, name


def test_the_dashboard_has_the_rows_that_people_look_for() -> None:
    """No panel lies on another, each says what it shows, and all name the data source by its variable."""
    board = json.loads((DEPLOY / "grafana/baton.json").read_text())
    assert [panel["title"] for panel in board["panels"] if panel["type"] == "row"] == ROWS
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for panel in panels():
        assert panel["description"]
        assert panel["datasource"]["uid"] == "${datasource}"


def test_every_alert_says_what_to_do() -> None:
    """In the page, in the order of the file."""
    assert re.findall(r"^\| `(Baton\w+)` \|", PAGE, re.MULTILINE) == [one.where for one in rule_questions()]


@needed
def test_the_rules_fire_when_they_should() -> None:
    """promtool's own unit tests: each rule once where it must fire, and where it must not."""
    done = subprocess.run(
        ["promtool", "test", "rules", RULES.parent / "alerts_test.yml"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    tested = set(re.findall(r"alertname: (\w+)", (RULES.parent / "alerts_test.yml").read_text()))
    assert tested == {one.where for one in rule_questions()}


@needed
def test_a_rule_that_never_fires_would_be_noticed(tmp_path: Path) -> None:
    """The test of the test: every threshold out of reach, every unit test fails."""
    rules = re.sub(r"> [\d.]+\b", "> 1e12", RULES.read_text()).replace("== 0", "== 7").replace("< 512", "< 0")
    (tmp_path / "alerts.yml").write_text(rules)
    shutil.copy(RULES.parent / "alerts_test.yml", tmp_path)
    done = subprocess.run(
        ["promtool", "test", "rules", tmp_path / "alerts_test.yml"],
        capture_output=True,
        text=True,
        check=False,
    )
    failed = set(re.findall(r"alertname: (\w+), time", done.stdout + done.stderr))
    assert failed == {one.where for one in rule_questions()}


@needed
def test_prometheus_takes_its_settings() -> None:
    subprocess.run(["promtool", "check", "config", DEPLOY / "prometheus/prometheus.yml"], check=True)


@needed
def test_prometheus_takes_every_expression(tmp_path: Path) -> None:
    """And has figures for what every gateway does; for the rest, see the real engines below."""
    silent = []
    with run_fake(FakeEngine("a")) as gateway, Prometheus(tmp_path, gateway.url) as prometheus:
        with gateway.client() as client:
            for _ in range(ROUNDS):
                client.post("/v1/completions", json={"model": "a", "prompt": "x"}).raise_for_status()
                time.sleep(0.5)  # two scrapes: a rate is made of two
        for question in (*dashboard_questions(), *rule_questions()):
            answered = prometheus.query(question.expression)
            if not answered and question.where.startswith(("Requests", "Latency", "State", "Tokens (")):
                silent.append(question.where)
        assert "err" not in prometheus.rules().values()
        with pytest.raises(AssertionError, match="parse error"):
            prometheus.query("sum by (route (baton_http_requests_total)")
    assert silent == []


@pytest.fixture(scope="module")
def scraped(real_gateway: RealGateway, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that has watched every kind of traffic on real engines."""
    folder = tmp_path_factory.mktemp("prometheus")
    made = [sys.executable, "-m", "training.flood_scenes.scene", str(folder / "scene.tif"), "--size", "256"]
    subprocess.run(made, check=True, capture_output=True)
    with Prometheus(folder, real_gateway.url) as prometheus, real_gateway.client() as client:
        for number in range(ROUNDS):
            traffic(client, (folder / "scene.tif").read_bytes(), number)
            time.sleep(0.5)  # two scrapes: a rate is made of two
        yield prometheus


def traffic(client: httpx.Client, scene: bytes, number: int) -> None:
    """One of everything that a panel shows."""
    ask = {"model": "smollm2", "temperature": 0, "max_tokens": 8}
    told = client.post(
        "/v1/completions", json=ask | {"prompt": f"{number} " + "The sea is " * 60, "handoff": {"save": True}}
    )
    start = {"from": told.raise_for_status().json()["handoff"]["id"]}
    client.post("/v1/completions", json=ask | {"prompt": " And", "handoff": start}).raise_for_status()
    upload = client.post("/pooling?model=flood-tiny", content=scene, headers={"content-type": "image/tiff"})
    upload.raise_for_status()
    assert client.post("/v1/completions", json=ask | {"model": "nobody"}).status_code == 404
    with client.stream(
        "POST", "/v1/completions", json=ask | {"prompt": "x", "max_tokens": 400, "stream": True}
    ) as left:
        next(left.iter_lines())


@pytest.mark.engine
@needed
@pytest.mark.parametrize("question", dashboard_questions(), ids=lambda one: one.where)
def test_a_panel_shows_something(scraped: Prometheus, question: Question) -> None:
    """Prometheus takes the expression, and has figures for it."""
    begun = time.monotonic()
    while not shows(scraped, question) and question.where.partition(" (")[0] not in MAY_BE_EMPTY:
        # A scrape that a busy machine does not answer in its 0.2 s takes all series away until the next one.
        assert time.monotonic() < begun + 30, question.expression
        time.sleep(0.1)


def shows(scraped: Prometheus, question: Question) -> bool:
    """Whether a panel has figures now."""
    values = [float(row["value"][1]) for row in scraped.query(question.expression)]
    return any(not math.isnan(value) for value in values)


@pytest.mark.engine
@needed
def test_no_rule_names_a_series_that_is_not_there_and_none_fires(scraped: Prometheus) -> None:
    """Where nothing is wrong; and Prometheus itself has evaluated them all."""
    names = scraped.names()
    for question in (*rule_questions(), *dashboard_questions()):
        assert question.names <= names, question.where
    assert set(scraped.rules().values()) == {"ok"}
    firing = scraped.query('ALERTS{alertstate="firing"}')
    assert [row["metric"]["alertname"] for row in firing] == []
    print(f"{len(names)} series names, {len(dashboard_questions())} expressions, window {WINDOW_S} s")
