"""Read the fields by which clients of other servers ask for their prompts to be cached.

Sources: Anthropic's Messages API, `cache_control` with `ttl` `5m` or `1h`; OpenAI's `prompt_cache_key` and
`prompt_cache_retention`. A hint is never an error: what is not understood is ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from baton.engines.port import Json, Operation

LIVES_S = {"5m": 300, "1h": 3600}
DEFAULT_LIFE = "5m"


@dataclass(frozen=True)
class SaveWish:
    """A client's wish that the context of a request is saved.

    Attributes:
        ttl_s: seconds that it should live; None: as long as the settings say.
    """

    ttl_s: int | None = None


def save_wish(operation: Operation, body: Json) -> SaveWish | None:
    """Return the wish in a request's body; None: there is none."""
    if operation is Operation.MESSAGES:
        lives = [_life_of(marked["cache_control"]) for marked in _marked(body)]
        return SaveWish(max(lives)) if lives else None
    if body.get("prompt_cache_key") or body.get("prompt_cache_retention") == "24h":
        return SaveWish()
    return None


def _life_of(control: Json) -> int:
    return LIVES_S.get(str(control.get("ttl")), LIVES_S[DEFAULT_LIFE])


def _marked(body: Json) -> Iterator[Json]:
    """Yield the objects of a body of `/v1/messages` that have `cache_control`."""
    for each in (body, *_objects(body.get("system")), *_objects(body.get("tools"))):
        if isinstance(each.get("cache_control"), dict):
            yield each
    for message in _objects(body.get("messages")):
        for part in _objects(message.get("content")):
            if isinstance(part.get("cache_control"), dict):
                yield part


def _objects(value: object) -> list[Json]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
