"""Read a request's body as JSON; work on large bodies runs in threads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request

from baton.admission.fair_queue import QueueLimits, watched_queue
from baton.admission.fair_threads import FairThreads
from baton.config.groups import LimitSettings
from baton.errors import BatonError, GatewayOverloaded, UnsupportedMediaType
from baton.http.media_types import media_type_of
from baton.http.request_state import context_of, state_of
from baton.http.state import gateway_of
from baton.http.validation.json_body import is_small, parse_object
from baton.telemetry.queues import QueueMetrics

Done = TypeVar("Done")

THREADS = 4
"""More would not be faster, because they share one interpreter lock."""
RETRY_AFTER_S = 5


def body_threads(metrics: QueueMetrics, wait_s: float) -> FairThreads:
    """Create the threads of one gateway for large bodies.

    Args:
        metrics: counts waiting requests.
        wait_s: seconds a body may wait for a thread.
    """
    limits = QueueLimits(THREADS, wait_s=wait_s)
    return FairThreads(watched_queue(limits, _no_thread, metrics, "bodies"), "baton-body")


async def read_json(request: Request, limits: LimitSettings, *, instead: str | None = None) -> dict[str, Any]:
    """Return the body as a JSON object.

    Args:
        request: whose body it is.
        limits: on what JSON may hold.
        instead: what the route takes, where JSON is not all; for the message.

    Raises:
        UnsupportedMediaType: the media type is not JSON.
        InvalidJson: the body is not JSON by RFC 8259, or not an object.
        InvalidRequest: the body holds too many values, or is nested too deep.
    """
    media_type = media_type_of(request)
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise UnsupportedMediaType(instead)
    body = await request.body()
    return await off_the_loop(request, partial(parse_object, body, limits))


async def off_the_loop(request: Request, work: Callable[[], Done]) -> Done:
    """Do work on a request's body: at once if the body is small, otherwise in a thread.

    Raises:
        GatewayOverloaded: no thread became free in time.
    """
    if not state_of(request.scope).large and is_small(await request.body()):
        return work()
    return await in_a_thread(request, work)


async def in_a_thread(request: Request, work: Callable[[], Done]) -> Done:
    """Do work in one of the threads for large bodies.

    Raises:
        GatewayOverloaded: no thread became free in time.
    """
    return await gateway_of(request).body_threads.run(context_of(request).tenant, work)


def _no_thread(_waited_s: float | None) -> BatonError:
    return GatewayOverloaded(
        "Too many large request bodies wait already; try again shortly.", retry_after_s=RETRY_AFTER_S
    )
