"""Prepare requests for engines that are servers elsewhere, which get them whole.

What holds for all requests holds for these too: fields that would steer an engine are dropped, field limits
and schemas are checked, images are read and decoded here, and no address in a body is fetched elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError
from starlette.requests import Request

from baton.engines.backend import Elsewhere, Operation
from baton.errors import InvalidRequest, OperationUnsupported
from baton.http.request import context_of, gateway_of
from baton.http.request_images import take_images
from baton.images.image import ClientImage
from baton.relay.asked import OPERATIONS

BOOLEAN = TypeAdapter(bool)
OF_TOOL_SERVERS = {"server_url", "connector_id"}
"""Fields of tools that a server would ask elsewhere."""


async def prepare_forwarded(
    request: Request,
    engine: Elsewhere,
    operation: Operation,
    body: dict[str, Any],
    *,
    saves: bool = False,
) -> None:
    """Check a request that will be sent on, and put its images into its body as they were decoded.

    Args:
        body: the request's body, which is changed.
        saves: whether it leaves a handoff behind without a field that says so.

    Raises:
        BatonError: the request may not be sent on, or holds images that are not taken.
    """
    _settle_stream(body)
    _refuse_tool_servers(body)
    if not _is_for_a_plugin(operation, body):
        images = await take_images(request, engine, operation, body)
        _put_back(images, engine, operation, body)
    if body.get("handoff") is None and not saves:
        body.pop("handoff", None)
        return
    if operation not in OPERATIONS:
        raise OperationUnsupported(
            "This operation does not support handoffs: use /v1/chat/completions, /v1/completions, "
            "/v1/messages or /v1/responses.",
            param="handoff",
        )
    await gateway_of(request).relay.same_store.require(engine, context_of(request))


def _settle_stream(body: dict[str, Any]) -> None:
    """Make `stream` true or false: vLLM takes "off" for false, and other servers may take it for true."""
    if (value := body.get("stream")) is None:
        return
    try:
        body["stream"] = BOOLEAN.validate_python(value)
    except ValidationError:
        raise InvalidRequest("'stream' must be true or false.", param="stream") from None


def _refuse_tool_servers(body: dict[str, Any]) -> None:
    """Refuse tools that the other server would ask at an address, or with a right, that the client names.

    Tools that a server runs by itself have neither.
    """
    tools = body.get("tools")
    named = [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    asked = "tools" if any(OF_TOOL_SERVERS & tool.keys() for tool in named) else None
    if field := "mcp_servers" if body.get("mcp_servers") else asked:
        raise OperationUnsupported(
            f"'{field}': tool servers are not asked for clients: call the tool yourself and send its result.",
            param=field,
        )


def _is_for_a_plugin(operation: Operation, body: dict[str, Any]) -> bool:
    """Return whether an IO processor plugin elsewhere reads the body, in a form that only it knows."""
    return operation is Operation.POOLING and "data" in body


def _put_back(
    images: Sequence[ClientImage],
    engine: Elsewhere,
    operation: Operation,
    body: dict[str, Any],
) -> None:
    if not images:
        return
    if operation is Operation.COMPLETIONS:
        if not engine.forwarding.is_gateway:
            raise OperationUnsupported(
                f"The engine '{engine.name}' is a server elsewhere that takes no 'images' beside a prompt: "
                "send them in a chat.",
                param="images",
            )
        body["images"] = [image.url for image in images]
    else:
        _drop_names(body)


def _drop_names(value: Any) -> None:
    """Drop the names by which vLLM's caches know images, which other servers refuse."""
    if isinstance(value, dict):
        if "uuid" in value and ("image_url" in value or value.get("type") == "input_image"):
            del value["uuid"]
        for item in value.values():
            _drop_names(item)
    elif isinstance(value, list):
        for item in value:
            _drop_names(item)
