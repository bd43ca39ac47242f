"""Answer as a fake engine does: prompts, texts and vLLM's shapes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from baton.engines.backend import EngineState, Json, Operation, WholeReply
from baton.engines.transfers import TransferChooser, TransferRequest
from baton.errors import ContextTooLong, EngineRestarting, ImagesMisplaced, InvalidRequest
from baton.images.image import ClientImage, PlacedImage
from baton.telemetry.ids import CUT_HEADER, RequestContext

if TYPE_CHECKING:
    from baton.engines.fake.engine import FakeEngine


# Write a fake engine's answers in OpenAI's and Anthropic's shapes, with no more fields than clients need.


KINDS = {
    Operation.COMPLETIONS: ("cmpl-", "text_completion"),
    Operation.CHAT: ("chatcmpl-", "chat.completion"),
    Operation.RESPONSES: ("resp_", "response"),
    Operation.MESSAGES: ("msg_", "message"),
    Operation.EMBEDDINGS: ("embd-", "list"),
    Operation.POOLING: ("pooling-", "list"),
    Operation.CLASSIFY: ("classify-", "list"),
    Operation.SCORE: ("score-", "list"),
    Operation.RERANK: ("rerank-", "list"),
}
"""The prefix of an answer's `id`, and its `object`."""


def event(body: Json, name: str | None = None) -> str:
    """Write one server-sent event."""
    return (f"event: {name}\n" if name else "") + f"data: {json.dumps(body)}\n\n"


def _whole_completion(answer: Answer, text: str) -> Json:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": "length"}
    return answer.head() | {"choices": [choice], "usage": answer.usage()}


def _whole_chat(answer: Answer, text: str) -> Json:
    message = {"role": "assistant"} | (answer.parsed or {"content": text})
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}
    return answer.head() | {"choices": [choice], "usage": answer.usage()}


def _whole_response(answer: Answer, text: str) -> Json:
    part: Json = {"type": "output_text", "text": text, "annotations": [], "logprobs": None}
    item = {"id": "msg_0", "type": "message", "role": "assistant", "status": "completed"}
    head = answer.head()
    usage = answer.usage()
    return {
        "id": head["id"],
        "object": "response",
        "created_at": head["created"],
        "model": head["model"],
        "status": "completed",
        "output": [item | {"content": [part]}],
        "parallel_tool_calls": True,
        "temperature": 1.0,
        "tool_choice": "none",
        "tools": [],
        "top_p": 1.0,
        "background": False,
        "max_output_tokens": usage["completion_tokens"],
        "service_tier": "auto",
        "truncation": "disabled",
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "output_tokens": usage["completion_tokens"],
            "total_tokens": usage["total_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }


def _whole_message(answer: Answer, text: str) -> Json:
    usage = answer.usage()
    return {
        "id": answer.head()["id"],
        "type": "message",
        "role": "assistant",
        "model": answer.head()["model"],
        "content": [{"type": "text", "text": text}],
        "stop_reason": "max_tokens",
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "output_tokens": usage["completion_tokens"],
        },
    }


def _whole_count(answer: Answer, _text: str) -> Json:
    return {"input_tokens": len(answer.words)}


def _whole_embedding(answer: Answer, _text: str) -> Json:
    inputs = answer.body["input"]
    texts = inputs if isinstance(inputs, list) else [inputs]
    data = [
        {"index": index, "object": "embedding", "embedding": [float(len(str(text))), 1.0]}
        for index, text in enumerate(texts)
    ]
    tokens = len(answer.words)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return answer.head() | {"data": data, "usage": usage}


def _inputs(answer: Answer, name: str) -> list[Any]:
    given = answer.body.get(name)
    return given if isinstance(given, list) else [given]


def _pooled(answer: Answer, rows: list[Json]) -> Json:
    tokens = len(answer.words)
    numbered = [{"index": index} | row for index, row in enumerate(rows)]
    return answer.head() | {"data": numbered, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}


def _whole_pooling(answer: Answer, _text: str) -> Json:
    texts = _inputs(answer, "input")
    return _pooled(answer, [{"object": "pooling", "data": [float(len(str(text)))]} for text in texts])


def _whole_classes(answer: Answer, _text: str) -> Json:
    row = {"label": "LABEL_0", "probs": [1.0, 0.0], "num_classes": 2}
    return _pooled(answer, [row for _ in _inputs(answer, "input")])


def _whole_scores(answer: Answer, _text: str) -> Json:
    return _pooled(answer, [{"object": "score", "score": 0.5} for _ in _inputs(answer, "documents")])


def _whole_ranks(answer: Answer, _text: str) -> Json:
    documents = _inputs(answer, "documents")
    rows = [
        {"index": index, "document": {"text": str(text)}, "relevance_score": 0.5}
        for index, text in enumerate(documents)
    ]
    tokens = len(answer.words)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"id": answer.head()["id"], "model": answer.head()["model"], "usage": usage, "results": rows}


def _whole_tokens(answer: Answer, _text: str) -> Json:
    ids = [token_id(word) for word in answer.words]
    return {"count": len(ids), "max_model_len": MAX_MODEL_LEN, "tokens": ids}


def _whole_text(answer: Answer, _text: str) -> Json:
    return {"prompt": " ".join(answer.words)}


WHOLE = {
    Operation.COMPLETIONS: _whole_completion,
    Operation.CHAT: _whole_chat,
    Operation.RESPONSES: _whole_response,
    Operation.MESSAGES: _whole_message,
    Operation.COUNT_TOKENS: _whole_count,
    Operation.EMBEDDINGS: _whole_embedding,
    Operation.POOLING: _whole_pooling,
    Operation.CLASSIFY: _whole_classes,
    Operation.SCORE: _whole_scores,
    Operation.RERANK: _whole_ranks,
    Operation.TOKENIZE: _whole_tokens,
    Operation.DETOKENIZE: _whole_text,
}
"""What writes the answer in one piece, by operation."""


def _completion_chunk(answer: Answer, token: str) -> str:
    choice = {"index": 0, "text": token, "logprobs": None, "finish_reason": None}
    return event(answer.head() | {"choices": [choice]})


def _chat_chunk(answer: Answer, token: str) -> str:
    return chat_chunk(answer, {"content": token})


def chat_chunk(answer: Answer, delta: Json) -> str:
    """Write one chunk of a streamed chat."""
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
    return event(answer.head() | {"object": "chat.completion.chunk", "choices": [choice]})


def deltas_of(message: Json) -> list[Json]:
    """Split a chat's message into the deltas of a stream, each tool call into two."""
    calls = message.get("tool_calls") or ()
    deltas: list[Json] = [{"role": "assistant"} | {k: v for k, v in message.items() if k != "tool_calls"}]
    for index, call in enumerate(calls):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        begun = call | {"index": index, "function": {"name": name, "arguments": arguments[:5]}}
        deltas.append({"tool_calls": [begun]})
        deltas.append({"tool_calls": [{"index": index, "function": {"arguments": arguments[5:]}}]})
    return deltas


def _response_chunk(_answer: Answer, token: str) -> str:
    kind = "response.output_text.delta"
    return event({"type": kind, "delta": token, "item_id": "msg_0"}, kind)


def begun(answer: Answer) -> str:
    """Write the event that a stream begins with; empty: it begins with its first token."""
    if answer.operation is Operation.RESPONSES:
        return _response_event(answer, "", "response.created")
    if answer.operation is Operation.MESSAGES:
        message = _whole_message(answer, "") | {"content": [], "stop_reason": None}
        message["usage"] = message["usage"] | {"output_tokens": 0}
        return event({"type": "message_start", "message": message}, "message_start")
    return ""


def ended(answer: Answer, text: str) -> str:
    """Write the events that a stream ends with, those of completions and chats apart."""
    if answer.operation is Operation.RESPONSES:
        return _response_event(answer, text, "response.completed")
    if answer.operation is Operation.MESSAGES:
        usage = {"output_tokens": answer.usage()["completion_tokens"]}
        delta = {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}, "usage": usage}
        return event(delta, "message_delta") + event({"type": "message_stop"}, "message_stop")
    return ""


def _response_event(answer: Answer, text: str, name: str) -> str:
    """Write an event that holds the whole response so far."""
    state = name.removeprefix("response.")
    response = _whole_response(answer, text) | {"status": "in_progress" if state == "created" else state}
    return event({"type": name, "response": response}, name)


def _message_chunk(_answer: Answer, token: str) -> str:
    delta = {"type": "text_delta", "text": token}
    return event({"type": "content_block_delta", "index": 0, "delta": delta}, "content_block_delta")


CHUNK = {
    Operation.COMPLETIONS: _completion_chunk,
    Operation.CHAT: _chat_chunk,
    Operation.RESPONSES: _response_chunk,
    Operation.MESSAGES: _message_chunk,
}
"""What writes one token of a stream, by operation."""


# Make the fake engine's prompts, in which each word counts as one token.


DEFAULT_TOKENS = 16
"""Tokens of an answer whose request sets no limit."""
MAX_MODEL_LEN = 8192
"""Most tokens of a prompt and its answer."""
IMAGE = "<image>"
"""The word that stands for an image in a prompt."""

POOLING = (
    Operation.EMBEDDINGS,
    Operation.POOLING,
    Operation.CLASSIFY,
    Operation.SCORE,
    Operation.RERANK,
)
"""Operations that embed instead of generating."""
STREAMS = (Operation.COMPLETIONS, Operation.CHAT, Operation.RESPONSES, Operation.MESSAGES)
"""Operations that generate, and can stream."""
_PROMPT_FIELDS = {
    Operation.COMPLETIONS: "prompt",
    Operation.CHAT: "messages",
    Operation.RESPONSES: "input",
    Operation.MESSAGES: "messages",
    Operation.COUNT_TOKENS: "messages",
    Operation.EMBEDDINGS: "input",
    Operation.POOLING: "input",
    Operation.CLASSIFY: "input",
    Operation.SCORE: "queries",
    Operation.RERANK: "query",
    Operation.TOKENIZE: "prompt",
    Operation.DETOKENIZE: "tokens",
}
_LIMIT_FIELDS = {
    Operation.CHAT: ("max_completion_tokens", "max_tokens"),
    Operation.RESPONSES: ("max_output_tokens",),
}


def prompt_words(operation: Operation, body: Json, transfer: TransferRequest) -> list[str]:
    """Return the words of a request's prompt, which are its tokens.

    Raises:
        InvalidRequest: the operation's prompt field is missing, empty or of the wrong type.
    """
    if transfer.prompt is not None:
        return [str(token) for token in transfer.prompt]
    name = _PROMPT_FIELDS[operation]
    if operation is Operation.TOKENIZE and "messages" in body:
        name = "messages"
    prompt = body.get(name)
    if operation is Operation.TOKENIZE and prompt == "":
        return []
    if prompt is None or prompt in ([], ""):
        raise InvalidRequest(f"{name}: Field required", param=name)
    if not isinstance(prompt, str | list):
        raise InvalidRequest(f"{name}: Input should be a text or a list", param=name)
    if name == "messages":
        prompt = [message_text(message) for message in prompt]
    if operation is Operation.RESPONSES and isinstance(prompt, list):
        prompt = [_item_text(item) for item in prompt]
    words = prompt.split() if isinstance(prompt, str) else [str(item) for item in prompt]
    return [word for part in words for word in part.split()] or ["nothing"]


def message_text(message: Any) -> str:
    """Return the text of a message, with the word `<image>` for each image.

    Raises:
        InvalidRequest: the message has no `role` or no `content`.
    """
    if not isinstance(message, dict) or "role" not in message or "content" not in message:
        raise InvalidRequest("messages: Input should have a role and a content", param="messages")
    content = message["content"]
    if isinstance(content, list) and any(part.get("type") == "image_url" for part in content):
        return " ".join(IMAGE if part["type"] == "image_url" else part["text"] for part in content)
    return str(content)


def _item_text(item: Any) -> str:
    """Return the text of an item of `/v1/responses`: of its message, or all of it."""
    content = item.get("content") if isinstance(item, dict) else None
    if isinstance(content, list):
        return " ".join(str(part.get("text")) for part in content if isinstance(part, dict))
    return str(item if content is None else content)


def token_limit(operation: Operation, body: Json) -> int:
    """Compute the number of tokens of a request's answer; 0 where the operation does not generate.

    Raises:
        InvalidRequest: the limit is no positive integer.
    """
    if operation not in STREAMS:
        return 0
    for name in _LIMIT_FIELDS.get(operation, ("max_tokens",)):
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InvalidRequest(f"{name} must be at least 1.", param=name)
        return value
    return DEFAULT_TOKENS


def token_ids(text: str) -> list[int]:
    """Return the token ids of a text, one for each word."""
    return [token_id(word) for word in text.split()]


def token_id(word: str) -> int:
    """Return the token id of a word; a number is its own, so that prompts of token ids stay unchanged."""
    return int(word) if word.isdecimal() else sum(word.encode())


def with_images(prompt: list[int], images: Sequence[ClientImage]) -> tuple[list[int], list[PlacedImage]]:
    """Repeat every `<image>` token of a prompt once for each pixel of its image's width.

    Returns:
        The new prompt, and where each image stands in it.

    Raises:
        ImagesMisplaced: the prompt has not one `<image>` for each image.
    """
    target = token_id(IMAGE)
    if prompt.count(target) != len(images):
        raise ImagesMisplaced(param="messages")
    tokens: list[int] = []
    placed: list[PlacedImage] = []
    for token in prompt:
        if token != target:
            tokens.append(token)
            continue
        image = images[len(placed)]
        placed.append(PlacedImage(image, len(tokens), image.width, (target,)))
        tokens += [target] * image.width
    return tokens, placed


class Answer:
    """One request that a fake engine works on.

    Args:
        context: receives the numbers of prompt and generated tokens.
        transfer: its report receives the token ids.

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
        self.operation = operation
        self.body = body
        self._id = context.request_id
        self._context = context
        self._created = int(time.time())
        self.words = prompt_words(operation, body, transfer)
        limit = token_limit(operation, body)
        left = MAX_MODEL_LEN - len(self.words)
        if limit > left:
            if left < 1 or not context.cuts_max_tokens:
                raise ContextTooLong(
                    f"This model's maximum context length is {MAX_MODEL_LEN} tokens.", param="max_tokens"
                )
            context.answer_headers[CUT_HEADER], limit = str(left), left
        said = [self.words[index % len(self.words)] for index in range(limit)]
        self._said = [word if index == 0 else f" {word}" for index, word in enumerate(said)]
        self._transfer = transfer
        if operation in (*STREAMS, *POOLING):
            context.prompt_tokens += len(self.words)
        self._chooser, self._chosen = chooser, self._choose(chooser)
        for each in self._transfers:
            each.report.prompt_ids = [token_id(word) for word in self.words]
            each.report.images = [one.ref for one in each.images]
            each.report.saves = False  # there is no KV
            if each.audited and self._said:
                each.report.first_token = {token_id(self._said[0]): 0.0}  # it is sure of its answer

    def _choose(self, chooser: TransferChooser | None) -> TransferRequest | None:
        if chooser is None or self.operation not in STREAMS:
            return None
        chosen = chooser.choose([token_id(word) for word in self.words], loads=True, saves=True)
        if chosen is not None:
            self._engine.transfers.append(chosen)
        return chosen

    @property
    def _transfers(self) -> list[TransferRequest]:
        return [self._transfer] if self._chosen is None else [self._transfer, self._chosen]

    async def _tokens(self) -> AsyncIterator[str]:
        engine, cut = self._engine, self._context.cut
        engine.active += 1
        deaths = engine.deaths
        if cut is not None:
            cut.end = self._cut
        try:
            async with engine.slots:
                for number, word in enumerate(self._said, 1):
                    await engine.behaviour.wait(engine.behaviour.token_seconds)
                    if engine.state is EngineState.FAILED or engine.deaths != deaths:
                        raise EngineRestarting()
                    if cut is not None and cut.ended:
                        break
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
            self._context.cached_tokens += engine.behaviour.cached_tokens
        except (asyncio.CancelledError, GeneratorExit):
            engine.aborted += 1
            raise
        finally:
            engine.active -= 1
            if cut is not None:
                cut.end = None

    def _cut(self) -> bool:
        """End the answer where it stands; see `Cut`."""
        cut, report = self._context.cut, self._transfer.report
        assert cut is not None
        cut.prompt, cut.said, cut.ended = report.prompt_ids, list(report.output_ids), True
        cut.text = "".join(self._said[: len(cut.said)])
        return True

    async def whole(self) -> WholeReply:
        """Answer in one piece."""
        shape = WHOLE[self.operation]
        said = [token async for token in self._tokens()] if self.operation in STREAMS else []
        text = "".join(said)
        return WholeReply(json.dumps(shape(self, text) | self._transfer_fields()).encode())

    async def events(self) -> AsyncIterator[str]:
        """Answer as server-sent events."""
        shape = CHUNK[self.operation]
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
        options = self.body.get("stream_options") or {}
        if self.operation in (Operation.COMPLETIONS, Operation.CHAT):
            if transfer := self._transfer_fields():
                yield event(self.head() | {"choices": []} | transfer)
            if options.get("include_usage"):
                yield event(self.head() | {"choices": [], "usage": self.usage()})
            yield "data: [DONE]\n\n"

    def head(self) -> Json:
        """Return the fields that every answer and chunk begins with."""
        prefix, kind = KINDS[self.operation]
        return {
            "id": f"{prefix}{self._id}",
            "object": kind,
            "created": self._created,
            "model": self._context.model or self._engine.name,
        }

    def _transfer_fields(self) -> Json:
        """Write the field of vLLM's connector in the answer of a request that loads or saves KV."""
        if not self._transfer.moves_kv or self.operation not in (Operation.COMPLETIONS, Operation.CHAT):
            return {}
        return {
            "kv_transfer_params": {"baton_kv": {"save": self._transfer.save, "load": self._transfer.load}}
        }

    @property
    def parsed(self) -> Json | None:
        """The message that `FakeBehaviour.parsed` puts in place of a chat's answer, if any."""
        return self._engine.behaviour.parsed if self.operation is Operation.CHAT else None

    def usage(self) -> Json:
        """Return the answer's `usage` in OpenAI's shape."""
        prompt, said = len(self.words), len(self._said)
        return {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}
