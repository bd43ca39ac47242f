"""What a page of metrics says of the stat logger's series, beside vLLM's own of the same engine."""

from __future__ import annotations

from collections import defaultdict

from prometheus_client.parser import text_string_to_metric_families

GAPS = ("baton_stats_token_gaps_total", "vllm:inter_token_latency_seconds_count")
QUEUE = ("baton_stats_queue_seconds_count", "vllm:request_queue_time_seconds_count")
"""Two loggers count these from the same statistics; ours leaves out the time of what was never scheduled."""
Totals = dict[str, dict[str, float]]


def totals(page: str) -> Totals:
    """By engine, then by series: the sum over all its other labels. A family named twice is no page."""
    found: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    families = [family.name for family in text_string_to_metric_families(page)]
    assert len(families) == len(set(families))
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if not sample.name.endswith("_bucket"):
                found[sample.labels.get("model_name", "")][sample.name] += sample.value
    return {name: dict(series) for name, series in found.items()}


def assert_counted_once(page: str, model: str) -> dict[str, float]:
    """The series of one engine, which agree with vLLM's own, and say that it did something."""
    of_engine = totals(page)[model]
    assert of_engine[GAPS[0]] == of_engine[GAPS[1]]
    assert 0 < of_engine[QUEUE[0]] <= of_engine[QUEUE[1]]
    assert of_engine["baton_stats_step_seconds_total"] > 0
    assert of_engine["baton_stats_errors_total"] == 0
    return of_engine
