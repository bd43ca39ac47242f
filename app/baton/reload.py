"""Read the settings again while the gateway runs, and change what changed: engines, aliases, limits, keys.

Everything is read, checked and built before anything is changed, and then all of it in one step of the event
loop. So settings with an error change nothing, and no request sees a part of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import structlog

from baton.admission.api_keys import Keyring, read_keys
from baton.admission.body_budget import BodyBudget, BodyRooms
from baton.admission.fair_threads import in_own_thread
from baton.config.groups import EngineSettings, Frozen
from baton.config.settings import Settings
from baton.engines.fleet import Supervisor
from baton.engines.on_demand import OnDemand
from baton.errors import OperatorError, SettingsError, SettingsRefused
from baton.http.request import Gateway
from baton.telemetry.memory import MemoryWatch

LIVE = ("limits.", "admission.", "drain_delay_s", "drain_timeout_s")
"""What can change while the gateway runs, beside engines and keys."""
FIXED = frozenset({"admission.wait_s"})
"""What of it cannot: other queues than those of engines have it too."""
NAMES = frozenset({"aliases", "default"})
COMING = frozenset({"start", "idle_s", "memory", "pin", "group", "fallback"})
"""Settings of an engine that change without a start, as its names do: when it is there, and who stands in."""

log = structlog.get_logger("baton.settings")


class Reloads:
    """Reads the settings of one gateway again, one time after the other.

    Args:
        reread: reads the settings as the start did; raises `SettingsError`.
        available: bytes of memory that were available at the start.
    """

    def __init__(
        self,
        gateway: Gateway,
        keyring: Keyring | None,
        reread: Callable[[], Settings],
        *,
        bodies: BodyBudget,
        uploads: BodyBudget,
        lines: BodyBudget,
        memory: MemoryWatch,
        available: int | None,
    ) -> None:
        self._gateway = gateway
        self._began = gateway.settings
        self._keyring = keyring
        self._reread = reread
        self._bodies, self._uploads, self._lines = bodies, uploads, lines
        self._memory = memory
        self._available = available
        self._turn = asyncio.Lock()

    async def __call__(self) -> dict[str, Any]:
        """Read the settings and the keys again, and change what changed.

        Returns:
            What changed, and what needs a restart to change.

        Raises:
            SettingsRefused: something is wrong, in the words of the start; nothing was changed.
        """
        counted = self._gateway.metrics.usage.reloads
        async with self._turn:
            try:
                found = await self._run()
            except OperatorError as error:
                counted.labels("refused").inc()
                log.error("settings_not_reloaded", cause=error.message)
                raise SettingsRefused(f"Nothing was changed. {error.message}") from None
        counted.labels("changed" if found["changed"] else "unchanged").inc()
        log.info("settings_reloaded", changed=found["changed"], needs_restart=found["needs_restart"])
        return found

    async def _run(self) -> dict[str, Any]:
        now = self._gateway.settings
        read = await in_own_thread(self._reread)
        if "engines" in self._began.model_fields_set - read.model_fields_set:  # half written
            raise SettingsError(
                "engines: none is named any more, and the embedded models would take their place: name some, "
                "or restart the gateway"
            )
        if self._keyring is not None:
            await in_own_thread(read_keys, now.keys_file)
        differing = list(_differing(now, read))
        live = [name for name in differing if name.startswith(LIVE) and name not in FIXED]
        restart = [name for name in differing if name not in live]
        if self._keyring is None and now.keys_file.exists():
            restart.append("keys")
        wanted = _with_live(now, read)
        engines = dict(_changed_engines(now, wanted))
        built = await self._built(
            wanted, [name for name, what in engines.items() if what in ("added", "changed")]
        )
        on_demand = await in_own_thread(self._gateway.fleet.budget, wanted) if engines else None
        if self._gateway.drain.begun:
            raise SettingsError("The gateway ends.")
        keys = self._keyring.refresh() if self._keyring is not None else []
        self._apply(wanted, built, on_demand)
        changed: list[dict[str, Any]] = [
            {"setting": f"engines.{name}", "change": what} for name, what in engines.items()
        ]
        changed += [{"setting": name, "change": "changed"} for name in live]
        changed += [{"setting": "keys", "change": "changed", "ids": keys}] if keys else []
        return {"object": "settings.reload", "changed": changed, "needs_restart": restart}

    async def _built(self, wanted: Settings, names: list[str]) -> list[Any]:
        """Build the engines that are new or changed, without starting them."""
        fleet = self._gateway.fleet
        self._require_names(wanted)
        if not names:
            return []
        if fleet.build is None:
            raise SettingsError(f"engines '{names[0]}': engines of this gateway cannot change: restart it")
        self._require_services(wanted, names)
        return await in_own_thread(fleet.build, wanted, names)

    def _require_names(self, wanted: Settings) -> None:
        """Refuse a name that an adapter has which an operator loaded."""
        named = {name for each in wanted.engines for name in (each.name, *each.aliases)}
        kept = {each.name for each in wanted.engines}
        adapters = {
            name for each in self._gateway.fleet.engines if each.name in kept for name in each.adapters
        }
        if taken := sorted(named & adapters):
            raise SettingsError(f"engines: an adapter that an operator loaded has the name '{taken[0]}'")

    def _require_services(self, wanted: Settings, names: list[str]) -> None:
        """Refuse engines that need what the gateway makes at its start where one asks for it."""
        chosen = [each for each in wanted.engines if each.name in names]
        stores = any(each.handoff for each in self._began.engines)
        automatic = any(_is_automatic(each, self._began) for each in self._began.engines)
        answers = self._gateway.responses.stores or not wanted.responses.budget
        for each in chosen:
            for needed, there, why in (
                (each.handoff, stores, "`handoff`"),
                (each.handoff and _is_automatic(each, wanted), automatic, "automatic handoffs"),
                (each.runner == "generate", answers, "stored responses"),
            ):
                if needed and not there:
                    raise SettingsError(
                        f"engines '{each.name}': {why}: no engine of this gateway had that at its start: "
                        "restart the gateway"
                    )

    def _apply(self, wanted: Settings, built: list[Any], on_demand: OnDemand | None) -> None:
        """Put other settings in force, at once."""
        gateway = self._gateway
        before, gateway.settings = gateway.settings, wanted
        if wanted.limits != before.limits:
            gateway.compiler.limit(wanted.limits)
            gateway.batches.limit(wanted.limits)
            one = self._keyring is None
            rooms = BodyRooms.of(wanted, available=self._available, one_tenant=one)
            self._bodies.room, self._uploads.room = rooms.memory, rooms.disk
            self._lines.room = rooms.lines
        if wanted.admission != before.admission:
            gateway.admission.change(wanted.admission)
            self._memory.reserve = int(wanted.admission.memory_reserve)
        if wanted.engines != before.engines:
            for each in wanted.engines:
                gateway.admission.add(each.name)
            gateway.fleet.change(
                wanted.engines, built, on_demand, wanted.drain_timeout_s, self._busy, self._gone
            )
            gateway.relay.follow(gateway.fleet.latest_here, wanted)

    def _busy(self, supervisor: Supervisor) -> bool:
        engine = supervisor.engine
        return any(self._gateway.admission.at(engine.name)) or bool(engine.active)

    def _gone(self, name: str) -> None:
        self._gateway.admission.remove(name)
        self._gateway.pooling.remove(name)


def _differing(now: Settings, read: Settings) -> Iterator[str]:
    """Yield the names of the settings that differ, those of engines apart."""
    for name in Settings.model_fields:
        one, other = getattr(now, name), getattr(read, name)
        if one == other or name == "engines":
            continue
        if isinstance(one, Frozen):
            for key in type(one).model_fields:
                if getattr(one, key) != getattr(other, key):
                    yield f"{name}.{key}"
        else:
            yield name


def _with_live(now: Settings, read: Settings) -> Settings:
    """Return the settings of now with those of the others that can change while the gateway runs."""
    fixed = {name.partition(".")[2]: now.admission.wait_s for name in FIXED}
    return now.model_copy(
        update={
            "engines": read.engines,
            "limits": read.limits,
            "admission": read.admission.model_copy(update=fixed),
            "drain_delay_s": read.drain_delay_s,
            "drain_timeout_s": read.drain_timeout_s,
        }
    )


def _changed_engines(now: Settings, wanted: Settings) -> Iterator[tuple[str, str]]:
    """Yield the names of engines that differ, with what becomes of each."""
    before = {each.name: each for each in now.engines}
    for each in wanted.engines:
        known = before.pop(each.name, None)
        if known is None:
            yield each.name, "added"
        elif known != each:
            yield each.name, _change_of(known, each)
    for name in before:
        yield name, "removed"


def _is_automatic(engine: EngineSettings, settings: Settings) -> bool:
    return engine.own and (engine.auto or settings.handoffs.auto) != "off"


def _change_of(one: EngineSettings, other: EngineSettings) -> str:
    for what, without in (("renamed", NAMES), ("adjusted", NAMES | COMING)):
        if one.model_dump(exclude=set(without)) == other.model_dump(exclude=set(without)):
            return what
    return "changed"
