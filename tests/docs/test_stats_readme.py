"""plugins/baton_stats/README.md is true: every series is in it with its labels, and no expression names another."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.metrics import MetricWrapperBase

from baton_stats.series import BANDS, ENGINE, Families
from baton_stats.steps import Phase

README = Path(__file__).parents[2] / "plugins" / "baton_stats" / "README.md"
TEXT = README.read_text()
FAMILIES: dict[str, MetricWrapperBase] = {
    family._name + ("_total" if isinstance(family, Counter) else ""): family
    for family in vars(Families(CollectorRegistry())).values()
}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_series_is_documented_with_its_labels(name: str) -> None:
    (row,) = re.findall(rf"^\| `{name}` \| (.*?) \|", TEXT, re.MULTILINE)
    assert re.findall(r"`(\w+)`", row) == [
        label for label in FAMILIES[name]._labelnames if label not in ENGINE
    ]


def test_no_series_is_named_that_does_not_exist() -> None:
    """In the table, and in the expressions."""
    named = set(re.findall(r"baton_stats_\w+", TEXT))
    assert {name.removesuffix("_bucket") for name in named} == set(FAMILIES)


def test_the_values_of_labels_are_the_code_s() -> None:
    for value in (*Phase, *(name for _, name in BANDS)):
        assert f"`{value}`" in TEXT
    for phase in re.findall(r'phase=~?"([^"]+)"', TEXT):
        assert set(phase.replace("\\", "").split("|")) <= set(Phase)
    for usage in re.findall(r'usage="([^"]+)"', TEXT):
        assert usage in {name for _, name in BANDS}


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed (Debian: prometheus)")
def test_prometheus_takes_the_expressions(tmp_path: Path) -> None:
    """Every one of the table, as a rule."""
    shown = re.findall(r"^\| [^|]+\? \| `(.+)` \|$", TEXT, re.MULTILINE)
    assert len(shown) == TEXT.count("? | `")
    rules = [{"record": f"a:{n}", "expr": expr.replace("\\|", "|")} for n, expr in enumerate(shown)]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "shown", "rules": rules}]}))
    command = ["promtool", "check", "rules", str(tmp_path / "rules.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_file_named_is_there() -> None:
    """And none is left out."""
    named = set(re.findall(r"^\| `(\w+\.py)` \|", TEXT, re.MULTILINE))
    assert named == {path.name for path in README.parent.glob("*.py")} - {"__init__.py"}


def test_the_plugins_folder_lists_it_and_the_page_on_platforms() -> None:
    folder = README.parents[1]
    text = (folder / "README.md").read_text()
    assert "(baton_stats/README.md)" in text
    assert "(platforms.md)" in text
    page = (folder / "platforms.md").read_text()
    for name in re.findall(r"\]\((\.\./[\w/.]+)\)", page):
        assert (folder / name).resolve().exists(), name
    for name in re.findall(r"tests/[\w/]+\.py", page + text):
        assert (folder.parent / name).is_file(), name
