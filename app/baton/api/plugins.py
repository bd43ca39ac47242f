"""`GET /v1/plugins`: every vLLM plugin that is installed, and why one is not used."""

from __future__ import annotations

import sys
from typing import Any

from fastapi import APIRouter, Request

from baton.api.gateway import gateway_of
from baton.engines.installed import installed_plugins

router = APIRouter()
GENERAL = "vllm.general_plugins"
IO_PROCESSORS = "vllm.io_processor_plugins"


@router.get("/v1/plugins")
def list_plugins(request: Request) -> dict[str, Any]:
    """The installed plugins of all of vLLM's groups, with the engines that run each IO processor."""
    users: dict[str, list[str]] = {}
    for engine in gateway_of(request).fleet.engines:
        if engine.plugin is not None:
            users.setdefault(engine.plugin.name, []).append(engine.name)
    rows = [plugin.row() for plugin in installed_plugins()]
    for row in rows:
        if row["group"] == GENERAL and row["loaded"] and not _imported(str(row["value"])):
            row["loaded"], row["reason"] = False, "no engine here has loaded it, or it failed; see the log"
        if row["group"] == IO_PROCESSORS:
            row["engines"] = users.get(str(row["name"]), [])
            if not row["engines"]:
                row["reason"] = row["reason"] or "no engine uses it"
                row["loaded"] = False
    return {"object": "list", "data": rows}


def _imported(value: str) -> bool:
    """Whether this process has what an entry point names: vLLM loads general plugins in every process."""
    return value.partition(":")[0] in sys.modules
