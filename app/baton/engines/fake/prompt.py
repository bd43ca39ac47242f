"""Make the fake engine's prompts, in which each word counts as one token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton.engines.kv_transfer import TransferRequest
from baton.engines.port import Json, Operation
from baton.errors import ImagesMisplaced, InvalidRequest
from baton.images.client_image import ClientImage
from baton.images.placed_image import PlacedImage

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
    """Return how many tokens a request's answer has; 0 where the operation does not generate.

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
        placed.append(PlacedImage(image, image.digest, len(tokens), image.width, (target,)))
        tokens += [target] * image.width
    return tokens, placed
