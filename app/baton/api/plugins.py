"""`GET /v1/plugins`: every vLLM plugin that is installed, and why one is not used."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from baton.api.gateway import gateway_of
from baton.engines.installed import installed_plugins

router = APIRouter()
IO_PROCESSORS = "vllm.io_processor_plugins"


@router.get("/v1/plugins")
async def list_plugins(request: Request) -> dict[str, Any]:
    """The installed plugins of all of vLLM's groups, with the engines that run each IO processor."""
    users: dict[str, list[str]] = {}
    for engine in gateway_of(request).fleet.engines:
        if engine.plugin is not None:
            users.setdefault(engine.plugin.name, []).append(engine.name)
    rows = [plugin.row() for plugin in installed_plugins()]
    for row in rows:
        if row["group"] == IO_PROCESSORS:
            row["engines"] = users.get(str(row["name"]), [])
            if not row["engines"]:
                row["reason"] = row["reason"] or "no engine uses it"
                row["loaded"] = False
    return {"object": "list", "data": rows}
