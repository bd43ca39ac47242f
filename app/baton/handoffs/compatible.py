"""Decide whether an engine can use the handoff that another engine saved."""

from __future__ import annotations

from baton.engines.port import Engine
from baton.errors import HandoffIncompatible
from baton.handoffs.records.record import HandoffRecord


def require_compatible(record: HandoffRecord, engine: Engine) -> None:
    """Refuse a handoff that an engine cannot continue.

    Raises:
        HandoffIncompatible: the weights differ, or the engine cannot compute the handoff's latent steps or
            images.
    """
    if record.weights != engine.weights:
        raise HandoffIncompatible(
            f"The handoff of the model '{record.model}' cannot be continued by '{engine.name}': their "
            'weights differ. Ask an engine of the same weights, or continue its text with "translate": true.',
            param="handoff.from",
        )
    if record.latent_steps and record.placeholder != engine.placeholder:
        raise HandoffIncompatible(
            f"The handoff holds latent steps of the model '{record.model}'; the engine '{engine.name}' does "
            "not support latent steps, or marks them with another placeholder token.",
            param="handoff.from",
        )
    if len(record.images) > engine.images.limit:
        raise HandoffIncompatible(
            f"The handoff holds {len(record.images)} images; the model '{engine.name}' takes at most "
            f"{engine.images.limit}.",
            param="handoff.from",
        )
