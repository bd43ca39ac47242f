"""Read what a request asks of handoffs, from its body and its header."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from baton.engines.backend import Backend, Json, Operation
from baton.engines.engine import LocalEngine
from baton.errors import InvalidRequest, OperationUnsupported
from baton.errors.invalid_fields import invalid_field

# Parse and check a request's handoff options: its `handoff` field, or the body of `POST /v1/handoffs`.


WRITTEN_BY_THE_ENGINE = frozenset({Operation.RESPONSES, Operation.MESSAGES})
"""Operations whose prompt is what the request says, with a handoff too."""
OPERATIONS = WRITTEN_BY_THE_ENGINE | {Operation.COMPLETIONS, Operation.CHAT}
"""Operations whose requests may have a `handoff` field."""
Label = Annotated[str, Field(max_length=200)]
Seconds = Annotated[int, Field(ge=1)]
Steps = Annotated[int, Field(ge=0)]
EngineWord = Annotated[str, Field(min_length=1, max_length=128)]
HandoffId = Annotated[str, Field(min_length=1, max_length=64)]
MOST_JOINED = 16


def _as_list(given: object) -> object:
    """Return the ids in a `from` field as a list."""
    if not isinstance(given, list):
        return [] if given is None else [given]
    if not 1 <= len(given) <= MOST_JOINED:
        raise ValueError(f"there are {len(given)} handoffs; name 1 to {MOST_JOINED}")
    for index, each in enumerate(given):
        if each in given[:index]:
            raise ValueError(f"[{index}] repeats [{given.index(each)}]; name each handoff once")
    return given


HandoffIds = Annotated[
    list[HandoffId], BeforeValidator(_as_list, json_schema_input_type=HandoffId | list[HandoffId] | None)
]
"""The handoffs that a request continues; the contexts of several are joined."""
Order = Literal["given", "any"]
"""Whether they are joined in the given order, or with the one first whose stored KV saves most time."""
Join = Literal["exact", "moved"]
"""Whether the KV of all but the first is computed, or moved to its place in the joined context."""
Model = TypeVar("Model", bound=BaseModel)


class Closed(BaseModel):
    """Base of request models: read-only, and unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class SaveOptions(Closed):
    """The options of the save: `handoff.save` as an object."""

    ttl_s: Seconds | None = None
    pin: bool = False
    label: Label | None = None
    scope: Literal["context", "prompt"] = "context"
    latent_steps: Steps = 0


class Translate(Closed):
    """The options of a translation: `handoff.translate` as an object."""

    via: Literal["text", "rosetta"] = "text"


VIA_ROSETTA = Translate(via="rosetta")


class HandoffOptions(Closed):
    """The `handoff` field of a request: `save` a handoff, continue one or several (`from`), or both."""

    save: SaveOptions | Literal[True, False] = False
    sources: HandoffIds = Field([], alias="from")
    join: Join = "exact"
    order: Order = "given"
    translate: bool | Translate | None = None

    @property
    def via_rosetta(self) -> bool:
        """True if one vector stands for the handoff of another model, not its text."""
        return isinstance(self.translate, Translate) and self.translate.via == "rosetta"

    @property
    def saving(self) -> SaveOptions | None:
        """The options of its save; None: the context is not saved."""
        if self.save is True:
            return SaveOptions()
        return self.save or None

    @property
    def latent_steps(self) -> int:
        """Number of latent steps after the prompt."""
        return self.saving.latent_steps if self.saving is not None else 0


class NewHandoff(Closed):
    """The body of `POST /v1/handoffs`. Fields of a chat that its template reads may stand beside these."""

    model_config = ConfigDict(extra="ignore")

    model: str
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    images: list[str | dict[str, Any]] | None = None
    sources: HandoffIds = Field([], alias="from")
    join: Join = "exact"
    order: Order = "given"
    translate: bool | None = None
    latent_steps: Steps = 0
    ttl_s: Seconds | None = None
    pin: bool = False
    label: Label | None = None

    @property
    def adds_nothing(self) -> bool:
        """True if the context is that of its sources, with nothing after them."""
        return self.prompt is None and self.messages is None

    @property
    def translates_alone(self) -> bool:
        """True if the handoff is the translation of one of another model, with nothing after it."""
        return self.adds_nothing and len(self.sources) == 1

    @model_validator(mode="after")
    def _one_of_two(self) -> NewHandoff:
        if self.prompt is not None and self.messages is not None:
            raise ValueError("give either 'prompt' or 'messages'")
        if self.adds_nothing and len(self.sources) < (1 if self.translate else 2):
            raise ValueError("give 'prompt', 'messages', several handoffs in 'from', or one with 'translate'")
        if self.images and self.prompt is None:
            raise ValueError("'images' go with 'prompt'; images of a chat are parts of its messages")
        return self


class HandoffChanges(Closed):
    """The body of `PATCH /v1/handoffs/{id}`; fields that are left out do not change."""

    ttl_s: Seconds | None = None
    pin: bool = False
    label: Label | None = None


class WarmHandoff(Closed):
    """The body of `POST /v1/handoffs/{id}/warm`, which may be left out."""

    model: EngineWord | None = Field(
        None, description="The only engine to bring it to; without, all that would load it."
    )


class KvHintAction(Closed):
    """One action of `kv_hints`, as vLLM's `KvHintAction`."""

    action_id: Annotated[str, Field(max_length=512)]
    action_type: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:/-]{1,64}$")]  # it may stand in a header
    action_version: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,16}$")]
    payload: dict[str, Any]


class KvHints(Closed):
    """Hints about KV, as vLLM's `KvHintsEnvelope`."""

    protocol_version: Annotated[str, Field(max_length=32)]
    message_id: Annotated[str, Field(max_length=512)]
    actions: Annotated[list[KvHintAction], Field(max_length=64)]


class WarmContexts(Closed):
    """The body of `POST /v1/warm`: which contexts to bring into memory."""

    model: EngineWord | None = Field(
        None, description="The only engine to bring them to; without, all that would load them."
    )
    prompt_cache_key: Annotated[str, Field(min_length=1, max_length=4096)] | None = Field(
        None,
        description="The key of requests whose contexts the gateway saved by itself; the newest are meant.",
    )
    kv_hints: KvHints | None = Field(
        None,
        description='vLLM\'s envelope of hints: `kv.prefetch`, whose `payload` is `{"handoff": ID}` or '
        '`{"prompt_cache_key": KEY}`. Of other actions the answer says that they are not supported.',
    )

    @model_validator(mode="after")
    def _one(self) -> WarmContexts:
        if (self.prompt_cache_key is None) == (self.kv_hints is None):
            raise ValueError("give either 'prompt_cache_key' or 'kv_hints'")
        return self


HINTS = "kv_hints"


def take_hints(body: Json) -> KvHints | None:
    """Take the field `kv_hints` out of a request's body; None: there is none.

    Raises:
        InvalidRequest: it is no envelope of hints.
    """
    given = body.pop(HINTS, None)
    if given is None:
        return None
    return parse_options(KvHints, given, HINTS)


def translates(wanted: bool | Translate | None, engine: LocalEngine) -> bool:
    """Return whether a request may continue handoffs of other weights by their text.

    Args:
        wanted: its `translate` field; None: it has none.
    """
    return engine.translates if wanted is None else bool(wanted)


def part_name(field: str, index: int) -> str:
    """Name one of several handoffs in a field, as errors do: `from[1]`."""
    return f"{field}[{index}]"


FIELDS = frozenset(
    field.alias or name
    for kind in (SaveOptions, Translate, HandoffOptions, NewHandoff, HandoffChanges)
    for name, field in kind.model_fields.items()
)


def parse_options(kind: type[Model], given: object, where: str = "") -> Model:
    """Parse what a client sent.

    Args:
        given: what the client sent.
        where: the field that it stands in; empty: it is the whole body.

    Raises:
        InvalidRequest: it does not fit the model; `param` names the field.
    """
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _refusal(error, where, given) from None


def _refusal(error: ValidationError, where: str, given: object) -> InvalidRequest:
    items = error.errors(include_url=False, include_input=False)
    unknown = next((item for item in items if item["type"] == "extra_forbidden"), None)
    if unknown is not None:
        path = [str(part) for part in unknown["loc"] if part in FIELDS]  # the rest names types
        message = f"There is no field '{str(unknown['loc'][-1])[:40]}' here"
    else:
        found = invalid_field(error)
        path, message = [found.path] if found.path else [], found.message
        if path == ["from.0"] and isinstance(given, dict) and not isinstance(given.get("from"), list):
            path = ["from"]  # `_as_list` made a list of it, not the client
    name = ".".join([where, *path] if where else path)
    return InvalidRequest(f"{name}: {message}" if name else message, param=where or name or None)


def take_options(
    body: dict[str, Any], engine: LocalEngine, operation: Operation, most_steps: int
) -> HandoffOptions | None:
    """Remove the `handoff` field from a body and parse it; returns None if there is none.

    Raises:
        InvalidRequest: the field is not valid, or does not go with the rest of the body.
        OperationUnsupported: the operation, or the engine, does not support handoffs.
    """
    given = body.pop("handoff", None)
    if given is None:
        return None
    if operation not in OPERATIONS:
        raise OperationUnsupported(
            "This operation does not support handoffs: use /v1/chat/completions, /v1/completions, "
            "/v1/messages or /v1/responses.",
            param="handoff",
        )
    require_handoffs(engine)
    options = parse_options(HandoffOptions, given, "handoff")
    if len(options.sources) > 1 and operation in WRITTEN_BY_THE_ENGINE:
        raise InvalidRequest(
            "Several handoffs are joined by /v1/completions and /v1/chat/completions: use one of these.",
            param="handoff.from",
        )
    _require_one_context(body, options)
    if operation is Operation.COMPLETIONS:
        require_one_prompt(body, "a handoff", may_be_left_out=bool(options.sources))
    elif operation is Operation.CHAT:
        _require_chat(body)
    elif options.latent_steps:
        raise InvalidRequest(
            "'latent_steps' are for /v1/completions and /v1/chat/completions: use one of these.",
            param="handoff.save.latent_steps",
        )
    require_latent(engine, options.latent_steps, most_steps)
    return options


def require_steps_behind_text(options: NewHandoff) -> None:
    """Refuse `latent_steps` in a request that adds no prompt or messages after its handoffs.

    Raises:
        InvalidRequest: the request asks for them.
    """
    if options.adds_nothing and options.latent_steps:
        raise InvalidRequest(
            "'latent_steps' need a 'prompt' or 'messages' behind the contexts of 'from'.",
            param="latent_steps",
        )


def require_handoffs(engine: Backend) -> None:
    """Refuse an engine that does not support handoffs.

    Raises:
        OperationUnsupported: the engine was configured without `handoff`.
    """
    if not engine.supports_handoffs:
        raise OperationUnsupported(
            f"The engine '{engine.name}' does not support handoffs: set `handoff = true` in its settings.",
            param="model",
        )


def require_latent(engine: LocalEngine, steps: int, most: int) -> None:
    """Refuse latent steps that the engine cannot compute, or more than are allowed.

    Args:
        most: most steps of a request.

    Raises:
        OperationUnsupported: the engine was configured without `latent`.
        InvalidRequest: `steps` is greater than `most`.
    """
    if steps and engine.placeholder is None:
        raise OperationUnsupported(
            f"The engine '{engine.name}' does not support latent steps: set `latent = true` in its settings.",
            param="latent_steps",
        )
    if steps > most:
        raise InvalidRequest(
            f"'latent_steps' is {steps}; at most {most} are allowed (setting handoffs.latent_steps_max).",
            param="latent_steps",
        )


def _require_one_context(body: dict[str, Any], options: HandoffOptions) -> None:
    several = body.get("n") not in (None, 1)
    if several and options.saving is not None and options.saving.scope != "prompt":
        raise InvalidRequest(
            "'n' must be 1 to save a context with its answer; it may be more with handoff.save.scope "
            '"prompt".',
            param="n",
        )
    _refuse_rewriting(body, "a handoff")


def _refuse_rewriting(body: dict[str, Any], beside: str) -> None:
    """Refuse fields that change the prompt after the gateway has written it."""
    for name in ("use_beam_search", "truncate_prompt_tokens", "echo"):
        if not (body.get(name) is None or body[name] is False):
            raise InvalidRequest(f"'{name}' cannot be used with {beside}: leave it out.", param=name)


def require_one_prompt(body: dict[str, Any], beside: str, *, may_be_left_out: bool = False) -> None:
    """Refuse a completion of several prompts, or one whose prompt the engine would change.

    Args:
        beside: the feature that needs one prompt, for the error's message.
        may_be_left_out: a request without a prompt is allowed.

    Raises:
        InvalidRequest: `prompt` is neither one text nor one list of token ids, or a field of the body would
            change it.
    """
    _refuse_rewriting(body, beside)
    prompt = body.get("prompt", "" if may_be_left_out else None)
    if not isinstance(prompt, str) and not (
        isinstance(prompt, list) and all(type(token) is int for token in prompt)
    ):
        raise InvalidRequest(
            f"With {beside}, 'prompt' must be one text or one list of token ids.", param="prompt"
        )
    if body.get("prompt_embeds") is not None:
        raise InvalidRequest(
            f"'prompt_embeds' cannot be used with {beside}: send 'prompt' instead.", param="prompt_embeds"
        )


def _require_chat(body: dict[str, Any]) -> None:
    if body.get("continue_final_message") or body.get("add_generation_prompt") is False:
        raise InvalidRequest(
            "A chat with a handoff must end with a message that the model answers: leave out "
            "'continue_final_message' and 'add_generation_prompt'.",
            param="continue_final_message",
        )


# Read the header `X-Baton-Handoff`, for clients that can set headers but no fields of the body.


HEADER = "X-Baton-Handoff"
ID_HEADER = "X-Handoff-Id"
"""Response header with the id of the saved handoff, for clients that drop unknown fields."""
HINTS_HEADER = "X-Baton-KV-Hints-Unused"
"""Response header with the actions of a request's `kv_hints` of which nothing is done."""
AUTO, OFF, SAVE = "auto", "off", "save"


def apply_header(body: Json, value: str | None) -> bool:
    """Put what the header asks for into the body's `handoff` field.

    Args:
        body: the request's body, which is changed.
        value: `auto`, `off`, `save`, or the id of the handoff to continue; None: there is no header.

    Returns:
        Whether handoffs may be automatic for this request.

    Raises:
        InvalidRequest: header and body both name a handoff, or ask for one.
    """
    wish = (value or "").strip()
    if wish.lower() == OFF:
        return False
    if wish and wish.lower() != AUTO:
        if body.get("handoff") is not None:
            raise InvalidRequest(
                f"The request has the field 'handoff' and the header {HEADER}: leave one of them out.",
                param="handoff",
            )
        body["handoff"] = {"save": True} if wish.lower() == SAVE else {"from": wish}
    return True
