"""Decide the number of replicas by the gateways' own queues.

Ray Serve pickles this module by value and runs it in its controller, so it imports nothing of Baton.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

LOAD = "baton_load"
"""The name under which each replica reports its load, see `Admission.load`."""


class QueuePolicy:
    """Wants as many replicas as bring their average load to `target_load`.

    Ray Serve applies its delays and the fewest and most replicas to what this returns.

    Args:
        target_load: the load to aim at; 1: an engine of the replica has no free place.
    """

    def __init__(self, target_load: float) -> None:
        self._target_load = target_load

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """Return the wanted number of replicas, and the state that is kept for the next call."""
        loads = (context.aggregated_metrics or {}).get(LOAD) or {}
        if not loads:  # no replica has reported yet
            return context.target_num_replicas, {}
        return sum(loads.values()) / self._target_load, {}
