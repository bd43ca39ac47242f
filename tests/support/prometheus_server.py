"""A real Prometheus that scrapes a gateway, and what the dashboard and the rules ask of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

from support.gateways import free_port

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus/alerts.yml"
NAME = re.compile(r"\b(?:baton_\w+|vllm:\w+)\b")
WINDOW_S = 20

missing = next(
    (f"{tool} is not installed" for tool in ("prometheus", "promtool") if not shutil.which(tool)), ""
)
"""Why no test here can run; empty: they can."""
must_run = "prometheus" in os.environ.get("TESTS_NEED", "").split(",")
"""They fail where Prometheus is missing, and are not skipped: so CI asks for it."""
needed = pytest.mark.skipif(bool(missing) and not must_run, reason=missing)


@dataclass(frozen=True)
class Question:
    """One expression that an operator sees the answer of.

    Attributes:
        where: the panel or the rule.
        expression: as Prometheus takes it.
    """

    where: str
    expression: str

    @property
    def names(self) -> set[str]:
        """The series it names."""
        return set(NAME.findall(self.expression))


def panels() -> list[dict[str, Any]]:
    """Every panel of the dashboard that shows something."""
    found = json.loads((DEPLOY / "grafana/baton.json").read_text())["panels"]
    return [panel for panel in found if panel["type"] != "row"]


def dashboard_questions(window: str = f"{WINDOW_S}s") -> list[Question]:
    """The dashboard's expressions with everything chosen, as Grafana would send them."""
    return [
        Question(f"{panel['title']} ({panel['id']})", filled(target["expr"], window))
        for panel in panels()
        for target in panel["targets"]
    ]


def filled(expression: str, window: str) -> str:
    """An expression of the dashboard with its variables' values in place."""
    return re.sub(r"\$(?:instance|engine|tenant)\b", ".*", expression.replace("$__rate_interval", window))


def rule_questions() -> list[Question]:
    """The expressions of the alert rules."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [Question(rule["alert"], rule["expr"]) for group in groups for rule in group["rules"]]


class Prometheus:
    """A Prometheus on a free port that scrapes one address five times a second, with the rules of deploy/.

    Args:
        folder: for its settings and its data.
        target: the gateway's metrics, `http://HOST:PORT`.
        key: an API key, where that address wants one.
    """

    def __init__(self, folder: Path, target: str, key: str | None = None) -> None:
        self._folder = folder
        scrape: dict[str, Any] = {
            "job_name": "baton",
            "static_configs": [{"targets": [urlsplit(target).netloc]}],
        }
        if key is not None:
            scrape["authorization"] = {"credentials": key}
        self._settings = {
            "global": {"scrape_interval": "200ms", "evaluation_interval": "200ms"},
            "rule_files": [str(RULES)],
            "scrape_configs": [scrape],
        }
        self.url = f"http://127.0.0.1:{free_port()}"

    def __enter__(self) -> Prometheus:
        (self._folder / "prometheus.yml").write_text(yaml.safe_dump(self._settings))
        self._log = open(self._folder / "prometheus.log", "w")  # closed in __exit__
        self._process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={self._folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={self._folder / 'data'}",
                f"--web.listen-address={urlsplit(self.url).netloc}",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        self._client = httpx.Client(base_url=self.url, timeout=30)
        self._wait_until_scraped()
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self._process.terminate()
        self._process.wait(20)
        self._log.close()

    def _wait_until_scraped(self) -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                if any(float(row["value"][1]) == 1 for row in self.query('up{job="baton"}')):
                    return
            except (httpx.TransportError, httpx.HTTPStatusError):
                pass  # it starts
            time.sleep(0.2)
        raise AssertionError((self._folder / "prometheus.log").read_text())

    def query(self, expression: str) -> list[dict[str, Any]]:
        """What an expression gives now; an HTTP error if Prometheus refuses it."""
        return self._asked("/api/v1/query", query=expression)["result"]  # type: ignore[no-any-return]  # JSON

    def query_range(self, expression: str, start: float, end: float, step: float) -> list[dict[str, Any]]:
        """What an expression gave between two times, in seconds since 1970."""
        asked = self._asked("/api/v1/query_range", query=expression, start=start, end=end, step=step)
        return asked["result"]  # type: ignore[no-any-return]  # JSON

    def names(self) -> set[str]:
        """Every series there is."""
        answer = self._client.get("/api/v1/label/__name__/values")
        return set(answer.raise_for_status().json()["data"])

    def rules(self) -> dict[str, str]:
        """How the last evaluation of each rule went: `ok`, `err`, or `unknown` before the first."""
        groups = self._client.get("/api/v1/rules").raise_for_status().json()["data"]["groups"]
        return {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}

    def _asked(self, path: str, **params: Any) -> Any:
        answer = self._client.get(path, params=params)
        assert answer.status_code != 400, f"{params['query']}\n{answer.text}"
        return answer.raise_for_status().json()["data"]
