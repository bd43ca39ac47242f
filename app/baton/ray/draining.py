"""Notice that Ray Serve drains this replica, and end its last requests with an error that clients can read.

Ray Serve calls no hook when it begins to drain: it waits for running requests, and kills the replica with
those that take too long. But it answers the health checks of its HAProxy with `DRAINING` from then on, at the
replica's own address, so that is what is asked here.
"""

from __future__ import annotations

import asyncio

import httpx
import structlog
from starlette.types import Scope

from baton.http.request_state import Drain

HEALTH_PATH = "/-/healthz"
DRAINING = "DRAINING"
"""What Ray Serve's health check of a replica answers while it is drained, with 503."""
ASK_EVERY_S = 1.0
ANSWER_WITHIN_S = 10.0
"""A replica with much to do, or a slow machine, answers late; without the answer its streams end torn."""
log = structlog.get_logger("baton.ray")


class DrainWatch:
    """Begins the gateway's drain when Ray Serve drains the replica.

    Args:
        drain: of the gateway.
        cut_after_s: seconds after which requests that still run are ended.
    """

    def __init__(self, drain: Drain, cut_after_s: float) -> None:
        self._drain = drain
        self._cut_after_s = cut_after_s
        self._task: asyncio.Task[None] | None = None

    def see(self, scope: Scope) -> None:
        """Learn the replica's own address from a request; without requests there is nothing to end."""
        server = scope.get("server")
        if self._task is None and server is not None and server[1]:
            host = f"[{server[0]}]" if ":" in server[0] else server[0]
            self._task = asyncio.create_task(self._run(f"http://{host}:{server[1]}{HEALTH_PATH}"))

    async def close(self) -> None:
        """Stop watching."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, address: str) -> None:
        async with httpx.AsyncClient(timeout=ANSWER_WITHIN_S, trust_env=False) as client:
            while not await _draining(client, address):  # noqa: ASYNC110  # it is not in this process's hands
                await asyncio.sleep(ASK_EVERY_S)
        self._drain.begin()
        log.info("draining", timeout_s=self._cut_after_s)
        await asyncio.sleep(self._cut_after_s)
        if ended := self._drain.cut():
            log.warning("requests_ended", count=ended)


async def _draining(client: httpx.AsyncClient, address: str) -> bool:
    try:
        answer = await client.get(address)
    except httpx.TransportError:
        return False
    return answer.status_code == 503 and answer.text == DRAINING
