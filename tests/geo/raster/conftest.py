from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton_geo.raster.decoders import Decoders


@pytest.fixture(scope="session")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decoders]:
    """Sixteen decoders, shared by the tests that leave them as they were."""
    decoders = Decoders(16, 30.0, tmp_path_factory.mktemp("scenes"))
    yield decoders
    decoders.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where scenes of a test's own decoders keep their files."""
    made = tmp_path / "scenes"
    made.mkdir()
    return made
