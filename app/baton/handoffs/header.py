"""Read the header `X-Baton-Handoff`, for clients that can set headers but no fields of the body."""

from __future__ import annotations

from baton.engines.port import Json
from baton.errors import InvalidRequest

HEADER = "X-Baton-Handoff"
AUTO, OFF, SAVE = "auto", "off", "save"


def apply_header(body: Json, value: str | None) -> bool:
    """Put what the header asks for into the body's `handoff` field.

    Args:
        body: the request's body, which is changed.
        value: `auto`, `off`, `save`, or the id of the handoff to continue; None: there is no header.

    Returns:
        Whether handoffs may be automatic for this request.

    Raises:
        InvalidRequest: header and body both name a handoff, or ask for one.
    """
    wish = (value or "").strip()
    if wish.lower() == OFF:
        return False
    if wish and wish.lower() != AUTO:
        if body.get("handoff") is not None:
            raise InvalidRequest(
                f"The request has the field 'handoff' and the header {HEADER}: leave one of them out.",
                param="handoff",
            )
        body["handoff"] = {"save": True} if wish.lower() == SAVE else {"from": wish}
    return True
