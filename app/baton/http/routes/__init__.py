"""The routes. `openai` is the table of those that an engine answers; `ROUTERS` lists all.

`/metrics` and the page at `/` are not among them: `server.py` decides whether and where they answer.
"""

from __future__ import annotations

from baton.http.routes import (
    adapters,
    batches,
    engines,
    handoffs,
    mcp,
    openai,
    operations,
    pooling,
    processes,
    responses,
    scenes,
    usage,
)

ROUTERS = (
    openai.router,
    responses.router,
    batches.router,
    pooling.router,
    scenes.router,
    processes.router,
    handoffs.router,
    engines.router,
    adapters.router,
    usage.router,
    mcp.router,
    operations.router,
    operations.docs_router,
)
