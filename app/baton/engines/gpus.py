"""Find the NVIDIA GPUs of this machine without importing torch or vLLM."""

from __future__ import annotations

import csv
import subprocess
from dataclasses import dataclass

MIB = 1024**2
QUERY = ("index", "uuid", "name", "memory.total", "memory.free", "driver_version")
TIMEOUT_S = 30
"""The first call after a start loads the driver, which can take seconds."""


class NoGpu(Exception):
    """No GPU was found; the message says why."""


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU.

    Attributes:
        index: its number on this machine.
        uuid: its id, `GPU-...`.
        name: product name.
        bytes_total: bytes of its memory.
        bytes_free: bytes that no process uses.
        driver: version of the driver.
    """

    index: str
    uuid: str
    name: str
    bytes_total: int
    bytes_free: int
    driver: str


def read_gpus(command: str = "nvidia-smi") -> list[Gpu]:
    """Return the GPUs that the driver's own tool lists.

    Args:
        command: the tool.

    Raises:
        NoGpu: the tool is missing, fails, or lists none.
    """
    query = [command, f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=TIMEOUT_S)
    except FileNotFoundError:
        raise NoGpu(f"{command} is not installed") from None
    except subprocess.CalledProcessError as error:
        said = (error.stdout or error.stderr or "").strip().partition("\n")[0]
        raise NoGpu(f"{command} failed: {said or f'exit status {error.returncode}'}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoGpu(f"{command} failed: {error}") from None
    rows = [row for row in csv.reader(done.stdout.splitlines(), skipinitialspace=True) if row]
    try:
        found = [
            Gpu(index, uuid, name, int(total) * MIB, int(free) * MIB, driver)
            for index, uuid, name, total, free, driver in rows
        ]
    except ValueError:  # [N/A] where a card has no memory of its own, as on Jetson
        raise NoGpu(f"{command} says what cannot be read: {done.stdout.strip()!r}") from None
    if not found:
        raise NoGpu(f"{command} lists none")
    return found
