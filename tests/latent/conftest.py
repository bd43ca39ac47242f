"""Tiny models of the four families, that think calmly."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from baton.config.settings import load_settings
from baton.models.store import ModelStore

CALM = "0.12"
"""How far random weights spread: with more, rounding decides what is thought (see test_engine.py)."""
TINY = Path(__file__).parents[1] / "connector" / "tiny_models.py"


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder of models; Qwen2 and Gemma are tied, Mistral and Llama have a head of their own."""
    folder = tmp_path_factory.mktemp("families")
    source = ModelStore(load_settings().models_folder).resolve("smollm2")
    subprocess.run([sys.executable, str(TINY), source, str(folder), CALM], check=True, capture_output=True)
    return folder
