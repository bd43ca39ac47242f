"""Answer one request of a fake engine, in one piece or as a stream."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from baton.engines.fake.prompt import MAX_MODEL_LEN, POOLING, STREAMS, prompt_words, token_id, token_limit
from baton.engines.fake.shapes import CHUNK, KINDS, WHOLE, begun, chat_chunk, deltas_of, ended, event
from baton.engines.kv_transfer import TransferChooser, TransferRequest
from baton.engines.port import EngineState, Json, Operation, WholeReply
from baton.errors import ContextTooLong, EngineRestarting
from baton.images.image_position import ImagePosition
from baton.telemetry.ids import CUT_HEADER, RequestContext

if TYPE_CHECKING:
    from baton.engines.fake.engine import FakeEngine


class Answer:
    """One request that a fake engine works on.

    Args:
        engine: the engine.
        operation: the operation.
        body: the request's body.
        context: receives the numbers of prompt and generated tokens.
        transfer: its report receives the token ids.
        chooser: chooses a transfer for the prompt.

    Raises:
        InvalidRequest: the prompt or the token limit is invalid.
        ContextTooLong: prompt and limit exceed `MAX_MODEL_LEN`.
    """

    def __init__(
        self,
        engine: FakeEngine,
        operation: Operation,
        body: Json,
        context: RequestContext,
        transfer: TransferRequest,
        chooser: TransferChooser | None = None,
    ) -> None:
        self._engine = engine
        self._operation = operation
        self._body = body
        self._id = context.request_id
        self._context = context
        self._created = int(time.time())
        self._words = prompt_words(operation, body, transfer)
        limit = token_limit(operation, body)
        left = MAX_MODEL_LEN - len(self._words)
        if limit > left:
            if left < 1 or not context.cuts_max_tokens:
                raise ContextTooLong(
                    f"This model's maximum context length is {MAX_MODEL_LEN} tokens.", param="max_tokens"
                )
            context.answer_headers[CUT_HEADER], limit = str(left), left
        said = [self._words[index % len(self._words)] for index in range(limit)]
        self._said = [word if index == 0 else f" {word}" for index, word in enumerate(said)]
        self._transfer = transfer
        if operation in (*STREAMS, *POOLING):
            context.prompt_tokens += len(self._words)
        self._chooser, self._chosen = chooser, self._choose(chooser)
        for each in self._transfers:
            each.report.prompt_ids = [token_id(word) for word in self._words]
            each.report.images = [ImagePosition(one.digest, one.offset, one.length) for one in each.images]
            each.report.saves = False  # there is no KV
            if each.audited and self._said:
                each.report.first_token = {token_id(self._said[0]): 0.0}  # it is sure of its answer

    def _choose(self, chooser: TransferChooser | None) -> TransferRequest | None:
        if chooser is None or self._operation not in STREAMS:
            return None
        chosen = chooser.choose([token_id(word) for word in self._words], loads=True, saves=True)
        if chosen is not None:
            self._engine.transfers.append(chosen)
        return chosen

    @property
    def _transfers(self) -> list[TransferRequest]:
        return [self._transfer] if self._chosen is None else [self._transfer, self._chosen]

    async def _tokens(self) -> AsyncIterator[str]:
        engine = self._engine
        engine.active += 1
        deaths = engine.deaths
        try:
            async with engine.slots:
                for number, word in enumerate(self._said, 1):
                    await engine.behaviour.wait(engine.behaviour.token_seconds)
                    if engine.state is EngineState.FAILED or engine.deaths != deaths:
                        raise EngineRestarting()
                    engine.count()
                    self._context.generated_tokens += 1
                    for each in self._transfers:
                        each.report.output_ids.append(token_id(word.strip()))
                    ends = engine.behaviour.ends_answers and number == len(self._said)
                    yield "" if ends else word
            said = self._transfer.report.output_ids
            self._transfer.report.answer_ids = said[:-1] if engine.behaviour.ends_answers else said
            if self._chooser is not None and self._chosen is not None:
                self._chooser.ended(self._chosen)
        except (asyncio.CancelledError, GeneratorExit):
            engine.aborted += 1
            raise
        finally:
            engine.active -= 1

    async def whole(self) -> WholeReply:
        """Answer in one piece."""
        shape = WHOLE[self._operation]
        said = [token async for token in self._tokens()] if self._operation in STREAMS else []
        text = "".join(said)
        return WholeReply(json.dumps(shape(self, text) | self._transfer_fields()).encode())

    async def events(self) -> AsyncIterator[str]:
        """Answer as server-sent events."""
        shape = CHUNK[self._operation]
        failure = self._engine.behaviour.stream_error
        said = 0
        async for token in self._tokens():
            if failure is not None and said == self._engine.behaviour.stream_error_after:
                raise failure
            if not said and (first := begun(self)):
                yield first
            said += 1
            if self.parsed is None:
                yield shape(self, token)
        for delta in deltas_of(self.parsed) if self.parsed is not None else ():
            yield chat_chunk(self, delta)
        if last := ended(self, "".join(self._said)):
            yield last
        options = self._body.get("stream_options") or {}
        if self._operation in (Operation.COMPLETIONS, Operation.CHAT):
            if transfer := self._transfer_fields():
                yield event(self.head() | {"choices": []} | transfer)
            if options.get("include_usage"):
                yield event(self.head() | {"choices": [], "usage": self.usage()})
            yield "data: [DONE]\n\n"

    def head(self) -> Json:
        """Return the fields that every answer and chunk begins with."""
        prefix, kind = KINDS[self._operation]
        return {
            "id": f"{prefix}{self._id}",
            "object": kind,
            "created": self._created,
            "model": self._engine.name,
        }

    def _transfer_fields(self) -> Json:
        """Return what vLLM's connector adds to the answer of a request that loads or saves KV."""
        if not self._transfer.moves_kv or self._operation not in (Operation.COMPLETIONS, Operation.CHAT):
            return {}
        return {
            "kv_transfer_params": {"baton_kv": {"save": self._transfer.save, "load": self._transfer.load}}
        }

    @property
    def parsed(self) -> Json | None:
        """The message that `FakeBehaviour.parsed` puts in place of a chat's answer, if any."""
        return self._engine.behaviour.parsed if self._operation is Operation.CHAT else None

    @property
    def operation(self) -> Operation:
        """The operation."""
        return self._operation

    def usage(self) -> Json:
        """Return the answer's `usage` in OpenAI's shape."""
        prompt, said = len(self._words), len(self._said)
        return {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}

    @property
    def words(self) -> list[str]:
        """The words of the prompt."""
        return self._words

    @property
    def body(self) -> Json:
        """The request's body."""
        return self._body
