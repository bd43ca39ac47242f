"""Serve `GET /v1/plugins`: the installed vLLM plugins, and why one is not used."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from fastapi import APIRouter, Request

from baton.engines.installed_plugins import installed_plugins, running_platform
from baton.http.request import gateway_of, in_a_thread

router = APIRouter()
PLATFORMS = "vllm.platform_plugins"
IO_PROCESSORS = "vllm.io_processor_plugins"
BY_IMPORT = ("vllm.general_plugins", "vllm.stat_logger_plugins")
"""Groups whose plugins vLLM loads by itself with the first engine, in this process too."""


@router.get("/v1/plugins")
async def list_plugins(request: Request) -> dict[str, Any]:
    """List the installed plugins of all of vLLM's groups, with the engines that use each IO processor."""
    return await in_a_thread(request, partial(_list, request))


def _list(request: Request) -> dict[str, Any]:
    users: dict[str, list[str]] = {}
    for engine in gateway_of(request).fleet.here:
        if engine.plugin is not None:
            users.setdefault(engine.plugin.name, []).append(engine.name)
    rows = [plugin.row() for plugin in installed_plugins()]
    for row in rows:
        if row["group"] == IO_PROCESSORS:
            row["engines"] = users.get(str(row["name"]), [])
        reason = _unused(row)
        if row["loaded"] and reason:
            row["loaded"], row["reason"] = False, reason
    return {"object": "list", "data": rows}


def _unused(row: dict[str, object]) -> str:
    """Return why a plugin that vLLM could load is not used; empty if it is used."""
    group, module = row["group"], str(row["value"]).partition(":")[0]
    if group in BY_IMPORT and module not in sys.modules:
        return "no engine here has loaded it, or it failed; see the log"
    if group == PLATFORMS and _package(running_platform() or "") != _package(module):
        return "vLLM runs on another platform here"
    if group == IO_PROCESSORS and not row["engines"]:
        return "no engine uses it"
    return ""


def _package(module: str) -> str:
    return module.partition(".")[0]
