"""Write down what takes more than one request: retries, and waiting for a handoff."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from itertools import count
from typing import Any, TypeVar

from baton_client import routes
from baton_client.call import Call, Pause, Reply, Script
from baton_client.errors import (
    ApiError,
    BadAnswer,
    ConnectionLost,
    HandoffFailed,
    HandoffNotReady,
    NotFound,
    error_class,
)
from baton_client.retries import Retries, retry_after
from baton_client.routes import Start
from baton_client.values import Handoff

T = TypeVar("T")
FIRST_POLL_S, LONGEST_POLL_S = 0.05, 1.0


def exchange(call: Call[T], retries: Retries) -> Script[T]:
    """Send a call, again where `retries` say so, and read its answer.

    Raises:
        ConnectionLost: no answer came.
        ApiError: the answer is an error.
        BadAnswer: the answer is not what Baton would send.
    """
    for attempt in count():
        try:
            reply = yield call
        except ConnectionLost as lost:
            pause = retries.after_loss(call, lost, attempt)
            if pause is None:
                raise
        else:
            assert reply is not None
            pause = retries.after_reply(reply, attempt)
            if pause is None:
                return result_of(call, reply)
        yield Pause(pause)
    raise AssertionError("the loop ends by returning or raising")


def result_of(call: Call[T], reply: Reply) -> T:
    """Read a reply.

    Raises:
        ApiError: it is an error.
        BadAnswer: it is not what Baton would send.
    """
    if not 200 <= reply.status < 300:
        raise error_of(reply)
    try:
        return call.read(reply)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise BadAnswer(
            f"The answer to {call.method} {call.path} is not in Baton's form ({type(error).__name__}: "
            f"{error}). Check that base_url is the address of a Baton gateway."
        ) from error


def error_of(reply: Reply) -> ApiError:
    """Return the error that a reply reports, also where a proxy wrote it."""
    told: dict[str, Any] = {}
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        told = dict(json.loads(reply.content)["error"])
    message = told.get("message") or f"HTTP {reply.status} without a reason: it may not come from Baton."
    return error_class(reply.status)(
        reply.status,
        told.get("code"),
        str(message),
        told.get("param"),
        retry_after_s=retry_after(reply.headers),
        request_id=told.get("request_id"),
    )


def delete(handoff: Start, retries: Retries) -> Script[bool]:
    """Delete a handoff; returns whether it was there."""
    try:
        yield from exchange(routes.delete_handoff(handoff), retries)
    except NotFound:
        return False
    return True


def until_ready(
    handoff_id: str, timeout_s: float, retries: Retries, clock: Callable[[], float] = time.monotonic
) -> Script[Handoff]:
    """Ask for a handoff until it is ready.

    Raises:
        HandoffFailed: the request that saves it failed.
        HandoffNotReady: it is still pending after `timeout_s`.
        NotFound: it is unknown, or gone.
    """
    deadline, pause_s = clock() + timeout_s, FIRST_POLL_S
    while True:
        handoff = yield from exchange(routes.get_handoff(handoff_id), retries)
        if handoff.state == "ready":
            return handoff
        if handoff.state == "failed":
            raise HandoffFailed(f"The handoff {handoff_id} failed: create it again.")
        left = deadline - clock()
        if left <= 0:
            raise HandoffNotReady(
                f"The handoff {handoff_id} is still pending after {timeout_s:g} s: wait longer."
            )
        yield Pause(min(pause_s, left))
        pause_s = min(2 * pause_s, LONGEST_POLL_S)
