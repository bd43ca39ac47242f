"""Find the images in a request's body, in the order in which the model gets them.

OpenAI's, Anthropic's and vLLM's requests hold images in many places. So every object of a body is searched,
except the client's own JSON; one that vLLM would take for media is either an image in a known form, or
refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from baton.errors import InvalidImage, InvalidRequest
from baton.images.image import ClientImage

Json = dict[str, Any]

FREE_JSON = frozenset(
    {
        "arguments",
        "chat_template_kwargs",
        "functions",
        "input_schema",
        "metadata",
        "parameters",
        "response_format",
        "tools",
    }
)
"""Fields with the client's own JSON, which never holds media."""
NOT_IN_PROMPT = frozenset({"bad_words", "stop", "stop_sequences"})
"""Fields whose texts never become part of a prompt."""

OF_A_CALL = frozenset({"input"})
"""Arguments of a tool call in Anthropic's messages; elsewhere `input` may hold images."""

IMAGES = frozenset({"image_url", "input_image"})
OTHER_MEDIA = frozenset(
    {
        "audio_embeds",
        "audio_url",
        "file_url",
        "image_embeds",
        "image_pil",
        "input_audio",
        "input_file",
        "prompt_embeds",
        "video_embeds",
        "video_url",
    }
)
"""Types, and keys of a part of any type, under which vLLM reads media."""
OTHER_TYPES = OTHER_MEDIA | {"audio", "file", "input_video", "video"}


class Dialect(Enum):
    """The form of image parts on a route: OpenAI's chat, its responses, or Anthropic's messages."""

    CHAT = "chat"
    RESPONSES = "responses"
    MESSAGES = "messages"


@dataclass(frozen=True)
class ImagePart:
    """One image in a body.

    Attributes:
        holder: the list or object that holds the part.
        key: its index or key there.
        where: its place in the body, for messages: `messages[2].content[1].image_url`.
        url: a `data:` URL, or the URL of an image to fetch.
    """

    holder: Any
    key: int | str
    where: str
    url: str


def image_parts(value: Any, dialect: Dialect, where: str = "") -> Iterator[ImagePart]:
    """Yield every image of a body.

    Args:
        where: the place of `value` in the body.

    Raises:
        InvalidImage: an image part has an unknown form, or holds no image.
        InvalidRequest: the body holds media other than images.
    """
    items: Any = ()
    if isinstance(value, list):
        items = enumerate(value)
    elif isinstance(value, dict):
        free = FREE_JSON | (OF_A_CALL if _is_call(value, dialect, where) else frozenset())
        items = ((key, item) for key, item in value.items() if key not in free)
    for key, item in items:
        if not isinstance(item, dict | list):
            continue
        there = f"{where}[{key}]" if isinstance(key, int) else f"{where}.{key}" if where else key
        found = _part(item, dialect, value, key, there) if isinstance(item, dict) else None
        if found is not None:
            yield found
        else:
            yield from image_parts(item, dialect, there)


def listed_images(body: Json) -> Iterator[ImagePart]:
    """Yield every image of a completion's body: those of its field `images`, a list of URLs or chat parts.

    Raises:
        InvalidImage: an entry has an unknown form, or holds no image.
        InvalidRequest: `images` is no list, or the body holds media elsewhere.
    """
    listed = body.get("images")
    if not isinstance(listed, list | None):
        raise InvalidRequest("images: give a list of images, each as a data: URL.", param="images")
    for key, item in enumerate(listed or ()):
        where = f"images[{key}]"
        found = _part(item, Dialect.CHAT, listed, key, where) if isinstance(item, dict) else None
        if found is None and not isinstance(item, str):
            raise InvalidImage(f"{where}: give a data: URL, or a part of type 'image_url'.", param=where)
        yield found or ImagePart(listed, key, where, item)
    rest = {key: item for key, item in body.items() if key != "images"}
    for part in image_parts(rest, Dialect.CHAT):
        raise InvalidRequest(
            f"{part.where}: send the images of a plain prompt in 'images'.", param=part.where
        )


def _is_call(part: Json, dialect: Dialect, where: str) -> bool:
    """Check whether a part of a message is a model's tool call; elsewhere a `type` says nothing."""
    return dialect is Dialect.MESSAGES and ".content[" in where and part.get("type") == "tool_use"


def _part(part: Json, dialect: Dialect, holder: Any, key: int | str, where: str) -> ImagePart | None:
    kind = part.get("type")
    kind = kind if isinstance(kind, str) else None
    _refuse_other_media(part, kind, where)
    if kind == "image":
        return ImagePart(holder, key, f"{where}.source", _source_url(part.get("source"), dialect, where))
    if not any(name in part for name in IMAGES) and kind not in IMAGES:
        return None
    if dialect is Dialect.MESSAGES:
        raise InvalidImage(
            f'{where}: send an image here as {{"type": "image", "source": {{...}}}}.', param=where
        )
    if kind is not None and kind not in IMAGES:
        raise InvalidRequest(
            f"{where}: a part may not hold an image and be of type '{str(kind)[:40]}'.", param=where
        )
    url = part.get("image_url")
    url = url.get("url") if isinstance(url, dict) else url
    if not isinstance(url, str) or not url.strip():
        raise InvalidImage(
            f"{where}.image_url: there is no image here; send it as a data: URL. An image cannot be named by "
            "an id, for none is kept.",
            param=f"{where}.image_url",
        )
    return ImagePart(holder, key, f"{where}.image_url", url)


def _refuse_other_media(part: Json, kind: str | None, where: str) -> None:
    source = part.get("source")
    if kind != "image" and isinstance(source, Mapping) and "url" in source:
        raise InvalidRequest(
            f"{where}.source: only images may be fetched by URL; 'source.url' is not supported here.",
            param=f"{where}.source",
        )
    found = [kind] if kind in OTHER_TYPES else []
    found += [name for name in part if name in OTHER_MEDIA]
    if found:
        raise InvalidRequest(
            f"{where}: '{found[0]}' is not supported; the only media are images, as 'image_url'.",
            param=f"{where}.{found[0]}" if found[0] in part else where,
        )


def _source_url(source: object, dialect: Dialect, where: str) -> str:
    """Return the URL of an image in Anthropic's form, whose source is base64 or a URL."""
    if dialect is not Dialect.MESSAGES or not isinstance(source, Mapping):
        raise InvalidImage(f"{where}: send an image here as 'image_url'.", param=where)
    url = source.get("url")
    if source.get("type") == "base64" and isinstance(source.get("data"), str):
        url = f"data:;base64,{source['data']}"
    if not isinstance(url, str) or not url.strip():
        raise InvalidImage(
            f"{where}.source: there is no image here; send it in base64.", param=f"{where}.source"
        )
    return url


def part_of(image: ClientImage, dialect: Dialect) -> Json:
    """Return the part that replaces a client's image part in the body for the engine.

    By `uuid` vLLM names the image by the digest of its bytes, the same on every engine; where a handler drops
    it, by a hash of its own.
    """
    if dialect is Dialect.MESSAGES:
        source = {"type": "base64", "media_type": image.media_type, "data": image.base64}
        return {"type": "image", "source": source}
    if dialect is Dialect.RESPONSES:
        part = {"type": "input_image", "image_url": image.url, "detail": "auto"}
        return part | {"uuid": image.digest}
    return {"type": "image_url", "image_url": {"url": image.url}, "uuid": image.digest}


def typed_token(value: Any, texts: tuple[str, ...], where: str = "") -> tuple[str, str] | None:
    """Find the first text of a body that holds a placeholder of images: its place, and the placeholder."""
    if isinstance(value, str):
        found = next((text for text in texts if text in value), None)
        return (where, found) if found is not None else None
    items: Any = ()
    if isinstance(value, list):
        items = ((f"{where}[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, dict):
        unread = FREE_JSON | NOT_IN_PROMPT
        items = (
            (f"{where}.{key}" if where else key, item) for key, item in value.items() if key not in unread
        )
    hits = (typed_token(item, texts, there) for there, item in items if isinstance(item, str | dict | list))
    return next((hit for hit in hits if hit is not None), None)
