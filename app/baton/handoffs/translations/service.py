"""Let a model continue a handoff of another model: by its text, never by its KV.

What the handoff says is written by the other model's own template and tokenizer, computed once, and kept as a
handoff of that model, which lives as long as the one it was made from. KV never crosses from one model's
weights to another's, not between fine-tunes of equal shape either.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from baton.engines.port import Engine
from baton.errors import BatonError, HandoffIncompatible
from baton.handoffs.options import SaveOptions, part_name
from baton.handoffs.prompts.prompt import ContextPrompt
from baton.handoffs.records.record import HandoffRecord
from baton.handoffs.records.state import HandoffState
from baton.handoffs.service import Handoffs
from baton.handoffs.sessions import Sessions
from baton.handoffs.source import Source, Translated
from baton.handoffs.sources import naming
from baton.handoffs.translations.spoken import Spoken, spoken
from baton.telemetry.ids import RequestContext

SAVED_WITHIN_S = 10.0
"""A new translation's KV is waited for so long, so that it can be loaded at once."""


@dataclass(frozen=True)
class Translations:
    """Makes the translations of one gateway.

    Attributes:
        engines: the engines that it serves.
        handoffs: all handoffs.
        sessions: computes them.
    """

    engines: Sequence[Engine]
    handoffs: Handoffs
    sessions: Sessions
    _making: WeakValueDictionary[tuple[str, str], asyncio.Lock] = field(
        default_factory=WeakValueDictionary, init=False
    )

    async def sources(
        self,
        engine: Engine,
        context: RequestContext,
        records: Sequence[HandoffRecord],
        save: SaveOptions | None = None,
        where: str = "handoff.from",
    ) -> list[Source]:
        """Return what a request continues: handoffs as they are, or their translations, which may be made.

        Args:
            engine: the engine that answers.
            context: the request.
            records: the handoffs that it names.
            save: how a new translation is kept.
            where: the field that names them.

        Raises:
            BatonError: a handoff cannot be translated; of several `param` names the one at fault.
        """
        found = []
        for index, record in enumerate(records):
            try:
                found.append(await self._source(engine, context, record, save or SaveOptions()))
            except BatonError as error:
                raise naming(error, part_name(where, index) if len(records) > 1 else where) from None
        return found

    async def _source(
        self, engine: Engine, context: RequestContext, record: HandoffRecord, save: SaveOptions
    ) -> Source:
        if record.weights == engine.weights:
            return Source(record)
        said = await self._spoken(context, record)
        if len(said.images) > engine.images.limit:
            raise HandoffIncompatible(
                f"The handoff holds {len(said.images)} images; the model '{engine.name}' takes at most "
                f"{engine.images.limit}.",
            )
        prompt = await said.written(engine, context)
        lock = self._making.setdefault((record.id, engine.name), asyncio.Lock())
        async with lock:  # several requests need it at once, and one makes it
            if (kept := self._kept(record, engine, prompt)) is not None:
                await self.handoffs.settled(kept, SAVED_WITHIN_S)
                return Source(kept, Translated(record, 0))
            return await self._make(engine, context, record, prompt, save)

    async def _spoken(self, context: RequestContext, record: HandoffRecord) -> Spoken:
        """Read what a handoff says, with an engine of its weights.

        Raises:
            HandoffIncompatible: no engine here has its tokenizer.
        """
        theirs = next((each for each in self.engines if each.weights == record.weights), None)
        if theirs is None:
            raise HandoffIncompatible(
                f"The handoff of the model '{record.model}' cannot be translated: no engine here serves that "
                "model, whose tokenizer reads it."
            )
        return await spoken(theirs, context, record, await self.handoffs.images(record))

    def _kept(self, record: HandoffRecord, engine: Engine, prompt: ContextPrompt) -> HandoffRecord | None:
        """Return the translation that was made before, if it still says the same."""
        tokens = array("i", prompt.tokens or [])
        return next(
            (
                each
                for each in self.handoffs.translations_of(record)
                if (each.model, each.weights, each.state) == (engine.name, engine.weights, HandoffState.READY)
                and each.tokens == tokens
            ),
            None,
        )

    async def _make(
        self,
        engine: Engine,
        context: RequestContext,
        record: HandoffRecord,
        prompt: ContextPrompt,
        save: SaveOptions,
    ) -> Source:
        left = max(1, math.floor(self.handoffs.seconds_left(record)))
        save = save.model_copy(update={"ttl_s": min(save.ttl_s or left, left), "scope": "prompt"})
        session = self.sessions.open_translation(engine, context, record, prompt, save)
        target = session.target
        assert target is not None
        await session.compute([])
        await self.handoffs.settled(target, SAVED_WITHIN_S)
        return Source(target, Translated(record, session.computed))
