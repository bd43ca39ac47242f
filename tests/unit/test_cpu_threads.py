"""The cores that vLLM is told to bind its threads to, for engines of any number of ranks."""

from __future__ import annotations

import pytest

from baton.config import vllm_environment
from baton.config.settings import load_settings
from baton.config.vllm_environment import cpu_threads


@pytest.mark.parametrize(
    ("ranks", "cores", "told"),
    [
        ([None], [0, 1], "0,1"),
        ([1, 1], [2, 3, 5], "2,3,5"),
        ([2], [0, 1], "0|1"),
        ([2, 2], [0, 1, 2, 3, 4], "0,2,4|1,3"),
        ([4], [7], "7|7|7|7"),
        ([1, 2], [0, 1], "nobind"),
    ],
)
def test_cores_are_divided_over_the_ranks(
    monkeypatch: pytest.MonkeyPatch, ranks: list[int | None], cores: list[int], told: str
) -> None:
    """vLLM refuses another number of lists than it has ranks; with fewer cores than ranks they share."""
    monkeypatch.setattr(vllm_environment, "cores", lambda: cores)
    engines = [
        {"name": f"e{number}", "model": "m", "args": {"tensor_parallel_size": count} if count else {}}
        for number, count in enumerate(ranks)
    ]
    assert cpu_threads(load_settings(engines=engines)) == told


def test_cores_that_the_operator_names_are_not_touched() -> None:
    assert cpu_threads(load_settings(cpu_threads="0-1|2-3")) == "0-1|2-3"
