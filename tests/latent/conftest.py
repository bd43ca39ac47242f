"""Tiny models of the four families, that think calmly."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.made_models import make_models

CALM = "0.12"
"""How far random weights spread: with more, rounding decides what is thought (see test_engine.py)."""
TINY = Path(__file__).parents[1] / "connector" / "tiny_models.py"


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder of models; Qwen2 and Gemma are tied, Mistral and Llama have a head of their own."""
    return make_models(TINY, tmp_path_factory.mktemp("families"), CALM)
