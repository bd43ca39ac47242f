"""Delete from the archive what has expired, with the files that nothing else needs."""

from __future__ import annotations

import time
from collections.abc import Callable

from pydantic import ValidationError

from baton.handoffs.archive.bucket import Bucket, Conflict
from baton.handoffs.archive.copies import Archive
from baton.handoffs.archive.documents import DUE, Due, OtherVersion, Tampered, end_of, record_name
from baton.handoffs.archive.records import DELETED_FOR_S

MARGIN_S = 60.0
"""A handoff is deleted so long after its end: the clocks of gateways may differ."""


def remove_expired(
    archive: Archive, stop: Callable[[], bool] = lambda: False, now: Callable[[], float] = time.time
) -> int:
    """Delete the handoffs whose life has ended; returns how many.

    The objects of `due/` are listed in order of time, so only what is due is looked at.

    Args:
        archive: the archive.
        stop: says that the rest is left for another time.
        now: seconds since the epoch.

    Raises:
        HandoffStoreUnavailable: the archive failed.
    """
    count, bucket = 0, archive.bucket
    for name in bucket.names(DUE):
        try:
            at, handoff = end_of(name)
        except ValueError:  # not written by a gateway
            continue
        if stop() or at + MARGIN_S > now():
            break
        count += _end(archive, bucket, name, handoff, now() - MARGIN_S)
    return count


def _end(archive: Archive, bucket: Bucket, due: str, handoff: str, now: float) -> int:
    """Look at one handoff that is due; returns whether it has expired."""
    objects = _objects(archive, bucket, due)
    try:
        found = archive.records.read(handoff)
    except OtherVersion:  # that one deletes it
        return 0
    except Tampered:
        bucket.delete(record_name(handoff))
        found = None
    ended = 0
    if found is not None and found.document.record is not None:
        if found.document.record.expires_at > now:  # its life was extended: it is due again then
            bucket.delete(due)
            return 0
        try:
            archive.records.bury(handoff, found.document, over=found.tag)
        except Conflict:  # it is being extended
            return 0
        archive.metrics.handoff("expired")
        objects, ended = found.document.objects, 1
    elif found is not None and found.document.deleted_at + DELETED_FOR_S <= now + MARGIN_S:
        bucket.delete(record_name(handoff))
    archive.records.release(handoff, objects)
    bucket.delete(due)
    return ended


def _objects(archive: Archive, bucket: Bucket, due: str) -> list[str]:
    found = bucket.get(due)
    try:
        return list(Due.model_validate_json(archive.names.unseal(due, found.data)).objects) if found else []
    except (Tampered, ValidationError):
        return []
