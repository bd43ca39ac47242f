"""Install what locks name, and say how far it is: pip is silent, or speaks three lines a package.

`install.py [PIP OPTIONS] -r LOCK...`, by the Python of the environment to install into. On a terminal one
line moves along; elsewhere a line is written for each large file, and every ten seconds.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

LARGE = re.compile(r"\d{2,}(\.\d+)? MB|GB")
ASKED = re.compile(r"Collecting (\S+)")
TAKEN = re.compile(
    r"\s*(?:Downloading|Using cached|Processing) (\S+\.(?:whl|tar\.gz|zip))(?: \((\d.+B)\)|$| \(from)"
)
HELD = re.compile(r"Requirement already satisfied: (\S+)")
EVERY_S = 10


def main() -> int:
    """Run pip; its exit status."""
    arguments = sys.argv[1:]
    locks = [Path(value) for option, value in pairwise(arguments) if option == "-r"]
    total = sum(len(re.findall(r"^[a-z0-9].*==", lock.read_text(), re.MULTILINE)) for lock in locks)
    command = [
        sys.executable,
        "-u",
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--progress-bar=off",
    ]
    command += ["--no-deps", "--require-hashes", *arguments]
    progress = Progress(total)
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as pip:
            assert pip.stdout is not None
            for line in pip.stdout:
                progress.heard(line.rstrip())
        progress.end()
        if pip.returncode:
            errors.seek(0)
            sys.stderr.writelines(line for line in errors if not line.startswith("WARNING"))
    return pip.returncode


class Progress:
    """How many packages pip has at hand, of how many."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._asked = 0
        self._seen: set[str] = set()
        self._terminal = sys.stdout.isatty()
        self._shown = time.monotonic()

    def heard(self, line: str) -> None:
        """Show what a line of pip's means for those who wait."""
        if line.startswith("Ignoring "):  # its marker is not true here
            self._total -= 1
        elif asked := ASKED.match(line):
            self._asked += 1
            self._show(f"looking up {self._asked} of {self._total}: {asked[1]}", at_once=False)
        elif held := HELD.match(line):
            self._seen.add(held[1])
        elif taken := TAKEN.match(line):
            name = taken[1].rpartition("/")[2]
            self._seen.add(name)
            size = f", {taken[2]}" if taken[2] else ""
            text = f"{len(self._seen)} of {self._total}: {'-'.join(name.split('-')[:2])}{size}"
            self._show(text, at_once=bool(LARGE.search(size)))
        elif line.startswith("Installing collected packages"):
            self._show(f"unpacking {line.count(',') + 1} packages", at_once=True)

    def end(self) -> None:
        """Leave the line that moved."""
        if self._terminal:
            print("\r\033[K", end="", flush=True)

    def _show(self, text: str, *, at_once: bool) -> None:
        if self._terminal:
            print(f"\r\033[K      {text}", end="", flush=True)
        elif at_once or time.monotonic() - self._shown > EVERY_S:
            self._shown = time.monotonic()
            print(f"      {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
