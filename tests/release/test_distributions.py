"""What is published: sdist and wheel install where there is nothing else, and say of themselves what is true."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from support.wheel_environment import (
    BUILD_LOCK,
    CPU_LOCK,
    PROJECT,
    ROOT,
    TORCH_LOCK,
    WheelEnvironment,
    build,
    clean,
    closure,
    pinned,
)

import baton

SOURCE_FOLDERS = ("app", "plugins", "connectors", "examples", "training", "tests", "bench", "deploy", "docs")
CLIENT = ROOT / "app" / "client"
CLIENT_PROJECT = tomllib.loads((CLIENT / "pyproject.toml").read_text())["project"]
PACKAGES = [Path(path) for path in PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]]


@pytest.fixture(scope="module", params=["wheel", "sdist"])
def installed(
    request: pytest.FixtureRequest, distributions: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> WheelEnvironment:
    """An environment with what the dependencies name, and one of our distributions in it."""
    sdist, wheel = distributions
    environment = WheelEnvironment(tmp_path_factory.mktemp(request.param) / "venv")
    environment.link(closure(PROJECT["project"]["dependencies"]))
    if request.param == "sdist":
        environment.link(pinned(BUILD_LOCK))
    environment.install(wheel if request.param == "wheel" else sdist)
    return environment


def test_the_declared_dependencies_are_enough(installed: WheelEnvironment) -> None:
    """The command, and the gateway with fake engines, import; nothing of vLLM is there."""
    done = installed.run(str(installed.python.parent / "baton"), "--version")
    assert (done.returncode, done.stdout) == (0, f"baton {baton.__version__}\n"), done.stderr
    script = "import baton.serve, baton.engines.fake.engine, baton_kv.contract, baton_geo.contract, baton_stats.series"
    done = installed.run("-W", "error", "-c", script)
    assert (done.returncode, done.stderr) == (0, "")
    command = [sys.executable, "-m", "pip", "--python", str(installed.python), "check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=clean())
    assert done.returncode == 0, done.stdout


def test_without_vllm_the_command_says_what_to_install(installed: WheelEnvironment) -> None:
    """In a line, not in a traceback."""
    done = installed.run(str(installed.python.parent / "baton"), "serve")
    assert done.returncode != 0
    assert "vllm-baton[cpu]" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_wheel_has_our_packages_and_nothing_else(distributions: tuple[Path, Path]) -> None:
    """Every file that git has of them, `py.typed` too; and every entry point leads to one of them."""
    with zipfile.ZipFile(distributions[1]) as wheel:
        names = {Path(name) for name in wheel.namelist()}
        points = wheel.read(next(name for name in wheel.namelist() if name.endswith("entry_points.txt")))
    tops = {name.parts[0] for name in names if not name.parts[0].endswith(".dist-info")}
    assert tops == {package.name for package in PACKAGES}
    kept = {path.relative_to(ROOT / package.parent) for package in PACKAGES for path in files(ROOT / package)}
    assert kept == {name for name in names if name.parts[0] in tops}
    assert all(Path(package.name) / "py.typed" in names for package in PACKAGES)
    for module in re.findall(r"= ([\w.]+):", points.decode()):
        path = Path(*module.split("."))
        assert names & {path.with_suffix(".py"), path / "__init__.py"}, module


def files(folder: Path) -> list[Path]:
    return [
        path
        for path in folder.rglob("*")
        if path.is_file() and not {"__pycache__", "_build"} & set(path.parts)
    ]


def test_the_sdist_has_what_the_tests_need(distributions: tuple[Path, Path]) -> None:
    """The same tree, so that a distributor can run them: but for what git keeps for itself."""
    with tarfile.open(distributions[0]) as sdist:
        names = {Path(*Path(name).parts[1:]) for name in sdist.getnames()}
    for folder in SOURCE_FOLDERS:
        missing = {path.relative_to(ROOT) for path in files(ROOT / folder)} - names
        assert missing == set(), folder
    assert {Path("Makefile"), Path("README.md"), Path("CHANGELOG.md"), Path("LICENSE")} <= names
    assert {path.relative_to(ROOT) for path in ROOT.glob("*.lock")} <= names


@pytest.fixture(scope="module")
def client_distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist and the wheel of the Python client."""
    return build(tmp_path_factory.mktemp("client-dist"), CLIENT)


def test_the_client_installs_with_httpx_alone(
    client_distributions: tuple[Path, Path], tmp_path: Path
) -> None:
    """Nothing of the gateway is there, nor does the client look for it."""
    environment = WheelEnvironment(tmp_path / "venv")
    environment.link(closure(CLIENT_PROJECT["dependencies"]))
    environment.install(client_distributions[1])
    script = "import importlib.util, baton_client; assert not importlib.util.find_spec('baton'); print(baton_client.__version__)"
    done = environment.run("-W", "error", "-c", script)
    assert (done.stdout, done.stderr) == (f"{baton.__version__}\n", "")


def test_the_clients_distributions_have_its_package_and_nothing_else(
    client_distributions: tuple[Path, Path],
) -> None:
    """The license and the README as metadata; the sdist can be built again."""
    sdist, wheel = client_distributions
    kept = {str(path.relative_to(CLIENT)) for path in files(CLIENT / "baton_client")}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name for name in names if ".dist-info/" not in name} == kept
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    with tarfile.open(sdist) as archive:
        found = {str(Path(*Path(name).parts[1:])) for name in archive.getnames()}
    assert kept | {"LICENSE", "README.md", "pyproject.toml"} <= found


def test_twine_finds_nothing_wrong(
    distributions: tuple[Path, Path], client_distributions: tuple[Path, Path]
) -> None:
    """The metadata and the README as the index would show it."""
    pytest.importorskip("twine", reason="twine is not installed: `make dist` installs it")
    command = [
        sys.executable,
        "-m",
        "twine",
        "check",
        "--strict",
        *map(str, distributions + client_distributions),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_changelog_begins_with_this_version() -> None:
    """And says when it was, or that it was not yet."""
    heading = re.search(
        r"^## (\S+) - (\d{4}-\d{2}-\d{2}|unreleased)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert heading is not None
    assert heading[1] == baton.__version__


def test_the_bill_of_materials_names_every_pin(tmp_path: Path) -> None:
    """With its version and its hashes; the tool has checked the file against CycloneDX's schema."""
    pytest.importorskip("cyclonedx_py", reason="cyclonedx-bom is not installed: `make dist` installs it")
    command = [sys.executable, str(ROOT / ".ci" / "sbom.py"), str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    bill = json.loads((tmp_path / f"vllm-baton-{baton.__version__}.cdx.json").read_text())
    assert bill["metadata"]["component"]["version"] == baton.__version__
    told = {part["name"]: part for part in bill["components"]}
    for lock in (CPU_LOCK, TORCH_LOCK, ROOT / "requirements-models.lock"):
        for block in re.split(r"^(?=[A-Za-z0-9])", lock.read_text(), flags=re.MULTILINE):
            if pin := re.match(r"([A-Za-z0-9._-]+)==([^ \\\n]+)", block):
                part = told.pop(pin[1])
                assert part["version"] == pin[2]
                hashes = {one["content"] for source in part["externalReferences"] for one in source["hashes"]}
                assert hashes == set(re.findall(r"sha256:(\w+)", block)), pin[1]
    assert told == {}
