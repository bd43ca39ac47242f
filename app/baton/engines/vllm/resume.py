"""Resume a request whose engine was lost, at another of the same weights or at its own once it is back.

What a request has said is known in vLLM's front end: its `RequestState` holds the detokenizer, the log
probabilities, what is held back for stop strings. None of it is lost with an engine's core. So the state
moves into the front end of the engine that goes on, whose core gets the same request with what was said
behind its prompt. vLLM's handlers and parsers see one stream of outputs that goes on.

Before its first token every request may begin anew. Later a greedy one goes on with the very tokens that it
would have had, a sampled one with a valid sample, as does a seeded one, with other random numbers. Its
grammar accepts first what was said (`core.py`), its adapter is the one of the same files there, and its
images are sent again. What a core knows beside that is lost: requests that need it end as they would without
this, see `hindrance`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from copy import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import structlog
from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.outputs import STREAM_FINISHED, RequestOutput
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.engine.output_processor import RequestOutputCollector, RequestState

from baton.engines.transfers import TransferRequest
from baton.engines.vllm.core import SAID_KEY
from baton.engines.vllm.images import hashes_of
from baton.errors import BatonError
from baton.telemetry.ids import Cut

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    from baton.engines.adapters import Adapter
    from baton.engines.vllm.lora import Loaded

log = structlog.get_logger("baton.engine")

STATELESS: dict[str, Any] = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "bad_words": (None, []),
    "thinking_token_budget": None,
    "repetition_detection": None,
    "trace_decode_token_ids": None,
    "watermarking": (None, False),
}
"""Sampling parameters whose effect depends on what was said, and the values that have none."""
OURS = frozenset({"kv_transfer_params"})
"""What `extra_args` may hold: others' may be read by a logits processor that counts tokens."""


MOST_MOVES = 2
"""Times that a request may go on: one under which a third engine is lost is taken to be the cause.

Two, as engines of one machine may be lost in the same moment."""


class Streams:
    """Generating requests of one vLLM client.

    Args:
        client: the client; what it sends its core, and how it tells of its core's end, is noted from now on.
        find: waits for the streams of an engine that may go on with these, which may be of the same engine,
            and for which what it is given is true; None: none came in time.
        expect: called with the tag and the transfer of a request that goes on here.
        resumed: called for each request that went on elsewhere.
        name: of the engine.

    Attributes:
        adapter: finds a LoRA adapter as the engine holds it; None: it holds none.
    """

    adapter: Callable[[Adapter], Loaded] | None = None

    def __init__(
        self,
        client: AsyncLLM,
        find: Callable[[Callable[[Streams], bool]], Awaitable[Streams | None]],
        expect: Callable[[str, TransferRequest], None],
        resumed: Callable[[], None],
        name: str = "",
    ) -> None:
        self.client = client
        self.name = name
        self._find = find
        self._expect = expect
        self._resumed = resumed
        self._sent: dict[str, EngineCoreRequest] = {}
        self._unread: dict[RequestOutputCollector, RequestOutput] = {}
        self._crowd = 0
        self._aborts: set[asyncio.Task[None]] = set()
        core, processor = client.engine_core, client.output_processor
        self._send, self._propagate = core.add_request_async, processor.propagate_error
        core.add_request_async = self._note_and_send
        processor.propagate_error = self._keep_unread

    async def generate(
        self,
        prompt: Any,
        params: SamplingParams,
        request_id: str,
        *,
        transfer: TransferRequest | None = None,
        tag: str = "",
        resumed: Callable[[], None] = lambda: None,
        adapter: Adapter | None = None,
        cut: Cut | None = None,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate as `AsyncLLM.generate`, and go on elsewhere if the core is lost.

        Args:
            transfer: what the request loads and saves.
            tag: id of reports about it.
            resumed: called each time that it goes on.
            adapter: the LoRA adapter that it is computed with; None: none.
            cut: ends it before it is complete; None: nobody does.
            options: as of `AsyncLLM.generate`.

        Raises:
            EngineDeadError: the core was lost, and the request cannot go on, or no engine came in time.
            EngineGenerateError: vLLM failed otherwise.
        """
        at, queue, moves, held = self, None, 0, _Held(adapter)
        try:
            while queue is None:
                try:
                    queue = await at.client.add_request(request_id, prompt, params, **options)
                except EngineDeadError:
                    if hashes_of(prompt) and not _has_images(prompt):
                        raise  # that engine had them
                    at, moves = await at._next(moves, held, alone=False), moves + 1
                    if adapter is not None:
                        options["lora_request"] = held.request
                    if transfer is not None and transfer.moves_kv:
                        at._expect(tag, transfer)
                    resumed()
            finished = False
            while not finished:
                if cut is not None:
                    cut.end = partial(at._cut, queue, cut, transfer)
                try:
                    output = queue.get_nowait() or await queue.get()
                except EngineDeadError:
                    unread = at._unread.pop(queue, None)
                    if unread is not None and unread.finished:
                        yield unread
                        return
                    at, queue = await at._move(queue, moves, held, transfer, tag)
                    moves += 1
                    resumed()
                    if unread is not None:
                        yield unread
                    continue
                assert isinstance(output, RequestOutput)
                finished = output.finished
                if output is not STREAM_FINISHED:
                    yield output
        except (asyncio.CancelledError, GeneratorExit):
            if queue is not None:
                with contextlib.suppress(EngineDeadError):  # then there is nothing to abort
                    await at.client.abort(queue.request_id, internal=True)
            raise
        except (EngineDeadError, VLLMClientError, GracefulHTTPError):
            raise
        except Exception as error:
            if queue is not None:
                await at.client.abort(queue.request_id, internal=True)
            raise EngineGenerateError() from error
        finally:
            held.take(None)
            if cut is not None:
                cut.end = None
            if queue is not None:
                at._forget(queue, params.n)

    def _cut(self, queue: RequestOutputCollector, cut: Cut, transfer: TransferRequest | None) -> bool:
        """End a request where it stands: its last output comes next, with all that it has said."""
        processor = self.client.output_processor
        states = [state for state in processor.request_states.values() if state.queue is queue]
        if not states:
            return False
        state, request = states[0], self._sent.get(states[0].request_id)
        if len(states) > 1 or state.parent_req is not None:
            cut.why = "it has several answers"
        elif request is None or (why := unsure(request, state, transfer)) is not None:
            cut.why = "it was never sent" if request is None else why
        else:
            detokenizer: Any = state.detokenizer
            cut.prompt = list(state.prompt_token_ids or ())
            cut.said, cut.text = list(detokenizer.output_token_ids), detokenizer.output_text
        cut.ended = True
        gone = processor.abort_requests([each.request_id for each in states], internal=True)
        abort = asyncio.ensure_future(self._abort(gone))
        self._aborts.add(abort)
        abort.add_done_callback(self._aborts.discard)
        return True

    async def _abort(self, requests: list[str]) -> None:
        with contextlib.suppress(EngineDeadError):  # then there is nothing to abort
            await self.client.engine_core.abort_requests_async(requests)

    async def _next(self, moves: int, held: _Held, *, alone: bool) -> Streams:
        """Find the engine that goes on with a request, and hold its adapter there.

        Args:
            alone: whether it was the only request of the engine that was lost, and so perhaps the cause: it
                goes on at its own engine, or at one that has no others.
        """

        def fits(found: Streams) -> bool:
            lonely = found.name == self.name or not found.client.output_processor.request_states
            return (lonely or not alone) and held.is_at(found)

        if moves >= MOST_MOVES or (found := await self._find(fits)) is None:
            raise EngineDeadError()
        held.take(found)
        self._resumed()
        return found

    async def _move(
        self,
        queue: RequestOutputCollector,
        moves: int,
        held: _Held,
        transfer: TransferRequest | None,
        tag: str,
    ) -> tuple[Streams, RequestOutputCollector]:
        """Hand the states of a request, one for each of its answers, to the engine that goes on with it."""
        states = [
            state for state in self.client.output_processor.request_states.values() if state.queue is queue
        ]
        requests = [self._sent.get(state.request_id) for state in states]
        for state, request in zip(states, requests, strict=True):
            why = "it was never sent" if request is None else hindrance(request, state, transfer)
            if why is not None:
                log.warning("request_not_resumed", request_id=tag or None, reason=why)
                raise EngineDeadError()
        if not states:
            raise EngineDeadError()
        found = await self._next(moves, held, alone=self._crowd == 1)
        if transfer is not None and transfer.moves_kv:
            found._expect(tag, transfer)
        moved = RequestOutputCollector(states[0].output_kind, queue.request_id)
        for state in states:
            self.client.output_processor.request_states.pop(state.request_id, None)
            found._adopt(state, moved)
        try:
            for state, request in zip(states, requests, strict=True):
                assert request is not None
                found._sent[state.request_id] = request  # whole: it may have to move once more
                await found._send(continued(request, state, held.request))
        except EngineDeadError as error:
            moved.put(error)  # it is read next, and moves the request on
        return found, moved

    def _adopt(self, state: RequestState, queue: RequestOutputCollector) -> None:
        processor = self.client.output_processor
        state.queue = queue
        processor.request_states[state.request_id] = state
        processor.external_req_ids[state.external_req_id].append(state.request_id)
        if state.parent_req is not None:
            processor.parent_requests[state.parent_req.request_id] = state.parent_req
        self.client._run_output_handler()

    async def _note_and_send(self, request: EngineCoreRequest) -> None:
        if request.sampling_params is not None:  # what is pooled is not moved, and nothing would forget it
            self._sent[request.request_id] = request
        await self._send(request)

    def _keep_unread(self, error: Exception) -> None:
        """Keep the outputs that nobody has read yet: vLLM puts the error into their place."""
        states = self.client.output_processor.request_states.values()
        self._crowd = len({id(state.queue) for state in states})
        for state in states:
            if state.queue is not None and isinstance(state.queue.output, RequestOutput):
                self._unread[state.queue] = state.queue.output
        self._propagate(error)

    def _forget(self, queue: RequestOutputCollector, answers: int) -> None:
        queue.close()
        self._unread.pop(queue, None)
        for number in range(answers):
            self._sent.pop(f"{number}_{queue.request_id}", None)  # as `ParentRequest` names them
        self._sent.pop(queue.request_id, None)


def _has_images(prompt: Any) -> bool:
    """Return whether a rendered prompt holds its images: not where the engine had them already."""
    return all(item is not None for items in prompt["mm_kwargs"].values() for item in items)


def hindrance(
    request: EngineCoreRequest, state: RequestState, transfer: TransferRequest | None
) -> str | None:
    """Return why a request cannot go on at another core; None: it can."""
    params, detokenizer = request.sampling_params, state.detokenizer
    embedded = request.prompt_token_ids is None or request.prompt_embeds is not None
    if params is None or detokenizer is None or embedded:
        return "its prompt is not all token ids"
    if any(feature.data is None for feature in request.mm_features or ()):
        return "its prompt holds an image that only the lost engine had"
    if not detokenizer.output_token_ids:
        return None  # it begins anew
    for name, harmless in STATELESS.items():
        if getattr(params, name) not in (harmless if isinstance(harmless, tuple) else (harmless,)):
            return f"`{name}` depends on what was said"
    if not OURS.issuperset(params.extra_args or ()):
        return "`vllm_xargs` may depend on what was said"
    if transfer is not None and (
        transfer.prompt_only or transfer.moved or transfer.mixture or transfer.latent_steps
    ):
        return "its handoff is of the prompt alone, or of KV that was moved or thought"
    return None


def unsure(request: EngineCoreRequest, state: RequestState, transfer: TransferRequest | None) -> str | None:
    """Return why another request, with what was said behind its prompt, may not go on exactly; None: it does.

    Of this one nothing is known then but its token ids, and what its client says again.
    """
    if (why := hindrance(request, state, transfer)) is not None:
        return why
    params = request.sampling_params
    assert params is not None
    if request.mm_features:
        return "its prompt holds images"
    if transfer is not None and (transfer.salt is not None or transfer.latent_steps):
        return "it started from KV that was moved or thought"
    if params.structured_outputs is not None:
        return "a grammar constrains it"
    if params.seed is not None and params.temperature > 0:
        return "with its `seed` the random numbers of the beginning would come again"
    text: str | None = getattr(state.detokenizer, "output_text", None)
    if text is None:
        return "its tokens are not read as text"
    stops = [params.stop] if isinstance(params.stop, str) else params.stop or ()
    if any(text.endswith(stop[:length]) for stop in stops for length in range(1, len(stop))):
        return "its text may end within a stop string"
    return None


class _Held:
    """The LoRA adapter of a request, held at the engine that the request went on at.

    Args:
        adapter: None: it has none.

    Attributes:
        request: what vLLM is told there to compute with it.
    """

    def __init__(self, adapter: Adapter | None) -> None:
        self._adapter = adapter
        self._loaded: Loaded | None = None
        self.request: LoRARequest | None = None

    def is_at(self, found: Streams) -> bool:
        """Whether an engine holds the adapter, of the same files."""
        if self._adapter is None:
            return True
        if found.adapter is None:
            return False
        try:
            return found.adapter(self._adapter) is not None
        except BatonError:
            return False

    def take(self, found: Streams | None) -> None:
        """Hold it at an engine in place of the last one; None: at none any more."""
        if self._loaded is not None:
            self._loaded.end()
        self._loaded = self.request = None
        if self._adapter is not None and found is not None and found.adapter is not None:
            self._loaded = found.adapter(self._adapter)
            self._loaded.begin()
            self.request = self._loaded.request


def continued(
    request: EngineCoreRequest, state: RequestState, adapter: LoRARequest | None = None
) -> EngineCoreRequest:
    """Make the request that goes on behind what was said.

    Args:
        adapter: what the engine is told to compute with.
    """
    assert request.sampling_params is not None
    assert request.prompt_token_ids is not None
    assert state.detokenizer is not None
    said = list(state.detokenizer.output_token_ids)
    rest = copy(request)
    rest.lora_request = adapter
    # Under names of their own: what this front end has noted of its core's cache stays true.
    rest.mm_features = [
        replace(feature, mm_hash=f"{feature.mm_hash}.{uuid4().hex}") for feature in request.mm_features or ()
    ] or request.mm_features
    if not said:
        return rest
    params = request.sampling_params.clone()
    if params.max_tokens is not None:
        params.max_tokens -= len(said)
    params.min_tokens = max(0, params.min_tokens - len(said))
    params.prompt_logprobs = params.prompt_logprob_token_ids = None
    if params.seed is not None:
        # With the same one the random numbers of the beginning would come again; 64 bits hold it.
        params.seed = (params.seed + len(said)) % 2**63
    if params.structured_outputs is not None:
        params.extra_args = (params.extra_args or {}) | {SAID_KEY: len(said)}
    rest.prompt_token_ids, rest.sampling_params = [*request.prompt_token_ids, *said], params
    return rest
