"""`bench/breakeven.py`: from how many tokens on a load wins, and that its page shows what it prints."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def loaded(path: Path) -> Any:
    """A script of no package. Its folder is not on the path: other scripts there are named as tests' folders are."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where its dataclasses look for their own
    spec.loader.exec_module(module)
    return module


breakeven = loaded(ROOT / "bench/breakeven.py")


@pytest.mark.parametrize("model", breakeven.MODELS, ids=lambda model: model.name)
@pytest.mark.parametrize("gib", [0.1, 2.2, 51])
def test_a_load_wins_from_there_on_and_not_before(model: Any, gib: float) -> None:
    def loses(tokens: int) -> bool:
        load_s = 0.015 + model.bytes(tokens) / gib / 1024**3
        return load_s > model.operations(tokens) / 600e12

    found = breakeven.break_even(model, 600, gib, 15)
    if found is None:
        assert all(map(loses, (1, 1000, 30_000, breakeven.LONGEST)))
    else:
        assert loses(found - 1)
        assert not any(map(loses, (found, found + 1, breakeven.LONGEST)))


def test_it_finds_the_prefill_times_that_were_measured() -> None:
    """`docs/results/gpu.md`: 51, 215 and 1,100 ms for 2,048, 8,192 and 30,000 tokens of the 8B shape."""
    shape = next(model for model in breakeven.MODELS if model.name == "Llama 3.1 8B")
    for tokens, measured_ms in ((2048, 51), (8192, 215), (30_000, 1100)):
        assert shape.operations(tokens) / 600e12 * 1000 == pytest.approx(measured_ms, rel=0.1)


def test_the_page_shows_what_it_prints() -> None:
    printed = subprocess.run(
        [sys.executable, str(ROOT / "bench/breakeven.py")], capture_output=True, text=True, check=True
    ).stdout
    assert printed.strip() in (ROOT / "docs/results/break-even.md").read_text()
