"""The distributions as they are built, and environments with nothing of Baton in them but one of these."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path

ROOT = Path(__file__).parents[1]
CPU_LOCK = ROOT / "requirements-cpu.lock"
BUILD_LOCK = ROOT / "requirements-build.lock"


def build(folder: Path) -> tuple[Path, Path]:
    """The sdist, and the wheel built from it, by the installed build backend: no index is asked."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
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
    what is put in by pip, as users do, is Baton.

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
            place = self.packages / part
            if not place.exists():
                place.symlink_to(Path(str(found.locate_file(part))))

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


def pinned(lock: Path) -> list[str]:
    """The distributions a lock names."""
    return re.findall(r"^([A-Za-z0-9._-]+)==", lock.read_text(), re.MULTILINE)
