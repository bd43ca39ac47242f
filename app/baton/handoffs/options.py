"""What a request wants of the relay: its `handoff` field, and the body of `POST /v1/handoffs`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from baton.engines.port import Engine, Operation
from baton.errors import InvalidRequest, OperationUnsupported

OPERATIONS = (Operation.COMPLETIONS, Operation.CHAT)
Label = Annotated[str, Field(max_length=200)]
Seconds = Annotated[int, Field(ge=1)]
Steps = Annotated[int, Field(ge=0)]
HandoffId = Annotated[str, Field(min_length=1, max_length=64)]
Wish = TypeVar("Wish", bound=BaseModel)


class Closed(BaseModel):
    """Fields of a request: read-only, and closed to names it does not know."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class SaveOptions(Closed):
    """`handoff.save` as an object."""

    ttl_s: Seconds | None = None
    pin: bool = False
    label: Label | None = None
    scope: Literal["context", "prompt"] = "context"
    latent_steps: Steps = 0


class HandoffOptions(Closed):
    """The `handoff` field of a request."""

    save: SaveOptions | Literal[True, False] = False
    source: HandoffId | None = Field(None, alias="from")

    @property
    def saving(self) -> SaveOptions | None:
        """What is to be left behind, if anything is."""
        if self.save is True:
            return SaveOptions()
        return self.save or None

    @property
    def latent_steps(self) -> int:
        """How many latent steps follow the prompt."""
        return self.saving.latent_steps if self.saving is not None else 0


class NewHandoff(Closed):
    """The body of `POST /v1/handoffs`, but for the fields of a chat that decide how it is written."""

    model_config = ConfigDict(extra="ignore")

    model: str
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    images: list[str | dict[str, Any]] | None = None
    source: HandoffId | None = Field(None, alias="from")
    latent_steps: Steps = 0
    ttl_s: Seconds | None = None
    pin: bool = False
    label: Label | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> NewHandoff:
        if (self.prompt is None) is (self.messages is None):
            raise ValueError("give either 'prompt' or 'messages'")
        if self.images and self.prompt is None:
            raise ValueError("'images' are a plain prompt's; a message's stand among its parts")
        return self


class Changes(Closed):
    """The body of `PATCH /v1/handoffs/{id}`; what is left out stays as it is."""

    ttl_s: Seconds | None = None
    pin: bool = False
    label: Label | None = None


FIELDS = frozenset(
    field.alias or name
    for kind in (SaveOptions, HandoffOptions, NewHandoff, Changes)
    for name, field in kind.model_fields.items()
)


def parsed(kind: type[Wish], given: object, where: str = "") -> Wish:
    """What a client sent, as `kind`.

    Raises:
        InvalidRequest: it is not one; `param` names the field.
    """
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        names = [where] if where else []
        names += [str(part) for part in first["loc"] if part in FIELDS]  # beside them stand types
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            message = f"There is no field '{str(first['loc'][-1])[:40]}' here"
        name = ".".join(names)
        raise InvalidRequest(f"{name}: {message}" if name else message, param=where or name or None) from None


def take_options(body: dict[str, Any], engine: Engine, operation: Operation) -> HandoffOptions | None:
    """Take the `handoff` field out of a body.

    Raises:
        InvalidRequest: it is not one, or does not fit the rest of the body.
        OperationUnsupported: this route or this engine does not hand over.
    """
    given = body.pop("handoff", None)
    if given is None:
        return None
    if operation not in OPERATIONS:
        raise OperationUnsupported(
            "Nothing is handed over here: use /v1/completions or /v1/chat/completions.", param="handoff"
        )
    require_relay(engine)
    wish = parsed(HandoffOptions, given, "handoff")
    _require_one_context(body, wish)
    if operation is Operation.COMPLETIONS:
        require_one_prompt(body, "a handoff", may_be_left_out=wish.source is not None)
    else:
        _require_chat(body)
    return wish


def require_relay(engine: Engine) -> None:
    """Refuse an engine that does not hand over.

    Raises:
        OperationUnsupported: it is one.
    """
    if not engine.relays:
        raise OperationUnsupported(
            f"The engine '{engine.name}' does not hand over: its settings lack `handoff = true`.",
            param="model",
        )


def require_latent(engine: Engine, steps: int, most: int) -> None:
    """Refuse latent steps where they cannot be had, and more than there may be.

    Raises:
        OperationUnsupported: the engine takes none.
        InvalidRequest: there are too many.
    """
    if steps and engine.placeholder is None:
        raise OperationUnsupported(
            f"The engine '{engine.name}' takes no latent steps: its settings lack `latent = true`.",
            param="latent_steps",
        )
    if steps > most:
        raise InvalidRequest(
            f"'latent_steps' is {steps}, and at most {most} are allowed.", param="latent_steps"
        )


def _require_one_context(body: dict[str, Any], wish: HandoffOptions) -> None:
    several = body.get("n") not in (None, 1)
    if several and wish.saving is not None and wish.saving.scope != "prompt":
        raise InvalidRequest(
            "'n' must be 1 to save a context; with scope \"prompt\" it may be more.", param="n"
        )
    _refuse_rewriting(body, "a handoff")


def _refuse_rewriting(body: dict[str, Any], beside: str) -> None:
    """Where we write the whole prompt, nothing else may."""
    for name in ("use_beam_search", "truncate_prompt_tokens", "echo"):
        if not (body.get(name) is None or body[name] is False):
            raise InvalidRequest(f"'{name}' does not go with {beside}.", param=name)


def require_one_prompt(body: dict[str, Any], beside: str, *, may_be_left_out: bool = False) -> None:
    """Refuse a completion that is not of one prompt, text or token ids, taken as it is.

    Args:
        body: of the request.
        beside: what goes with one prompt only, for the error.
        may_be_left_out: there is a context without it.

    Raises:
        InvalidRequest: it is one.
    """
    _refuse_rewriting(body, beside)
    prompt = body.get("prompt", "" if may_be_left_out else None)
    if not isinstance(prompt, str) and not (
        isinstance(prompt, list) and all(type(token) is int for token in prompt)
    ):
        raise InvalidRequest(f"With {beside} 'prompt' is one text, or one list of token ids.", param="prompt")
    if body.get("prompt_embeds") is not None:
        raise InvalidRequest(f"'prompt_embeds' does not go with {beside}.", param="prompt_embeds")


def _require_chat(body: dict[str, Any]) -> None:
    require_known_parts(body)
    if body.get("continue_final_message") or body.get("add_generation_prompt") is False:
        raise InvalidRequest(
            "A chat with a handoff ends with a message that the model answers.",
            param="continue_final_message",
        )


TEXT_KEYS = {"type", "text"}
"""A part with any other key, null or not, is taken for an image by vLLM, which then forgets our token ids."""
IMAGE_KEYS = {"type", "image_url", "uuid", "detail"}


def require_known_parts(body: dict[str, Any]) -> None:
    """A context is handed over as its token ids and its images; what is neither has no place in either.

    Raises:
        InvalidRequest: it holds sound, video, embeddings, or parts that say more than they should.
    """
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and not _is_known(part):
                raise InvalidRequest("Only a context of text and images is handed over.", param="messages")


def _is_known(part: dict[str, Any]) -> bool:
    keys = {"text": TEXT_KEYS, "image_url": IMAGE_KEYS}.get(str(part.get("type")))
    return keys is not None and part.keys() <= keys
