"""What the stat logger reads of vLLM's statistics, held; and that nothing in them can end an engine."""

from __future__ import annotations

import logging
import re
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from prometheus_client import REGISTRY, generate_latest  # after the skip
from vllm.plugins import STAT_LOGGER_PLUGINS_GROUP, load_plugins_by_group  # after the skip
from vllm.v1.engine import FinishReason  # after the skip
from vllm.v1.metrics.loggers import (  # after the skip
    PrometheusStatLogger,
    StatLoggerManager,
    load_stat_logger_plugin_factories,
)
from vllm.v1.metrics.prometheus import unregister_vllm_metrics  # after the skip
from vllm.v1.metrics.stats import FinishedRequestStats, IterationStats, SchedulerStats  # after the skip

from baton_stats.plugin import BatonStatLogger  # after the skip


def logger(name: str, *, index: int = 0, ahead: bool = False) -> BatonStatLogger:
    config = SimpleNamespace(
        model_config=SimpleNamespace(served_model_name=name),
        scheduler_config=SimpleNamespace(async_scheduling=ahead),
    )
    return BatonStatLogger(config, index)


def step(
    decoding: int = 0, prompts: int = 0, over: int = 0, waiting: int = 0
) -> tuple[SchedulerStats, IterationStats]:
    """vLLM's own statistics objects, filled as its output processor fills them."""
    iteration = IterationStats()
    iteration.inter_token_latencies_iter = [0.05] * decoding
    iteration.time_to_first_tokens_iter = [0.1] * prompts
    iteration.finished_requests = [
        FinishedRequestStats(finish_reason=FinishReason.STOP, queued_time=0.01) for _ in range(over)
    ]
    running = decoding + prompts - over
    return SchedulerStats(num_running_reqs=running, num_waiting_reqs=waiting, kv_cache_usage=0.4), iteration


def value(name: str, model: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"baton_stats_{name}", {"model_name": model, "engine": "0"} | labels)


def test_vllm_takes_it_for_a_stat_logger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed, it is loaded; and only if VLLM_PLUGINS, where it is set, names it."""
    if not load_plugins_by_group(STAT_LOGGER_PLUGINS_GROUP):
        pytest.skip("this environment has an installation of Baton without its stat logger: run `make test`")
    assert load_stat_logger_plugin_factories() == [BatonStatLogger]
    monkeypatch.setenv("VLLM_PLUGINS", "baton_geo")
    assert load_stat_logger_plugin_factories() == []
    monkeypatch.setenv("VLLM_PLUGINS", "baton_geo,baton_stats")
    assert load_stat_logger_plugin_factories() == [BatonStatLogger]


def test_vllm_s_manager_calls_it_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made and called as AsyncLLM does, but for the Prometheus logger, which wants a whole configuration."""
    monkeypatch.setattr(PrometheusStatLogger, "__init__", lambda *_: None)
    monkeypatch.setattr(PrometheusStatLogger, "record", lambda *_, **__: None)
    manager = StatLoggerManager(
        SimpleNamespace(
            model_config=SimpleNamespace(served_model_name="managed"),
            scheduler_config=SimpleNamespace(async_scheduling=False),
        ),
        custom_stat_loggers=[BatonStatLogger],
        enable_default_loggers=False,
    )
    manager.record(*step(prompts=1))
    assert value("steps_total", "managed", phase="prefill") == 1


def test_two_engines_and_one_started_anew_share_families_and_count_once() -> None:
    """Whatever vLLM removes of its own series between them."""
    first, second = logger("one"), logger("two")
    first.record(*step(prompts=1))
    unregister_vllm_metrics()
    logger("one").record(*step(prompts=1))
    second.record(*step(decoding=2, over=1))
    assert value("steps_total", "one", phase="prefill") == 2
    assert value("steps_total", "two", phase="decode") == 1
    assert value("queue_seconds_count", "two") == 1
    page = generate_latest(REGISTRY).decode()
    assert len(re.findall(r"^# TYPE baton_stats_steps_total", page, re.MULTILINE)) == 1


def test_what_it_cannot_read_is_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """An exception in `record` would end the engine for everyone."""
    odd = logger("odd")
    with caplog.at_level(logging.ERROR, logger="vllm.baton_stats"):
        logging.getLogger("vllm").addHandler(caplog.handler)  # vLLM's logger does not propagate
        try:
            for _ in range(3):
                odd.record(SimpleNamespace(), None)  # type: ignore[arg-type]  # a vLLM that moved
        finally:
            logging.getLogger("vllm").removeHandler(caplog.handler)
    assert value("errors_total", "odd") == 3
    assert len({id(record) for record in caplog.records if "no longer updated" in record.message}) == 1
    odd.record(None, None)
    odd.record(SchedulerStats(), None)
    assert value("errors_total", "odd") == 3


def test_a_request_that_was_never_scheduled_has_no_queue_time() -> None:
    """vLLM then subtracts from zero."""
    scheduler, iteration = step(over=1)
    iteration.finished_requests[0].queued_time = -12345.0
    logger("never").record(scheduler, iteration)
    assert value("queue_seconds_count", "never") == 0


def test_it_logs_where_vllm_does(caplog: pytest.LogCaptureFixture) -> None:
    """`log` is called every ten seconds by vLLM's server."""
    talking = logger("talking", index=3)
    talking.record(*step(prompts=1))
    time.sleep(0.01)
    talking.record(*step(decoding=1))
    logging.getLogger("vllm").addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.INFO, logger="vllm.baton_stats"):
            talking.log()
            talking.log()
    finally:
        logging.getLogger("vllm").removeHandler(caplog.handler)
    (line,) = {record.getMessage() for record in caplog.records}
    assert line.startswith("Engine 003: Busy 0.")


@pytest.mark.parametrize("requests", [1, 16, 256])
def test_a_step_costs_it_microseconds(requests: int) -> None:
    """Beside a step's milliseconds; the figure is printed. The limit leaves room for a busy machine."""
    told, counting = step(decoding=requests), logger(f"costs-{requests}")
    best = min(timed(lambda: counting.record(*told)) for _ in range(5))
    print(f"baton_stats: {best * 1e6:.1f} us a step with {requests} requests")
    assert best < 0.001


def timed(call: object, times: int = 1000) -> float:
    begun = time.perf_counter()
    for _ in range(times):
        call()  # type: ignore[operator]  # a function
    return (time.perf_counter() - begun) / times
