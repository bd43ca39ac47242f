"""Find the handoffs that requests continue, and wait for those that are still pending."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass

from baton.engines.adapters import base_of
from baton.engines.backend import Json
from baton.engines.engine import LocalEngine
from baton.errors import BatonError, HandoffIncompatible, HandoffNotFound, HandoffPending
from baton.library.handoff import Handoff, HandoffState
from baton.library.library import Library
from baton.relay.asked import part_name


@dataclass(frozen=True)
class Translated:
    """The way in which a handoff came from that of another model.

    Attributes:
        source: the handoff of the other model, which the client named.
        computed: number of its tokens that were computed for this request; 0: it was made before.
    """

    source: Handoff
    computed: int

    def public(self, record: Handoff) -> Json:
        """Return the fields of `handoff.source` that show it."""
        return {
            "id": self.source.id,
            "from_model": self.source.model,
            "translated_id": record.id,
            "computed_tokens": self.computed,
            "dropped": {"latent_steps": self.source.latent_steps},
        }


@dataclass(frozen=True)
class Source:
    """A handoff that a request continues.

    Attributes:
        record: the handoff, of the weights of the engine that answers.
        translated: how it came from the one that the client named; None: it is that one.
    """

    record: Handoff
    translated: Translated | None = None

    @property
    def named(self) -> Handoff:
        """The handoff that the client named."""
        return self.record if self.translated is None else self.translated.source


# Decide whether an engine can use the handoff that another engine saved.


def is_compatible(record: Handoff, engine: LocalEngine) -> bool:
    """Return whether an engine can continue a handoff as it is: its token ids, if not its KV."""
    return why_incompatible(record, engine) is None


def has_kv_of(record: Handoff, engine: LocalEngine) -> bool:
    """Return whether a handoff's KV, if it is stored, is what an engine would compute: of its adapter too."""
    return record.weights == engine.weights


def require_compatible(record: Handoff, engine: LocalEngine) -> None:
    """Refuse a handoff that an engine cannot continue.

    Raises:
        HandoffIncompatible: the weights differ, or the engine cannot compute the handoff's latent steps or
            images.
    """
    if (why := why_incompatible(record, engine)) is not None:
        raise HandoffIncompatible(why, param="handoff.from")


def why_incompatible(record: Handoff, engine: LocalEngine) -> str | None:
    """Return why an engine cannot continue a handoff; None: it can."""
    if base_of(record.weights) != base_of(engine.weights):
        return (
            f"The handoff of the model '{record.model}' cannot be continued by '{engine.name}': their "
            'weights differ. Ask an engine of the same weights, or continue its text with "translate": true.'
        )
    if record.latent_steps and record.placeholder != engine.placeholder:
        return (
            f"The handoff holds latent steps of the model '{record.model}'; the engine '{engine.name}' does "
            "not support latent steps, or marks them with another placeholder token."
        )
    if len(record.images) > engine.images.limit:
        return (
            f"The handoff holds {len(record.images)} images; the model '{engine.name}' takes at most "
            f"{engine.images.limit}."
        )
    return None


def naming(error: BatonError, where: str) -> BatonError:
    """Name in an error the one of several handoffs that it is about."""
    prefix = f"{where}: "
    error.param = where
    error.message = prefix + error.message.removeprefix(prefix)  # several requests may get the same error
    return error


async def _of_field(finding: Awaitable[Handoff], field: str) -> Handoff:
    """Find the only handoff of a field, which an error names."""
    try:
        return await finding
    except BatonError as error:
        error.param = field if error.param is not None else None
        raise


async def _all_named(looks: Sequence[Awaitable[Handoff]], field: str) -> list[Handoff]:
    """Look for all handoffs of a field, before an error names the first at fault.

    Which look ends first would tell whose an id is.
    """
    found = []
    for index, each in enumerate(await asyncio.gather(*looks, return_exceptions=True)):
        if isinstance(each, BatonError):
            raise naming(each, part_name(field, index))
        if isinstance(each, BaseException):
            raise each
        found.append(each)
    return found


@dataclass(frozen=True)
class Sources:
    """Finds handoffs for the requests of one gateway.

    Attributes:
        wait_s: seconds that a request waits for a pending one.
    """

    handoffs: Library
    wait_s: float

    async def one(
        self,
        handoff_id: str,
        engine: LocalEngine,
        tenant: str,
        *,
        translates: bool = False,
        wait_s: float | None = None,
    ) -> Handoff:
        """Return the handoff that a request continues, once it is ready.

        Args:
            translates: its text is continued where the engine cannot continue it as it is.
            wait_s: seconds to wait for a pending one; None: `handoffs.wait_s`.

        Raises:
            HandoffNotFound: the id is unknown, expired, failed, or another tenant's; clients cannot tell
                which.
            HandoffPending: the handoff is still pending after that time.
            HandoffIncompatible: the engine cannot continue it, see `require_compatible`.
        """
        record = await self._there(handoff_id, engine, tenant, translates=translates)
        return await self._ready(record, engine, translates=translates, wait_s=wait_s)

    async def _ready(
        self, record: Handoff, engine: LocalEngine, *, translates: bool, wait_s: float | None
    ) -> Handoff:
        """Wait until a handoff that was just found is not pending, and return it; see `one`."""
        if await self.handoffs.settled(record, self.wait_s if wait_s is None else wait_s):
            record = await self._there(record.id, engine, record.tenant, translates=translates)
        if record.state is HandoffState.PENDING:
            raise HandoffPending()
        await self.handoffs.fetch_here(record, engine)
        return record

    async def all(
        self,
        ids: Sequence[str],
        engine: LocalEngine,
        tenant: str,
        field: str = "handoff.from",
        *,
        translates: bool = False,
        wait_s: float | None = None,
    ) -> list[Handoff]:
        """Return the handoffs that a request continues, in order; see `one`.

        Args:
            field: the field of the request that names them.
            translates: as for `one`.
            wait_s: as for `one`.

        Raises:
            BatonError: as `one`; of several handoffs `param` names the first at fault.
        """
        if len(ids) < 2:
            found = [self.one(each, engine, tenant, translates=translates, wait_s=wait_s) for each in ids]
            return [await _of_field(each, field) for each in found]
        known = await self.usable(ids, engine, tenant, field, translates=translates)
        ready = [self._ready(each, engine, translates=translates, wait_s=wait_s) for each in known]
        waiting = [asyncio.ensure_future(each) for each in ready]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
            for index, task in enumerate(waiting):
                if task.done() and isinstance(error := task.exception(), BatonError):
                    raise naming(error, part_name(field, index))
            records = list(await asyncio.gather(*waiting))
            await self.require_there(records, tenant, field)  # others were waited for meanwhile
            return records
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def usable(
        self, ids: Sequence[str], engine: LocalEngine, tenant: str, field: str, *, translates: bool
    ) -> list[Handoff]:
        """Return handoffs that a request can continue, pending ones as they are.

        The arguments are those of `all`.

        Raises:
            BatonError: as `all`.
        """
        return await _all_named(
            [self._there(each, engine, tenant, translates=translates) for each in ids], field
        )

    async def require_there(self, records: Sequence[Handoff], tenant: str, field: str) -> None:
        """Refuse handoffs one of which was deleted, or has expired, since they were found.

        Args:
            field: the field of the request that names them.

        Raises:
            HandoffNotFound: one was; `param` names it.
        """
        await _all_named([self.handoffs.get(record.id, tenant) for record in records], field)

    async def _there(self, handoff_id: str, engine: LocalEngine, tenant: str, *, translates: bool) -> Handoff:
        """Return a handoff that the engine can continue, perhaps a pending one."""
        record = await self.handoffs.get(handoff_id, tenant)
        if record.state is HandoffState.FAILED or record not in self.handoffs:
            raise HandoffNotFound()
        if not translates:
            require_compatible(record, engine)
        return record
