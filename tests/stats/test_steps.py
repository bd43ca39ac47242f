"""What steps are taken to have been spent on: phases, times and shares worked out by hand."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from baton_stats.series import BANDS, Families, Recent, StepSeries, percentile
from baton_stats.steps import Phase, Spent, Step, StepClock


class Hands:
    """A clock that the test moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def told(*steps: tuple[float, Step], ahead: bool = False) -> list[Spent]:
    """Return the cost of steps that were reported so many seconds after one another."""
    hands = Hands()
    clock, spent = StepClock(hands, ahead=ahead), []
    for seconds, step in steps:
        hands.now += seconds
        spent.append(clock.measure(step))
    return spent


PROMPT = Step(running=1, first_token_s=[0.3])
DECODES = Step(running=1, gaps_s=[0.05])
CHUNK = Step(running=1)
LAST = Step(finished=1, gaps_s=[0.05])
BOTH = Step(running=2, first_token_s=[0.4], gaps_s=[0.2])
BESIDE_A_CHUNK = Step(running=2, gaps_s=[0.2])
WAITS = Step(waiting=1)


@pytest.mark.parametrize(
    ("step", "phase"),
    [
        (PROMPT, Phase.PREFILL),
        (CHUNK, Phase.PREFILL),
        (Step(finished=1, first_token_s=[0.1]), Phase.PREFILL),
        (DECODES, Phase.DECODE),
        (LAST, Phase.DECODE),
        (BOTH, Phase.MIXED),
        (BESIDE_A_CHUNK, Phase.MIXED),
        (WAITS, Phase.STALLED),
    ],
)
def test_a_step_s_phase(step: Step, phase: Phase) -> None:
    assert told((1.0, step))[0].phase is phase


def test_scheduled_ahead_a_newcomer_is_not_taken_for_a_chunk() -> None:
    """With async scheduling the next step's requests count as running already when the last one is told."""
    newcomer = Step(running=2, gaps_s=[0.05])
    phases = [spent.phase for spent in told((1, DECODES), (1, newcomer), (1, BOTH), ahead=True)]
    assert phases[1:] == [Phase.DECODE, Phase.MIXED]
    chunked = [spent.phase for spent in told((1, newcomer), (1, newcomer), ahead=True)]
    assert chunked[1] is Phase.MIXED


def test_busy_time_is_told_time_and_idle_time_is_not() -> None:
    """The first step after idleness took as long as its request was there; then each until the next."""
    spent = told((9.0, PROMPT), (0.05, DECODES), (0.06, LAST), (30.0, PROMPT), (0.07, LAST))
    assert [round(one.seconds, 6) for one in spent] == [0.3, 0.05, 0.06, 0.3, 0.07]


def test_a_first_step_cannot_have_taken_longer_than_the_engine_was_idle() -> None:
    """A request that waited in the frontend arrived before the engine had it."""
    assert told((0.1, PROMPT))[0].seconds == pytest.approx(0.1)
    assert told((5.0, CHUNK))[0].seconds == 0.0


def test_the_blocks_of_a_step_count_though_it_gave_them_back() -> None:
    """And waiting counts as the mean of before and after."""
    spent = told((1, Step(running=1, waiting=2, kv_usage=0.6)), (1, Step(finished=1, gaps_s=[0.1])))[1]
    assert (spent.kv_usage, spent.waiting, spent.running) == (0.6, 1.0, 1)


def sample(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"baton_stats_{name}", {"model_name": "m", "engine": "0"} | labels)


def test_series_of_a_few_steps() -> None:
    """Shares, means and percentiles come out of plain sums."""
    registry = CollectorRegistry()
    series = StepSeries(Families(registry), "m", 0)
    series.add(Spent(Phase.PREFILL, 3.0, running=1, waiting=2, kv_usage=0.2, gaps=0, gap_s=0.0))
    series.add(Spent(Phase.DECODE, 1.0, running=4, waiting=0, kv_usage=0.95, gaps=4, gap_s=1.0))
    for seconds in (0.004, 0.004, 0.4):
        series.queued(seconds)
    assert sample(registry, "step_seconds_total", phase="prefill") == 3
    assert sample(registry, "step_seconds_total", phase="decode") == 1
    assert sample(registry, "steps_total", phase="mixed") == 0
    assert sample(registry, "kv_usage_seconds_total") == pytest.approx(3 * 0.2 + 0.95)
    assert [sample(registry, "kv_seconds_total", usage=name) for _, name in BANDS] == [3, 0, 0, 1]
    assert sample(registry, "request_seconds_total", state="running") == 7
    assert sample(registry, "request_seconds_total", state="waiting") == 6
    assert sample(registry, "token_gap_seconds_total", phase="decode") == 1
    assert sample(registry, "queue_seconds_bucket", le="0.005") == 2
    assert sample(registry, "queue_seconds_bucket", le="0.5") == 3


def test_usage_above_all_counts_in_the_last_band() -> None:
    """A rounding error above 1 is not lost."""
    registry = CollectorRegistry()
    StepSeries(Families(registry), "m", 0).add(Spent(Phase.DECODE, 1.0, 1, 0, 1.0000001, 1, 0.1))
    assert sample(registry, "kv_seconds_total", usage="90-100") == 1


def test_the_line_says_what_happened_since_the_last() -> None:
    """Nothing of an idle time, and nothing twice."""
    recent = Recent()
    assert recent.line() is None
    recent.add(Spent(Phase.PREFILL, 1.5, 1, 0, 0.1, 0, 0.0))
    recent.add(Spent(Phase.MIXED, 0.5, 2, 0, 0.5, 2, 0.3))
    for seconds in (0.001, 0.002, 0.5):
        recent.queued(seconds)
    assert recent.line() == (
        "Busy 2.0 s: prefill 75%, mixed 25%; KV cache in use: 20%, at most 50%; "
        "Token gap in mixed steps: 150 ms; Queue time of 3 requests: p50 2 ms, p90 500 ms, p99 500 ms"
    )
    assert recent.line() is None


@pytest.mark.parametrize(("at", "value"), [(50, 5), (90, 9), (99, 10), (100, 10), (1, 1)])
def test_percentiles_are_values_that_were_there(at: int, value: float) -> None:
    """Nearest rank, of one to ten."""
    assert percentile([float(number) for number in range(1, 11)], at) == value
