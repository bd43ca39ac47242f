"""The whole product imports under the Python of the system, whose patch release is seldom the newest: Debian 12 has 3.11.2."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from support.wheel_environment import PROJECT, ROOT, clean

SYSTEM = Path("/usr/bin/python3")
LOCK = ROOT / "requirements-cpu.lock"
must_run = "system-python" in os.environ.get("TESTS_NEED", "").split(",")
SOURCES = ("app", "plugins", "connectors")
IMPORT_ALL = """
import importlib, pkgutil, sys
left_out = sys.argv[1].split(",")
count = 0
for package in sys.argv[2:]:
    found = importlib.import_module(package)
    for module in pkgutil.walk_packages(found.__path__, package + ".", onerror=lambda name: None):
        if not module.name.startswith(tuple(left_out)):
            importlib.import_module(module.name)
            count += 1
print(count, "modules under", sys.version.split()[0])
"""


def asked(python: Path, script: str) -> str:
    return subprocess.run([python, "-c", script], capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def system_python() -> str:
    """Its version; the packages of this environment fit it if it is of the same minor version."""
    found = asked(SYSTEM, "import platform; print(platform.python_version())") if SYSTEM.exists() else "none"
    if found.split(".")[:2] != [str(part) for part in sys.version_info[:2]]:
        reason = (
            f"the tests run on Python {sys.version_info[0]}.{sys.version_info[1]}, the system has {found}"
        )
        (pytest.fail if must_run else pytest.skip)(reason)
    return found


@pytest.mark.timeout(200)
def test_every_module_imports_under_it(system_python: str, tmp_path: Path) -> None:
    """With what the lock names for it: this environment's packages, and what only that patch release needs."""
    subprocess.run([SYSTEM, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site,) = {Path(str(importlib.metadata.distribution("pydantic").locate_file("")))}
    paths = [*(str(ROOT / folder) for folder in SOURCES), str(site)]
    (packages / "this-environment.pth").write_text("\n".join(paths))
    missing = only_for(system_python)
    if missing:
        (tmp_path / "missing.lock").write_text(missing)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes"]
        command += ["--target", str(packages), "--requirement", str(tmp_path / "missing.lock")]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=clean())
        if done.returncode and not must_run:
            pytest.skip(f"no package index is reachable: {done.stderr.splitlines()[-1:]}")
        assert done.returncode == 0, done.stderr
    tops = [Path(each).name for each in PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]]
    left_out = "baton.ray" if importlib.util.find_spec("ray") is None else "-"
    command = [str(tmp_path / "venv/bin/python"), "-c", IMPORT_ALL, left_out, *tops]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=clean())
    assert done.returncode == 0, done.stderr[-3000:]
    count, said = done.stdout.strip().splitlines()[-1].split(" ", 1)
    files = [
        file
        for top in PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
        for file in (ROOT / top).rglob("*.py")
    ]
    assert int(count) > 0.8 * len(files), "all but Ray's, and what is run and not imported"
    assert said == f"modules under {system_python}"


def only_for(version: str) -> str:
    """The lock's pins whose markers are true for that version and not for this Python, with their hashes and without markers."""
    kept = ""
    for pin, hashes in re.findall(
        r"^([a-z0-9][^\\\n]+) \\\n((?:    .*\n?)+)", LOCK.read_text(), re.MULTILINE
    ):
        marker = Requirement(pin).marker
        if marker and marker.evaluate({"python_full_version": version}) and not marker.evaluate():
            kept += f"{pin.partition(' ; ')[0]} \\\n{hashes}"
    return kept
