"""Write handoffs to the archive in the background, and delete there what has expired."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial

import structlog
from pydantic import ValidationError

from baton.errors import HandoffImagesLost, HandoffStoreUnavailable
from baton.library.archive.bucket import Bucket, Conflict
from baton.library.archive.copies import TRIES, Archive, Outcome
from baton.library.archive.documents import DUE, Due, OtherVersion, Tampered, end_of, record_name
from baton.library.archive.records import DELETED_FOR_S
from baton.library.handoff import Handoff, HandoffState
from baton.library.here.records import Others
from baton.library.tiers import Here
from baton_kv.stores.base import StoreError

# Delete from the archive what has expired, with the files that nothing else needs.


MARGIN_S = 60.0
"""A handoff is deleted so long after its end: the clocks of gateways may differ."""


def remove_expired(
    archive: Archive, stop: Callable[[], bool] = lambda: False, now: Callable[[], float] = time.time
) -> int:
    """Delete the handoffs whose life has ended; returns how many.

    The objects of `due/` are listed in order of time, so only what is due is looked at.

    Args:
        stop: says that the rest is left for another time.
        now: seconds since the epoch.
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


THREADS = 2
"""Handoffs that are written at once."""
AGAIN_AFTER_S = 30.0
"""What could not be written is tried again this much later."""
MAX_WAITING = 10_000
EXPIRED_EVERY_S = 3600.0
CLOSE_WITHIN_S = 2.0
GUARDS = 64
Job = Callable[[], bool]
"""Returns whether it is done; if not, it is tried again later."""


class Archiver:
    """The background work of one gateway for the archive.

    Args:
        after_s: handoffs that live at least so long are archived.
    """

    def __init__(self, archive: Archive, here: Here, after_s: float) -> None:
        self._archive = archive
        self._here = here
        self._after_s = after_s
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="archive-write")
        self._lock = threading.Lock()
        self.jobs: dict[str, Job] = {}
        self._running: dict[str, Future[None]] = {}
        self.later: dict[str, float] = {}
        self._wrong: set[str] = set()
        self._guards = [threading.Lock() for _ in range(GUARDS)]
        self._closed = threading.Event()
        self._upkeep = threading.Thread(target=self._keep_up, name="archive-upkeep", daemon=True)
        self._upkeep.start()
        self._log = structlog.get_logger("baton.handoffs")

    def wants(self, record: Handoff) -> bool:
        """Return whether a handoff belongs into the archive."""
        return (
            not record.automatic
            and record.state is HandoffState.READY
            and (record.pin or record.ttl_s >= self._after_s)
        )

    def write_later(self, record: Handoff) -> None:
        """Bring the archive up to date with a handoff.

        Args:
            record: the handoff as this gateway's index knows it; it is noted there when it is archived.
        """
        self.begin(record.id, lambda: self._write(record))

    def take_kv_out_later(self, record: Handoff) -> None:
        """Take KV that was found to be wrong out of the archive, whatever else is to be written."""
        with self._lock:
            self._wrong.add(record.id)
        self.write_later(record)

    def begin(self, name: str, job: Job) -> None:
        """Do something in the background, after what is under way for the same name."""
        with self._lock:
            if self._closed.is_set():
                return
            if name not in self.jobs and len(self.jobs) >= MAX_WAITING:
                self._archive.metrics.handoff("failed")
                self._log.warning("handoff_not_archived", handoff=name, reason="too many are waiting")
                return
            self.jobs[name] = job
            self.later.pop(name, None)
            if name not in self._running:
                self._start(name)
            self._archive.metrics.waiting.set(len(self.jobs))

    def guard(self, handoff_id: str) -> threading.Lock:
        """Return the lock that is held while a handoff is changed here, or its document is written."""
        return self._guards[hash(handoff_id) % len(self._guards)]

    def is_waiting(self, name: str) -> bool:
        """Return whether a job of this name has not ended yet."""
        return name in self.jobs

    def idle(self) -> bool:
        """Return whether nothing is under way; what is tried again later is not."""
        with self._lock:
            return not self._running

    def close(self) -> None:
        """Begin nothing more, and give what is under way a moment."""
        with self._lock:
            self._closed.set()
            running = list(self._running.values())
        self._threads.shutdown(wait=False, cancel_futures=True)
        wait(running, CLOSE_WITHIN_S)
        self._archive.files.close()
        self._upkeep.join(CLOSE_WITHIN_S)

    def _start(self, name: str) -> None:
        self._running[name] = self._threads.submit(self._run, name)

    def _run(self, name: str) -> None:
        with self._lock:
            job = self.jobs[name]
        try:
            done = job()
        except (HandoffStoreUnavailable, StoreError, Conflict) as error:
            self._log.warning("handoff_not_archived", handoff=name, reason=str(error) or "changed by others")
            done = False
        except HandoffImagesLost as error:  # they will not come back
            self._log.warning("handoff_not_archived", handoff=name, reason=error.message)
            done = True
        except Exception as error:  # noqa: BLE001  # the border of this thread: the next job may work
            self._log.error("handoff_not_archived", handoff=name, reason=f"{type(error).__name__}: {error}")
            done = False
        self._ended(name, job, done)

    def _ended(self, name: str, job: Job, done: bool) -> None:
        with self._lock:
            self._running.pop(name, None)
            if self.jobs.get(name) is not job:  # something newer came meanwhile
                if not self._closed.is_set():
                    self._start(name)
            elif done:
                del self.jobs[name]
            else:
                self._archive.metrics.handoff("failed")
                self.later[name] = time.monotonic() + AGAIN_AFTER_S
            self._archive.metrics.waiting.set(len(self.jobs))

    def _write(self, known: Handoff) -> bool:
        if known.id in self._wrong:
            self._archive.records.release(*self._archive.without_kv(known))
            with self._lock:
                self._wrong.discard(known.id)
        for _ in range(TRIES):
            record = self._here.find(known.id, known.tenant)
            if record is None or record.expires_at <= time.time():
                return True
            outcome = self._archive.write(self._here, record, partial(self._commit, known, record))
            if outcome is Outcome.DELETED:
                self._here.remove(record)  # another gateway deleted it
                return True
            if outcome is Outcome.WRITTEN and known.archived:
                return True
        return False

    def _commit(self, known: Handoff, record: Handoff, write: Callable[[], object]) -> bool:
        """Write a document, and note that the handoff is archived; not if it was changed since it was read.

        From then on other machines may change it in the archive, and this one may no more do so without.
        """
        with self.guard(record.id):
            if self._here.pool is None:
                now = self._here.find(record.id, record.tenant)
                if now is None or now.revision != record.revision:
                    return False
            write()
            if record.archived or self._mark(record):
                known.archived = True
        return True

    def _mark(self, record: Handoff) -> bool:
        """Note on this machine that a handoff is archived; not if it is another than was written.

        From then on it is changed in the archive first, so nothing may be missing there.
        """

        def mark(now: Handoff, _others: Others) -> None:
            now.archived = now.revision == record.revision

        marked = self._here.change(record, mark)
        return marked is not None and marked.archived

    def _keep_up(self) -> None:
        """Try again what failed, and look for what has expired, until this is closed."""
        next_expired = time.monotonic() + random.uniform(0.1, 1.0) * EXPIRED_EVERY_S
        while not self._closed.wait(1.0):
            now = time.monotonic()
            with self._lock:
                for name in [name for name, at in self.later.items() if at <= now]:
                    del self.later[name]
                    if name in self.jobs and name not in self._running:
                        self._start(name)
            if now >= next_expired:
                next_expired = now + EXPIRED_EVERY_S
                self.begin(" expired", self._remove_expired)

    def _remove_expired(self) -> bool:
        count = remove_expired(self._archive, self._closed.is_set)
        self._log.info("archive_expired", handoffs=count)
        return True
