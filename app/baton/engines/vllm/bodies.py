"""What a body needs before vLLM's handlers read it: what they cannot be told otherwise."""

from __future__ import annotations

from baton.engines.port import Json, Operation, TransferRequest
from baton.telemetry.ids import RequestContext


def for_responses(operation: Operation, body: Json, context: RequestContext) -> Json:
    """The id in the body, where this handler reads it; and no null that its answer would choke on."""
    if operation is not Operation.RESPONSES:
        return body
    kept = {
        key: value
        for key, value in body.items()
        if value is not None or key not in ("background", "truncation")
    }
    return kept | {"request_id": f"resp_{context.request_id}"}


def with_whole_prompt(operation: Operation, body: Json, transfer: TransferRequest | None) -> Json:
    """The body with the token ids that are its prompt; a chat takes them beside its messages."""
    if transfer is None or transfer.prompt is None:
        return body
    if operation is Operation.CHAT:
        return _without_images(body) | {"kv_transfer_params": {"prompt_token_ids": transfer.prompt}}
    return body | {"prompt": transfer.prompt, "add_special_tokens": False}


def _without_images(body: Json) -> Json:
    """A chat's body for a prompt that is given in token ids: beside a message of more than text vLLM would
    not use them. Messages are not written again, so what they say matters to nobody.
    """
    return body | {"messages": [_text_alone(message) for message in body["messages"]]}


def _text_alone(message: Json) -> Json:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = [part for part in content if not isinstance(part, dict) or part.get("type") != "image_url"]
    return message | {"content": texts or ""}
