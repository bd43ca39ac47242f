"""Wait until every rank has ended a job, then report one outcome for the job."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from baton_kv.contract import Transfer, TransferFailure, TransferOutcome

SAYS_MOST = (
    TransferFailure.CORRUPT,
    TransferFailure.OTHER,
    TransferFailure.DEVICE,
    TransferFailure.FULL,
    TransferFailure.INCOMPATIBLE,
    TransferFailure.MALFORMED,
    TransferFailure.NOT_WHOLE,
    TransferFailure.BUSY,
    TransferFailure.MISSING,
    TransferFailure.GIVEN_UP,
)


class RankOutcomes:
    """The outcomes of jobs that some ranks have ended and others have not.

    Args:
        ranks: number of ranks, each of which ends every job once.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._ended: dict[tuple[str, Transfer], list[TransferOutcome]] = {}

    def add(self, outcomes: Iterable[TransferOutcome]) -> Iterator[TransferOutcome]:
        """Take outcomes of ranks; yield one outcome for each job that all ranks have ended."""
        for outcome in outcomes:
            job = (outcome.request_id, outcome.kind)
            ended = self._ended.setdefault(job, [])
            ended.append(outcome)
            if len(ended) == self._ranks:
                yield combined(self._ended.pop(job))


def combined(outcomes: list[TransferOutcome]) -> TransferOutcome:
    """Return one job's outcome over its ranks: it failed if one failed, and took as long as the slowest.

    With several failures, the one that says most: a rank that finds an entry corrupt removes it, and the next
    then finds it missing.
    """
    failures = [outcome.failure for outcome in outcomes if outcome.failure is not None]
    return replace(
        outcomes[0],
        failure=min(failures, key=SAYS_MOST.index, default=None),
        bytes=sum(outcome.bytes for outcome in outcomes),
        seconds=max(outcome.seconds for outcome in outcomes),
    )
