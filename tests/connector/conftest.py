"""Fixtures of the connector's tests: a relay over a file store, a small device."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from connector.store_relays import SLAB_BYTES, Relay

from baton_kv import entry_format


@pytest.fixture
def relay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Relay:
    monkeypatch.setattr(entry_format, "CHUNK_BYTES", 2 * SLAB_BYTES)  # two chunks a head
    return Relay(tmp_path / "store")


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
