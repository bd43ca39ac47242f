"""Write down what takes more than one request: retries, waiting for a handoff or a scene."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from baton_client import routes
from baton_client.call import Call, Pause, Reply, Report, Script
from baton_client.errors import (
    ApiError,
    BadAnswer,
    ConnectionLost,
    HandoffFailed,
    HandoffNotReady,
    NotFound,
    SceneFailed,
    error_class,
)
from baton_client.retries import Retries, retry_after
from baton_client.routes import Parameter, Start
from baton_client.values import Handoff, KeptScene, Progress

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


def keep_scene(
    retries: Retries,
    model: str,
    scene: str | Path | bytes | Mapping[str, Any],
    folder: str | Path | None,
    progress: Report | None,
    key: str | None,
    media_type: str | None,
    parameters: Mapping[str, Parameter],
) -> Script[KeptScene]:
    """Send a scene as a job, follow it until it is done, and fetch its files.

    Raises:
        SceneFailed: the gateway refused it, or failed.
        BadAnswer: a file has a name that is none.
        FileNotFoundError: there is no such folder.
    """
    path = None if folder is None else Path(folder)
    if path is not None and not path.is_dir():
        raise FileNotFoundError(f"The files cannot be written: there is no folder {path}.")
    call = routes.begin_scene(model, scene, key or uuid4().hex, progress, media_type, parameters)
    kept = yield from exchange(call, retries)
    pause_s = FIRST_POLL_S
    while kept.state in ("queued", "running"):
        yield Pause(pause_s)
        pause_s = min(2 * pause_s, LONGEST_POLL_S)
        kept = yield from exchange(routes.get_scene(kept.id), retries)
        if progress is not None:
            progress(Progress("computing", kept.tiles_done or 0, kept.tiles))
    if kept.state != "done":
        error = kept.error or {}
        raise SceneFailed(str(error.get("message") or "The scene failed."), kept.id, error.get("code"))
    if path is None:
        return kept
    for name in kept.files:
        if Path(name).name != name or name.startswith("."):
            raise BadAnswer("The answer names a file that is outside of the folder.")
        yield from exchange(routes.scene_file(kept.id, name, path / name, progress), retries)
    return kept
