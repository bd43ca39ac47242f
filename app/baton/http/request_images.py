"""The images of a request: found, read, checked, and put back as what the engine is to see.

After this no part of a body names anything outside of it, and every image in it is one that we have decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from starlette.requests import Request

from baton.config.groups import ImageSettings
from baton.engines.port import Engine, ImageInput, Operation, Reply, TransferRequest
from baton.errors import InvalidRequest, OperationUnsupported
from baton.handoffs.conversation import Writer
from baton.handoffs.options import require_one_prompt
from baton.http.request_body import in_a_thread, off_the_loop
from baton.http.request_state import context_of
from baton.http.state import gateway_of
from baton.images.client_image import ClientImage
from baton.images.parts import Dialect, ImagePart, image_parts, listed_images, part_of, typed_token
from baton.telemetry.ids import RequestContext

DIALECTS = {
    Operation.RESPONSES: Dialect.RESPONSES,
    Operation.MESSAGES: Dialect.MESSAGES,
    Operation.COUNT_TOKENS: Dialect.MESSAGES,
}


async def take_images(
    request: Request, engine: Engine, operation: Operation, body: dict[str, Any]
) -> list[ClientImage]:
    """Read the images of a body, and put the images as they were read in their places.

    Those of a plain prompt are taken out: no handler of vLLM's knows them.

    Returns:
        What was read, in the order of the prompt.

    Raises:
        InvalidRequest: there are too many, a text holds what stands for one, there are media that are no
            images, or they come with more than one plain prompt.
        OperationUnsupported: the model takes none.
        InvalidImage: one is not taken.
        ImageFetchFailed: one could not be fetched.
    """
    gateway = gateway_of(request)
    dialect, plain = DIALECTS.get(operation, Dialect.CHAT), operation is Operation.COMPLETIONS

    def find() -> list[ImagePart]:
        parts = list(listed_images(body) if plain else image_parts(body, dialect))
        placed = plain and bool(parts)  # then the prompt says itself where its images stand
        _refuse_typed({**body, "prompt": None} if placed else body, engine.images)
        return parts

    parts = await off_the_loop(request, find)
    if plain:
        body.pop("images", None)
    if not parts:
        return []
    if plain:
        require_one_prompt(body, "images")
    _require_count(parts, engine, gateway.settings.images)
    images = await gateway.images.read(parts, context_of(request).tenant)
    if not plain:
        await in_a_thread(request, partial(_put, parts, images, dialect))
        context_of(request).images = _names(images, dialect)
    return images


async def completed(
    engine: Engine, body: dict[str, Any], context: RequestContext, client_images: Sequence[ClientImage]
) -> Reply:
    """Complete a plain prompt with images, which vLLM's own handler has no field for.

    Raises:
        BatonError: it has not one place for each of them, or the engine failed.
    """
    special = body.get("add_special_tokens") is not False
    tokens, images = await Writer(engine, context, client_images).plain(body["prompt"], special=special)
    return await engine.call(
        Operation.COMPLETIONS, body, context, TransferRequest(prompt=tokens, images=images)
    )


def _put(parts: Sequence[ImagePart], images: Sequence[ClientImage], dialect: Dialect) -> None:
    for part, image in zip(parts, images, strict=True):
        part.holder[part.key] = part_of(image, dialect)


def _names(images: Sequence[ClientImage], dialect: Dialect) -> frozenset[str] | None:
    """What vLLM calls these images; None where it drops what we call them."""
    return None if dialect is Dialect.MESSAGES else frozenset(image.digest for image in images)


def _require_count(parts: Sequence[ImagePart], engine: Engine, settings: ImageSettings) -> None:
    if engine.images.limit == 0:
        raise OperationUnsupported(
            f"{parts[0].where}: the model '{engine.name}' takes no images, only text.", param=parts[0].where
        )
    most = min(engine.images.limit, settings.count)
    if len(parts) > most:
        raise InvalidRequest(
            f"The request holds {len(parts)} images; with the model '{engine.name}' at most {most} are taken "
            "(setting images.count, and what the model takes).",
            param=parts[most].where,
        )


def _refuse_typed(body: dict[str, Any], images: ImageInput) -> None:
    found = typed_token(body, images.texts) if images.texts else None
    if found is not None:
        where, text = found
        raise InvalidRequest(
            f"{where}: the text holds '{text}', which stands for an image in this model's prompts: leave it "
            "out, and send images as parts of their own.",
            param=where,
        )
