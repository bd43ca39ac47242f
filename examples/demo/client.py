"""One streamed chat request, and what is measured of it."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from baton.errors import OperatorError

Json = dict[str, Any]
STREAMED: Json = {
    "stream": True,
    "stream_options": {"include_usage": True},
    "return_token_ids": True,
    "temperature": 0,
}
ANSWER_WITHIN_S = 300


@dataclass
class Answer:
    """What came of one agent's request.

    Attributes:
        agent: whose it is.
        text: the answer.
        prompt_ids: the whole prompt's token ids, as the engine had them.
        token_ids: the answer's.
        prompt_tokens: length of the prompt.
        cached_tokens: how many of them had their KV already, wherever it came from.
        first_token_s: seconds from sending the request to the first token.
        handoff: the id of what it left behind.
        outcome: where the KV of the handoff it started from came from.
    """

    agent: str
    text: str = ""
    prompt_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_token_s: float | None = None
    handoff: str | None = None
    outcome: str | None = None

    @property
    def prefilled_tokens(self) -> int:
        """Tokens of the prompt that were computed for this request."""
        return self.prompt_tokens - self.cached_tokens

    def take(self, chunk: Json) -> str:
        """Take in one chunk of the stream; the text it adds."""
        self.prompt_ids += chunk.get("prompt_token_ids") or []
        if usage := chunk.get("usage"):
            self.prompt_tokens = usage["prompt_tokens"]
            self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        if handoff := chunk.get("handoff"):
            self.handoff = handoff.get("id")
            self.outcome = (handoff.get("source") or {}).get("outcome")
        added = ""
        for choice in chunk["choices"]:
            self.token_ids += choice.get("token_ids") or []
            added += choice["delta"].get("content") or ""
        self.text += added
        return added


async def ask(
    client: httpx.AsyncClient, agent: str, body: Json, key: str, heard: Callable[[str], None]
) -> Answer:
    """Send one chat request and take in its answer, token by token.

    Args:
        client: of the gateway.
        agent: who asks.
        body: of the request.
        key: the API key, if the gateway wants one.
        heard: told of every piece of text when it comes.

    Raises:
        OperatorError: no answer, or not a whole one.
    """
    answer, began = Answer(agent), time.perf_counter()
    async for chunk in _chunks(client, body | STREAMED, key):
        added = answer.take(chunk)
        if answer.first_token_s is None and (answer.token_ids or added):
            answer.first_token_s = time.perf_counter() - began
        heard(added)
    return answer


async def served(client: httpx.AsyncClient, key: str) -> list[str]:
    """The names of the engines that a gateway serves.

    Raises:
        OperatorError: it does not say.
    """
    try:
        response = await client.get("/v1/models", headers=headers_of(key))
    except httpx.HTTPError as error:
        raise OperatorError(_unreachable(client, error)) from None
    if response.status_code != httpx.codes.OK:
        raise OperatorError(f"{client.base_url}: {reason_of(response.content)}")
    try:
        return [model["id"] for model in response.json()["data"]]
    except (ValueError, KeyError, TypeError):
        raise OperatorError(f"What answers on {client.base_url} is no OpenAI API.") from None


def headers_of(key: str) -> dict[str, str]:
    """The headers that carry an API key, if there is one."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def reason_of(body: bytes) -> str:
    """What an answer that is an error says."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "the answer was an error without a reason"


async def _chunks(client: httpx.AsyncClient, body: Json, key: str) -> AsyncIterator[Json]:
    try:
        async with client.stream(
            "POST", "/v1/chat/completions", json=body, headers=headers_of(key)
        ) as response:
            if response.status_code != httpx.codes.OK:
                raise OperatorError(f"{body['model']}: {reason_of(await response.aread())}")
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    yield _checked(line.removeprefix("data: "), body["model"])
    except httpx.HTTPError as error:
        raise OperatorError(_unreachable(client, error)) from None


def _checked(data: str, model: str) -> Json:
    chunk: Json = json.loads(data)
    if "error" in chunk:
        raise OperatorError(f"{model}: {reason_of(data.encode())}")
    return chunk


def _unreachable(client: httpx.AsyncClient, error: httpx.HTTPError) -> str:
    return f"No answer from {client.base_url}: {str(error) or type(error).__name__}."
