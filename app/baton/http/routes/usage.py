"""Serve `/v1/usage`, what tenants have used, and `/v1/settings/reload`, by which settings are read again."""

from __future__ import annotations

import re
from datetime import date
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from baton.admission.usage import COUNTED, GROUPS, HOW_TO_COUNT, Asked
from baton.errors import InvalidRequest, OperationUnsupported, OperatorKeyNeeded
from baton.http.request import gateway_of, require_operator, state_of

router = APIRouter()
Name = Annotated[str | None, Query(max_length=128)]
DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


@router.get("/v1/usage")
async def show_usage(
    request: Request,
    first: Annotated[str | None, Query(alias="from", max_length=10)] = None,
    last: Annotated[str | None, Query(alias="to", max_length=10)] = None,
    by: Annotated[str, Query(max_length=64)] = ",".join(GROUPS),
    tenant: Name = None,
    key: Name = None,
    model: Name = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    offset: Annotated[int, Query(ge=0, le=2**31)] = 0,
) -> dict[str, Any]:
    """Show tokens and requests by day of UTC, tenant, key and model: the tenant's own; operators see all.

    `from` and `to` are the first and the last day, both included; without them it is the month so far. `by`
    names what the rows are told apart by, such as `tenant,model`; the rest is added up. `budgets` are those
    of the caller's key.
    """
    gateway, state = gateway_of(request), state_of(request.scope)
    usage, own = gateway.usage, state.context.tenant
    if not usage.kept:
        raise OperationUnsupported(f"This gateway counts no usage: {HOW_TO_COUNT}.")
    if tenant not in (None, own) and not state.operator:
        raise OperatorKeyNeeded("Only operators may see what other tenants have used: leave 'tenant' out.")
    groups = [name.strip() for name in by.split(",") if name.strip()]
    if wrong := [name for name in groups if name not in GROUPS]:
        raise InvalidRequest(f"'by': '{wrong[0]}' is none of {', '.join(GROUPS)}.", param="by")
    given = {"tenant": tenant if state.operator else own, "key": key, "model": model}
    asked = Asked(
        _day(first, "from") or f"{usage.today[:7]}-01",
        _day(last, "to") or usage.today,
        groups,
        {name: value for name, value in given.items() if value is not None},
        limit + 1,
        offset,
    )
    rows = await usage.rows(asked)
    total = await usage.rows(Asked(asked.first, asked.last, (), asked.where))
    return {
        "object": "usage",
        "from": asked.first,
        "to": asked.last,
        "data": [_whole(row) for row in rows[:limit]],
        "has_more": len(rows) > limit,
        "total": _whole(total[0]),
        "budgets": usage.budgets(state.key) if state.key is not None else [],
    }


def _day(given: str | None, name: str) -> str | None:
    """Return a day that a request names, as it is."""
    if given is None:
        return None
    try:
        if DAY.fullmatch(given):
            return date.fromisoformat(given).isoformat()
    except ValueError:
        pass
    raise InvalidRequest(f"'{name}' must be a day such as 2030-01-31.", param=name)


def _whole(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row as it is shown; without any request every number is 0."""
    counted = {name: row[name] or 0 for name in COUNTED}
    tokens = counted["prompt_tokens"] + counted["completion_tokens"]
    named = {name: row[name] or None for name in GROUPS if name in row}
    return named | counted | {"total_tokens": tokens}


@router.post("/v1/settings/reload")
async def reload_settings(request: Request) -> dict[str, Any]:
    """Read the settings and the keys again; an operator's key is needed.

    Only what changed is touched, and only what can be while the gateway runs: the answer lists it, and what
    needs a restart. Settings with an error change nothing. Engines that are new or changed start in the
    background: `GET /v1/events` tells how that goes.
    """
    require_operator(request, "settings.reload")
    gateway = gateway_of(request)
    if gateway.reload is None:
        raise OperationUnsupported("The settings of this gateway cannot be read again while it runs.")
    return await gateway.reload()
