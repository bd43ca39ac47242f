"""docs/reference is what the code says: no page differs, and no setting, route, error or metric is left out."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from support.errors_tree import ANSWERED
from support.gateways import run_fake
from support.table_tests import each

from baton import errors
from baton.config.groups import EngineSettings, Frozen, RemoteSettings
from baton.config.settings import Settings
from baton.engines.fake.engine import FakeEngine
from baton.engines.vllm_version import VLLM_VERSIONS, installed_vllm, minor_of
from baton.telemetry.metrics import GatewayMetrics, RemoteMetrics, TransferMetrics

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"


def module_of_docs(name: str) -> ModuleType:
    """A module in docs/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


fault_tests = module_of_docs("fault_tests")
pages = module_of_docs("reference_pages")


def text(name: str) -> str:
    return (REFERENCE / f"{name}.md").read_text()


@each("name", pages.PAGES)
def test_a_page_is_what_the_code_makes_of_it(name: str) -> None:
    if name == "vllm-flags.md" and minor_of(installed_vllm() or "") != VLLM_VERSIONS[0]:
        return  # it is of the lock's vLLM
    written = (REFERENCE / name).read_text()
    assert written == pages.PAGES[name](), f"docs/reference/{name} is old: run `make docs-reference`"


def settings_names() -> list[str]:
    names = []
    for name, field in Settings.model_fields.items():
        annotation = EngineSettings if name == "engines" else field.annotation
        if isinstance(annotation, type) and issubclass(annotation, Frozen):
            names += [f"{name}.{key}" for key in annotation.model_fields]
            names += (
                [f"engines.remote.{key}" for key in RemoteSettings.model_fields] if name == "engines" else []
            )
        else:
            names.append(name)
    return names


@each("name", settings_names())
def test_every_setting_is_documented(name: str) -> None:
    (row,) = re.findall(rf"^\| `{re.escape(name)}` \|.*\| (.*) \|$", text("settings"), re.MULTILINE)
    assert row


def test_the_ten_settings_that_are_touched_exist_and_have_these_defaults() -> None:
    page = (DOCS / "how-to/configure.md").read_text()
    rows = dict(re.findall(r"^\| `([\w.]+)` \| (.*?) ?\| .* \|$", page, re.MULTILINE))
    assert len(rows) == 10
    assert set(rows) <= set(settings_names())
    for name, default in rows.items():
        assert f"| `{name}` | {default} |" in text("settings"), name


def test_every_route_is_documented() -> None:
    with run_fake(FakeEngine("a")) as gateway:
        for route in gateway.app.routes:
            path = getattr(route, "path", None)
            if path is None or path.endswith("oauth2-redirect"):
                continue
            for method in route.methods - {"HEAD"}:
                assert f"| `{method} {path.replace(':path', '')}` |" in text("routes"), path


@each("error", ANSWERED)
def test_every_error_code_is_documented_with_its_status(error: type) -> None:
    assert f"| `{error.code}` | {error.status} |" in text("errors")


def test_every_metric_is_documented_with_its_labels() -> None:
    registry = GatewayMetrics().registry
    TransferMetrics(registry, "engine")
    RemoteMetrics(registry, "engine")
    for collector in registry._collector_to_names:
        name = next(name for name in registry._collector_to_names[collector] if not name.endswith("_created"))
        labels = ", ".join(f"`{label}`" for label in collector._labelnames)
        full = {"Counter": "_total", "Info": "_info"}.get(type(collector).__name__, "")
        base = name.removesuffix("_total").removesuffix("_info")
        row = next(
            (line for line in text("metrics").splitlines() if line.startswith(f"| `{base}{full}` |")), None
        )
        assert row is not None, base
        assert labels in row, row


NAMED = {
    "settings": {*Settings.model_fields, "remote"},
    "errors": {error.code for error in ANSWERED},
    "metrics": set(re.findall(r"^\| `(\w+)` \|", text("metrics"), re.MULTILINE)),
    "routes": set(re.findall(r"^\| `([^`]+)` \|", text("routes"), re.MULTILINE)),
    "commands": set(re.findall(r"^## `(.+)`", text("commands"), re.MULTILINE)),
    "exits": {error.__name__ for error in errors.OperatorError.__subclasses__()},
    "introductions": {name.removesuffix(".md") for name in pages.PAGES},
}


@each("section", NAMED)
def test_no_note_is_of_what_does_not_exist(section: str) -> None:
    """A renamed error or metric does not leave its note behind."""
    assert set(pages.NOTES[section]) <= NAMED[section]


def test_every_field_of_the_handoff_object_is_described() -> None:
    for line in text("handoff").splitlines():
        if line.startswith("| `"):
            assert not line.endswith("|  |"), line


def rows() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pages.FAULTS["rows"]
    return found


@each("row", rows())
def test_every_row_of_the_fault_catalogue_has_a_test(row: dict[str, Any]) -> None:
    assert fault_tests.by_row(ROOT / "tests").get(row["row"]), (
        f"no test has @pytest.mark.fault({row['row']!r})"
    )


def test_no_test_is_of_a_row_that_does_not_exist() -> None:
    assert set(fault_tests.by_row(ROOT / "tests")) <= {row["row"] for row in rows()}
