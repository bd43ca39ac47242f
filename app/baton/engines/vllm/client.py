"""Wrap the engine client that vLLM's serving handlers call, to check every prompt and watch every output.

Every request passes here on its way into the engine: the wrapper sets the tenant's prefix-cache salt, refuses
prompts with placeholder tokens that are not the gateway's, and notes why the engine failed, which vLLM's
stream generators would turn into text of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import structlog
import torch
from pydantic_core import to_json

from baton.engines.backend import ImageInput
from baton.engines.json_schemas import not_held
from baton.engines.transfers import TransferChooser, TransferReport, TransferRequest
from baton.engines.vllm.errors import translate
from baton.engines.vllm.images import Sent, hashes_of, image_positions, stray_placeholders
from baton.engines.vllm.lora import Loaded, held
from baton.errors import (
    BatonError,
    ContextTooLong,
    EngineUnavailable,
    GenerationFailed,
    InvalidRequest,
    Unprocessable,
)
from baton.telemetry.ids import CUT_HEADER, RESUMED_HEADER, UNHELD_HEADER, Cut, RequestContext
from baton_kv.contract import PARAMS_KEY, transfer_params

if TYPE_CHECKING:
    from vllm.logprobs import Logprob
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    from baton.engines.adapters import Adapter
    from baton.engines.vllm.custom_tools import InputGrammar, ToolNames
    from baton.engines.vllm.images import ImagePrompts
    from baton.engines.vllm.resume import Streams


AT_ONCE = 64
"""Tokens that are read without a pause: a millisecond or two of the event loop."""
CUT_WITHIN = 8
"""Most tokens before a cut that are tokenized again with the text between the last of them and the cut."""


@dataclass(frozen=True)
class AnswerText:
    """Finds the tokens of an answer that say the text which its client received.

    Attributes:
        tokenizer: the model's tokenizer.
        special: token ids that no text holds.
        params: how the answer was sampled and read.
    """

    tokenizer: Any
    special: frozenset[int]
    params: SamplingParams

    async def tokens(self, report: TransferReport, text: str) -> list[int] | None:
        """Return the token ids of an answer as its client received it.

        Left out are a token or text that stopped it, special tokens that no text shows, and a character that
        the answer's last tokens only begin. What remains of a token in which a stop string began is tokenized
        again.

        Args:
            report: the ids of the prompt and of the generated tokens.

        Returns:
            None: no token ids say this text.
        """
        kept, shown, unshown, found = list[int](), list[str](), list[int](), 0
        pieces = await self._pieces(report.prompt_ids, report.output_ids)
        for token, piece in zip(report.output_ids, pieces, strict=True):
            if not piece:
                unshown += [token] if token not in self.special else []
            elif text.startswith(piece, found):
                kept += [*unshown, token]
                shown += [*([""] * len(unshown)), piece]
                unshown, found = [], found + len(piece)
            else:
                break
        return kept if found == len(text) else await self._cut(report.prompt_ids, kept, shown, text)

    async def _cut(
        self, prompt: list[int], kept: list[int], shown: Sequence[str], text: str
    ) -> list[int] | None:
        """Return token ids that begin with most of `kept` and say `text`."""
        for count in range(len(kept), max(-1, len(kept) - CUT_WITHIN), -1):
            rest = text[len("".join(shown[:count])) :]
            for written in (rest, rest.removeprefix(" ")):  # some tokenizers write a space before every text
                ids: list[int] = self.tokenizer.encode(written, add_special_tokens=False)
                if "".join(await self._pieces([*prompt, *kept[:count]], ids)) == rest:
                    return [*kept[:count], *ids]
        return None

    async def _pieces(self, before: list[int], tokens: Sequence[int]) -> list[str]:
        """Return the text that each token adds to those before, as vLLM's own detokenizer reads it."""
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer  # takes seconds, and is there by now

        params = SimpleNamespace(
            stop=None,
            min_tokens=0,
            include_stop_str_in_output=False,
            skip_special_tokens=self.params.skip_special_tokens,
            spaces_between_special_tokens=self.params.spaces_between_special_tokens,
        )
        request: Any = SimpleNamespace(
            request_id="", sampling_params=params, prompt_token_ids=before, prompt_embeds=None
        )
        detokenizer: Any = IncrementalDetokenizer.from_new_request(self.tokenizer, request)
        pieces = list[str]()
        for number, token in enumerate(tokens, 1):
            read = len(detokenizer.output_text)
            detokenizer.update([token], stop_terminated=False)
            pieces.append(detokenizer.output_text[read:])
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
        return pieces


def special_tokens(tokenizer: Any) -> frozenset[int]:
    """Return the token ids of a tokenizer that are no text; of None, none."""
    if tokenizer is None:
        return frozenset()
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset([*tokenizer.all_special_ids, *(token for token, each in added.items() if each.special)])


def note_space_marker(tokenizer: Any) -> None:
    """Note how a tokenizer marks a space at a word's beginning, which vLLM asks for log probabilities.

    vLLM reads it from all of the tokenizer's JSON, at the first such answer, on the event loop: of 49,000
    tokens that takes it a tenth of a second, of 260,000 a second. Here only the part is read that says it.
    """
    from vllm.tokenizers import detokenizer_utils  # takes seconds, and is there by now

    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is None:
        return  # vLLM reads nothing
    splitter = backend.pre_tokenizer
    read = splitter.__getstate__().decode() if splitter is not None else "null"
    part = SimpleNamespace(backend_tokenizer=SimpleNamespace(to_str=lambda: f'{{"pre_tokenizer": {read}}}'))
    marker = detokenizer_utils.get_leading_space_marker(part)
    setattr(tokenizer, detokenizer_utils._CACHED_MARKER_KEY, marker)


# The log probabilities that an engine can give for an audit, and how exact they are.

AUDITED_TOKENS = 5
"""Tokens whose log probabilities an audited request notes."""
FLOAT32_ROUNDING_NATS = 0.001
HALF_ROUNDING_NATS = 1.0
"""In bfloat16 and float16 a sum in another order shows: two computations of one prompt were seen to differ by
up to 0.5 nats."""


def audited_tokens(client: AsyncLLM) -> int:
    """Count the tokens whose raw log probabilities an engine may be asked for, at most `AUDITED_TOKENS`.

    0: its log probabilities depend on each request's temperature and penalties, or it gives none.
    """
    model = client.model_config
    if model.logprobs_mode != "raw_logprobs":
        return 0
    return AUDITED_TOKENS if model.max_logprobs < 0 else min(AUDITED_TOKENS, model.max_logprobs)


def rounding_nats(client: AsyncLLM) -> float:
    """Return by how many nats log probabilities of two computations of one prompt may differ by rounding."""
    return FLOAT32_ROUNDING_NATS if client.model_config.dtype is torch.float32 else HALF_ROUNDING_NATS


def likeliest(place: Mapping[int, Logprob], count: int) -> dict[int, float]:
    """Return the log probabilities of the `count` likeliest tokens at one place of an answer, by token id.

    vLLM adds the token that was sampled, which is left out if it is less likely. Empty: an entry is minus
    infinity, as where vLLM pads the rows of a batch.
    """
    found = {
        token: each.logprob for token, each in place.items() if each.rank is not None and each.rank <= count
    }
    return {} if any(math.isinf(value) for value in found.values()) else found


log = structlog.get_logger("baton.engine")

GRAMMARS = ("json", "regex", "choice", "grammar", "structural_tag")
"""What vLLM's `StructuredOutputsParams` may hold to compile."""
DEAD_END = (
    "The model's tokens cannot spell what the request demands of the answer: loosen `structured_outputs`, "
    "`response_format` or the tool's schema, or keep to characters the model knows."
)
"""vLLM fails a constrained request when the grammar allows none of the model's tokens."""


@dataclass(slots=True)
class Call:
    """One operation that vLLM's handlers work on.

    Attributes:
        context: ids and tenant of the request; receives its numbers of tokens.
        salt: the tenant's prefix-cache salt; None: there is only one tenant.
        failure: why the engine failed this request; None: it has not.
        transfer: what to load and save, for a request with a handoff.
        chooser: chooses that for a request without one; None: nothing is loaded or saved then.
        expect: called with the tag and the transfer of a prompt, before reports about it come.
        chosen: number of transfers that `chooser` has chosen.
        placeholder: token id that stands for a latent step; None: the engine was configured without `latent`.
        images: how the model takes images.
        deltas: whether each output holds only the tokens since the last one.
        asked: most tokens that the answer may have, by the request; None: it does not say.
        constrained: whether a grammar constrains the answer, e.g. by `response_format` or a named tool.
        audited_tokens: most tokens whose raw log probabilities the engine may be asked for; 0: it has none.
        grammars: grammars that custom tools' inputs are checked by, because nothing constrained them.
        names: what the client calls its tools; None: as vLLM does.
        noting: the audited transfers whose first token's log probabilities the engine was asked for.
        ended: why each of the answers ended, by its index.
        cut: whether one of them was cut, by a limit or by a stop string.
        unclosed: whether the cut was within a call of a tool.
        adapter: the LoRA adapter that the request is computed with; None: none.
        cut_text: reads what an answer has said that was ended where it stands.
        counted: the prompt tokens and the generated ones that it has added to the context's.
    """

    context: RequestContext
    salt: str | None = None
    failure: BatonError | None = None
    transfer: TransferRequest | None = None
    chooser: TransferChooser | None = None
    expect: Callable[[str, TransferRequest], None] = lambda _tag, _transfer: None
    chosen: int = 0
    placeholder: int | None = None
    images: ImageInput = field(default_factory=ImageInput)
    deltas: bool = False
    asked: int | None = None
    constrained: bool = False
    audited_tokens: int = 0
    grammars: Mapping[str, InputGrammar] = field(default_factory=dict)
    names: ToolNames | None = None
    noting: set[TransferRequest] = field(default_factory=set)
    ended: dict[int, str] = field(default_factory=dict)
    cut: bool = False
    unclosed: bool = False
    adapter: Loaded | None = None
    cut_text: AnswerText | None = None
    counted: tuple[int, int] = (0, 0)

    async def watch(
        self,
        outputs: AsyncGenerator[Any, None],
        sent: Sent,
        transfer: TransferRequest | None = None,
        text: AnswerText | None = None,
    ) -> AsyncIterator[Any]:
        """Pass the engine's outputs on, note the error that ends them, and close them at once.

        The first output shows whether the engine process has received the images that were `sent`.

        Args:
            transfer: what the engine loads and saves beside this prompt; receives the report.
            text: reads the answer of a transfer that saves it.
        """
        first, said = True, list[str]()
        async with aclosing(outputs):
            try:
                async for output in outputs:
                    self._count(output, first=first)
                    if first:
                        sent.settle(failed=failed(output))
                    first = False
                    if self.constrained and failed(output):
                        raise Unprocessable(DEAD_END)
                    if transfer is not None:
                        _note(transfer.report, output, deltas=self.deltas)
                        if not self.deltas:
                            said.clear()
                        said.append(output.outputs[0].text)
                        if output.finished and text is not None:
                            transfer.report.answer_ids = await text.tokens(transfer.report, "".join(said))
                        if transfer in self.noting:
                            self._note_first_token(transfer, output)
                        _correct(output, transfer.report)
                        if output.finished and transfer is not self.transfer and self.chooser is not None:
                            self.chooser.ended(transfer)
                    if output.finished and self.context.cut is not None and self.context.cut.ended:
                        await self._read_cut(self.context.cut)
                    if output.finished:
                        self.context.cached_tokens += getattr(output, "num_cached_tokens", None) or 0
                    yield output
            except (asyncio.CancelledError, GeneratorExit):
                raise
            except Exception as error:  # the border to vLLM: our stream reports it to the client
                self.failure = translate(error)
                if self.failure.status >= 500 and not self.failure.retryable:
                    log.error("engine_request_failed", exc_info=error)
                raise

    async def _read_cut(self, cut: Cut) -> None:
        """Leave out of what was said a character that its last tokens only begin: nobody received it."""
        if cut.why is not None or self.cut_text is None:
            return
        report = TransferReport(prompt_ids=cut.prompt, output_ids=cut.said)
        said = await self.cut_text.tokens(report, cut.text)
        if said is None or said != cut.said[: len(said)]:
            cut.why = "no token ids say what was received"
        else:
            cut.said = said

    def transfer_of(self, prompt: Any, sampling_params: Any) -> TransferRequest | None:
        """Choose the KV to load and save beside a prompt, and put it into the sampling parameters."""
        transfer, tag = self.transfer, self.context.request_id
        if transfer is None and self.chooser is not None and (images := image_positions(prompt)) is not None:
            # The engine computes all of a prompt whose log probabilities are asked for.
            loads, ids = sampling_params.prompt_logprobs is None, prompt["prompt_token_ids"]
            transfer = self.chooser.choose(ids, images, loads=loads, saves=sampling_params.n == 1)
            if transfer is not None:
                self.chosen += 1
                tag = tag if self.chosen == 1 else f"{tag}.{self.chosen}"
        if transfer is not None and transfer.audited and self._can_note(sampling_params):
            # Handlers show log probabilities only to clients that asked for them.
            sampling_params.logprobs = self.audited_tokens
            self.noting.add(transfer)
        if transfer is not None and transfer.computed:
            sampling_params.skip_reading_prefix_cache = True
        if transfer is not None and transfer.moves_kv:
            self.expect(tag, transfer)
            extra = sampling_params.extra_args or {}
            used = self.adapter.adapter if self.adapter is not None else None
            sampling_params.extra_args = extra | {"kv_transfer_params": _transfer_params(transfer, tag, used)}
        return transfer

    def _can_note(self, sampling_params: Any) -> bool:
        """Return whether the log probabilities of the first token are the model's own, and not asked for.

        vLLM applies a grammar before it takes them.
        """
        theirs = (sampling_params.logprobs, getattr(sampling_params, "logprob_token_ids", None))
        return bool(self.audited_tokens) and not self.constrained and theirs == (None, None)

    def _note_first_token(self, transfer: TransferRequest, output: Any) -> None:
        places = output.outputs[0].logprobs
        if places:
            self.noting.discard(transfer)
            transfer.report.first_token = likeliest(places[0], self.audited_tokens)

    def _count(self, output: Any, *, first: bool) -> None:
        """Add an output's tokens to the request's; outputs of pooling have no completions."""
        prompt, generated = self.counted
        if first:
            self.count(prompt + len(output.prompt_token_ids or ()), generated)
        if self.deltas or output.finished:
            outputs = getattr(output, "outputs", ())
            completions = outputs if isinstance(outputs, list) else ()
            said = sum(len(completion.token_ids) for completion in completions)
            self.count(self.counted[0], generated + said)
            for completion in completions:
                if completion.finish_reason is not None:
                    self.ended[completion.index] = completion.finish_reason
                    self.cut |= completion.finish_reason != "stop" or isinstance(completion.stop_reason, str)

    def count(self, prompt: int, generated: int) -> None:
        """Set the tokens of this call: by its outputs or, as for beam search, by what the answer says."""
        self.context.prompt_tokens += prompt - self.counted[0]
        self.context.generated_tokens += generated - self.counted[1]
        self.counted = prompt, generated


CURRENT_CALL: ContextVar[Call] = ContextVar("baton_current_call")
"""The call that the running handler works on; set by `VllmEngine.call` and while its stream is read."""


class WatchedClient:
    """An `EngineClient` that checks and watches `generate` and `encode`, and is its `AsyncLLM` otherwise.

    Args:
        engine: vLLM's client.
        images: puts images into prompts of token ids.
        audited_tokens: see `Call.audited_tokens`.
        streams: generates in its place, and goes on elsewhere where its core is lost; None: nothing does.
    """

    def __init__(
        self,
        engine: AsyncLLM,
        images: ImagePrompts,
        audited_tokens: int = 0,
        streams: Streams | None = None,
    ) -> None:
        self._engine = engine
        self._streams = streams
        self._images = images
        self._audited_tokens = audited_tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        call = CURRENT_CALL.get()
        with _noting(call):
            return self._generate(call, prompt, sampling_params, *args, **kwargs)

    def _generate(
        self, call: Call, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any
    ) -> AsyncIterator[Any]:
        call.deltas = sampling_params.output_kind.name == "DELTA"
        call.constrained = sampling_params.structured_outputs is not None
        call.audited_tokens = self._audited_tokens
        if call.context.cut is not None:  # special tokens too: the model has seen them
            tokenizer = self._engine.renderer.tokenizer
            call.cut_text = AnswerText(tokenizer, frozenset(), sampling_params)
        if call.constrained:
            _note_unheld(call, sampling_params.structured_outputs)
        self._refuse_no_token(call, sampling_params)
        _require_adapter(call, kwargs.get("lora_request"))
        _refuse_latent_placeholders(call, prompt)
        _require_prompt(call, prompt)
        if call.asked is not None:
            _note_cut(call, call.asked, prompt, self._engine.model_config.max_model_len)
        transfer = call.transfer_of(prompt, sampling_params)
        if transfer is not None:
            placed = [each.ref for each in transfer.images]
            transfer.report.images = placed or image_positions(prompt) or ()
        saves = transfer is not None and transfer is call.transfer and transfer.saves_answer
        text = self._answer_text(sampling_params) if saves else None
        if transfer is not None and transfer.images:
            outputs = self._generate_with_images(call, transfer, prompt, sampling_params, *args, **kwargs)
            outputs = _after_trial(call, sampling_params, outputs)
            sent = self._sent([each.image.digest for each in transfer.images])
            return call.watch(held(call.adapter, outputs), sent, transfer, text)
        _require_read_images(call, prompt)
        _refuse_image_placeholders(call, prompt)
        outputs = self._stream(call, transfer, salted(prompt, call.salt), sampling_params, *args, **kwargs)
        outputs = _after_trial(call, sampling_params, outputs)
        sent = self._sent(hashes_of(prompt))
        return call.watch(held(call.adapter, outputs), sent, transfer, text)

    def _refuse_no_token(self, call: Call, params: SamplingParams) -> None:
        """Refuse constraints that can leave no token, where vLLM would answer with token 0 again and again.

        Raises:
            InvalidRequest: `bad_words`, or `min_tokens`, can take away all of `allowed_token_ids`.
        """
        allowed = set(params.allowed_token_ids or ())
        if not allowed or not (params.bad_words or params.min_tokens):
            return
        read, renderer = params.clone(), self._engine.renderer
        generation = self._engine.input_processor.generation_config_fields
        read.update_from_generation_config(generation, renderer.get_eos_token_id())
        if renderer.tokenizer is not None:
            with contextlib.suppress(ValueError):  # which vLLM raises itself
                read.update_from_tokenizer(renderer.tokenizer)
        stops = read.all_stop_token_ids if params.min_tokens else set()
        lasts: dict[tuple[int, ...], set[int]] = {(): set()}
        for word in read.bad_words_token_ids or ():
            lasts.setdefault(tuple(word[:-1]), set()).add(word[-1])
        if not allowed <= stops.union(*lasts.values()):
            return
        lengths = {len(past) for past in lasts}
        for past in lasts:
            ends = [past[len(past) - length :] for length in lengths if length <= len(past)]
            banned = set[int]().union(*(lasts.get(end, ()) for end in ends))
            banned |= stops if len(past) < params.min_tokens else set()
            if allowed <= banned and allowed.issuperset(past):
                raise InvalidRequest(
                    "allowed_token_ids: 'bad_words', and 'min_tokens' of those that end an answer, can take "
                    "away every one of them: allow further tokens.",
                    param="allowed_token_ids",
                )

    def _answer_text(self, params: SamplingParams) -> AnswerText:
        """Make the reader of an answer; in gpt-oss's, special tokens separate thoughts from words."""
        tokenizer, config = self._engine.renderer.tokenizer, self._engine.model_config.hf_config
        shown = not params.skip_special_tokens or config.model_type == "gpt_oss"
        return AnswerText(tokenizer, frozenset() if shown else special_tokens(tokenizer), params)

    def _stream(
        self,
        call: Call,
        transfer: TransferRequest | None,
        prompt: Any,
        params: SamplingParams,
        request_id: str,
        **options: Any,
    ) -> AsyncGenerator[Any, None]:
        if self._streams is None:
            alone: AsyncGenerator[Any, None] = self._engine.generate(prompt, params, request_id, **options)
            return alone
        extra = params.extra_args or {}
        tag = extra.get("kv_transfer_params", {}).get(PARAMS_KEY, {}).get("tag", "")

        def resumed() -> None:
            headers = call.context.answer_headers
            headers[RESUMED_HEADER] = str(int(headers.get(RESUMED_HEADER, 0)) + 1)

        return self._streams.generate(
            prompt,
            params,
            request_id,
            transfer=transfer,
            tag=tag,
            resumed=resumed,
            adapter=call.adapter.adapter if call.adapter is not None else None,
            cut=call.context.cut,
            **options,
        )

    async def _generate_with_images(
        self, call: Call, transfer: TransferRequest, prompt: Any, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        """Generate from a prompt of token ids that holds images."""
        prompt = await self._images.add(prompt, transfer.images)
        _refuse_image_placeholders(call, prompt)
        stream = self._stream(call, transfer, salted(prompt, call.salt), *args, **kwargs)
        async with aclosing(stream) as outputs:
            async for output in outputs:
                yield output

    def encode(self, prompt: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        call = CURRENT_CALL.get()
        with _noting(call):
            _require_read_images(call, prompt)
            _refuse_image_placeholders(call, prompt)
        outputs = self._engine.encode(salted(prompt, call.salt), *args, **kwargs)
        return call.watch(outputs, self._sent(hashes_of(prompt)))

    def _sent(self, hashes: list[str]) -> Sent:
        return Sent(self._engine.renderer.mm_processor_cache, hashes) if hashes else Sent()


@contextlib.contextmanager
def _noting(call: Call) -> Iterator[None]:
    """Note why a prompt is refused, which vLLM's handlers would turn into text of their own."""
    try:
        yield
    except BatonError as error:
        call.failure = error
        raise


def _after_trial(
    call: Call, sampling_params: Any, outputs: AsyncGenerator[Any, None]
) -> AsyncGenerator[Any, None]:
    """Compile a prompt's grammar on trial before the engine gets it, whatever the grammar was made of."""
    made, try_grammar = sampling_params.structured_outputs, call.context.try_grammar
    if made is None or try_grammar is None:
        return outputs

    async def tried() -> AsyncGenerator[Any, None]:
        async with aclosing(outputs):
            await try_grammar({kind: getattr(made, kind) for kind in GRAMMARS})
            async for output in outputs:
                yield output

    return tried()


def failed(output: Any) -> bool:
    """Return whether the engine process failed a request, perhaps before it had read all of it."""
    completions = getattr(output, "outputs", ())
    reasons = [item.finish_reason for item in completions] if isinstance(completions, list) else []
    return "error" in reasons or getattr(output, "error", None) is not None


def _transfer_params(transfer: TransferRequest, tag: str, adapter: Adapter | None) -> dict[str, Any]:
    """Return the transfer in the connector's terms."""
    return transfer_params(
        adapter={"name": adapter.name, "digest": adapter.digest} if adapter is not None else None,
        save=transfer.save or False,
        scope="prompt" if transfer.prompt_only else None,
        load=transfer.load,
        limit=transfer.limit,
        moved=[part.model_dump() for part in transfer.moved],
        apart=transfer.salt,
        mixture=transfer.mixture.model_dump() if transfer.mixture is not None else None,
        least=transfer.least or None,
        tag=tag,
    )


def _require_adapter(call: Call, used: LoRARequest | None) -> None:
    """Check that vLLM computes with the adapter whose KV the request may load and save.

    Raises:
        EngineUnavailable: the adapter was replaced since the request came.
        GenerationFailed: it would compute with another one; nothing is computed.
    """
    wanted = call.adapter.request.lora_int_id if call.adapter is not None else None
    if (used.lora_int_id if used is not None else None) != wanted:
        if call.adapter is not None and call.adapter.leaves:
            raise EngineUnavailable("The LoRA adapter was replaced as the request began; try again.")
        log.error("adapter_not_used", wanted=wanted)
        raise GenerationFailed()


def _require_prompt(call: Call, prompt: Any) -> None:
    """Check that the engine gets the transfer's prompt, not one that vLLM rendered from the body.

    Raises:
        GenerationFailed: it would get another prompt; nothing is computed.
    """
    wanted = call.transfer.prompt if call.transfer is not None else None
    given = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
    if wanted is not None and list(given or ()) != wanted:
        log.error("relay_prompt_not_used")
        raise GenerationFailed()


def _note_unheld(call: Call, made: Any) -> None:
    """Note in the answer's headers which keywords of its schemas the grammar leaves out."""
    found = set[str]()
    for kind, text in (("json", made.json), ("structural_tag", made.structural_tag)):
        given = text if isinstance(text, str) else to_json(text).decode() if text else ""
        if given:
            with contextlib.suppress(ValueError, RecursionError):  # which vLLM refuses
                schemas = [json.loads(given)] if kind == "json" else _schemas_of(json.loads(given))
                found |= set[str]().union(*(not_held(schema, alone=kind == "json") for schema in schemas))
    if found:
        call.context.answer_headers[UNHELD_HEADER] = ", ".join(sorted(found))


def _schemas_of(tag: Any) -> Iterator[Any]:
    """Yield the schemas in a structural tag."""
    left = [tag]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            yield from (value[key] for key in ("json_schema", "schema") if isinstance(value.get(key), dict))
        inner = value.items() if isinstance(value, dict) else enumerate(value)
        left += [
            each
            for key, each in inner
            if isinstance(each, dict | list) and key not in ("json_schema", "schema")
        ]


def _note_cut(call: Call, asked: int, prompt: Any, longest: int) -> None:
    """Note in the answer's headers to how many tokens vLLM cuts it, because its prompt leaves no more.

    Raises:
        ContextTooLong: answers are not cut.
    """
    given = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
    if given is None or asked <= (left := longest - len(given)):
        return
    if not call.context.cuts_max_tokens:
        raise ContextTooLong(
            f"The prompt has {len(given)} tokens and leaves {left} of the model's {longest}; {asked} were "
            "asked for (setting limits.cut_max_tokens).",
            param="max_tokens",
        )
    before = int(call.context.answer_headers.get(CUT_HEADER, left))
    call.context.answer_headers[CUT_HEADER] = str(min(before, left))  # of several prompts the longest's


def _refuse_latent_placeholders(call: Call, prompt: Any) -> None:
    """Refuse a prompt that holds more placeholders than the gateway put there.

    Raises:
        InvalidRequest: the client's own text or token ids hold the placeholder of a latent step.
    """
    if call.placeholder is None:
        return
    given = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
    wanted = call.transfer.latent_steps if call.transfer is not None else 0
    if list(given or ()).count(call.placeholder) != wanted:
        raise InvalidRequest(
            f"The prompt holds the token {call.placeholder}, which stands for a latent step of this model: "
            "leave it out, and ask for steps with 'handoff.save.latent_steps'.",
            param="prompt",
        )


def _require_read_images(call: Call, prompt: Any) -> None:
    """Check that the engine gets only images that Baton has read for this request, under their digests.

    Under another image's digest, an image would be answered from that one's cache entry, whoever sent it.

    Raises:
        GenerationFailed: the prompt holds another image; nothing is computed.
    """
    names, known = hashes_of(prompt), call.context.images
    if known is None or not names:
        return
    if not set(names) <= known if call.images.named else len(names) > len(known):
        log.error("image_not_read", names=names)
        raise GenerationFailed()


def _refuse_image_placeholders(call: Call, prompt: Any) -> None:
    """Refuse a prompt with an image placeholder token that belongs to no image.

    Such a token would take the place of an image that was sent, or be computed with an embedding that was
    never trained; the code of several models fails on it, and the engine with it.

    Raises:
        InvalidRequest: the client's own text or token ids hold such a token.
    """
    if stray_placeholders(prompt, call.images.tokens):
        texts = ", ".join(f"'{text}'" for text in call.images.texts)
        raise InvalidRequest(
            "The prompt, or the context that it continues, holds a token that stands for an image of this "
            f"model (written {texts}) but belongs to none: leave it out; send images as parts of messages.",
            param="prompt",
        )


def _note(report: TransferReport, output: Any, *, deltas: bool) -> None:
    """Note a `RequestOutput` in the report; with `deltas` its token ids are only the new ones."""
    if not report.prompt_ids:
        report.prompt_ids = list(output.prompt_token_ids or ())
    report.cached = output.num_cached_tokens or report.cached
    completion = output.outputs[0]
    if output.finished:
        at_stop_string = isinstance(completion.stop_reason, str)
        # After a stop string the engine saves, but cannot report it here.
        report.saves = output.kv_transfer_params is not None or at_stop_string
    if deltas:
        report.output_ids.extend(completion.token_ids)
    else:
        report.output_ids = list(completion.token_ids)


def _correct(output: Any, report: TransferReport) -> None:
    """Hide the store key from clients in an output, and count no token as cached that was computed.

    vLLM counts all tokens that the connector promised: also those whose KV was lost, or computed between
    moved ones.
    """
    output.kv_transfer_params = None
    if output.num_cached_tokens:
        output.num_cached_tokens = max(0, output.num_cached_tokens - report.lost - report.computed)


def salted(prompt: Any, salt: str | None) -> Any:
    """Set a rendered prompt's prefix-cache salt in place, whatever it was before; return the prompt."""
    if isinstance(prompt, dict):
        prompt.pop("cache_salt", None)
        if salt is not None:
            prompt["cache_salt"] = salt
    return prompt
