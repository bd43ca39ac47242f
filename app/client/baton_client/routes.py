"""Write the calls of the gateway's routes: what is sent, and how the answer is read.

`driver.blocking` and `awaiting` make methods of some of them: their docstrings say what the method does.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import quote

from baton_client.call import Call, Reply, Report, Told, Upload
from baton_client.values import Answer, ContextMessages, Engine, Handoff, Json, KeptScene, SceneAnswer

PAGE_ROWS = 100
"""Most handoffs of a page."""
Messages: TypeAlias = str | Sequence[Mapping[str, Any]]
"""A chat's messages, or the text of a single one of the user's."""
Start: TypeAlias = Handoff | str
"""A handoff or its id."""
Starts: TypeAlias = Start | list[Start] | tuple[Start, ...]
"""A handoff, or several whose contexts are joined."""
Parameter: TypeAlias = str | float | Sequence[str | float]
"""A parameter of a plugin; several values are joined with commas."""
MEDIA_TYPES = {
    ".tif": "image/tiff",
    ".tiff": "image/tiff",
    ".jp2": "image/jp2",
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".webp": "image/webp",
}


class Page(NamedTuple):
    """A page of handoffs, the newest first.

    Attributes:
        handoffs: of this page.
        after: id from which the next page goes on; None: this is the last one.
    """

    handoffs: tuple[Handoff, ...]
    after: str | None


def id_of(start: Start) -> str:
    """Return a handoff's id."""
    return start.id if isinstance(start, Handoff) else start


def ids_of(starts: Starts) -> str | list[str]:
    """Return a handoff's id, or those of several."""
    return [id_of(each) for each in starts] if isinstance(starts, list | tuple) else id_of(starts)


def messages_of(messages: Messages) -> list[Mapping[str, Any]]:
    """Return a chat's messages; a text is one message of the user."""
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)


def chosen(fields: Mapping[str, Any]) -> Json:
    """Return the fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def given(**fields: Any) -> Json:
    """Return the fields that are neither None, False nor 0, which all are the API's defaults."""
    return {name: value for name, value in fields.items() if value not in (None, False, 0)}


def chat(
    model: str,
    messages: Messages,
    *,
    start: Starts | None = None,
    join: str | None = None,
    order: str | None = None,
    translate: bool | None = None,
    save: bool = False,
    label: str | None = None,
    pin: bool = False,
    ttl_s: int | None = None,
    latent_steps: int = 0,
    told: Told | None = None,
    **fields: Any,
) -> Call[Answer]:
    """Ask a model, from a handoff or from the beginning.

    Args:
        messages: of the chat, those after `start` alone; a text is one message of the user.
        start: the handoff that the chat goes on from, or several, whose contexts are joined.
        join: how: `exact` (None), or `moved`, which is faster and not exact.
        order: in which order: `given` (None), or `any`.
        translate: whether `start` may be of another model, which is then continued by its text; None: as
            the engine is configured.
        save: whether the chat with its answer is saved as a handoff: `Answer.handoff`.
        label: a text of your own for that handoff; this, `pin`, `ttl_s` and `latent_steps` mean `save`.
        pin: whether its KV stays when others' is evicted.
        ttl_s: seconds it lives; None: as long as the gateway allows.
        latent_steps: number of latent steps after the prompt.
        told: called with each piece of the answer's text as it comes; None: the answer comes whole.
        fields: further fields of the request, such as `max_tokens` and `temperature`.

    Raises:
        NotFound: there is no such model, or no such handoff any more.
        Overloaded: the gateway still has too much to do after the retries.
        ApiError: the gateway refused the request, or failed.
        ConnectionLost: no answer came.
        ValueError: `stream` is set, in place of `told`.
    """
    starting = {"join": join, "order": order, "translate": translate}
    saving = {"label": label, "pin": pin, "ttl_s": ttl_s, "latent_steps": latent_steps}
    asked = fields | {"told": told}
    return chat_call(model, messages, start, starting, save=save, saving=saving, fields=asked)


def chat_call(
    model: str,
    messages: Messages,
    start: Starts | None,
    starting: Mapping[str, Any],
    *,
    save: bool,
    saving: Mapping[str, Any],
    fields: Mapping[str, Any],
) -> Call[Answer]:
    """Write the call of a chat; see `chat`.

    Args:
        starting: `join`, `order`, `translate`.
        saving: `label`, `ttl_s`, `pin`, `latent_steps`; any of them means `save`.
        fields: of the body, and `told`.
    """
    if fields.get("stream"):
        raise ValueError(
            "Give `told`, which is called with each piece of text; for events use an OpenAI client with a "
            "HandoffTransport."
        )
    told: Told | None = fields.get("told")
    handoff = given(save=given(**saving) or save)
    if start is not None:
        handoff |= {"from": ids_of(start)} | chosen(starting)
    body: Json = {**fields, "model": model, "messages": messages_of(messages)}
    body.pop("told", None)
    if told is not None:
        body = {"stream_options": {"include_usage": True}} | body | {"stream": True}
    if handoff:
        body["handoff"] = handoff
    return Call("POST", "/v1/chat/completions", lambda reply: Answer.of(_json(reply)), body, told=told)


def create_handoff(
    model: str,
    *,
    messages: Messages | None = None,
    prompt: str | Sequence[int] | None = None,
    start: Starts | None = None,
    join: str | None = None,
    order: str | None = None,
    translate: bool | None = None,
    label: str | None = None,
    pin: bool = False,
    ttl_s: int | None = None,
    latent_steps: int = 0,
    **fields: Any,
) -> Call[Handoff]:
    """Compute a context and save it, without an answer. It may still be pending: see `wait`.

    Args:
        messages: the context as a chat; a text is one message of the user.
        prompt: the context as a text or token ids; either this or `messages`.
        start: the handoff that the new one continues, or several, whose contexts are joined; then neither
            `prompt` nor `messages` is needed.
        join: how: `exact` (None), or `moved`, which is faster and not exact.
        order: in which order: `given` (None), or `any`.
        translate: whether `start` may be of another model: the new handoff holds its text, and neither
            `prompt` nor `messages` is needed; None: as the engine is configured.
        label: a text of your own, for `find`.
        pin: whether its KV stays when others' is evicted.
        ttl_s: seconds it lives; None: as long as the gateway allows.
        latent_steps: number of latent steps after the context.
        fields: further fields of the body, such as `images`.

    Raises:
        ValueError: `messages` and `prompt` are both given, or both left out where no contexts are joined and
            none is translated.
    """
    whole = isinstance(start, list | tuple) or (start is not None and translate)
    if (messages is None) is (prompt is None) and not (whole and messages is None):
        raise ValueError(
            "Give either 'messages' or 'prompt', or several handoffs as 'start', or one with 'translate'."
        )
    saving = given(label=label, pin=pin, ttl_s=ttl_s, latent_steps=latent_steps)
    body: Json = {**fields, "model": model, **saving}
    if messages is not None:
        body["messages"] = messages_of(messages)
    if prompt is not None:
        body["prompt"] = prompt if isinstance(prompt, str) else list(prompt)
    if start is not None:
        starting = {"join": join, "order": order, "translate": translate}
        body |= {"from": ids_of(start)} | chosen(starting)
    return Call("POST", "/v1/handoffs", _handoff, body)


def get_handoff(handoff: Start) -> Call[Handoff]:
    """Return a handoff as it is now."""
    return Call("GET", _path(handoff), _handoff)


def change_handoff(
    handoff: Start, *, label: str | None = None, ttl_s: int | None = None, pin: bool | None = None
) -> Call[Handoff]:
    """Change a handoff: its label, its life from now in seconds, its pin. What is None stays."""
    return Call("PATCH", _path(handoff), _handoff, chosen({"label": label, "ttl_s": ttl_s, "pin": pin}))


def delete_handoff(handoff: Start) -> Call[None]:
    """Return the call that deletes a handoff."""
    return Call("DELETE", _path(handoff), lambda _reply: None)


def models() -> Call[list[Json]]:
    """Return the cards of the models that the gateway serves, as `/v1/models` has them."""
    return Call("GET", "/v1/models", lambda reply: list(_json(reply)["data"]))


def get_messages(handoff: Start) -> Call[ContextMessages]:
    """Return the messages of a handoff's context, or its text where it is no chat."""
    return Call("GET", f"{_path(handoff)}/messages", lambda reply: ContextMessages.of(_json(reply)))


def warm_handoff(handoff: Start, *, model: str | None = None) -> Call[Json]:
    """Bring a handoff's KV into the engines' memory, while a tool runs; asked again, say how far that is.

    Args:
        model: the only engine to bring it to; None: all that would load it.
    """
    return Call("POST", f"{_path(handoff)}/warm", _json, chosen({"model": model}))


def list_engines() -> Call[tuple[Engine, ...]]:
    """Return the gateway's engines: what each is good for, and does now."""
    return Call("GET", "/v1/engines", lambda reply: tuple(map(Engine.of, _json(reply)["data"])))


def list_handoffs(after: str | None = None) -> Call[Page]:
    """Return the call for a page of handoffs, the newest first."""
    params = {"limit": str(PAGE_ROWS)} | ({"after": after} if after else {})
    return Call("GET", "/v1/handoffs", _page, params=params)


def scene(
    model: str,
    scene: str | Path | bytes,
    *,
    accept: str = "image/tiff",
    target: str | Path | None = None,
    progress: Report | None = None,
    media_type: str | None = None,
    **parameters: Parameter,
) -> Call[SceneAnswer]:
    """Send a scene to a model's plugin, as a file; a path is read while it is sent.

    Args:
        scene: path of the file, or its bytes.
        accept: media type of the answer: `image/tiff` the mask, `image/png` the preview,
            `application/json` the numbers, `application/zip` all files.
        target: the file that the answer is written to; None: it is returned.
        progress: called with a `Progress` for each piece that is sent or received.
        media_type: of the scene; None: by the file's name, of bytes `image/tiff`.
        parameters: the plugin's own, such as `indices=[2, 1, 0]` and `outputs=["mask", "preview"]`.

    Raises:
        ApiError: the gateway or the plugin refused the scene, or failed.
        ConnectionLost: no answer came, or not all of it; `target` is not touched then.
        FileNotFoundError: there is no such file, or no folder for `target`.
    """
    body = Upload(scene if isinstance(scene, bytes) else Path(scene), progress)
    path = None if target is None else Path(target)
    if path is not None and not path.parent.is_dir():
        raise FileNotFoundError(f"The answer cannot be written: there is no folder {path.parent}.")
    headers = {
        "Accept": accept,
        "Content-Type": media_type or _media_type(scene),
        "Content-Length": str(body.size),
    }
    return Call(
        "POST",
        "/pooling",
        lambda reply: SceneAnswer(reply.media_type, reply.content, path),
        body,
        {"model": model} | {name: _joined(value) for name, value in parameters.items()},
        headers,
        path,
        progress,
    )


def begin_scene(
    model: str,
    scene: str | Path | bytes | Mapping[str, Any],
    key: str,
    progress: Report | None,
    media_type: str | None,
    parameters: Mapping[str, Parameter],
) -> Call[KeptScene]:
    """Return the call that begins a scene as a job; a mapping is `data` of a JSON request."""
    headers = {"Idempotency-Key": key}
    if isinstance(scene, Mapping):
        body: Json | Upload = {"model": model, "data": {**scene, **parameters}}
        return Call("POST", "/v1/scenes", _kept, body, headers=headers)
    upload = Upload(scene if isinstance(scene, bytes) else Path(scene), progress)
    headers |= {"Content-Type": media_type or _media_type(scene), "Content-Length": str(upload.size)}
    params = {"model": model} | {name: _joined(value) for name, value in parameters.items()}
    return Call("POST", "/v1/scenes", _kept, upload, params, headers)


def get_scene(scene_id: str) -> Call[KeptScene]:
    """Return a scene that was sent as a job, with its state and files."""
    return Call("GET", f"/v1/scenes/{quote(scene_id, safe='')}", _kept)


def delete_scene(scene_id: str) -> Call[None]:
    """End a scene that was sent as a job if it runs, and delete its files."""
    return Call("DELETE", f"/v1/scenes/{quote(scene_id, safe='')}", lambda _: None)


def scene_file(scene_id: str, name: str, target: Path, progress: Report | None) -> Call[Path]:
    """Return the call that writes a file of a scene to `target`."""
    path = f"/v1/scenes/{quote(scene_id, safe='')}/{quote(name, safe='')}"
    return Call("GET", path, lambda _: target, target=target, report=progress)


def _kept(reply: Reply) -> KeptScene:
    return KeptScene.of(_json(reply))


def _joined(value: Parameter) -> str:
    several = isinstance(value, Iterable) and not isinstance(value, str)
    return ",".join(map(str, value)) if several else str(value)  # type: ignore[arg-type]  # `several` says so


def _media_type(source: str | Path | bytes) -> str:
    suffix = ".tif" if isinstance(source, bytes) else Path(source).suffix.lower()
    return MEDIA_TYPES.get(suffix, "application/octet-stream")


def _path(handoff: Start) -> str:
    return f"/v1/handoffs/{quote(id_of(handoff), safe='')}"


def _json(reply: Reply) -> Json:
    body: Json = json.loads(reply.content)
    return body


def _handoff(reply: Reply) -> Handoff:
    return Handoff.of(_json(reply))


def _page(reply: Reply) -> Page:
    body = _json(reply)
    return Page(tuple(map(Handoff.of, body["data"])), body["last_id"] if body["has_more"] else None)
