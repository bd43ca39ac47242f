"""A platform from outside vLLM's tree: found, chosen, filtered and listed; with the package of tests/plugins, installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from baton.engines.installed_plugins import running_platform  # after the skip

PACKAGE = Path(__file__).parents[1] / "plugins" / "house_platform"
ENVIRONMENTS: dict[str, tuple[dict[str, str], str]] = {
    "installed": ({}, "house_platform.platform.HousePlatform"),
    "named": ({"VLLM_PLUGINS": "baton_geo,house_platform"}, "house_platform.platform.HousePlatform"),
    "not named": ({"VLLM_PLUGINS": "baton_geo"}, "vllm.platforms.cpu.CpuPlatform"),
    "another target": ({"VLLM_TARGET_DEVICE": "cpu"}, "vllm.platforms.cpu.CpuPlatform"),
}
CHOSEN = """
import json, os, sys
from vllm.platforms import resolve_current_platform_cls_qualname
for environment in json.loads(sys.argv[1]):
    os.environ.update(environment)
    print("CHOSEN", resolve_current_platform_cls_qualname())
    for name in environment:
        del os.environ[name]
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that pip installed it in."""
    folder = tmp_path_factory.mktemp("platform")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--target", str(folder)]
    command = [sys.executable, "-m", "pip", "install", "-q", *options, str(PACKAGE)]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def run(installed: Path, *words: str, **environment: str) -> str:
    path = os.pathsep.join(filter(None, [str(installed), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, *words]
    done = subprocess.run(
        command,
        env=os.environ | environment | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_vllm_chooses_it_unless_it_is_left_out(installed: Path) -> None:
    """Before its own platform for CPUs; a target that is named comes before both."""
    environments = json.dumps([environment for environment, _ in ENVIRONMENTS.values()])
    told = run(installed, "-c", CHOSEN, environments)
    chosen = [line.split()[1] for line in told.splitlines() if line.startswith("CHOSEN")]
    assert dict(zip(ENVIRONMENTS, chosen, strict=True)) == {
        name: expected for name, (_, expected) in ENVIRONMENTS.items()
    }


def test_baton_plugins_lists_it_with_the_reason_it_is_left_out(installed: Path) -> None:
    """As any other plugin, without importing it."""

    def row(**environment: str) -> tuple[object, object]:
        rows = json.loads(run(installed, "-m", "baton.cli", "plugins", "--json", **environment))
        (found,) = [row for row in rows if row["group"] == "vllm.platform_plugins"]
        assert (found["name"], found["distribution"]) == ("house_platform", "house-platform")
        return found["loaded"], found["reason"]

    assert row() == (True, None)
    assert row(VLLM_PLUGINS="baton_geo") == (False, "VLLM_PLUGINS does not name it")


def test_the_running_platform_is_read_where_vllm_keeps_it() -> None:
    """In this process: vLLM's own for CPUs, or a user's."""
    from vllm import platforms

    assert type(platforms.current_platform).__module__ == running_platform()
