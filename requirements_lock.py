"""Write the lock files, but for requirements-torch.lock: `make lock`.

Each holds what any CPython from 3.11.0 on needs, of any patch release, on Linux (x86-64, aarch64), and
requirements-remote.lock on macOS too, with the hashes of all wheels. What only some need has a marker.
"""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import product
from pathlib import Path

from packaging.markers import Marker

ROOT = Path(__file__).parent
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PATCHES = 25
LINUX = (("linux", "x86_64"), ("linux", "aarch64"))
PLATFORMS = {"remote": (*LINUX, ("darwin", "arm64"))}
"""By lock; the others are for Linux alone."""

# torchvision, torchaudio and torchcodec: their published builds are linked to CUDA and break transformers
# beside a CPU torch; triton is not used by a CPU. torch has a lock of its own.
LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec", "triton", "pip")


def main() -> None:
    """Resolve one lock after the other; later ones keep to the versions of the earlier."""
    # intel-cmplr-lib-ur: intel-openmp's wheel for Linux needs it, those for Windows do not, and a resolver
    # reads one of them.
    # websockets: the OpenAI Agents SDK, which the tests run beside the gateway, wants one below 17.
    own = "intel-cmplr-lib-ur==2024.2.1 ; platform_machine == 'x86_64'"
    write(
        "cpu",
        "--extra=cpu",
        "--extra=geo",
        "--upgrade-package=websockets<17",
        "pyproject.toml",
        "-",
        stdin=own,
    )
    within = "--constraint=requirements-cpu.lock"
    # A gateway of engines that are servers elsewhere: no vLLM, no torch.
    write("remote", within, "pyproject.toml")
    write("build", within, "-", stdin="hatchling\neditables")
    write("dev", within, "--extra=dev", "pyproject.toml")
    # Beside the others: who runs one gateway a machine needs none of it.
    write("ray", within, "--constraint=requirements-dev.lock", "--extra=ray", "pyproject.toml")


def write(name: str, *arguments: str, stdin: str | None = None) -> None:
    """Resolve for all Pythons and platforms at once; what is locked stays at its version while it fits."""
    place = ROOT / f"requirements-{name}.lock"
    command = [
        sys.executable,
        "-m",
        "uv",
        "pip",
        "compile",
        "--quiet",
        "--universal",
        "--python-version",
        PYTHONS[0],
    ]
    command += [
        "--fork-strategy",
        "fewest",
        "--generate-hashes",
        "--strip-extras",
        "--no-annotate",
        "--no-header",
    ]
    command += [f"--no-emit-package={left_out}" for left_out in LEFT_OUT]
    subprocess.run([*command, "-o", place, *arguments], check=True, cwd=ROOT, input=stdin, text=True)
    blocks = re.split(r"^(?=[a-z0-9])", place.read_text(), flags=re.MULTILINE)
    environments = supported(name)
    place.write_text("".join(_for_these(block, environments) for block in blocks if "==" in block))


def supported(name: str) -> list[dict[str, str]]:
    """The environments that a lock is for, as markers see them."""
    return [
        {
            "python_version": python,
            "python_full_version": f"{python}.{patch}",
            "sys_platform": platform,
            "platform_system": platform.capitalize(),
            "platform_machine": machine,
            "os_name": "posix",
            "implementation_name": "cpython",
            "platform_python_implementation": "CPython",
        }
        for python, patch, (platform, machine) in product(PYTHONS, range(PATCHES), PLATFORMS.get(name, LINUX))
    ]


def _for_these(block: str, environments: list[dict[str, str]]) -> str:
    """A pin without a marker that is true everywhere; nothing, where it is true nowhere."""
    pin, _, rest = block.partition(" \\\n")
    requirement, _, marker = pin.partition(" ; ")
    if not marker:
        return block
    answers = {Marker(marker).evaluate(environment) for environment in environments}
    if answers == {False}:
        return ""
    return block if False in answers else f"{requirement} \\\n{rest}"


if __name__ == "__main__":
    main()
