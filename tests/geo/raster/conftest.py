from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from geo.raster.made import write_tiff

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


@pytest.fixture
def own(folder: Path) -> Iterator[Decoders]:
    """Two decoders of this test alone."""
    decoders = Decoders(2, 0.2, folder)
    yield decoders
    decoders.close()


@pytest.fixture
def raster(tmp_path: Path) -> Path:
    """A scene of 200 x 200 pixels, half of them above 0."""
    pixels = np.ones((1, 200, 200), "int16")
    pixels[:, :, :100] = -1
    return write_tiff(tmp_path / "scene.tif", pixels)
