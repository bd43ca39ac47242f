"""Decide whether a call is sent again, and after how long.

Each call of this client may be sent twice: a gateway that was lost while it answered has told nobody, and a
handoff that it saved expires. What a second time costs is tokens.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton_client.call import Call, Reply
from baton_client.errors import ConnectionLost

ALWAYS = frozenset({429, 503})
"""Statuses after which every call is sent again: the gateway did not work on it, or lost what it did."""
GATEWAY_LOST = b'"gateway_lost"'
"""The code with which our proxy answers 502 when the gateway that had the request is gone."""
BUDGET_SPENT = b'"budget_spent"'
"""The code of a 429 that lasts until the key's next day or month."""
IF_ASKED = 409
"""A conflict passes only where the gateway sends `Retry-After` with it: a pending handoff."""


@dataclass(frozen=True)
class Retries:
    """The rules by which calls are sent again.

    Attributes:
        limit: how often at most; 0: never.
        first_s: seconds before the first retry, if the gateway names none; doubled for each further one.
        longest_s: most seconds before a retry, also if the gateway asks for more.
    """

    limit: int = 2
    first_s: float = 0.5
    longest_s: float = 30.0

    def after_reply(self, reply: Reply, attempt: int) -> float | None:
        """Return the seconds to wait before a call is sent again; None: the reply is final."""
        asked = retry_after(reply.headers)
        passing = reply.status in ALWAYS or (reply.status == IF_ASKED and asked is not None)
        passing = passing or (reply.status == 502 and GATEWAY_LOST in reply.content)
        passing = passing and not (reply.status == 429 and BUDGET_SPENT in reply.content)
        if not passing or attempt >= self.limit:
            return None
        return self._backoff(attempt) if asked is None else min(asked, self.longest_s)

    def after_loss(self, call: Call[Any], lost: ConnectionLost, attempt: int) -> float | None:
        """Return the seconds to wait before a call without a whole answer is sent again; None: it is not."""
        half_written = lost.answered and (call.target is not None or call.told is not None)
        if not lost.resend or half_written or attempt >= self.limit:
            return None
        return self._backoff(attempt)

    def _backoff(self, attempt: int) -> float:
        """Return a random time of at least half the step, so that clients do not come back together."""
        step = min(self.first_s * 2.0**attempt, self.longest_s)
        return step * random.uniform(0.5, 1)


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that `Retry-After` names; None: it is missing, or not a number."""
    try:
        return max(0.0, float(headers["retry-after"]))
    except (KeyError, ValueError):
        return None
