"""Give a route what it needs of one request: its state, the gateway's services, its body as JSON."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from baton.admission.api_keys import StoredKey
from baton.admission.fair_queue import USUAL, Order, QueueLimits, watched_queue
from baton.admission.fair_threads import FairThreads
from baton.admission.tenants import Admission, Ticket
from baton.admission.usage import Usage
from baton.batches.service import Batches
from baton.config.groups import LimitSettings
from baton.config.settings import Settings
from baton.engines.engine import Engine
from baton.engines.fleet import Choice, Fleet
from baton.errors import (
    LONGEST_WORD,
    BatonError,
    GatewayOverloaded,
    ModelNotAllowed,
    OperatorKeyNeeded,
    UnsupportedMediaType,
)
from baton.http.body.json import is_small, parse_object
from baton.http.body.trial import TrialCompiler
from baton.images.reader import ImageReader
from baton.library.library import Library
from baton.pooling.jobs import SceneJobs
from baton.pooling.run import Pooling
from baton.relay.door import Relay
from baton.responses.service import StoredResponses
from baton.telemetry.ids import RequestContext
from baton.telemetry.logs import AuditLog
from baton.telemetry.metrics import GatewayMetrics, QueueMetrics

# Recognise the media types of request bodies.


UPLOAD_TYPES = frozenset(
    {
        "application/octet-stream",
        "image/geotiff",
        "image/jp2",
        "image/jpeg",
        "image/png",
        "image/tiff",
        "image/webp",
    }
)
"""Media types of `POST /pooling` and `/v1/scenes` whose body is a file, not JSON."""


FORM = "multipart/form-data"
"""Media type of `POST /v1/files`."""


def media_type_of(request: Request) -> str:
    """Return the body's media type in lower case, without its parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


KEY = "baton"
"""Its key in the ASGI scope, which no other file reads."""


@dataclass(slots=True)
class RequestState:
    """The state of one request.

    Attributes:
        ticket: the places that it holds in the admission queues.
        key: what is stored of the key that it came with; None: there are no keys.
        head: whether it is a `HEAD` request, whose content is left out.
        model: name of the engine that answers it; None until one is picked.
        error_code: code of the error that it was answered with, if any.
        error_reason: reason of that error, a label of the metric of rejections.
        large: work on its body is done in threads, however small the body is that was sent.
        send: sends ASGI messages to the server, past all middleware.
        operator: its key is an operator's; without keys, it came from this machine.
        valid: returns whether its key is still one.
        order: its place among its tenant's own requests.
        used: whether an engine was picked for it, so that it counts as usage.
        counted: its prompt tokens and generated tokens that are counted already.
        act: what an operator does by it, such as `engine.stop`: a line of the audit log.
        what: what that is done to, where its path does not say it.
    """

    context: RequestContext
    ticket: Ticket = field(default_factory=Ticket)
    key: StoredKey | None = None
    head: bool = False
    model: str | None = None
    error_code: str | None = None
    error_reason: str | None = None
    large: bool = False
    send: Send | None = None
    operator: bool = False
    valid: Callable[[], bool] = lambda: True
    order: Order = USUAL
    used: bool = False
    counted: tuple[int, int] = (0, 0)
    act: str | None = None
    what: str | None = None

    @property
    def key_id(self) -> str:
        """The id of its key; empty: there are no keys."""
        return self.key.id if self.key is not None else ""

    def uncounted(self) -> int:
        """Return the tokens that it has used and that are not counted yet."""
        return self.context.prompt_tokens + self.context.generated_tokens - sum(self.counted)

    def count(self, usage: Usage, *, requests: int = 0) -> None:
        """Count the tokens since the last count as its model's."""
        prompt, generated = self.context.prompt_tokens, self.context.generated_tokens
        usage.count(
            self.context.tenant,
            self.key_id,
            self.model or "",
            prompt=prompt - self.counted[0],
            generated=generated - self.counted[1],
            failed=requests > 0 and self.error_code is not None,
            requests=requests,
        )
        self.counted = (prompt, generated)

    def note(self, error: BatonError) -> None:
        """Note the error that the request is answered with.

        The exception itself is not kept: its traceback holds the request's body, and that holds this state.
        """
        self.error_code, self.error_reason = error.code, error.reason

    def attach(self, scope: Scope) -> None:
        """Store this state in the scope of its request."""
        scope[KEY] = self


def state_of(scope: Scope) -> RequestState:
    """Return the state of the request with this scope."""
    state = scope[KEY]
    assert isinstance(state, RequestState)
    return state


def context_of(request: Request) -> RequestContext:
    """Return the client and the ids of a request."""
    return state_of(request.scope).context


def require_operator(request: Request, act: str) -> None:
    """Refuse a request that is not an operator's; it is a line of the audit log either way.

    Args:
        act: what is done, for that line.

    Raises:
        OperatorKeyNeeded: its key is another one's, or there are no keys and the port is open to others.
    """
    state = state_of(request.scope)
    state.act = act
    if not state.operator:
        raise OperatorKeyNeeded()


LEAVE_WITHIN_S = 1.0
"""Seconds in which a stream that is handed on tells its client how it goes on."""


class Drain:
    """The drain of one gateway, with the requests that run.

    Args:
        on_begin: called when it begins, to end what would run for ever.

    Attributes:
        begun: the gateway is draining; new requests should go to another one.
    """

    def __init__(self, on_begin: Callable[[], None] = lambda: None) -> None:
        self.begun = False
        self._on_begin = on_begin
        self._running: dict[asyncio.Task[object], Callable[[], bool]] = {}
        self._cut: set[asyncio.Task[object]] = set()
        self._leaving: set[asyncio.Task[object]] = set()

    def begin(self) -> None:
        """Begin to drain."""
        self.begun = True
        self._on_begin()

    def cut(self) -> int:
        """End every request that still runs; returns their number.

        A stream that can be handed on ends by itself, within a moment.
        """
        running = self._running.keys() - self._cut - self._leaving
        leaving = {task for task in running if self._running[task]()}
        self._leaving |= leaving
        self._cancel(running - leaving)
        if leaving:
            asyncio.get_running_loop().call_later(LEAVE_WITHIN_S, self._cancel, leaving)
        return len(running)

    def _cancel(self, tasks: set[asyncio.Task[object]]) -> None:
        late = tasks & self._running.keys()
        self._cut |= late
        for task in late:
            task.cancel()

    def was_cut(self, task: asyncio.Task[object]) -> bool:
        """Return whether the drain ended the request of this task."""
        return task in self._cut

    @contextlib.contextmanager
    def watching(
        self, task: asyncio.Task[object], leave: Callable[[], bool] = lambda: False
    ) -> Iterator[None]:
        """Register the task of a request while it runs.

        Args:
            leave: has its stream handed on; returns whether it is.
        """
        self._running[task] = leave
        try:
            yield
        finally:
            del self._running[task]
            self._cut.discard(task)
            self._leaving.discard(task)


# Give every route access to the services of the running gateway.


Reload = Callable[[], Awaitable[dict[str, Any]]]
"""Reads the settings again, and returns what changed; raises `SettingsRefused` where nothing did."""


@dataclass
class Gateway:
    """The services of one gateway, created in `server.create_app`.

    Attributes:
        settings: those in force; a reload puts others in their place.
        reload: reads the settings again; None: they cannot be while the gateway runs.
    """

    settings: Settings
    fleet: Fleet
    metrics: GatewayMetrics
    library: Library
    relay: Relay
    responses: StoredResponses
    batches: Batches
    pooling: Pooling
    drain: Drain
    admission: Admission
    images: ImageReader
    body_threads: FairThreads
    compiler: TrialCompiler
    usage: Usage
    audit: AuditLog
    scenes: SceneJobs
    reload: Reload | None = None


def gateway_of(request: Request) -> Gateway:
    """Return the gateway that a request was sent to."""
    gateway = request.app.state.gateway
    assert isinstance(gateway, Gateway)
    return gateway


def begin_usage(request: Request, engine: Engine) -> None:
    """Count an engine as what answers a request.

    Raises:
        BatonError: the key has spent its tokens.
    """
    state = state_of(request.scope)
    gateway_of(request).usage.begin(state.key, state.context.request_id, state.uncounted)
    state.model, state.used = engine.name, True


def allowed(request: Request, model: object, choices: list[Choice]) -> list[Choice]:
    """Leave out the engines that a request's key may not use.

    Args:
        model: what the request asks for: the name of a group will do for its engines.

    Raises:
        ModelNotAllowed: none is left.
    """
    key = state_of(request.scope).key
    if key is None:
        return choices
    found = [each for each in choices if may_use(request, each[0].engine, str(model), each[1])]
    if not found:
        raise not_allowed(key, choices[0][1])
    return found


def may_use(request: Request, engine: Engine, *words: str) -> bool:
    """Return whether the key of a request may use an engine, or what one of these words means at it.

    Args:
        words: its names or its group's, or an adapter's, which then alone counts.
    """
    key, fleet = state_of(request.scope).key, gateway_of(request).fleet
    if key is None:
        return True
    if adapters := [word for word in words if word in engine.adapters]:
        return key.may_use(*adapters)
    groups = (word for word in words if fleet.in_group(word, fleet.supervisor(engine.base)))
    return key.may_use(engine.name, *engine.aliases, *groups)


def not_allowed(key: StoredKey, name: str) -> ModelNotAllowed:
    """Make the error of a key that names models, none of which has this name."""
    models = ", ".join(key.models)
    return ModelNotAllowed(
        f"This key may not use the model '{name[:LONGEST_WORD]}'; it may use: {models}.", param="model"
    )


@contextlib.contextmanager
def counted_for(request: Request, engine: Engine) -> Iterator[None]:
    """Count what is used inside as another model's than the request's own."""
    state, usage = state_of(request.scope), gateway_of(request).usage
    state.count(usage)
    own, state.model = state.model, engine.name
    try:
        yield
    finally:
        state.count(usage)
        state.model = own


def replay(body: bytes) -> Receive:
    """Return an ASGI `receive` that gives a body; then it waits, as for a client that stays."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not messages:
            await asyncio.get_running_loop().create_future()
        return messages.pop()

    return receive


# Read a request's body as JSON; work on large bodies runs in threads.


Done = TypeVar("Done")

THREADS = 4
"""More would not be faster, because they share one interpreter lock."""
RETRY_AFTER_S = 5


def body_threads(metrics: QueueMetrics, wait_s: float) -> FairThreads:
    """Create the threads of one gateway for large bodies.

    Args:
        wait_s: seconds a body may wait for a thread.
    """
    limits = QueueLimits(THREADS, wait_s=wait_s)
    return FairThreads(watched_queue(limits, _no_thread, metrics, "bodies"), "baton-body")


async def read_json(request: Request, limits: LimitSettings, *, instead: str | None = None) -> dict[str, Any]:
    """Return the body as a JSON object.

    Args:
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
