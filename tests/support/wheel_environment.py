"""The distributions as they are built, and environments with nothing of Baton in them but one of these."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
CPU_LOCK = ROOT / "requirements-cpu.lock"
TORCH_LOCK = ROOT / "requirements-torch.lock"
BUILD_LOCK = ROOT / "requirements-build.lock"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]


def build(folder: Path, project: Path = ROOT) -> tuple[Path, Path]:
    """A project's sdist, and the wheel built from it, by the installed build backend: no index is asked."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(project)]
    subprocess.run(command, check=True, capture_output=True, env=clean())
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def clean(**more: str) -> dict[str, str]:
    """This process's environment without what leads Python to the source tree."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return kept | more


class WheelEnvironment:
    """A virtual environment with what a lock names, and one of our distributions.

    What the lock names is linked from the environment that the tests run in: installing it anew takes minutes and
    gigabytes, and would be the same files. A package that the lock does not name is not there, nor is the source tree;
    what is put in by pip, as users do, is Baton. What rasters need is there file by file: their decoders may read what
    is under the environment, but not follow a link out of it.

    Attributes:
        python: its interpreter.
        folder: where it is.
    """

    def __init__(self, folder: Path, *locks: Path) -> None:
        self.folder = folder
        command = [sys.executable, "-m", "venv", "--without-pip", str(folder)]
        subprocess.run(command, check=True, capture_output=True)
        self.python = folder / "bin" / "python"
        (self.packages,) = folder.glob("lib/python*/site-packages")
        self._whole = closure(EXTRAS["geo"])
        for lock in locks:
            self.link(pinned(lock))

    def link(self, names: Iterable[str]) -> None:
        """Put these distributions in, as they are where the tests run."""
        for name in names:
            self._link(name)

    def _link(self, name: str) -> None:
        found = distribution(name)
        parts = {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}
        for part in parts:
            source, place = Path(str(found.locate_file(part))), self.packages / part
            if place.exists():
                continue
            if name in self._whole and source.is_dir():
                shutil.copytree(source, place, copy_function=link_or_copy)
            else:
                place.symlink_to(source)

    def install(self, built: Path) -> None:
        """One of our distributions, by pip, from its file alone."""
        command = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(self.python),
            "install",
            "--quiet",
            "--no-deps",
        ]
        command += ["--no-index", "--no-build-isolation", "--disable-pip-version-check", str(built)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=clean())
        assert done.returncode == 0, done.stderr[-3000:]

    def run(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run the interpreter, in its own folder: the source tree is not on its path."""
        return subprocess.run(
            [str(self.python), *words],
            capture_output=True,
            text=True,
            check=False,
            cwd=self.folder,
            env=clean(**environment),
        )


def link_or_copy(source: str, place: str) -> None:
    """A hard link, which costs nothing, where both are on one device."""
    try:
        os.link(source, place)
    except OSError:
        shutil.copy2(source, place)


def closure(requirements: Iterable[str]) -> set[str]:
    """The distributions that these need, and those, and so on; none of an extra."""
    found: set[str] = set()
    asked = [Requirement(line) for line in requirements]
    while asked:
        requirement = asked.pop()
        name = canonicalize_name(requirement.name)
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        asked += [Requirement(line) for line in distribution(name).requires or ()]
    return found


def pinned(lock: Path) -> list[str]:
    """The distributions a lock names for this Python and machine."""
    lines = re.findall(r"^[A-Za-z0-9._-]+==[^\\\n]+", lock.read_text(), re.MULTILINE)
    requirements = map(Requirement, lines)
    return [each.name for each in requirements if each.marker is None or each.marker.evaluate()]
