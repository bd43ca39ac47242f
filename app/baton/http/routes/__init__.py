"""The routes. `forwarded` is the table of those that pass a request on to an engine; `ROUTERS` lists all.

`/metrics` is not among them: `server.py` decides on which port it answers.
"""

from __future__ import annotations

from baton.http.routes import docs, forwarded, handoffs, health, models, peer, plugins, pooling, responses

ROUTERS = (
    forwarded.router,
    responses.router,
    pooling.router,
    handoffs.router,
    models.router,
    plugins.router,
    peer.router,
    health.router,
    docs.router,
)
