"""What llm-d's endpoint picker makes of a page of metrics, by the rules of its `core-metrics-extractor` for vLLM.

Of each gauge it takes the first series that fits its selector; series without a timestamp are all equally new. It
parses with Prometheus' own Go parser, as `promtool check metrics` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

WAITING, RUNNING, USED = "vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"
CACHE = "vllm:cache_config_info"


@dataclass(frozen=True)
class Scored:
    """What the picker knows of one pod.

    Attributes:
        waiting: requests that wait in the engine.
        running: requests that it works on.
        used: share of its KV cache that is in use.
        block_size: tokens a block.
        blocks: blocks of its KV cache.
    """

    waiting: int
    running: int
    used: float
    block_size: int
    blocks: int


def scored(page: str, **labels: str) -> Scored:
    """Read a page as the picker does.

    Args:
        page: in Prometheus' text format.
        labels: of its selectors, `model_name=...`; none: as it is without settings.
    """
    cache = _first(page, CACHE, {})[0]  # its series have no model_name
    figures = {name: _first(page, name, labels)[1] for name in (WAITING, RUNNING, USED)}
    return Scored(
        int(figures[WAITING]),
        int(figures[RUNNING]),
        figures[USED],
        int(cache["block_size"]),
        int(cache["num_gpu_blocks"]),
    )


def _first(page: str, name: str, labels: Mapping[str, str]) -> tuple[dict[str, str], float]:
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                assert family.type == "gauge", f"{name} is a {family.type}"
                return sample.labels, sample.value
    raise AssertionError(f"no series of {name} with {dict(labels)}")
