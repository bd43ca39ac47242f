"""vLLM joins what the ranks report; ranks end a job in different steps, and some of them fail."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import KVConnectorOutput

from baton_kv.connector import WorkerReport
from baton_kv.contract import Transfer, TransferFailure, TransferOutcome
from baton_kv.scheduler_role import RankOutcomes

JOBS, STEPS = 12, 8


def reported(ended: list[TransferOutcome]) -> Any:
    """Return what a worker says of a step in which these jobs ended, as the connector has it say."""
    of = {kind: {each.request_id for each in ended if each.kind is kind} for kind in Transfer}
    failed = {each.request_id for each in ended if each.kind is Transfer.LOAD and each.failure}
    return SimpleNamespace(
        kv_connector_output=KVConnectorOutput(
            finished_sending=of[Transfer.SAVE] or None,
            finished_recving=of[Transfer.LOAD] or None,
            failed_recving=failed,
            kv_connector_worker_meta=WorkerReport(ended) if ended else None,
        )
    )


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("seed", range(20))
def test_a_job_ends_once_when_its_last_rank_has_ended_it_and_fails_if_one_failed(
    ranks: int, seed: int
) -> None:
    chance = random.Random(seed)
    jobs = [(f"r{number}", chance.choice([Transfer.LOAD, Transfer.SAVE])) for number in range(JOBS)]
    ends = {(job, rank): chance.randrange(STEPS) for job in jobs for rank in range(ranks)}
    fails = {key: chance.random() < 0.15 for key in ends}
    joined, outcomes = KVOutputAggregator(ranks), RankOutcomes(ranks)
    found: dict[str, TransferOutcome] = {}
    for step in range(STEPS):
        steps = [
            [
                TransferOutcome(
                    job[0], "k", job[1], failure=TransferFailure.DEVICE if fails[job, rank] else None, bytes=1
                )
                for job in jobs
                if ends[job, rank] == step
            ]
            for rank in range(ranks)
        ]
        output = joined.aggregate([reported(ended) for ended in steps])
        assert output is not None
        told = output.kv_connector_output
        assert told is not None
        over = [job for job in jobs if max(ends[job, rank] for rank in range(ranks)) == step]
        loads = {name for name, kind in over if kind is Transfer.LOAD}
        assert (told.finished_recving or set()) == loads
        assert (told.finished_sending or set()) == {name for name, _ in over} - loads
        failed = {job[0] for job in over if any(fails[job, rank] for rank in range(ranks))}
        assert told.failed_recving == failed & loads
        report = told.kv_connector_worker_meta
        ended = list(outcomes.add(report.outcomes)) if isinstance(report, WorkerReport) else []
        assert {each.request_id for each in ended} == {name for name, _ in over}, "in the same step as vLLM"
        assert {each.request_id for each in ended if each.failure} == failed
        found |= {each.request_id: each for each in ended}
    assert len(found) == JOBS
    assert {each.bytes for each in found.values()} == {ranks}
