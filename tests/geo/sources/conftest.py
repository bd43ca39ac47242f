from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from geo.sources.fetching import Setup
from geo.sources.hosts import hosting


@pytest.fixture
def at(tmp_path: Path) -> Iterator[Setup]:
    with hosting() as good, hosting("127.0.0.2", good.port) as trap:
        yield Setup(good, trap, tmp_path / "spool")


@pytest.fixture
def spool_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "spool"
    folder.mkdir()
    return folder
