"""Implement vLLM's stat logger interface; the only module of the plugin that imports vLLM."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from vllm.v1.metrics.loggers import StatLoggerBase

from baton_stats.series import Recent, StepSeries, process_families
from baton_stats.steps import Step, StepClock

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

log = logging.getLogger("vllm.baton_stats")  # a child of vLLM's logger, for its level and handler


class BatonStatLogger(StatLoggerBase):
    """Adds vLLM's statistics of every engine step to the `baton_stats_*` series.

    vLLM creates one for each engine if the plugin is installed.
    """

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        name = vllm_config.model_config.served_model_name
        self._prefix = f"Engine {engine_index:03d}"
        self._series = StepSeries(process_families(), name, engine_index)
        self._clock = StepClock(time.monotonic, ahead=bool(vllm_config.scheduler_config.async_scheduling))
        self._recent = Recent()
        self._warned = False

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        """Count one step. Never raises, since an exception would end the engine."""
        try:
            self._count(scheduler_stats, iteration_stats)
        except Exception:  # vLLM's statistics may change between versions; counted, and logged once
            self._series.failed()
            if not self._warned:
                log.exception(
                    "baton_stats cannot read this vLLM's statistics; its series are no longer updated."
                )
            self._warned = True

    def _count(self, scheduler: SchedulerStats | None, iteration: IterationStats | None) -> None:
        finished = iteration.finished_requests if iteration is not None else ()
        waited = [request.queued_time for request in finished]
        for seconds in waited:
            if seconds >= 0:  # negative: it finished before it was scheduled
                self._series.queued(seconds)
                self._recent.queued(seconds)
        if scheduler is not None:
            spent = self._clock.measure(_step(scheduler, iteration, len(waited)))
            self._series.add(spent)
            self._recent.add(spent)

    def log(self) -> None:
        """Log one line about the steps since the last; vLLM calls this when it logs its statistics."""
        line = self._recent.line()
        if line is not None:
            log.info("%s: %s", self._prefix, line)

    def log_engine_initialized(self) -> None:
        """Do nothing; there are no statistics yet."""


def _step(scheduler: SchedulerStats, iteration: IterationStats | None, finished: int) -> Step:
    """Convert vLLM's statistics of a step to plain values; `iteration` is None if the step had no outputs."""
    return Step(
        running=scheduler.num_running_reqs,
        waiting=scheduler.num_waiting_reqs + scheduler.num_skipped_waiting_reqs,
        kv_usage=scheduler.kv_cache_usage,
        finished=finished,
        first_token_s=iteration.time_to_first_tokens_iter if iteration is not None else (),
        gaps_s=iteration.inter_token_latencies_iter if iteration is not None else (),
    )
