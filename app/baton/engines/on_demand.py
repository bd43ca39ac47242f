"""Share one budget of memory among the engines: load those that requests wait for, unload others for them.

The rules:

- An engine on demand is loaded for the first request, and takes its bytes of the budget until it has ended.
- Models that wait get room in the order in which they began to wait, so that none starves.
- Who leaves: idle engines, the least recently used first. Where these do not make room enough, engines with
  requests too: they take no more, and those that run may end, within `drain_s`.
- None leaves within `min_loaded_s` of becoming ready, so that models that do not fit together take turns no
  faster. So a model waits, for each one before it, at most that long, `drain_s` and a start.
- Requests that give way to clients, which are lines of batches, have idle engines leave and no others, and
  are ended where theirs leaves.
- Engines that always run and pinned ones never leave.
- What an engine is measured to take counts where it is more than was said; then others leave, or itself.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol

import structlog

from baton.admission.fair_queue import FairQueue, QueueLimits
from baton.config.environment import visible_gpus
from baton.config.gpu_memory import USABLE_SHARE, gpus_of
from baton.config.groups import MIB, EngineSettings, OnDemandSettings, SupervisionSettings
from baton.config.settings import Settings
from baton.engines.backend import EngineState
from baton.engines.hardware import NoGpu, read_gpus
from baton.engines.vllm_version import is_cpu_build
from baton.errors import BatonError, EngineOverloaded, EngineUnavailable, SettingsError
from baton.telemetry.metrics import OnDemandMetrics

MACHINE = "memory"
"""The place where engines on CPUs take memory; on GPUs the places are these."""
NO_PROCESS = frozenset({EngineState.UNLOADED, EngineState.STOPPED, EngineState.FAILED})
"""States of an engine that takes no memory."""
UNKNOWN_START_S = 15.0
"""Seconds that a start is taken to need which was never seen."""
NEVER_FITS_S = 300
"""Seconds after which a retry makes sense where only an operator can make room."""
RETRY_AFTER_S = 5
MEASURE_EVERY_S = 5.0
"""Seconds between two looks at the memory of an engine that runs."""
Release = Callable[[], None]
"""Ends the use of an engine by a request; a second call does nothing."""
GiveWay = Callable[[], None]
"""Ends a request that nobody waits for, which begins again later."""
Source = Literal["set", "estimated", "measured"]
log = structlog.get_logger("baton.on_demand")


@dataclass(frozen=True)
class Terms:
    """The terms on which an engine takes memory.

    Attributes:
        need: bytes that it takes, by place.
        source: where this number comes from.
        on_demand: whether it is loaded for requests; else it always runs.
        idle_s: seconds without a request after which it is unloaded; None: it stays.
        pin: whether it stays once it is loaded.
        waiting: requests of one tenant that may wait for it to be loaded.
    """

    need: Mapping[str, int]
    source: Source = "estimated"
    on_demand: bool = True
    idle_s: float | None = None
    pin: bool = False
    waiting: int = 1024


class Served(Protocol):
    """The supervisor of an engine, as far as loading needs it."""

    note: str | None

    @property
    def state(self) -> EngineState: ...

    @property
    def start_s(self) -> float:
        """Seconds that its last start took; 0: it was never started."""
        ...

    @property
    def working(self) -> bool:
        """True if its engine works on a request, or saves KV."""
        ...

    @property
    def memory_bytes(self) -> int | None: ...

    def load(self) -> None:
        """Begin to start it; its state is `starting` from now on."""
        ...

    def unload(self, drain_s: float, busy: Callable[[], bool]) -> None:
        """Begin to stop it once its requests have ended; its state is `unloading` from now on."""
        ...

    def take_back(self) -> None:
        """Take an `unload` back: it runs on, or is started again where it has stopped."""
        ...

    def give_up(self) -> None:
        """Leave it down until an operator starts it."""
        ...

    def refusal(self) -> EngineUnavailable: ...


@dataclass(eq=False)
class Resident:
    """One engine, and who uses it or waits for it.

    Attributes:
        need: bytes that it takes, by place; once measured, at least what was measured.
        users: requests that use it.
        waiting: requests that wait for it to be loaded, each with whether it gives way to clients.
        giving_way: what ends the uses of those that give way.
        wanted: somebody was told to come back, or is an operator: it is loaded though nobody waits.
        used_at: when a request last began or ended to use it.
        ready_at: when it last became ready.
        began_at: when its start began.
        leaves_for: the model that it makes room for; None: it makes none.
        failures: when starts failed lately.
        retry_at: when the next start may begin.
        removed: it is no engine of the settings any more, and takes its memory until it has ended.
    """

    name: str
    terms: Terms
    served: Served
    queue: FairQueue
    need: dict[str, int]
    source: Source
    users: int = 0
    waiting: OrderedDict[asyncio.Future[None], bool] = field(default_factory=OrderedDict)
    giving_way: dict[Release, GiveWay] = field(default_factory=dict)
    wanted: bool = False
    used_at: float = 0.0
    ready_at: float = 0.0
    began_at: float = 0.0
    seen: EngineState | None = None
    leaves_for: str | None = None
    failures: deque[float] = field(default_factory=deque)
    retry_at: float = 0.0
    measured_at: float = -math.inf
    removed: bool = False

    @property
    def state(self) -> EngineState:
        return self.served.state

    @property
    def yields(self) -> bool:
        """True if all who wait for it give way to clients, so that no client's engine leaves for it."""
        return not self.wanted and bool(self.waiting) and all(self.waiting.values())

    @property
    def holds(self) -> bool:
        """True if it takes its memory; one that always runs also while it is down."""
        always = not self.terms.on_demand and not self.removed
        return always or self.state not in NO_PROCESS

    @property
    def leaves(self) -> bool:
        """True if its memory will be free once its requests have ended."""
        return self.removed or self.state is EngineState.UNLOADING

    @property
    def busy(self) -> bool:
        return self.users > 0 or self.served.working

    @property
    def may_leave(self) -> bool:
        """True if room may be made by unloading it; one that was lost has no requests, and must come back."""
        can = self.state in (EngineState.READY, EngineState.RESTARTING)
        return self.terms.on_demand and not self.terms.pin and not self.removed and can


class OnDemand:
    """The engines of one gateway in one budget.

    Args:
        terms: those of each engine that runs here, by its name.
        budget: bytes that all of them may take, by place.
        clock: seconds on a monotonic clock.

    Attributes:
        start_s: seconds that one start may take.
        names: of the engines that are loaded on demand.
    """

    def __init__(
        self,
        settings: OnDemandSettings,
        supervision: SupervisionSettings,
        terms: Mapping[str, Terms],
        budget: Mapping[str, int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self.start_s = settings.start_s
        self._supervision = supervision
        self._take_terms(terms, budget)
        self._clock = clock
        self._residents: dict[str, Resident] = {}
        self._turns: OrderedDict[str, None] = OrderedDict()  # names of models that wait for room
        self._wake = asyncio.Event()

    def _take_terms(self, terms: Mapping[str, Terms], budget: Mapping[str, int]) -> None:
        self._terms, self._budget = dict(terms), dict(budget)
        self.names = frozenset(name for name, each in terms.items() if each.on_demand)

    def bind(self, served: Mapping[str, Served], metrics: OnDemandMetrics) -> None:
        """Connect it with the engines' supervisors, before they are started."""
        self._metrics = metrics
        self._take(served)

    def change(self, other: OnDemand | None, served: Mapping[str, Served]) -> None:
        """Take the terms and the budget of another one.

        Who uses an engine that stays, or waits for it, still does.

        Args:
            other: made of other settings; None: nothing is on demand by these.
            served: the supervisors of all engines of these settings.
        """
        self._take_terms(*((other._terms, other._budget) if other is not None else ({}, {})))
        for name in [name for name in self._residents if not self.names or name not in self._terms]:
            gone = self._residents[name]
            gone.removed = True
            self._fail(gone, None)
            self._metrics.forget(name)
            if not self.names:
                del self._residents[name]
        self._take(served)
        self._turns = OrderedDict((name, None) for name in self._turns if name in self.names)
        for resident in self._residents.values():
            if (
                resident.waiting and resident.name in self.names
            ):  # its engine may have been replaced as it came
                self._turns.setdefault(resident.name)
        self._wake.set()

    def _take(self, served: Mapping[str, Served]) -> None:
        """Have each engine of the terms in the budget."""
        if not self.names:
            return
        for name, terms in self._terms.items():
            known = self._residents.get(name)
            if known is not None and known.served is served[name]:
                known.terms, known.source, known.need = terms, terms.source, dict(terms.need)
                known.measured_at = -math.inf
                known.queue.limit(QueueLimits(terms.waiting, waiting=0))
            else:
                queue = FairQueue(QueueLimits(terms.waiting, waiting=0), _too_many)
                self._residents[name] = Resident(
                    name, terms, served[name], queue, dict(terms.need), terms.source, used_at=self._clock()
                )
            self._metrics.memory.labels(name).set_function(partial(self._held, name))
            if terms.on_demand:
                for outcome in ("ready", "failed"):
                    self._metrics.loads.labels(name, outcome)
                for reason in ("idle", "room", "budget"):
                    self._metrics.unloads.labels(name, reason)
                self._metrics.waiting.labels(name).set_function(partial(self._waiting, name))
        for place, size in self._budget.items():
            self._metrics.budget.labels(place).set(size)

    def _held(self, name: str) -> int:
        resident = self._residents.get(name)
        return sum(resident.need.values()) if resident is not None and resident.holds else 0

    def _waiting(self, name: str) -> int:
        return len(self._residents[name].waiting) if name in self._residents else 0

    # What requests and operators ask.

    async def use(self, name: str, tenant: str, give_way: GiveWay | None = None) -> Release:
        """Have an engine loaded, wait until it is ready, and keep it from being unloaded.

        Args:
            give_way: ends the request where clients need the room; None: it is a client's.

        Raises:
            EngineUnavailable: it cannot be loaded, or not in time; with the seconds after which to try again.
            EngineOverloaded: too many requests wait for it already.
        """
        resident = self._residents[name]
        if resident.state is EngineState.READY:
            return self._used(resident, give_way=give_way)
        if (error := self._hindrance(resident, wants=give_way is None)) is not None:
            raise error
        began = self._clock()
        async with resident.queue.place(tenant):
            self._turns.setdefault(name)
            await self._ready(resident, yields=give_way is not None)
        self._metrics.wait.labels(name).observe(self._clock() - began)
        return self._used(resident, counted=True, give_way=give_way)

    def want(self, name: str) -> None:
        """Load an engine though no request waits for it, as an operator asked."""
        resident = self._residents[name]
        resident.wanted, resident.retry_at = True, 0.0
        resident.failures.clear()
        self._turns.setdefault(name)
        self._wake.set()

    def forget(self, name: str) -> None:
        """Load an engine no more for those who asked so far: an operator stops it."""
        self._residents[name].wanted = False
        self._turns.pop(name, None)
        self._wake.set()

    def changed(self, name: str) -> None:
        """Note that an engine's state has changed."""
        if (resident := self._residents.get(name)) is not None:
            self._note(resident)
            self._wake.set()

    def row(self, name: str) -> dict[str, object]:
        """Describe for everybody how an engine comes and goes."""
        resident, now = self._residents.get(name), self._clock()
        on_demand = resident is not None and resident.terms.on_demand
        shown: dict[str, object] = {"start": "on_demand" if on_demand else "always"}
        shown |= {"ready_in_s": None, "unloads_in_s": None, "memory_needed_bytes": None, "memory_from": None}
        if resident is None:
            return shown
        state, idle_s = resident.state, resident.terms.idle_s
        if on_demand and (state is EngineState.STARTING or name in self._turns):
            shown["ready_in_s"] = round(self._ready_in(resident), 1)
        if idle_s is not None and state is EngineState.READY and not resident.busy:
            shown["unloads_in_s"] = round(max(0.0, resident.used_at + idle_s - now), 1)
        return shown | {
            "memory_needed_bytes": sum(resident.need.values()),
            "memory_from": resident.source,
        }

    def _used(self, resident: Resident, *, counted: bool = False, give_way: GiveWay | None = None) -> Release:
        """Count a request that uses an engine; those that waited were counted as it became ready."""
        resident.users += not counted
        resident.used_at = self._clock()
        given_back = False

        def release() -> None:
            nonlocal given_back
            if given_back:
                return
            given_back = True
            resident.giving_way.pop(release, None)
            resident.users -= 1
            resident.used_at = self._clock()
            if not resident.users:
                self._wake.set()

        if give_way is not None:
            resident.giving_way[release] = give_way
        return release

    async def _ready(self, resident: Resident, *, yields: bool) -> None:
        """Wait until an engine is ready; it is then counted as used."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        resident.waiting[waiter] = yields
        self._wake.set()
        timer = loop.call_later(self._settings.wait_s, self._too_late, resident, waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._used(resident, counted=True)()  # it had become ready, and will not be used
            raise
        finally:
            timer.cancel()
            resident.waiting.pop(waiter, None)
            self._wake.set()

    def _too_late(self, resident: Resident, waiter: asyncio.Future[None]) -> None:
        if not waiter.done():
            if not resident.waiting[waiter]:
                resident.wanted = True  # it is told to come back: then it shall find it
            waiter.set_exception(self._later(resident, f"was not loaded within {self._settings.wait_s:g} s"))

    def _hindrance(self, resident: Resident, *, wants: bool = True) -> BatonError | None:
        """Make the error of a request that need not wait for an engine; None: it may wait.

        Args:
            wants: whether the engine is to be loaded though this request does not wait.
        """
        name, state, now = resident.name, resident.state, self._clock()
        if state not in (EngineState.UNLOADED, EngineState.UNLOADING, EngineState.STARTING):
            return resident.served.refusal()
        if state is EngineState.STARTING:
            return None
        if missing := self._never_fits(resident):
            return EngineUnavailable(missing, retry_after_s=NEVER_FITS_S)
        if resident.retry_at > now:
            return EngineUnavailable(
                f"The model '{name}' could not be loaded, which is tried again; try again shortly.",
                retry_after_s=math.ceil(resident.retry_at - now),
            )
        if resident.served.start_s and self._ready_in(resident) > self._settings.wait_s:
            if wants:
                resident.wanted = True
                self._turns.setdefault(name)
                self._wake.set()
            return self._later(resident, "waits for room behind other models")
        return None

    def _later(self, resident: Resident, why: str) -> EngineUnavailable:
        return EngineUnavailable(
            f"The model '{resident.name}' {why}; try again later.",
            retry_after_s=math.ceil(max(1.0, self._ready_in(resident))),
        )

    def _ready_in(self, resident: Resident) -> float:
        """Estimate the seconds until an engine is ready, if what runs on others ends in time."""
        now = self._clock()
        if resident.state is EngineState.STARTING:
            return max(1.0, _start_s(resident) - (now - resident.began_at))
        seconds = 0.0
        before = list(self._turns)
        before = before[: before.index(resident.name)] if resident.name in before else before
        for number, name in enumerate([*before, resident.name]):
            each = self._residents[name]
            if self._missing(each):
                stay = self._settings.min_loaded_s
                seconds += stay if number else self._stays(each)
            seconds += _start_s(each)
        return seconds

    def _stays(self, resident: Resident) -> float:
        """Return the seconds until the first engine may leave for another."""
        left = (
            self._stay_ends(each) - self._clock()
            for each in self._residents.values()
            if each.may_leave and each is not resident
        )
        return max(0.0, min(left, default=0.0))

    # Who holds memory, and who leaves.

    def _free(self, place: str, without: Collection[Resident] = ()) -> int:
        held = sum(
            each.need.get(place, 0) for each in self._residents.values() if each.holds and each not in without
        )
        return self._budget.get(place, 0) - held

    def _missing(self, resident: Resident, without: Collection[Resident] = ()) -> bool:
        """Whether there is no room for an engine, even without these others."""
        return any(self._free(place, without) < need for place, need in resident.need.items())

    def _never_fits(self, resident: Resident) -> str | None:
        """Explain why an engine cannot be loaded whoever else leaves; None: it can."""
        leaving = [each for each in self._residents.values() if each.terms.on_demand and not each.terms.pin]
        leaving += [each for each in self._residents.values() if each.terms.pin and not each.holds]
        leaving += [each for each in self._residents.values() if each.removed]
        for place, need in resident.need.items():
            left = self._free(place, leaving)
            if need > left:
                return (
                    f"The model '{resident.name}' cannot be loaded: it needs {need // MIB} MiB of {place}, "
                    f"and engines that stay leave {max(0, left) // MIB} MiB. Whoever runs the gateway can "
                    "change `on_demand.budget` or what stays."
                )
        return None

    def _stay_ends(self, resident: Resident) -> float:
        lost = resident.state is EngineState.RESTARTING and not resident.users  # else they wait to go on
        return -math.inf if lost else resident.ready_at + self._settings.min_loaded_s

    def _leaving(self, resident: Resident) -> tuple[list[Resident], float]:
        """Choose the engines that make room for another; and when to look again where none may leave yet."""
        leaving = [each for each in self._residents.values() if each.leaves]
        if not self._missing(resident, leaving):
            return [], math.inf
        could = [each for each in self._residents.values() if each.may_leave and each is not resident]
        could.sort(key=lambda each: (each.busy, each.users > len(each.giving_way), each.used_at))
        idle = [each for each in could if not each.busy]
        if resident.yields or not self._missing(resident, [*leaving, *idle]):
            could = idle
        now = self._clock()
        over = [each for each in could if self._stay_ends(each) <= now]
        if self._missing(resident, [*leaving, *over]):
            later = [self._stay_ends(each) for each in could if self._stay_ends(each) > now]
            return [], min(later, default=math.inf)
        chosen: list[Resident] = []
        for each in over:
            if not self._missing(resident, [*leaving, *chosen]):
                break
            chosen.append(each)
        for each in list(chosen):  # a small one may not be needed beside a larger one
            if not self._missing(resident, [*leaving, *(other for other in chosen if other is not each)]):
                chosen.remove(each)
        return chosen, math.inf

    def _unload(self, resident: Resident, reason: str, note: str, leaves_for: str | None = None) -> None:
        resident.served.note, resident.leaves_for = note, leaves_for
        self._metrics.unloads.labels(resident.name, reason).inc()
        log.info("engine_unloading", engine=resident.name, reason=reason, room_for=leaves_for)
        resident.served.unload(self._settings.drain_s, lambda: resident.busy)
        for give_way in list(resident.giving_way.values()):
            give_way()

    # The steps.

    async def run(self) -> None:
        """Load and unload engines, until this is cancelled."""
        while True:
            self._wake.clear()
            try:
                wait_s = self.step()
            except Exception as error:  # the border of a background task, which goes on
                log.error("on_demand_failed", exc_info=error)
                wait_s = 1.0
            try:
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def step(self) -> float | None:
        """Load and unload what is due; return the seconds until more is, None: until something changes."""
        now = self._clock()
        for resident in self._residents.values():
            self._note(resident)
        self._residents = {
            name: each for name, each in self._residents.items() if not each.removed or each.holds
        }
        due = [*self._unload_idle(now), *self._make_fit(), *self._serve_turns(now)]
        first = min(due, default=math.inf)
        return None if first == math.inf else max(0.0, first - self._clock())

    def _unload_idle(self, now: float) -> Iterable[float]:
        """Unload engines that were idle long enough; yields when to look at the others."""
        for each in self._residents.values():
            idle_s = each.terms.idle_s
            ready = each.state is EngineState.READY and not each.removed
            if idle_s is None or not ready or each.users or each.waiting:
                continue
            if each.used_at + idle_s > now:
                yield each.used_at + idle_s
            elif each.busy:  # with work of the gateway's own, whose end nobody tells
                yield now + 1
            else:
                self._unload(each, "idle", f"Nobody used it for {idle_s:g} s; a request loads it.")

    def _make_fit(self) -> Iterable[float]:
        """Unload idle engines where those that run take more than the budget; yields when to look again."""
        for place in self._budget:
            leaving = [each for each in self._residents.values() if each.leaves]
            idle = [each for each in self._residents.values() if each.may_leave and not each.busy]
            for each in sorted(idle, key=lambda one: one.used_at):
                if self._free(place, leaving) >= 0:
                    break
                if each.need.get(place):
                    leaving.append(each)
                    self._unload(each, "budget", "Engines took more memory than they were said to need.")
            if self._free(place, leaving) < 0:
                yield self._clock() + 1

    def _serve_turns(self, now: float) -> Iterable[float]:
        """Load the models that wait, each in its turn; yields when to look again."""
        while self._turns:
            turns = [self._residents[name] for name in self._turns]
            resident = min(turns, key=lambda each: each.yields)  # the first that a client waits for, if any
            state = resident.state
            if not resident.waiting and not resident.wanted:
                self._over(resident)
            elif state in (EngineState.UNLOADING, EngineState.STOPPING):
                if state is EngineState.UNLOADING and resident.leaves_for not in (None, *self._turns):
                    resident.served.take_back()  # nobody waits any more for its room
                return  # a change of its state is told
            elif state is not EngineState.UNLOADED:
                self._over(resident, None if state in (EngineState.READY, EngineState.STARTING) else _refuse)
            elif resident.retry_at > now or self._never_fits(resident):
                self._over(resident, self._hindrance)
            elif self._missing(resident):
                chosen, again = self._leaving(resident)
                for each in chosen:
                    note = f"It makes room for '{resident.name}'; a request loads it again."
                    self._unload(each, "room", note, resident.name)
                resident.served.note = "It waits for room, which others have."
                if again < math.inf:
                    yield again
                if any(each.busy for each in self._residents.values() if each.terms.on_demand):
                    yield now + 1  # what works of the gateway's own is over without a word
                return
            else:
                self._load(resident)

    def _over(self, resident: Resident, error: Callable[[Resident], BatonError | None] | None = None) -> None:
        """End a model's turn; those who wait for it are answered with an error, if there is one."""
        self._turns.pop(resident.name)
        if error is not None:
            resident.wanted = False
            self._fail(resident, error(resident))

    def _fail(self, resident: Resident, error: BatonError | None) -> None:
        for waiter in list(resident.waiting):
            if not waiter.done():
                waiter.set_exception(error or resident.served.refusal())

    def _load(self, resident: Resident) -> None:
        self._turns.pop(resident.name)
        resident.wanted, resident.began_at = False, self._clock()
        resident.served.note = None
        log.info("engine_loading", engine=resident.name, memory=sum(resident.need.values()))
        resident.served.load()
        resident.seen = EngineState.STARTING

    def _note(self, resident: Resident) -> None:
        """Follow a change of an engine's state."""
        if resident.removed:
            return
        before, resident.seen = resident.seen, resident.state
        state = resident.seen
        if state is EngineState.READY:
            self._measure(resident)
        if before is state or not (resident.terms.on_demand or resident.waiting):
            return  # one that always runs may be waited for since it was on demand
        if state is EngineState.READY:
            self._has_come(resident, loaded=before is EngineState.STARTING)
        elif before is EngineState.STARTING and state is EngineState.UNLOADED:
            self._start_failed(resident)
        elif state in (EngineState.STOPPING, EngineState.STOPPED, EngineState.FAILED):
            resident.wanted = False
            self._fail(resident, None)
        elif state is EngineState.UNLOADED and resident.leaves_for is not None:
            resident.served.note = f"It made room for '{resident.leaves_for}'; a request loads it again."
            resident.leaves_for = None

    def _has_come(self, resident: Resident, *, loaded: bool) -> None:
        """Wake those who waited for an engine; they count as its users before anybody looks."""
        now = self._clock()
        resident.ready_at = resident.used_at = now
        resident.measured_at = -math.inf
        resident.failures.clear()
        resident.wanted, resident.served.note, resident.leaves_for = False, None, None
        if loaded:
            self._metrics.loads.labels(resident.name, "ready").inc()
        for waiter in list(resident.waiting):
            if not waiter.done():
                resident.users += 1
                waiter.set_result(None)

    def _start_failed(self, resident: Resident) -> None:
        """Answer those who waited, and wait before the next start, longer each time."""
        now, limits = self._clock(), self._supervision
        self._metrics.loads.labels(resident.name, "failed").inc()
        while resident.failures and resident.failures[0] <= now - limits.window_s:
            resident.failures.popleft()
        delay = min(limits.backoff_s * 2 ** len(resident.failures), limits.backoff_max_s)
        resident.failures.append(now)
        resident.retry_at, resident.wanted = now + delay, False
        resident.served.note = "Its last start failed; the gateway's log says why. A request tries again."
        if len(resident.failures) > limits.restarts:
            resident.served.give_up()
            self._fail(resident, None)
        else:
            self._fail(resident, self._hindrance(resident))

    def _measure(self, resident: Resident) -> None:
        """Count what an engine takes where that is more than was said; on GPUs vLLM holds to its share."""
        said, now = resident.need.get(MACHINE), self._clock()
        if said is None or now < resident.measured_at + MEASURE_EVERY_S:
            return
        resident.measured_at, found = now, resident.served.memory_bytes
        if found is None or found <= said:
            return
        if resident.source == "set":
            log.warning(
                "engine_larger_than_said",
                engine=resident.name,
                said=said,
                measured=found,
                setting=f"engines.memory of '{resident.name}'",
            )
        resident.need[MACHINE], resident.source = found, "measured"


def on_demand_of(
    settings: Settings,
    shares: Mapping[str, float],
    bytes_of: Callable[[EngineSettings], int],
    available: int | None = None,
) -> OnDemand | None:
    """Make the budget that the engines share; None: none is loaded on demand.

    Args:
        shares: those of their GPUs' memory that engines may take, by their names.
        bytes_of: estimates what an engine takes on a CPU.
        available: bytes of memory that were available before any of them ran; None: it is not known.

    Raises:
        SettingsError: an engine on demand could never be loaded beside those that always run, or the
            memory of its GPU cannot be read.
    """
    engines = settings.own_engines
    if all(engine.start == "always" for engine in engines):
        return None
    given, waits = settings.on_demand.budget, settings.admission
    if is_cpu_build():
        found = None if available is None else max(0, available - int(waits.memory_reserve))
        most = given or found
        budget = {} if most is None else {MACHINE: int(most)}
        needs = {
            each.name: {place: int(each.memory or bytes_of(each)) for place in budget} for each in engines
        }
    else:
        totals = _gpu_bytes()
        if unknown := next((gpu for each in engines for gpu in gpus_of(each) if gpu not in totals), None):
            raise SettingsError(
                f"engines: the memory of GPU {unknown} cannot be read with `nvidia-smi`, which engines with "
                '`start = "on_demand"` need: set `start = "always"`'
            )
        budget = {_place(gpu): int(given or USABLE_SHARE * size) for gpu, size in totals.items()}
        needs = {
            each.name: {
                _place(gpu): int(shares.get(each.name, USABLE_SHARE) * totals[gpu]) for gpu in gpus_of(each)
            }
            for each in engines
        }
    terms = {
        each.name: Terms(
            needs[each.name],
            "estimated" if each.memory is None and is_cpu_build() else "set",
            each.start == "on_demand",
            each.idle_s,
            each.pin,
            waits.engine_requests + waits.engine_waiting,
        )
        for each in engines
    }
    require_room(terms, budget)
    return OnDemand(settings.on_demand, settings.supervision, terms, budget)


def _place(gpu: str) -> str:
    return f"GPU {gpu}"


def _gpu_bytes() -> dict[str, int]:
    """Read the memory of the GPUs by the names that `gpus_of` gives them; empty: they cannot be asked."""
    try:
        gpus = read_gpus()
    except NoGpu:
        return {}
    found = {name: gpu for gpu in gpus for name in (gpu.index, gpu.uuid)}
    seen = visible_gpus()
    if seen is not None:  # numbers count what the process sees
        found |= {str(number): found[name] for number, name in enumerate(seen) if name in found}
    return {name: gpu.bytes_total for name, gpu in found.items()}


def require_room(terms: Mapping[str, Terms], budget: Mapping[str, int]) -> None:
    """Require that each engine on demand has room beside those that always run.

    Raises:
        SettingsError: one has not.
    """
    staying = [each for each in terms.values() if not each.on_demand]
    for name, each in terms.items():
        for place, need in each.need.items():
            left = budget.get(place, 0) - sum(other.need.get(place, 0) for other in staying)
            if each.on_demand and need > left:
                raise SettingsError(
                    f"engines '{name}': it needs {need // MIB} MiB of {place}, and engines that always "
                    f"run leave {max(0, left) // MIB} MiB: raise `on_demand.budget`, lower `kv_cache_memory` "
                    'or set `start = "on_demand"` for others too'
                )


def _start_s(resident: Resident) -> float:
    return resident.served.start_s or UNKNOWN_START_S


def _refuse(resident: Resident) -> BatonError:
    return resident.served.refusal()


def _too_many(_waited_s: float | None) -> BatonError:
    return EngineOverloaded(
        "Too many requests wait for this model to be loaded; try again later.", retry_after_s=RETRY_AFTER_S
    )
