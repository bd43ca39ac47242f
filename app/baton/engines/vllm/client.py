"""The thin wrapper that vLLM's serving handlers get as their `engine_client`.

It stands where every request passes on its way into the engine: it puts the tenant's salt on the
prefix cache, and it notes why an engine failed, which vLLM's stream generators would turn into text
of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import structlog

from baton.engines.port import ImageInput, PlacedImage, TransferReport, TransferRequest
from baton.engines.vllm.errors import translate
from baton.engines.vllm.multimodal import Sent, hashes_of, strays
from baton.errors import BatonError, GenerationFailed, InvalidRequest, Unprocessable
from baton.telemetry.ids import RequestContext
from baton_kv.contract import transfer_params

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from baton.engines.vllm.image_prompts import ImagePrompts

log = structlog.get_logger("baton.engine")

DEAD_END = (
    "The model's tokens cannot spell what the request demands of the answer: loosen `structured_outputs`, "
    "`response_format` or the tool's schema, or keep to characters the model knows."
)
"""vLLM ends a request that samples under a grammar only where the grammar leaves no token."""


@dataclass(slots=True)
class Call:
    """One operation on its way through vLLM's handlers.

    Attributes:
        context: our ids for the request.
        salt: what separates this tenant's prefix cache from the others'; None: nothing to separate.
        failure: why the engine failed this request, once it has.
        transfer: what to load and save, for a request with a handoff.
        placeholder: the token id that stands for a latent step; None: the model does not think.
        images: what images are to the model.
        deltas: outputs hold only what is new since the last one.
        constrained: what may be said is constrained (`structured_outputs`, `response_format`, a named tool).
    """

    context: RequestContext
    salt: str | None = None
    failure: BatonError | None = None
    transfer: TransferRequest | None = None
    placeholder: int | None = None
    images: ImageInput = field(default_factory=ImageInput)
    deltas: bool = False
    constrained: bool = False

    async def watch(self, outputs: AsyncGenerator[Any, None], sent: Sent) -> AsyncIterator[Any]:
        """Pass the engine's outputs on, keep what ends them badly, and close them at once.

        The first of them tells whether the engine process has the images that were `sent`.
        """
        first = True
        async with aclosing(outputs):
            try:
                async for output in outputs:
                    self._count(output, first=first)
                    if first:
                        sent.settle(failed=failed(output))
                    first = False
                    if self.constrained and failed(output):
                        raise Unprocessable(DEAD_END)
                    if self.transfer is not None:
                        _note(self.transfer.report, output, deltas=self.deltas)
                    yield output
            except (asyncio.CancelledError, GeneratorExit):
                raise
            except Exception as error:  # the border to vLLM: kept, and told to the client by our stream
                self.failure = translate(error)
                if self.failure.status >= 500 and not self.failure.retryable:
                    log.error("engine_request_failed", exc_info=error)
                raise

    def _count(self, output: Any, *, first: bool) -> None:
        """Add an output's tokens to the request's; one that pools has no completions."""
        if first:
            self.context.prompt_tokens += len(output.prompt_token_ids or ())
        if self.deltas or output.finished:
            said = getattr(output, "outputs", ())
            completions = said if isinstance(said, list) else ()
            self.context.generated_tokens += sum(len(completion.token_ids) for completion in completions)


CURRENT_CALL: ContextVar[Call] = ContextVar("baton_current_call")
"""The call that the running handler works on; set by `VllmEngine.call` alone."""


class WatchedClient:
    """An `EngineClient` that is `AsyncLLM` but for `generate` and `encode`.

    Args:
        engine: the engine.
        images: puts images into prompts of token ids.
    """

    def __init__(self, engine: AsyncLLM, images: ImagePrompts) -> None:
        self._engine = engine
        self._images = images

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        call = CURRENT_CALL.get()
        call.deltas = sampling_params.output_kind.name == "DELTA"
        call.constrained = sampling_params.structured_outputs is not None
        _require_no_own_steps(call, prompt)
        if call.transfer is not None:
            _require_prompt(call, prompt)
            if call.transfer.moves_kv:
                extra = sampling_params.extra_args or {}
                wanted = _transfer_params(call.transfer, call.context)
                sampling_params.extra_args = extra | {"kv_transfer_params": wanted}
            if call.transfer.images:
                outputs = self._seeing(call, call.transfer.images, prompt, sampling_params, *args, **kwargs)
                return call.watch(outputs, self._sent([image.digest for image in call.transfer.images]))
        _require_read_images(call, prompt)
        _require_own_images(call, prompt)
        outputs = self._engine.generate(salted(prompt, call.salt), sampling_params, *args, **kwargs)
        return call.watch(outputs, self._sent(hashes_of(prompt)))

    async def _seeing(
        self, call: Call, images: Sequence[PlacedImage], prompt: Any, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        """The same for a prompt of token ids some of which stand for images."""
        prompt = await self._images.laid_over(prompt, images)
        _require_own_images(call, prompt)
        async with aclosing(self._engine.generate(salted(prompt, call.salt), *args, **kwargs)) as outputs:
            async for output in outputs:
                yield output

    def encode(self, prompt: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        call = CURRENT_CALL.get()
        _require_read_images(call, prompt)
        _require_own_images(call, prompt)
        outputs = self._engine.encode(salted(prompt, call.salt), *args, **kwargs)
        return call.watch(outputs, self._sent(hashes_of(prompt)))

    def _sent(self, hashes: list[str]) -> Sent:
        return Sent(self._engine.renderer.mm_processor_cache, hashes) if hashes else Sent()


def failed(output: Any) -> bool:
    """The engine process gave up on a request, perhaps before it had looked at all of it."""
    completions = getattr(output, "outputs", ())
    reasons = [item.finish_reason for item in completions] if isinstance(completions, list) else []
    return "error" in reasons or getattr(output, "error", None) is not None


def _transfer_params(transfer: TransferRequest, context: RequestContext) -> dict[str, Any]:
    """What the connector is told."""
    return transfer_params(
        save=transfer.save or False,
        scope="prompt" if transfer.prompt_only else None,
        load=transfer.load,
        limit=transfer.limit,
        tag=context.request_id,
    )


def _require_prompt(call: Call, prompt: Any) -> None:
    """See to it that the engine is given the transfer's prompt, and nothing vLLM made of the body instead.

    Raises:
        GenerationFailed: it is given another one; nothing is computed.
    """
    wanted = call.transfer.prompt if call.transfer is not None else None
    given = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
    if wanted is not None and list(given or ()) != wanted:
        log.error("relay_prompt_not_used")
        call.failure = GenerationFailed()
        raise call.failure


def _require_no_own_steps(call: Call, prompt: Any) -> None:
    """Refuse a prompt that holds more placeholders than the gateway put there.

    Raises:
        InvalidRequest: the client's own text or token ids hold the token that stands for a latent step.
    """
    if call.placeholder is None:
        return
    given = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
    meant = call.transfer.latent_steps if call.transfer is not None else 0
    if list(given or ()).count(call.placeholder) != meant:
        call.failure = InvalidRequest(
            f"The prompt holds the token {call.placeholder}, which stands for a latent step of this model: "
            "leave it out, and ask for steps with 'handoff.save.latent_steps'.",
            param="prompt",
        )
        raise call.failure


def _require_read_images(call: Call, prompt: Any) -> None:
    """See to it that the engine is given no image but those that were read of this request, by their names.

    By another's name an image would be taken for that one, whoever sent it.

    Raises:
        GenerationFailed: there is another; nothing is computed.
    """
    names, known = hashes_of(prompt), call.context.images
    if known is None or not names:
        return
    if not set(names) <= known if call.images.named else len(names) > len(known):
        log.error("image_not_read", names=names)
        call.failure = GenerationFailed()
        raise call.failure


def _require_own_images(call: Call, prompt: Any) -> None:
    """Refuse a prompt in which something stands for an image that is none.

    Such a token would take the place of an image that was sent, or be computed with what the model never
    learned; several models' code fails on it, and the engine with it.

    Raises:
        InvalidRequest: the client's own text or token ids hold it.
    """
    if strays(prompt, call.images.tokens):
        texts = ", ".join(f"'{text}'" for text in call.images.texts)
        call.failure = InvalidRequest(
            "The prompt, or the context it goes on from, holds a token that stands for an image of this "
            f"model (written {texts}) and belongs to none: leave it out; send images as parts of messages.",
            param="prompt",
        )
        raise call.failure


def _note(report: TransferReport, output: Any, *, deltas: bool) -> None:
    """Keep what a `RequestOutput` tells; its token ids are all so far, or only the new ones."""
    if not report.prompt_ids:
        report.prompt_ids = list(output.prompt_token_ids or ())
    report.cached = output.num_cached_tokens or report.cached
    completion = output.outputs[0]
    if output.finished:
        at_stop_string = isinstance(completion.stop_reason, str)
        # At a stop string the engine saves without being able to say so here.
        report.saves = output.kv_transfer_params is not None or at_stop_string
        report.ended_by_token = completion.finish_reason == "stop" and not at_stop_string
    said = completion.token_ids
    if deltas:
        report.output_ids.extend(said)
    else:
        report.output_ids = list(said)


def salted(prompt: Any, salt: str | None) -> Any:
    """The rendered prompt with the gateway's salt in place of whatever stood there."""
    if isinstance(prompt, dict):
        prompt.pop("cache_salt", None)
        if salt is not None:
            prompt["cache_salt"] = salt
    return prompt
