"""Serve the operations that are forwarded to an engine, each a row of `FORWARDED`.

To add one, write a member of `engines.port.Operation`, its handler in `engines/vllm/handlers.py`, a row here.
Unless `Operation.generates` says otherwise, schemas in its body are checked as those of a chat are.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response

from baton.engines.port import Operation
from baton.errors import InvalidRequest
from baton.http.pipeline import Prepare, answer, unchanged

STORED = ("background", "previous_response_id")
"""Fields that need stored responses. vLLM's store is off, because it is shared by all tenants."""


def without_store(body: dict[str, Any]) -> dict[str, Any]:
    """Refuse fields that need a stored response, and let the engine store none.

    Raises:
        InvalidRequest: `background` or `previous_response_id` is set.
    """
    for field in STORED:
        if body.get(field):
            raise InvalidRequest(
                f"'{field}' needs stored responses, which this server does not have: leave it out and "
                "send the earlier turns in 'input'.",
                param=field,
            )
    return body | {"store": False, "background": False}


@dataclass(frozen=True)
class ForwardedRoute:
    """One `POST` route.

    Attributes:
        path: the path, from the root.
        operation: the operation of the engine.
        name: its name in the OpenAPI document.
        description: its description there, in a sentence.
        prepare: changes the body before an engine is chosen.
    """

    path: str
    operation: Operation
    name: str
    description: str
    prepare: Prepare = unchanged

    @property
    def endpoint(self) -> Callable[[Request], Awaitable[Response]]:
        """The endpoint that FastAPI calls."""

        async def endpoint(request: Request) -> Response:
            return await answer(request, self.operation, self.prepare)

        return endpoint


SCORE = "Score how well pairs of texts match."
RERANK = "Order documents by how well they match a query, with the API of Jina and Cohere."

FORWARDED = (
    ForwardedRoute("/v1/completions", Operation.COMPLETIONS, "create_completions", "Complete a text."),
    ForwardedRoute("/v1/chat/completions", Operation.CHAT, "create_chat", "Answer a conversation."),
    ForwardedRoute(
        "/v1/responses",
        Operation.RESPONSES,
        "create_responses",
        "Answer through OpenAI's Responses API. Nothing is stored.",
        without_store,
    ),
    ForwardedRoute(
        "/v1/messages",
        Operation.MESSAGES,
        "create_message",
        "Answer a conversation through Anthropic's Messages API.",
    ),
    ForwardedRoute(
        "/v1/messages/count_tokens",
        Operation.COUNT_TOKENS,
        "count_tokens",
        "Count the tokens of a conversation.",
    ),
    ForwardedRoute(
        "/v1/embeddings", Operation.EMBEDDINGS, "create_embeddings", "Embed texts with a pooling model."
    ),
    ForwardedRoute(
        "/classify", Operation.CLASSIFY, "create_classification", "Compute class probabilities of texts."
    ),
    ForwardedRoute("/score", Operation.SCORE, "create_score", SCORE),
    ForwardedRoute("/v1/score", Operation.SCORE, "create_score", SCORE),
    ForwardedRoute("/rerank", Operation.RERANK, "create_rerank", RERANK),
    ForwardedRoute("/v1/rerank", Operation.RERANK, "create_rerank", RERANK),
    ForwardedRoute("/v2/rerank", Operation.RERANK, "create_rerank", RERANK),
    ForwardedRoute(
        "/tokenize", Operation.TOKENIZE, "tokenize", "Return the token ids of a text or a conversation."
    ),
    ForwardedRoute("/detokenize", Operation.DETOKENIZE, "detokenize", "Return the text of token ids."),
)

router = APIRouter()
for route in FORWARDED:
    router.add_api_route(
        route.path, route.endpoint, methods=["POST"], name=route.name, description=route.description
    )
