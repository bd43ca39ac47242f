"""Run plugins' requests as jobs whose files are kept: `/v1/scenes`.

A job is a folder: `job.json` says what it is, `request.json` what a JSON request asked until it has its turn,
and `files` holds what it made. The gateway that runs a job holds a lock on its folder, so that whoever finds
an unfinished one without a lock knows that its gateway is gone: the job has failed then, and has no files.
Files are written beside, and appear all at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import structlog

from baton.admission.fair_queue import QueueLimits, watched_queue
from baton.admission.fair_threads import in_own_thread
from baton.config.groups import SceneSettings
from baton.engines.backend import Json
from baton.errors import (
    BatonError,
    GatewayOverloaded,
    IdempotencyKeyReused,
    InternalError,
    OperationUnsupported,
    SceneNotFound,
    SceneNotReady,
)
from baton.pooling.errors import where
from baton.pooling.plugin import ResultFile, Upload
from baton.pooling.run import Runner
from baton.telemetry.ids import RequestContext
from baton.telemetry.metrics import QueueMetrics
from baton_kv.folders import make_folder

log = structlog.get_logger("baton.pooling")

State = Literal["queued", "running", "done", "failed"]
RECORD, WORK, FILES, PART = "job.json", "request.json", "files", "files.part"
PREFIX = "scene-"
LOST = {
    "code": "scene_lost",
    "message": "The gateway ended while it worked on this scene; send it again.",
    "retryable": True,
}
TOO_LARGE = {
    "code": "scene_too_large",
    "message": "The files of this scene do not fit into what this server keeps (setting scenes.budget).",
    "retryable": False,
}
RETRY_AFTER_S = 30
FAILED_KEPT = 100
"""Failed jobs of a tenant whose records stay until they expire: they take no part of the budget, and whoever
sends what fails again and again reads the last ones at most.
"""


@dataclass(frozen=True)
class KeptFile:
    """One file of a finished job.

    Attributes:
        name: file name, without a folder.
        bytes: its size.
        output: what the plugin calls it in a request; empty: it has no name there.
    """

    name: str
    media_type: str
    bytes: int
    output: str = ""


@dataclass(frozen=True)
class Job:
    """The record of a job.

    Attributes:
        key: digest of its `Idempotency-Key`; empty: it came without.
        body: digest of its body, to which the key belongs.
        created_at: seconds since the epoch, as are the next two.
        finished_at: None: it is not.
        expires_at: until when it is kept; None: it is not finished.
        error: code, message and whether it may be sent again; None: it has not failed.
        left_out: the reason, by name of a file that was wanted and is not made.
        progress: how far it came, as its plugin says.
    """

    id: str
    tenant: str
    model: str
    state: State
    created_at: float
    key: str = ""
    body: str = ""
    finished_at: float | None = None
    expires_at: float | None = None
    error: dict[str, Any] | None = None
    files: tuple[KeptFile, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)
    progress: dict[str, int] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Bytes of its files."""
        return sum(file.bytes for file in self.files)


@dataclass(eq=False)
class _Running:
    """A job of this gateway that is not finished.

    Attributes:
        lock: descriptor that holds the lock on its folder.
        size: bytes of its request, which wait on disk.
        over: set when it has ended, for threads that still work for it.
        copied: bytes of its files, from when they are copied until its record tells them.
    """

    job: Job
    context: RequestContext
    runner: Runner
    lock: int
    size: int
    writing: threading.Lock = field(default_factory=threading.Lock)
    over: threading.Event = field(default_factory=threading.Event)
    task: asyncio.Task[None] | None = None
    copied: int = 0


class SceneJobs:
    """The jobs of one gateway, and of those before it that used its folder.

    Args:
        wall: seconds since the epoch.
    """

    def __init__(
        self,
        settings: SceneSettings,
        folder: Path,
        queues: QueueMetrics,
        *,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._settings, self._folder, self._wall = settings, folder, wall
        limits = QueueLimits(settings.at_once, settings.waiting, reserve=1)
        self._places = watched_queue(limits, _no_place, queues, "scenes")
        self._running: dict[str, _Running] = {}
        self._keeping = threading.Lock()  # of jobs that end at once each finds what the others take
        self._turn = asyncio.Lock()  # of two requests with one key the second finds the first's job

    async def aclose(self) -> None:
        """End the running jobs; they have failed then."""
        tasks = [running.task for running in self._running.values() if running.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def begin(
        self,
        runner: Runner,
        work: Json | Upload,
        context: RequestContext,
        *,
        model: str,
        key: str,
        body: bytes,
        size: int,
        sent: bytes | None = None,
        release: Callable[[], Awaitable[None]],
        keep: Callable[[asyncio.Task[None], RequestContext], None] = lambda _task, _context: None,
    ) -> Job:
        """Begin a job, or return the one that has its `Idempotency-Key` already.

        Args:
            key: the `Idempotency-Key`; empty: there is none.
            body: digest of the request, to which the key belongs.
            size: bytes of the request.
            sent: a JSON request as it came, of which `work` is what counts; None: `work` is written anew.
            release: called when the work is not needed any more.
            keep: called with the job's task, and the context in which it counts tokens.

        Raises:
            OperationUnsupported: this server keeps no scenes.
            IdempotencyKeyReused: the key came with another body.
            GatewayOverloaded: too many jobs wait already, or too many bytes.
        """
        if not self._settings.budget:
            await release()
            raise OperationUnsupported("This server keeps no scenes (setting scenes.budget): use /pooling.")
        try:
            digest = hashlib.sha256(key.encode()).hexdigest() if key else ""
            await self._turn.acquire()
        except BaseException:
            await release()
            raise
        try:
            if digest and (known := await self._with_key(context.tenant, digest)) is not None:
                if known.body != body.hex():
                    raise IdempotencyKeyReused()
                await release()
                return known
            self._places.require_room(context.tenant)
            if sum(running.size for running in self._running.values()) + size > self._settings.budget:
                raise _no_place(None)
            job = Job(
                PREFIX + secrets.token_hex(16),
                context.tenant,
                model,
                "queued",
                self._wall(),
                digest,
                body.hex(),
            )
            try:
                lock = await in_own_thread(self._make, job, work, sent)
            except OSError as error:
                log.error("scenes_not_kept", cause=f"{type(error).__name__}: {error.strerror}")
                raise GatewayOverloaded(
                    "This server cannot keep scenes just now; its log says why."
                ) from None
        except BaseException:
            await release()
            raise
        finally:
            self._turn.release()
        running = _Running(job, replace(context, request_id=job.id), runner, lock, size)
        self._running[job.id] = running
        upload = work if isinstance(work, Upload) else None
        fields = () if isinstance(work, Upload) else tuple(work)
        running.task = asyncio.create_task(self._run(running, upload, fields, release), name=job.id)
        keep(running.task, running.context)
        await asyncio.sleep(0)  # it begins, for a task that is cancelled before that would clean nothing up
        return job

    async def _with_key(self, tenant: str, digest: str) -> Job | None:
        mine = (running.job for running in self._running.values())
        found = next((job for job in mine if (job.tenant, job.key) == (tenant, digest)), None)
        return found or next((job for job in await self.listed(tenant) if job.key == digest), None)

    async def listed(self, tenant: str) -> list[Job]:
        """List a tenant's jobs, the newest first."""
        jobs = [job for job in await in_own_thread(self._every) if job.tenant == tenant]
        return sorted(jobs, key=lambda job: -job.created_at)

    async def get(self, job_id: str, tenant: str) -> Job:
        """Find a job, with its progress as of now.

        Raises:
            SceneNotFound: the tenant has none with this id, or it is not kept any more.
        """
        running = self._running.get(job_id)
        if running is None:
            job = await in_own_thread(self._read, job_id)
            if job is None or job.tenant != tenant:
                raise SceneNotFound()
            return job
        if running.job.tenant != tenant:
            raise SceneNotFound()
        if running.job.state == "running":
            progress = await running.runner.progress(running.context)
            running.job = replace(running.job, progress=progress or running.job.progress)
        return running.job

    async def file(self, job_id: str, tenant: str, name: str) -> tuple[Path, KeptFile]:
        """Find a file of a job.

        Raises:
            SceneNotFound: there is no such job or file; of one that was left out it says why.
            SceneNotReady: the job is not done.
        """
        job = await self.get(job_id, tenant)
        if job.state != "done":
            raise SceneNotReady()
        found = next((file for file in job.files if file.name == name), None)
        if found is None:
            reason = job.left_out.get(name)
            raise SceneNotFound(reason and f"The scene has no file '{name}': {reason}")
        return self._folder / job.id / FILES / found.name, found

    async def delete(self, job_id: str, tenant: str) -> None:
        """End a job that runs, and remove it with its files.

        Raises:
            SceneNotFound: the tenant has none with this id.
        """
        await self.get(job_id, tenant)
        running = self._running.get(job_id)
        if running is not None and running.task is not None:
            if not running.over.is_set():  # a second cancel would stop what ends the job
                running.task.cancel()
            await asyncio.wait({running.task})
        await in_own_thread(shutil.rmtree, self._folder / job_id, True)

    async def _run(
        self,
        running: _Running,
        upload: Upload | None,
        fields: tuple[str, ...],
        release: Callable[[], Awaitable[None]],
    ) -> None:
        error: dict[str, Any] | None = LOST
        try:
            async with self._places.place(running.job.tenant):
                await self._note(running, replace(running.job, state="running"))
                work: Json | Upload = upload or {}
                if upload is None:
                    work = await in_own_thread(self._take_work, running.job, fields)
                answer = await running.runner.run(work, running.context, keep=True)
                try:
                    progress = await running.runner.progress(running.context)
                    left_out = await answer.left_out()
                    running.job = replace(running.job, progress=progress, left_out=left_out)
                    files = await in_own_thread(self._keep, running, await answer.files())
                finally:
                    await answer.close()
            error = TOO_LARGE if files is None else None
            running.job = replace(running.job, files=files or ())
        except BatonError as refused:
            error = {"code": refused.code, "message": refused.message, "retryable": refused.retryable}
        except OSError as failed:
            log.error("scene_not_kept", cause=type(failed).__name__)
            error = {"code": "scene_not_kept", "message": "The files could not be kept.", "retryable": True}
        except Exception as failed:  # noqa: BLE001  # the border of the job: nobody awaits its task
            log.error("scene_failed", scene=running.job.id, cause=where(failed))
            error = {"code": InternalError.code, "message": InternalError().message, "retryable": False}
        finally:
            running.over.set()
            now = self._wall()
            state: State = "done" if error is None else "failed"
            expires_at = now + self._settings.ttl_s
            job = replace(running.job, state=state, error=error, finished_at=now, expires_at=expires_at)
            try:
                with contextlib.suppress(OSError):  # the folder was removed, or the disk is full
                    await asyncio.shield(asyncio.ensure_future(self._note_end(running, job)))
            finally:  # also where it is cancelled once more
                os.close(running.lock)
                del self._running[job.id]
                await asyncio.shield(asyncio.ensure_future(_done(release)))

    async def _note(self, running: _Running, job: Job) -> None:
        running.job = job
        await in_own_thread(self._write_newest, running)

    async def _note_end(self, running: _Running, job: Job) -> None:
        await self._note(running, job)
        if job.state == "failed":
            await in_own_thread(self._drop_failed, job.tenant)

    def _drop_failed(self, tenant: str) -> None:
        """Remove the oldest failed jobs of a tenant beyond `FAILED_KEPT`."""
        failed = [job for job in self._every() if (job.tenant, job.state) == (tenant, "failed")]
        failed.sort(key=lambda job: job.finished_at or 0.0)
        for job in failed[:-FAILED_KEPT]:
            shutil.rmtree(self._folder / job.id, ignore_errors=True)

    def _make(self, job: Job, work: Json | Upload, sent: bytes | None) -> int:
        """Make a job's folder, and return the descriptor that locks it."""
        make_folder(self._folder)
        folder = self._folder / job.id
        folder.mkdir(0o700)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not isinstance(work, Upload):
                (folder / WORK).write_bytes(json.dumps(work).encode() if sent is None else sent)
            self._write(job)
        except BaseException:  # such as a full disk
            os.close(lock)
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return lock

    def _take_work(self, job: Job, fields: tuple[str, ...]) -> Json:
        """Read the fields of a JSON request that count; it waited on disk."""
        work: Json = json.loads((self._folder / job.id / WORK).read_bytes())
        (self._folder / job.id / WORK).unlink()
        return {field: work[field] for field in fields}

    def _write_newest(self, running: _Running) -> None:
        """Write a job as it is now: a thread whose waiter was cancelled may come last."""
        with running.writing:
            self._write(running.job)

    def _write(self, job: Job) -> None:
        record = self._folder / job.id / RECORD
        draft = record.with_suffix(".draft")
        draft.write_text(json.dumps(asdict(job)))
        draft.replace(record)

    def _read(self, job_id: str) -> Job | None:
        """Read a job; None if there is none, or it has expired. One whose gateway is gone has failed."""
        folder = self._folder / job_id
        if not job_id.startswith(PREFIX) or not job_id.removeprefix(PREFIX).isalnum():
            return None
        try:
            job = _job_of(folder)
            if job.state in ("queued", "running") and job.id not in self._running:
                job = self._unless_lost(folder, job)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, TypeError, KeyError):
            log.error("scene_record_unreadable", scene=job_id)
            return None
        if job.expires_at is not None and job.expires_at <= self._wall():
            shutil.rmtree(folder, ignore_errors=True)
            return None
        return job

    def _unless_lost(self, folder: Path, job: Job) -> Job:
        """Return a job as it is; one whose gateway is gone has failed.

        Its gateway writes the last record before it gives the lock back, so it is read again under the lock.
        """
        with _opened(folder) as descriptor:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return job
            job = _job_of(folder)
            if job.state not in ("queued", "running"):
                return job
            (folder / WORK).unlink(missing_ok=True)
            for part in (FILES, PART):
                shutil.rmtree(folder / part, ignore_errors=True)
            now = self._wall()
            expires_at = now + self._settings.ttl_s
            job = replace(job, state="failed", error=LOST, finished_at=now, expires_at=expires_at, files=())
            with contextlib.suppress(OSError):  # the disk is full: it is found again
                self._write(job)
        return job

    def _every(self) -> list[Job]:
        try:
            names = [name for name in os.listdir(self._folder) if name.startswith(PREFIX)]
        except OSError:
            return []
        return [job for name in names if (job := self._read(name)) is not None]

    def _keep(self, running: _Running, files: list[ResultFile]) -> tuple[KeptFile, ...] | None:
        """Copy a job's files into its folder; None: they do not fit into the budget."""
        job = running.job
        named = {name: output for output, (_, name, _) in running.runner.plugin.lasting.items()}
        kept = tuple(
            KeptFile(file.name, file.media_type, file.path.stat().st_size, named.get(file.name, ""))
            for file in files
        )
        need = sum(file.bytes for file in kept)
        with self._keeping:
            held = {each.job.id: each.copied for each in list(self._running.values()) if each is not running}
            if need > self._settings.budget or not self._make_room(job.tenant, need, beside=held):
                return None
            running.copied = need
        folder = self._folder / job.id
        (folder / PART).mkdir(0o700)
        for file in files:
            if not running.over.is_set():
                shutil.copyfile(file.path, folder / PART / file.name)
        (folder / PART).rename(folder / FILES)
        if running.over.is_set():
            shutil.rmtree(folder / FILES, ignore_errors=True)
        return kept

    def _make_room(self, tenant: str, need: int, beside: dict[str, int]) -> bool:
        """Remove the oldest finished jobs of the tenants with most bytes, until there is room.

        Args:
            tenant: that needs it; what it needs counts as its own already.
            beside: bytes that each job which ends now has copied; counted until its record tells them.
        """
        done = sorted((job for job in self._every() if job.state == "done"), key=lambda job: job.created_at)
        told = {job.id for job in done}
        budget = self._settings.budget - sum(size for name, size in beside.items() if name not in told)
        victims = []
        used = Counter({tenant: need})
        for job in done:
            used[job.tenant] += job.bytes
        while done and used.total() > budget:
            victim = max(done, key=lambda job: used[job.tenant])  # of equals the first, which is the oldest
            done.remove(victim)
            used[victim.tenant] -= victim.bytes
            victims.append(victim)
        if used.total() > budget:
            return False  # none goes for what does not fit anyway
        for victim in victims:
            shutil.rmtree(self._folder / victim.id, ignore_errors=True)
        return True


def _job_of(folder: Path) -> Job:
    said = json.loads((folder / RECORD).read_text())
    return Job(**said | {"files": tuple(KeptFile(**file) for file in said["files"])})


async def _done(release: Callable[[], Awaitable[None]]) -> None:
    await release()


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _no_place(_waited_s: float | None) -> BatonError:
    return GatewayOverloaded("Too many scenes wait already; try again later.", retry_after_s=RETRY_AFTER_S)
