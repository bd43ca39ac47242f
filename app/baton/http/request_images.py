"""Read and check the images of a request, and put them back into its body in the form that engines get.

Afterwards the body refers to nothing outside it, and Baton has decoded every image in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from starlette.requests import Request

from baton.config.groups import ImageSettings
from baton.engines.backend import Backend, ImageInput, Operation
from baton.errors import InvalidRequest, OperationUnsupported
from baton.http.request import context_of, gateway_of, in_a_thread, off_the_loop
from baton.images.image import ClientImage
from baton.images.parts import Dialect, ImagePart, image_parts, listed_images, part_of, typed_token
from baton.relay.asked import require_one_prompt

DIALECTS = {
    Operation.RESPONSES: Dialect.RESPONSES,
    Operation.MESSAGES: Dialect.MESSAGES,
    Operation.COUNT_TOKENS: Dialect.MESSAGES,
}


async def take_images(
    request: Request, engine: Backend, operation: Operation, body: dict[str, Any]
) -> list[ClientImage]:
    """Read the images of a body and replace each with the image as it was decoded.

    The field `images` of a completion is removed, for no handler of vLLM's reads it.

    Returns:
        The images in the order of the prompt.

    Raises:
        InvalidRequest: there are too many images, a text holds a placeholder of images, there are other
            media, or several plain prompts.
        OperationUnsupported: the model takes no images.
        InvalidImage: an image is damaged, too large or of an unsupported format.
        ImageFetchFailed: an image could not be fetched.
    """
    gateway = gateway_of(request)
    dialect, plain = DIALECTS.get(operation, Dialect.CHAT), operation is Operation.COMPLETIONS

    def find() -> list[ImagePart]:
        parts = list(listed_images(body) if plain else image_parts(body, dialect))
        placed = plain and bool(parts)  # then the prompt itself holds the placeholders
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


def _put(parts: Sequence[ImagePart], images: Sequence[ClientImage], dialect: Dialect) -> None:
    for part, image in zip(parts, images, strict=True):
        part.holder[part.key] = part_of(image, dialect)


def _names(images: Sequence[ClientImage], dialect: Dialect) -> frozenset[str] | None:
    """Return the names of the images in vLLM; None where it ignores the names that we give."""
    return None if dialect is Dialect.MESSAGES else frozenset(image.digest for image in images)


def _require_count(parts: Sequence[ImagePart], engine: Backend, settings: ImageSettings) -> None:
    if engine.images.limit == 0:
        raise OperationUnsupported(
            f"{parts[0].where}: the model '{engine.name}' takes no images, only text.", param=parts[0].where
        )
    most = min(engine.images.limit, settings.count)
    if len(parts) > most:
        raise InvalidRequest(
            f"The request holds {len(parts)} images; with the model '{engine.name}' at most {most} are "
            "allowed (setting images.count, and the model's own limit).",
            param=parts[most].where,
        )


def _refuse_typed(body: dict[str, Any], images: ImageInput) -> None:
    found = typed_token(body, images.texts) if images.texts else None
    if found is not None:
        where, text = found
        raise InvalidRequest(
            f"{where}: the text holds '{text}', the placeholder of an image in this model's prompts: leave "
            "it out, and send images as parts of their own.",
            param=where,
        )
