"""The routes. `openai` is the table of those that an engine answers; `ROUTERS` lists all.

`/metrics` is not among them: `server.py` decides on which port it answers.
"""

from __future__ import annotations

from baton.http.routes import adapters, handoffs, mcp, openai, operations, pooling, responses

ROUTERS = (
    openai.router,
    responses.router,
    pooling.router,
    handoffs.router,
    adapters.router,
    mcp.router,
    operations.router,
    operations.docs_router,
)
