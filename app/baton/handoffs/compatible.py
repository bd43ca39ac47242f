"""Whether an engine understands what another left behind."""

from __future__ import annotations

from baton.engines.port import Engine
from baton.errors import HandoffIncompatible
from baton.handoffs.record import HandoffRecord


def require_compatible(record: HandoffRecord, engine: Engine) -> None:
    """Refuse a handoff that an engine cannot start from.

    Raises:
        HandoffIncompatible: it is of other weights, or holds latent steps or images that the engine cannot
            compute.
    """
    if record.weights != engine.weights:
        raise HandoffIncompatible(
            f"The handoff is of the model '{record.model}', the request of '{engine.name}': "
            "their weights differ.",
            param="handoff.from",
        )
    if record.latent_steps and record.placeholder != engine.placeholder:
        raise HandoffIncompatible(
            f"The handoff holds latent steps of the model '{record.model}'; '{engine.name}' "
            "does not take them, or marks them with another token.",
            param="handoff.from",
        )
    if len(record.images) > engine.images.limit:
        raise HandoffIncompatible(
            f"The handoff holds {len(record.images)} images; '{engine.name}' takes at most "
            f"{engine.images.limit}.",
            param="handoff.from",
        )
