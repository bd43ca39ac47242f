"""The model of the tests in this folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.rgb_model import make_rgb


@pytest.fixture(scope="session")
def rgb(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of three bands that gives each of its three classes a good part of any scene."""
    folder = tmp_path_factory.mktemp("models") / "rgb"
    make_rgb(folder)
    return folder
