"""The examples in examples/ and the demo run against a real gateway."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.gateways import RealGateway

from baton.config.settings import load_settings

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
DEMO = (sys.executable, "-m", "examples.demo")
LANGGRAPH = ("langgraph", "langchain_openai")
MISSING = [package for package in LANGGRAPH if find_spec(package) is None]
pytestmark = pytest.mark.timeout(300)  # whoever comes first waits for the engines


def output_of(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def cached(text: str) -> list[tuple[int, int]]:
    found = re.findall(r"(\d+) of (\d+) prompt tokens cached", text)
    return [(int(some), int(whole)) for some, whole in found]


def test_every_example_is_described() -> None:
    described = (EXAMPLES / "README.md").read_text()
    assert all(f"]({path.name})" in described for path in EXAMPLES.glob("*.py"))


@pytest.mark.engine
def test_the_relay_with_the_openai_sdk(real_gateway: RealGateway) -> None:
    shown = output_of(sys.executable, str(EXAMPLES / "relay_openai.py"), f"{real_gateway.url}/v1", "smollm2")
    first, *others = cached(shown)
    assert first[0] < first[1] // 2
    assert len(others) == 4
    assert all(whole - some < 40 for some, whole in others)
    assert len(re.findall(r"^ +(loaded|resident): ", shown, re.MULTILINE)) == 4


@pytest.mark.skipif(bool(MISSING), reason="pip install langgraph langchain-openai")
@pytest.mark.engine
def test_the_relay_with_langgraph(real_gateway: RealGateway) -> None:
    shown = output_of(
        sys.executable, str(EXAMPLES / "relay_langgraph.py"), f"{real_gateway.url}/v1", "smollm2"
    )
    assert [line.split(":")[0] for line in shown.splitlines()[::2]].count("editor") == 1
    assert all(whole - some < 40 for some, whole in cached(shown)[1:])


@pytest.mark.engine
def test_the_demo_ends_in_its_table(real_gateway: RealGateway) -> None:
    shown = output_of(*DEMO, "agents", "--url", real_gateway.url, "--model", "smollm2", "--quick")
    assert "Contexts taken from a handoff: 4" in shown
    (figures,) = re.findall(r"^ *prefilled tokens +([\d,]+) +([\d,]+) +([\d,]+)", shown, re.MULTILINE)
    handoff, text = (int(figure.replace(",", "")) for figure in figures[:2])
    assert handoff < text


@pytest.mark.chaos
@pytest.mark.engine
def test_the_demo_with_pictures_encodes_one_picture_for_three_agents(tmp_path: Path) -> None:
    """On a gateway of its own; the scene, the mask and the picture are kept where it is told to."""
    shown = output_of(*DEMO, "vision", "--out", str(tmp_path))
    assert "encoded for these 3 agents: 1." in shown
    assert shown.count(" loaded") + shown.count(" resident") == 2
    assert {file.name for file in tmp_path.iterdir()} == {"scene.tif", "mask.tif", "preview.png"}


def test_every_settings_file_is_described_and_valid() -> None:
    """As `baton serve --config` reads it."""
    described = (EXAMPLES / "README.md").read_text()
    for file in EXAMPLES.glob("*.toml"):
        assert f"]({file.name})" in described
        assert load_settings(file).engines
