"""Keep clients' files, and run batches: read the input, ask every line, write the output.

A batch is run by whichever gateway over its folder holds the lock. All that is known of it is in the store,
so it goes on where it was after a restart: a line whose answer is stored is done, any other is asked again.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import structlog

from baton.admission.fair_queue import QueueLimits, watched_queue
from baton.admission.fair_threads import OURS, FairThreads, in_own_thread
from baton.batches.lines import Answer, Input, Reader, body_of, refusal_in, unreadable, written_answer
from baton.batches.store import DATABASE, ENDED, Batch, BatchStore, Line
from baton.config.groups import BatchSettings, LimitSettings
from baton.engines.backend import Json
from baton.errors import (
    BatchNotFound,
    BatonError,
    ClientFileNotFound,
    EngineRestarting,
    GatewayOverloaded,
    InternalError,
    QuotaReached,
    RemoteLost,
    SettingsError,
    StorageFull,
)
from baton.telemetry.events import Events
from baton.telemetry.metrics import BatchMetrics, QueueMetrics

log = structlog.get_logger("baton.batches")

LOOK_EVERY_S = 5.0
"""Seconds between two looks for batches, for what has expired, and whether the lock is free."""
FULL_RETRY_S = 5.0
"""Seconds until what could not be stored is tried again, unless a file is deleted before."""
LONGEST_PAUSE_S = 60.0
"""Longest wait before a line is asked again that an engine refused."""
MOST_PUT_OFF = 1024
"""Lines of a batch that wait to be asked again while others are; more keep their slots, and others wait."""
LOST_TRIES = 3
"""Times that a line is asked again under which its engine was lost: it may be why."""
LOST = frozenset({EngineRestarting.code, RemoteLost.code})
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
Result = TypeVar("Result")


@dataclass(frozen=True)
class Asked:
    """A line as a request.

    Attributes:
        tenant: the owner of the batch.
        key_id: id of the key that the batch was made with.
        path: the route.
        body: its JSON.
    """

    tenant: str
    key_id: str
    path: str
    body: bytes


Ask = Callable[[Asked], Awaitable[Answer | None]]
"""Asks a line of the gateway, as if a client had sent it; None: it gave way to a client's request."""


@dataclass
class Running:
    """A batch that this gateway runs.

    Attributes:
        cancelled: set when a client cancels it.
        waits: why it waits, for the client; None: it does not.
        put_off: lines that an engine refused for now, and that are to be asked again.
        refusal: why the last of them was refused.
    """

    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    waits: BatonError | None = None
    put_off: int = 0
    refusal: Json | None = None

    @property
    def told(self) -> Json | None:
        """The reason why it waits, or some of its lines do, in words for a client."""
        if self.waits is not None:
            return {"code": self.waits.code, "message": self.waits.message}
        return self.refusal if self.put_off else None


def batch_threads(metrics: QueueMetrics, wait_s: float) -> FairThreads:
    """Create the threads of one gateway that read and write files and batches.

    Args:
        wait_s: seconds a request may wait for a thread.
    """

    def refuse(_waited_s: float | None) -> BatonError:
        return GatewayOverloaded(
            "Too many requests use stored files now; try again shortly.", retry_after_s=5
        )

    limits = QueueLimits(1, wait_s=wait_s)
    return FairThreads(watched_queue(limits, refuse, metrics, "batches"), "baton-batches")


class SteadyClock:
    """Seconds since the epoch that do not jump: the time of its making, and what has passed since.

    Args:
        wall: seconds since the epoch, which may be set.
        clock: monotonic seconds.
    """

    def __init__(
        self, wall: Callable[[], float] = time.time, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._ahead = wall() - clock()

    def __call__(self) -> float:
        return self._clock() + self._ahead


class Batches:
    """The files and batches of one gateway.

    Args:
        folder: where they are kept; made with the first file.
        reader: reads input files.
        serves: returns whether a model is served here; None: whether one answers that need not be named.
        now: seconds since the epoch that do not jump.

    Raises:
        SettingsError: the folder that the settings name cannot be used.
    """

    def __init__(
        self,
        settings: BatchSettings,
        folder: Path,
        reader: Reader,
        threads: FairThreads,
        metrics: BatchMetrics,
        events: Events,
        *,
        serves: Callable[[str | None, str], BatonError | None],
        now: Callable[[], float] | None = None,
    ) -> None:
        self.settings = settings
        self._folder = folder
        self._reader = reader
        self._threads = threads
        self._metrics = metrics
        self._events = events
        self._serves = serves
        self._now = now or SteadyClock()
        self._store: BatchStore | None = None
        self._running: dict[str, Running] = {}
        self._wake, self._room = asyncio.Event(), asyncio.Event()
        self._draining = asyncio.Event()
        if settings.enabled and (settings.folder is not None or (folder / DATABASE).exists()):
            try:
                self._open()
            except (OSError, sqlite3.Error) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                if settings.folder is not None:
                    raise SettingsError(f"batches.folder: {folder}: {reason}") from None
                log.error("batches_unusable", folder=str(folder), reason=str(reason))

    def _open(self) -> BatchStore:
        if self._store is None:
            self._store = BatchStore(self._folder, self.settings, self._now)
        return self._store

    def close(self) -> None:
        """Close the store; what is under way goes on at the next start."""
        self._threads.close()
        if self._store is not None:
            self._store.close()

    def limit(self, limits: LimitSettings) -> None:
        """Hold the lines of input files to these limits from now on."""
        self._reader.limits = limits

    def drain(self) -> None:
        """Begin no more lines; those under way go on until the gateway ends."""
        self._draining.set()

    # For the routes

    async def use(self, tenant: str, work: Callable[[BatchStore], Result], *, makes: bool = False) -> Result:
        """Use the store in a thread.

        Args:
            makes: the folder is made if it is missing.

        Raises:
            ClientFileNotFound: nothing was ever stored.
            StorageFull: the disk is full.
            InternalError: the store cannot be used.
            BatonError: `work` raised it.
        """
        if self._store is None and not makes:
            raise ClientFileNotFound()
        try:
            return await self._threads.run(tenant, lambda: work(self._open()))
        except (sqlite3.Error, OSError, RuntimeError) as error:  # RuntimeError: the gateway ends
            if is_full(error):
                raise StorageFull(retry_after_s=60) from None
            log.error("batches_unusable", folder=str(self._folder), reason=str(error))
            raise InternalError("Stored files cannot be used now (setting batches.folder).") from error

    @property
    def empty(self) -> bool:
        """True if nothing was ever stored."""
        return self._store is None

    async def delete_file(self, file_id: str, tenant: str) -> None:
        """Delete a file, and try again at once what waits for its room.

        Raises:
            BatonError: see `BatchStore.delete_file`.
        """
        await self.use(tenant, lambda store: store.delete_file(file_id, tenant))
        self._room.set()

    async def begin(self, tenant: str, work: Callable[[BatchStore], Json]) -> Json:
        """Store a new batch, and have it run."""
        made = await self.use(tenant, work)
        self._wake.set()
        return made

    async def shown(self, batch_id: str, tenant: str) -> Json:
        """Return the object of a batch, with the reason why it waits, if it does.

        Raises:
            BatchNotFound: it is unknown, or another tenant's.
        """
        return self._told(await self._of_batch(tenant, lambda store: store.shown(batch_id, tenant)))

    async def cancel(self, batch_id: str, tenant: str) -> Json:
        """Cancel a batch: its lines end now, and what has been answered is written out.

        Raises:
            BatchNotFound: see `shown`.
            InvalidRequest: it has ended.
        """
        found = await self._of_batch(tenant, lambda store: store.cancel(batch_id, tenant))
        self._wake.set()
        return self._told(found)

    async def listed(self, tenant: str, limit: int, after: str | None) -> tuple[list[Json], bool]:
        """List a tenant's batches; see `BatchStore.list_batches`."""
        if self.empty:
            return [], False
        batches, more = await self.use(
            tenant, lambda store: store.list_batches(tenant, limit=limit, after=after)
        )
        return [self._told(batch) for batch in batches], more

    async def _of_batch(self, tenant: str, work: Callable[[BatchStore], Json]) -> Json:
        if self.empty:
            raise BatchNotFound()
        return await self.use(tenant, work)

    def _told(self, shown: Json) -> Json:
        running = self._running.get(shown["id"])
        if running is None or (told := running.told) is None or shown["status"] in ENDED:
            return shown
        return shown | {"errors": {"object": "list", "data": [told | {"param": None, "line": None}]}}

    # Running batches

    @contextlib.asynccontextmanager
    async def running(self, ask: Ask) -> AsyncIterator[None]:
        """Run batches while inside."""
        if not self.settings.enabled:
            yield
            return
        work = asyncio.create_task(self._keep_running(ask), name="batches")
        try:
            yield
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def _keep_running(self, ask: Ask) -> None:
        """Run every batch there is, as soon as this gateway holds the lock."""
        tasks: dict[str, asyncio.Task[None]] = {}
        mine = False
        try:
            while True:
                self._wake.clear()
                if self._store is not None:
                    try:
                        mine = mine or await self._run(BatchStore.try_to_run)
                        if mine:
                            await self._look(tasks, ask)
                    except Exception as error:  # the border of a background task, which goes on
                        log.error("batches_look_failed", exc_info=error)
                await _within(LOOK_EVERY_S, self._wake)
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def _look(self, tasks: dict[str, asyncio.Task[None]], ask: Ask) -> None:
        """Begin batches that are new, cancel those that are to be, remove what has expired."""
        for batch_id in [each for each, task in tasks.items() if task.done()]:
            del tasks[batch_id]
        for batch_id, status in await self._run(BatchStore.open_batches):
            if batch_id not in tasks:
                self._running[batch_id] = Running()
                tasks[batch_id] = asyncio.create_task(self._keep_at(batch_id, ask), name=batch_id)
            if status == "cancelling" and (running := self._running.get(batch_id)) is not None:
                running.cancelled.set()
        self._metrics.running.set(len(tasks))
        await self._run(BatchStore.sweep)
        files, size = await self._run(BatchStore.usage)
        self._metrics.files.set(files)
        self._metrics.bytes.set(size)

    async def _run(self, work: Callable[..., Result], *args: object) -> Result:
        """Use the store in a thread, however long that waits."""
        store = self._store
        assert store is not None
        return await self._threads.run(OURS, work, store, *args, patient=True)

    async def _keep_at(self, batch_id: str, ask: Ask) -> None:
        """Carry a batch to its end, again from where it is stored to be when the store cannot be used."""
        running = self._running[batch_id]
        try:
            while True:
                try:
                    await self._carry_out(batch_id, running, ask)
                    return
                except (sqlite3.Error, OSError, RuntimeError) as error:  # RuntimeError: no thread is left
                    running.waits = (
                        StorageFull() if is_full(error) else InternalError("Stored files cannot be used now.")
                    )
                    log.error("batch_waits", batch=batch_id, reason=str(error))
                await self._until_room()
        except Exception as error:  # the border of a background task: this batch alone is over
            log.error("batch_failed", batch=batch_id, exc_info=error)
            told = {"code": InternalError.code, "message": InternalError.default_message}
            await self._end(batch_id, "failed", [told | {"line": None, "param": None}])
        finally:
            self._running.pop(batch_id, None)
            self._wake.set()

    async def _carry_out(self, batch_id: str, running: Running, ask: Ask) -> None:
        batch = await self._run(BatchStore.batch, batch_id)
        if batch.status == "validating":
            await self._begin(batch)
            batch = await self._run(BatchStore.batch, batch_id)
        if batch.status == "in_progress":
            self._tell(batch)
            end = await self._answer_lines(batch, running, ask)
            if end == "completed":
                await self._run(lambda store: store.enter(batch_id, "finalizing", unless=("cancelling",)))
            batch = await self._run(BatchStore.batch, batch_id)
        else:
            end = "completed"
        if batch.status in ENDED:
            return
        await self._end(batch_id, "cancelled" if batch.status == "cancelling" else end)

    async def _end(self, batch_id: str, end: str, errors: list[Json] | None = None) -> None:
        """Write out what a batch has, and end it."""
        store = self._store
        assert store is not None
        await in_own_thread(store.finish, await self._run(BatchStore.batch, batch_id), end, errors)
        self._metrics.ended.labels(end).inc()
        self._tell(await self._run(BatchStore.batch, batch_id))

    def _tell(self, batch: Batch) -> None:
        told = {"id": batch.id, "status": batch.status}
        self._events.tell(batch.tenant, f"batch.{batch.status}", lambda: {"batch": told})

    async def _begin(self, batch: Batch) -> None:
        """Read the input of a batch; it goes in progress, or fails with what is wrong."""
        found = await in_own_thread(self._read, batch)
        for model, line in found.models.items():
            if not found.errors and (error := self._serves(model, batch.shown["endpoint"])) is not None:
                found.refuse(line, error.code, error.message, "body.model")
        if found.errors:
            await self._end(batch.id, "failed", found.errors)
            return
        model = next(iter(found.models)) if len(found.models) == 1 else None
        await self._run(lambda store: store.begin(batch, found.lines, model))

    def _read(self, batch: Batch) -> Input:
        assert self._store is not None
        try:
            with open(self._store.input_path(batch), "rb") as file:
                return self._reader.read(file, batch.shown["endpoint"])
        except FileNotFoundError:
            lost = Input()
            lost.refuse(None, "input_file_lost", "The input file is not there any more.")
            return lost

    async def _answer_lines(self, batch: Batch, running: Running, ask: Ask) -> str:
        """Ask all lines that have no answer; return `completed`, `expired` or `cancelled`."""
        lines = asyncio.create_task(self._ask_lines(batch, running, ask))
        cancelled = asyncio.create_task(running.cancelled.wait())
        try:
            left = max(0.0, batch.ends_at - self._now())
            await asyncio.wait({lines, cancelled}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if lines.done():
                try:
                    lines.result()
                except ExceptionGroup as errors:  # of the lines; those of the store are handled above
                    raise errors.exceptions[0] from None
                return "completed"
            return "cancelled" if cancelled.done() else "expired"
        finally:
            cancelled.cancel()
            lines.cancel()
            await asyncio.gather(lines, return_exceptions=True)

    async def _ask_lines(self, batch: Batch, running: Running, ask: Ask) -> None:
        slots = asyncio.Semaphore(self.settings.lines)
        async with asyncio.TaskGroup() as group:
            place = 0
            while lines := await self._run(BatchStore.following, batch, place):
                place = lines[-1].place + 1
                await self._require_room(batch, running)
                for line in lines:
                    await slots.acquire()
                    if self._draining.is_set():
                        await asyncio.Event().wait()  # until the gateway ends
                    group.create_task(self._answer_line(batch, line, running, ask, slots))

    async def _require_room(self, batch: Batch, running: Running) -> None:
        """Wait while the batch's tenant has more stored than it may."""
        while True:
            try:
                await self._run(lambda store: store.require_room(batch.tenant, files=0))
            except QuotaReached as error:
                running.waits = error
                await self._until_room()
            else:
                running.waits = None
                return

    async def _answer_line(
        self, batch: Batch, line: Line, running: Running, ask: Ask, slots: asyncio.Semaphore
    ) -> None:
        try:
            answer = await self._asked(batch, line, running, ask, slots)
            try:
                text, usage = await self._threads.run(OURS, written_answer, batch, line, answer, patient=True)
            except (ValueError, RecursionError) as error:  # the engine's JSON is none, or too deep
                log.error("line_answer_unreadable", batch=batch.id, line=line.number, reason=str(error)[:200])
                answer = unreadable(answer)
                text, usage = written_answer(batch, line, answer)
            while True:  # it is kept here until there is room, for it was computed
                try:
                    await self._run(lambda store: store.record(batch, line, text, usage, good=answer.good))
                    break
                except sqlite3.Error as error:
                    if not is_full(error):
                        raise
                    running.waits = StorageFull()
                    log.error("batch_waits", batch=batch.id, reason=str(error))
                await self._until_room()
                running.waits = None
            self._metrics.lines.labels("completed" if answer.good else "failed").inc()
        finally:
            slots.release()

    async def _asked(
        self, batch: Batch, line: Line, running: Running, ask: Ask, slots: asyncio.Semaphore
    ) -> Answer:
        """Ask a line until it has an answer: whether it is refused for now, or gives way."""
        refused = lost = 0
        while True:
            body = await self._run(lambda store: body_of(store.read(batch, line)))
            asked = Asked(batch.tenant, batch.key_id, batch.shown["endpoint"], body)
            while (answer := await ask(asked)) is None:
                self._metrics.lines.labels("gave_way").inc()
            lost += answer.code in LOST
            if answer.again_s is None or lost > LOST_TRIES:
                return answer
            self._metrics.lines.labels("put_off").inc()
            running.refusal = refusal_in(answer)
            pause_s = min(LONGEST_PAUSE_S, answer.again_s * 2**refused)
            del body, asked, answer  # many lines may wait
            await self._put_off(pause_s, running, slots)
            refused = min(refused + 1, 6)

    async def _put_off(self, seconds: float, running: Running, slots: asyncio.Semaphore) -> None:
        """Wait before a line is asked again; its slot is another line's meanwhile, perhaps of another model.

        Where this is cancelled the whole batch is, and nobody uses its slots any more.
        """
        lends = running.put_off < MOST_PUT_OFF
        running.put_off += 1
        try:
            if lends:
                slots.release()
            await asyncio.sleep(seconds)
            if lends:
                await slots.acquire()
        finally:
            running.put_off -= 1

    async def _until_room(self) -> None:
        """Wait for a while, or until a file is deleted."""
        self._room.clear()
        await _within(FULL_RETRY_S, self._room)


async def _within(seconds: float, event: asyncio.Event) -> None:
    """Wait for an event, for so many seconds at most."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


def is_full(error: Exception) -> bool:
    """Return whether an error says that the disk is full."""
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    return isinstance(error, OSError) and error.errno in NO_ROOM
