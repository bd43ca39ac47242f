"""Describe what a client asked of handoffs, and in which order it joins several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.admission.fair_threads import in_own_thread
from baton.engines.port import Engine, Json, Operation
from baton.handoffs.joins.overlap import continued_parts
from baton.handoffs.joins.parts import Part
from baton.handoffs.options import HandoffOptions, NewHandoff, SaveOptions, part_name
from baton.handoffs.planner import Planner
from baton.handoffs.records.record import HandoffRecord
from baton.handoffs.source import Source


@dataclass(frozen=True)
class SessionRequest:
    """What a client asked for.

    Attributes:
        operation: an operation that supports handoffs.
        body: the body of the request.
        parts: the handoffs that it continues, in the order in which they are joined.
        save: how its context is saved; None: it is not.
        latent_steps: number of latent steps after the prompt.
        answered: an answer follows the prompt; otherwise the context ends with the last message.
        moves: the KV of all parts but the first is moved to its place, where that can be done.
        translated_from: the handoff of other weights whose text the context holds; None: of none.
        target: the handoff to save, which was registered before; None: none was.
    """

    operation: Operation
    body: Json
    parts: Sequence[Part]
    save: SaveOptions | None
    latent_steps: int
    answered: bool = True
    moves: bool = False
    translated_from: HandoffRecord | None = None
    target: HandoffRecord | None = None

    @property
    def source(self) -> HandoffRecord | None:
        """The handoff that it continues, or the first of several."""
        return self.parts[0].record if self.parts else None

    @property
    def exact(self) -> bool:
        """Whether all KV that it uses is what the engine would compute."""
        return not self.moves and (len(self.parts) != 1 or self.parts[0].record.exact)

    @property
    def may_load(self) -> HandoffRecord | None:
        """The handoff whose KV may be loaded: its source, unless moved KV would begin an exact join."""
        source = self.source
        return source if source is not None and (source.exact or not self.exact) else None

    @property
    def parents(self) -> list[str]:
        """The handoffs that a saved context continues, as the client named them."""
        translated = [self.translated_from.id] if self.translated_from is not None else []
        return [part.named for part in self.parts] or translated

    @property
    def joins_alone(self) -> bool:
        """Whether nothing follows the joined contexts, neither a prompt nor an answer."""
        text = self.operation is Operation.COMPLETIONS and self.body.get("prompt") is None
        return text and self.prompt_only and len(self.parts) > 1

    @property
    def prompt_only(self) -> bool:
        """Whether the saved context ends before the answer."""
        return self.save is not None and self.save.scope == "prompt"

    @property
    def steps_of_context(self) -> int:
        """Number of latent steps in the context, with those of its source."""
        return self.latent_steps + (self.source.latent_steps if self.source is not None else 0)


async def parts_in_order(
    planner: Planner,
    engine: Engine,
    sources: Sequence[Source],
    options: HandoffOptions | NewHandoff,
    field: str,
) -> Sequence[Part]:
    """Return handoffs in the order in which they are joined.

    Args:
        planner: estimates what loading their KV saves.
        engine: the engine that answers.
        sources: the handoffs.
        options: how they are joined. With the order `any` one that must come first does (see
            `Part.must_be_first`), or the one whose stored KV saves most time, of those that no other one
            continues.
        field: the field of the request that names them.
    """
    parts = [
        Part(each.record, part_name(field, index), translated=each.translated)
        for index, each in enumerate(sources)
    ]
    if options.order == "given" or len(parts) < 2:
        return parts
    continued = await in_own_thread(continued_parts, parts)

    def worth(part: Part) -> tuple[bool, bool, float, int]:
        loads = part.record.exact or options.join == "moved"
        saving = planner.saving(engine, part.record) if loads else 0.0
        return part.must_be_first, part.where not in continued, saving, len(part.record.tokens)

    first = max(parts, key=worth)
    return [first, *(part for part in parts if part is not first)]
