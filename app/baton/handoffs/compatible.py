"""Decide whether an engine can use the handoff that another engine saved."""

from __future__ import annotations

from baton.engines.port import Engine
from baton.errors import HandoffIncompatible
from baton.handoffs.records.record import HandoffRecord


def is_compatible(record: HandoffRecord, engine: Engine) -> bool:
    """Return whether an engine can continue a handoff as it is."""
    return why_incompatible(record, engine) is None


def require_compatible(record: HandoffRecord, engine: Engine) -> None:
    """Refuse a handoff that an engine cannot continue.

    Raises:
        HandoffIncompatible: the weights differ, or the engine cannot compute the handoff's latent steps or
            images.
    """
    if (why := why_incompatible(record, engine)) is not None:
        raise HandoffIncompatible(why, param="handoff.from")


def why_incompatible(record: HandoffRecord, engine: Engine) -> str | None:
    """Return why an engine cannot continue a handoff; None: it can."""
    if record.weights != engine.weights:
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
