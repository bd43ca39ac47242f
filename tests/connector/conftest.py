"""Fixtures of the connector's tests: a relay over a file store, a small device."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from connector.store_relays import HEADS, SLAB_BYTES, Relay
from support.made_models import make_models

from baton_kv import format as entry_format

TINY = Path(__file__).parent / "tiny_models.py"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny random models of several families, a folder each."""
    return make_models(TINY, tmp_path_factory.mktemp("families"))


@pytest.fixture(scope="module")
def one_layer_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny random models of several families with one layer each, a folder each."""
    return make_models(TINY, tmp_path_factory.mktemp("families"), "0.3", "1")


@pytest.fixture
def relay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Relay:
    monkeypatch.setattr(entry_format, "RUN_BYTES", 2 * HEADS * SLAB_BYTES)  # two runs a layer
    return Relay(tmp_path / "store")


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory, as engines keep entries in."""
    if not os.path.ismount("/dev/shm"):
        pytest.skip("there is no /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 8 MB."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount a small device")
    command = ["mount", "-t", "tmpfs", "-o", "size=8m,mode=0700", "tmpfs", str(tmp_path)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no small device can be mounted here: {mounted.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)
