"""Serve the operations that are forwarded to an engine, each a row of `ENGINE_ROUTES`.

To add one, write a member of `Operation`, its handler in `engines/vllm/handlers.py`, a row here.
Unless `Operation.generates` says otherwise, schemas in its body are checked as those of a chat are.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fastapi import APIRouter, Request, Response

from baton.engines.backend import Operation
from baton.http.answer import answer


@dataclass(frozen=True)
class EngineRoute:
    """One `POST` route.

    Attributes:
        name: its name in the OpenAPI document.
    """

    path: str
    operation: Operation
    name: str
    description: str

    @property
    def endpoint(self) -> Callable[[Request], Awaitable[Response]]:
        """The endpoint that FastAPI calls."""

        async def endpoint(request: Request) -> Response:
            return await answer(request, self.operation)

        return endpoint


SCORE = "Score how well pairs of texts match."
RERANK = "Order documents by how well they match a query, with the API of Jina and Cohere."

ENGINE_ROUTES = (
    EngineRoute("/v1/completions", Operation.COMPLETIONS, "create_completions", "Complete a text."),
    EngineRoute("/v1/chat/completions", Operation.CHAT, "create_chat", "Answer a conversation."),
    EngineRoute(
        "/v1/messages",
        Operation.MESSAGES,
        "create_message",
        "Answer a conversation through Anthropic's Messages API.",
    ),
    EngineRoute(
        "/v1/messages/count_tokens",
        Operation.COUNT_TOKENS,
        "count_tokens",
        "Count the tokens of a conversation.",
    ),
    EngineRoute(
        "/v1/embeddings", Operation.EMBEDDINGS, "create_embeddings", "Embed texts with a pooling model."
    ),
    EngineRoute(
        "/classify", Operation.CLASSIFY, "create_classification", "Compute class probabilities of texts."
    ),
    EngineRoute("/score", Operation.SCORE, "create_score", SCORE),
    EngineRoute("/v1/score", Operation.SCORE, "create_score", SCORE),
    EngineRoute("/rerank", Operation.RERANK, "create_rerank", RERANK),
    EngineRoute("/v1/rerank", Operation.RERANK, "create_rerank", RERANK),
    EngineRoute("/v2/rerank", Operation.RERANK, "create_rerank", RERANK),
    EngineRoute(
        "/tokenize", Operation.TOKENIZE, "tokenize", "Return the token ids of a text or a conversation."
    ),
    EngineRoute("/detokenize", Operation.DETOKENIZE, "detokenize", "Return the text of token ids."),
)

router = APIRouter()
for route in ENGINE_ROUTES:
    router.add_api_route(
        route.path, route.endpoint, methods=["POST"], name=route.name, description=route.description
    )
