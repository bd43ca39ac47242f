"""Do what takes as long as a body is large in threads that tenants share, so that the event loop goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from starlette.requests import Request

from baton.admission.fair_queue import QueueLimits, watched_queue
from baton.admission.fair_threads import FairThreads
from baton.api.gateway import context_of, gateway_of
from baton.api.strict_json import is_small
from baton.errors import BatonError, GatewayOverloaded
from baton.telemetry.queues import QueueMetrics

Done = TypeVar("Done")

THREADS = 4
"""They share one interpreter, so more of them would do no more."""
RETRY_AFTER_S = 5


def body_threads(metrics: QueueMetrics, wait_s: float) -> FairThreads:
    """The threads of one gateway for large bodies.

    Args:
        metrics: counts who waits.
        wait_s: seconds a body may wait for one.
    """
    limits = QueueLimits(THREADS, wait_s=wait_s)
    return FairThreads(watched_queue(limits, _no_thread, metrics, "bodies"), "baton-body")


async def off_the_loop(request: Request, work: Callable[[], Done]) -> Done:
    """Do what takes as long as the request's body is large: at once for a small one, else in a thread.

    Raises:
        GatewayOverloaded: no thread came free in time.
    """
    if is_small(await request.body()):
        return work()
    return await in_a_thread(request, work)


async def in_a_thread(request: Request, work: Callable[[], Done]) -> Done:
    """Do work whose size the request's body does not tell in one of the threads for large bodies.

    Raises:
        GatewayOverloaded: no thread came free in time.
    """
    return await gateway_of(request).body_threads.run(context_of(request).tenant, work)


def _no_thread(_waited_s: float | None) -> BatonError:
    return GatewayOverloaded(
        "Too many large bodies wait to be worked on already; try again shortly.", retry_after_s=RETRY_AFTER_S
    )
