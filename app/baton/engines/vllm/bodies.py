"""Adapt request bodies for vLLM's handlers: set the response id, insert the prompt's token ids."""

from __future__ import annotations

from baton.engines.kv_transfer import TransferRequest
from baton.engines.port import Json, Operation
from baton.telemetry.ids import RequestContext


def for_responses(operation: Operation, body: Json, context: RequestContext) -> Json:
    """Put the id into the body of a responses request, and drop nulls on which vLLM's answer would fail."""
    if operation is not Operation.RESPONSES:
        return body
    kept = {
        key: value
        for key, value in body.items()
        if value is not None or key not in ("background", "truncation")
    }
    return kept | {"request_id": f"resp_{context.request_id}"}


def with_whole_prompt(operation: Operation, body: Json, transfer: TransferRequest | None) -> Json:
    """Put a transfer's prompt into the body; a chat takes its token ids beside the messages."""
    if transfer is None or transfer.prompt is None:
        return body
    if operation is Operation.CHAT:
        return _without_parts(body) | {"kv_transfer_params": {"prompt_token_ids": transfer.prompt}}
    return body | {"prompt": transfer.prompt, "add_special_tokens": False}


def _without_parts(body: Json) -> Json:
    """Drop the parts of a chat's messages.

    vLLM does not use a prompt of token ids beside messages that hold more than text. The messages are not
    rendered then, so that their content does not matter.
    """
    messages = [
        message | {"content": ""} if isinstance(message.get("content"), list) else message
        for message in body["messages"]
    ]
    return body | {"messages": messages}
