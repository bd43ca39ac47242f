"""The sync client."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from baton_client import routes
from baton_client.call import Report
from baton_client.conversation import Conversation
from baton_client.driver import Driver
from baton_client.handoffs import Handoffs
from baton_client.retries import Retries
from baton_client.routes import Messages, Parameter, Start, Starts
from baton_client.scripts import exchange
from baton_client.turns import first_turns
from baton_client.values import Answer, SceneAnswer
from baton_client.wire import client_options

BASE_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 600.0
MAX_ANSWER_BYTES = 256 * 1024**2


class Baton:
    """A client of a Baton gateway; use it in a `with` block, or call `close`. Threads may share it.

    Args:
        base_url: of the gateway, with `/v1` at its end or without.
        api_key: the key, if the gateway wants one.
        timeout_s: most seconds to wait for an answer to begin, and for each next piece of it.
        retries: how often a request is sent again at most, where that is harmless or the gateway asks for it.
        transport: what sends requests, such as `httpx.HTTPTransport(proxy=...)`; None: httpx's own.
        max_answer_bytes: most bytes that an answer may have; above them it is a `BadAnswer`. A file that is
            written to `target` may have 64 times as many.

    Attributes:
        handoffs: the routes of `/v1/handoffs`.
    """

    def __init__(
        self,
        base_url: str = BASE_URL,
        api_key: str | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        retries: int = 2,
        transport: httpx.BaseTransport | None = None,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
    ) -> None:
        options = client_options(base_url, api_key, timeout_s)
        self._driver = Driver(options, Retries(retries), transport, max_answer_bytes)
        self.handoffs = Handoffs(self._driver)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._driver.close()

    def chat(
        self,
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
        **fields: Any,
    ) -> Answer:
        """Ask a model, from a handoff or from the beginning.

        Args:
            model: name of the engine.
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
            fields: further fields of the request, such as `max_tokens` and `temperature`.

        Raises:
            NotFound: there is no such model, or no such handoff any more.
            Overloaded: the gateway still has too much to do after the retries.
            ApiError: the gateway refused the request, or failed.
            ConnectionLost: no answer came.
            ValueError: `stream` is set; this client does not stream.
        """
        starting = {"join": join, "order": order, "translate": translate}
        saving = {"label": label, "pin": pin, "ttl_s": ttl_s, "latent_steps": latent_steps}
        call = routes.chat(
            model, messages, start=start, starting=starting, save=save, saving=saving, fields=fields
        )
        return self._driver.run(exchange(call, self._driver.retries))

    def conversation(
        self,
        model: str,
        system: str | None = None,
        *,
        start: Start | None = None,
        label: str | None = None,
        keep: bool = False,
    ) -> Conversation:
        """Begin a conversation of which each turn sends the new message alone; nothing is sent yet.

        Args:
            model: name of the engine.
            system: the system message, before the first turn's.
            start: the handoff that it goes on from; it is never deleted.
            label: given to what it saves; its last handoff is kept, and `handoffs.find` returns it.
            keep: whether all that it saves is kept.
        """
        turns = first_turns(model, self._driver.retries, system, start, label, keep)
        return Conversation(self._driver, turns)

    def scene(
        self,
        model: str,
        scene: str | Path | bytes,
        *,
        accept: str = "image/tiff",
        target: str | Path | None = None,
        progress: Report | None = None,
        media_type: str | None = None,
        **parameters: Parameter,
    ) -> SceneAnswer:
        """Send a scene to a model's plugin, as a file; a path is read while it is sent.

        Args:
            model: name of the engine.
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
        call = routes.scene(
            model,
            scene,
            accept=accept,
            media_type=media_type,
            target=target,
            report=progress,
            parameters=parameters,
        )
        return self._driver.run(exchange(call, self._driver.retries))
