"""Write a fake engine's answers in OpenAI's and Anthropic's shapes, with no more fields than clients need."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from baton.engines.fake.prompt import MAX_MODEL_LEN, token_id
from baton.engines.port import Json, Operation

if TYPE_CHECKING:
    from baton.engines.fake.answer import Answer

KINDS = {
    Operation.COMPLETIONS: ("cmpl-", "text_completion"),
    Operation.CHAT: ("chatcmpl-", "chat.completion"),
    Operation.RESPONSES: ("resp_", "response"),
    Operation.MESSAGES: ("msg-", "message"),
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
