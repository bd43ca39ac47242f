"""Look whether a server elsewhere answers, which models it has, and whether it is another Baton."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from baton.config.groups import EngineSettings, RemoteSettings
from baton.engines.port import Json, Peer
from baton.engines.remote.client import Answer, RemoteClient
from baton.engines.remote.keys import Key
from baton.engines.remote.refusals import BUSY, ERROR_BYTES, KEY_REFUSED, refusal
from baton.engines.remote.requests import MODELS, PEER, headers_of
from baton.errors import RemoteFailed, RemoteTimeout, StartError
from baton.telemetry.ids import RequestContext

LIST_BYTES = 4 * 1024 * 1024
ANSWER_S = 10.0
"""Seconds that a look may take beyond those of the connection."""
OF_THE_MODEL = ("created", "object", "owned_by", "max_model_len")
"""Fields of a model's card that our clients see; others hold paths and names of the other machine."""


@dataclass(frozen=True)
class Look:
    """What a look found.

    Attributes:
        key_refused: whether the server refuses the key.
        card: of the model in the server's list; None: there is no list, or the model is not on it.
        models: names on that list; None: there is no list.
    """

    key_refused: bool = False
    card: Json | None = None
    models: tuple[str, ...] | None = None

    def require_usable(self, engine: str, url: str, model: str) -> None:
        """Refuse what no later try would mend.

        Raises:
            StartError: the server refuses the key, or has other models.
        """
        if self.key_refused:
            raise StartError(f"engines '{engine}': {url} refuses the key: correct `remote.key_file`.")
        if self.models is not None and self.card is None:
            listed = ", ".join(self.models[:20]) or "none"
            raise StartError(
                f"engines '{engine}': {url} serves no model '{model}': name one of its own in `model`; it "
                f"serves: {listed}."
            )


async def look(client: RemoteClient, settings: RemoteSettings, key: Key, model: str) -> Look:
    """Ask the server for its models.

    Raises:
        RemoteFailed: it failed, or cannot be reached.
        RemoteTimeout: it did not answer in time.
    """
    answer, body = await _got(client, settings, MODELS, headers_of(None, key), LIST_BYTES)
    if answer.status in (401, 403):
        return Look(key_refused=True)
    if answer.status >= 500:
        raise RemoteFailed()
    return _listed(body, model) if answer.status == 200 else Look()


def _listed(body: bytes, model: str) -> Look:
    try:
        found = json.loads(body)["data"]
        cards = {card["id"]: card for card in found if isinstance(card["id"], str)}
    except (ValueError, TypeError, KeyError, RecursionError):
        return Look()
    card = cards.get(model)
    shown = {name: card[name] for name in OF_THE_MODEL if name in card} if card is not None else None
    return Look(card=shown, models=tuple(cards))


async def _got(
    client: RemoteClient,
    settings: RemoteSettings,
    path: str,
    headers: Mapping[str, str],
    most: int,
    *,
    query: Mapping[str, str] | None = None,
) -> tuple[Answer, bytes]:
    """Return an answer and its body, both within the seconds of a look.

    Raises:
        BatonError: the server failed, or cannot be reached.
    """
    try:
        async with asyncio.timeout(settings.connect_s + ANSWER_S):
            answer = await client.ask("GET", path, headers, query=query)
            return answer, await answer.read(most)
    except TimeoutError as error:
        raise RemoteTimeout() from error


async def ask_peer(
    client: RemoteClient,
    engine: EngineSettings,
    key: Key,
    challenge: str | None = None,
    context: RequestContext | None = None,
) -> Peer | None:
    """Ask the server who it is; None: it is no other Baton.

    Args:
        client: its connections.
        engine: which is asked about.
        key: says for which tenant.
        challenge: what its proof is made for; None: no matter.
        context: of the client's request; None: there is none.

    Raises:
        BatonError: it failed, refuses the key or cannot be reached, so that this is not known.
    """
    query = {"challenge": challenge or secrets.token_hex(16), "model": engine.model}
    headers = headers_of(context, key)
    answer, body = await _got(client, engine.remote, PEER, headers, ERROR_BYTES, query=query)
    if answer.status in (*BUSY, *KEY_REFUSED) or answer.status >= 500:
        raise refusal(engine.name, answer.status, answer.headers, body)
    return _peer(body) if answer.status == 200 else None


def _peer(body: bytes) -> Peer | None:
    try:
        found = json.loads(body)
        if found["object"] != "peer":
            return None
        tenant, proof, hands_over = found["tenant"], found["store"], found["handoff"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if isinstance(tenant, str) and isinstance(proof, str | None) and isinstance(hands_over, bool):
        return Peer(tenant, proof, hands_over)
    return None
