"""Describe what a request continues: a handoff, or one that was made from what another model's says."""

from __future__ import annotations

from dataclasses import dataclass

from baton.engines.port import Json
from baton.handoffs.records.record import HandoffRecord


@dataclass(frozen=True)
class Translated:
    """How a handoff came from that of another model.

    Attributes:
        source: the handoff of the other model, which the client named.
        computed: number of its tokens that were computed for this request; 0: it was made before.
    """

    source: HandoffRecord
    computed: int

    def public(self, record: HandoffRecord) -> Json:
        """Return the fields of `handoff.source` that show it.

        Args:
            record: the handoff that was made.
        """
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

    record: HandoffRecord
    translated: Translated | None = None

    @property
    def named(self) -> HandoffRecord:
        """The handoff that the client named."""
        return self.record if self.translated is None else self.translated.source
