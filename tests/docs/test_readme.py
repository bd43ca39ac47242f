"""The README is true: its code runs, and every setting, route, error and metric is in it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from errors_tree import ANSWERED
from gateways import RealGateway, run_fake
from markdown_it import MarkdownIt

from baton.config.groups import EngineSettings, Frozen
from baton.config.settings import Settings, load_settings
from baton.engines.fake.engine import FakeEngine
from baton.telemetry.metrics import GatewayMetrics, TransferMetrics

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    tokens = MarkdownIt().parse(README)
    return [token.content for token in tokens if token.type == "fence" and token.info == language]


def settings_names() -> list[str]:
    names = []
    for name, field in Settings.model_fields.items():
        annotation = EngineSettings if name == "engines" else field.annotation
        if isinstance(annotation, type) and issubclass(annotation, Frozen):
            names += [f"{name}.{key}" for key in annotation.model_fields]
        else:
            names.append(name)
    return names


@pytest.mark.parametrize("name", settings_names())
def test_every_setting_is_documented(name: str) -> None:
    assert f"`{name}`" in README


def test_every_route_is_documented() -> None:
    with run_fake(FakeEngine("a")) as gateway:
        for route in gateway.server._app.routes:
            path = getattr(route, "path", None)
            if path is None or path.endswith("oauth2-redirect"):
                continue
            for method in route.methods - {"HEAD"}:
                assert f"`{method} {path.replace(':path', '')}`" in README, path


@pytest.mark.parametrize("error", ANSWERED, ids=lambda error: error.__name__)
def test_every_error_code_is_documented_with_its_status(error: type) -> None:
    assert f"| `{error.code}` | {error.status} |" in README


def test_every_metric_is_documented_with_its_labels() -> None:
    registry = GatewayMetrics().registry
    TransferMetrics(registry, "engine")
    for collector in registry._collector_to_names:
        name = next(name for name in registry._collector_to_names[collector] if not name.endswith("_created"))
        labels = ", ".join(f"`{label}`" for label in collector._labelnames)
        full = {"Counter": "_total", "Info": "_info"}.get(type(collector).__name__, "")
        base = name.removesuffix("_total").removesuffix("_info")
        row = next((line for line in README.splitlines() if line.startswith(f"| `{base}{full}` |")), None)
        assert row is not None, base
        if labels:
            assert labels in row, row


def test_the_settings_shown_are_settings(tmp_path: Path) -> None:
    for number, block in enumerate(blocks("toml")):
        path = tmp_path / f"{number}.toml"
        path.write_text(block)
        assert load_settings(path).engines


def test_the_shipped_settings_are_the_defaults() -> None:
    shipped = load_settings(ROOT / "deploy" / "baton.toml")
    assert shipped.model_dump() == load_settings().model_dump()
    written = (ROOT / "deploy" / "baton.toml").read_text()
    tomllib.loads(written)
    for name in settings_names():
        assert re.search(rf"^#? ?{name.rpartition('.')[2]} = ", written, re.MULTILINE), name


def test_the_json_shown_is_json() -> None:
    assert all(json.loads(block) for block in blocks("json"))


def test_the_two_commands_come_first_and_exist() -> None:
    first = blocks("")[0]
    assert [line.split("#")[0].strip() for line in first.splitlines()] == ["make serve", "make test"]
    makefile = (ROOT / "Makefile").read_text()
    for target in ("serve", "test", "lint", "bench", "chaos", "soak"):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_every_file_named_is_there() -> None:
    step_by_step = README[README.index("## A request") :]
    for name in re.findall(
        r"`((?:api|engines|handoffs|images|models|pooling|telemetry)/\w+\.py|\w+\.py)`", step_by_step
    ):
        assert (ROOT / "app/baton" / name).is_file(), name


@pytest.mark.engine
def test_the_code_shown_runs_on_a_real_gateway(real_gateway: RealGateway, tmp_path: Path) -> None:
    here = "http://127.0.0.1:8000"
    shown = blocks("bash") + blocks("python")
    assert len(shown) >= 3
    for block in blocks("bash"):
        script = "set -e\n" + block.replace(here, real_gateway.url).replace("curl ", "curl --fail -sS ")
        script = script.replace(".venv/bin/python", sys.executable)
        done = subprocess.run(
            ["bash", "-c", script], capture_output=True, text=True, check=False, cwd=tmp_path
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
        assert done.stdout.strip()
    assert "Paris" in _last_output(blocks("bash")[0], real_gateway.url)
    for block in blocks("python"):
        code = block.replace(here, real_gateway.url)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "Paris" in done.stdout


def _last_output(block: str, url: str) -> str:
    script = block.replace("http://127.0.0.1:8000", url)
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout
