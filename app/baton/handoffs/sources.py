"""Find the handoffs that requests continue, and wait for those that are still pending."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass

from baton.engines.port import Engine
from baton.errors import BatonError, HandoffNotFound, HandoffPending
from baton.handoffs.compatible import require_compatible
from baton.handoffs.options import part_name
from baton.handoffs.records.record import HandoffRecord
from baton.handoffs.records.state import HandoffState
from baton.handoffs.service import Handoffs


def naming(error: BatonError, where: str) -> BatonError:
    """Let an error say which of several handoffs it is about."""
    prefix = f"{where}: "
    error.param = where
    error.message = prefix + error.message.removeprefix(prefix)  # several requests may get the same error
    return error


async def _of_field(finding: Awaitable[HandoffRecord], field: str) -> HandoffRecord:
    """Find the only handoff of a field, which an error names."""
    try:
        return await finding
    except BatonError as error:
        error.param = field if error.param is not None else None
        raise


async def _all_named(looks: Sequence[Awaitable[HandoffRecord]], field: str) -> list[HandoffRecord]:
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
        handoffs: all handoffs.
        wait_s: seconds that a request waits for a pending one.
    """

    handoffs: Handoffs
    wait_s: float

    async def one(
        self,
        handoff_id: str,
        engine: Engine,
        tenant: str,
        *,
        translates: bool = False,
        wait_s: float | None = None,
    ) -> HandoffRecord:
        """Return the handoff that a request continues, once it is ready.

        Args:
            handoff_id: its id.
            engine: the engine that answers.
            tenant: the owner.
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
        self, record: HandoffRecord, engine: Engine, *, translates: bool, wait_s: float | None
    ) -> HandoffRecord:
        """Wait until a handoff that was just found is not pending, and return it; see `one`."""
        if await self.handoffs.settled(record, self.wait_s if wait_s is None else wait_s):
            record = await self._there(record.id, engine, record.tenant, translates=translates)
        if record.state is HandoffState.PENDING:
            raise HandoffPending()
        await self.handoffs.bring(record, engine)
        return record

    async def all(
        self,
        ids: Sequence[str],
        engine: Engine,
        tenant: str,
        field: str = "handoff.from",
        *,
        translates: bool = False,
        wait_s: float | None = None,
    ) -> list[HandoffRecord]:
        """Return the handoffs that a request continues, in order; see `one`.

        Args:
            ids: their ids.
            engine: the engine that answers.
            tenant: the owner.
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
        self, ids: Sequence[str], engine: Engine, tenant: str, field: str, *, translates: bool
    ) -> list[HandoffRecord]:
        """Return handoffs that a request can continue, pending ones as they are.

        The arguments are those of `all`.

        Raises:
            BatonError: as `all`.
        """
        return await _all_named(
            [self._there(each, engine, tenant, translates=translates) for each in ids], field
        )

    async def require_there(self, records: Sequence[HandoffRecord], tenant: str, field: str) -> None:
        """Refuse handoffs one of which was deleted, or has expired, since they were found.

        Args:
            records: the handoffs.
            tenant: the owner.
            field: the field of the request that names them.

        Raises:
            HandoffNotFound: one was; `param` names it.
        """
        await _all_named([self.handoffs.get(record.id, tenant) for record in records], field)

    async def _there(
        self, handoff_id: str, engine: Engine, tenant: str, *, translates: bool
    ) -> HandoffRecord:
        """Return a handoff that the engine can continue, perhaps a pending one."""
        record = await self.handoffs.get(handoff_id, tenant)
        if record.state is HandoffState.FAILED or record not in self.handoffs:
            raise HandoffNotFound()
        if not translates:
            require_compatible(record, engine)
        return record
