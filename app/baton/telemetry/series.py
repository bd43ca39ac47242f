"""Label values and histogram buckets that several metrics share."""

from __future__ import annotations

OTHER = "other"
"""The label value for what is not in a closed list: the number of series never grows with traffic."""
NOBODY = "none"
"""The tenant label of requests without a valid key."""

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper bounds of the buckets of durations."""
