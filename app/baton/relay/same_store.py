"""Decide whether a request's handoff may be sent on to the gateway that answers for an engine.

That gateway looks handoffs up under the tenant of the key that it is sent. So it must use the same store, and
the key must be the same tenant's; otherwise a client could name the handoffs of others, or none of its own.
"""

from __future__ import annotations

import hmac
import secrets
import time
from dataclasses import dataclass, field

from baton.engines.backend import Elsewhere, Forwarding
from baton.errors import OperationUnsupported
from baton.library.library import Library
from baton.relay.asked import require_handoffs
from baton.telemetry.ids import RequestContext

TRUSTED_S = 30.0
"""Seconds after which a gateway must prove its store again."""


@dataclass(frozen=True)
class SameStore:
    """Knows which gateways have proved that they use this one's store.

    Attributes:
        proved: until when an engine's gateway is trusted with a tenant's handoffs sent with a certain key, by
            monotonic seconds.
    """

    handoffs: Library
    proved: dict[tuple[str, str, str], float] = field(default_factory=dict)

    async def require(self, engine: Elsewhere, context: RequestContext) -> None:
        """Refuse a handoff that the other gateway would look up elsewhere, or for another tenant.

        Raises:
            OperationUnsupported: the message says what is missing.
            BatonError: the other gateway failed or cannot be reached.
        """
        require_handoffs(engine)
        forwarding = engine.forwarding
        known = (engine.name, context.tenant, forwarding.key_id(context.tenant))
        if self.proved.get(known, 0.0) > time.monotonic():
            return
        reason = await self._reason(forwarding, context)
        if reason is not None:
            self.proved.pop(known, None)
            raise OperationUnsupported(
                f"The engine '{engine.name}' is a server elsewhere, and handoffs do not reach it: {reason}.",
                param="handoff",
            )
        self.proved[known] = time.monotonic() + TRUSTED_S

    async def _reason(self, forwarding: Forwarding, context: RequestContext) -> str | None:
        """Return why a tenant's handoffs cannot be sent on; None: they can."""
        challenge = secrets.token_hex(32)
        ours = await self.handoffs.proof(challenge, context.tenant)
        if ours is None:
            return "this gateway has no store of its own to share"
        peer = await forwarding.peer(challenge, context)
        if peer is None:
            return "it is no Baton gateway"
        if peer.proof is None or not hmac.compare_digest(ours, peer.proof):
            return "it does not use this gateway's store (handoffs.shared, with the same secret)"
        if peer.tenant != context.tenant:
            return (
                "the key that it is sent belongs to another tenant than yours (remote.keys_dir gives each "
                "tenant its own)"
            )
        return None if peer.hands_over else "its engine has no `handoff = true`"
