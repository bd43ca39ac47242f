"""Keep a conversation's place: what it sends next, from which handoff, and what it deletes at its end."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from baton_client import routes
from baton_client.call import Script
from baton_client.errors import BatonError, ConnectionLost
from baton_client.retries import Retries
from baton_client.routes import Start
from baton_client.scripts import delete, exchange
from baton_client.values import Answer, Json

Content: TypeAlias = str | Sequence[Mapping[str, Any]]
"""A message's text, or its parts: texts and images."""
SAVING = ("label", "ttl_s", "pin", "latent_steps")
"""Arguments of a turn that say how its handoff is saved."""


class Users:
    """Count how many conversations need each handoff that one of them saved.

    A fork that has not said anything needs the handoff at which it was forked, so this handoff must stay when
    its parent ends first. Once it has saved a handoff of its own, the gateway keeps what that one continues.
    Conversations may end in different threads.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._kept: set[str] = set()
        self._lock = threading.Lock()

    def add(self, handoff_id: str) -> None:
        """Count one more conversation that needs this handoff."""
        with self._lock:
            self._counts[handoff_id] += 1

    def knows(self, handoff_id: str | None) -> bool:
        """Return whether a conversation saved this handoff, and will delete it."""
        with self._lock:
            return handoff_id in self._counts

    def keep(self, handoff_id: str) -> None:
        """Never give this handoff out for deletion."""
        with self._lock:
            self._kept.add(handoff_id)

    def release(self, handoff_ids: Iterable[str]) -> list[str]:
        """Count one user less of each; returns those to delete, the newest first: nobody needs them."""
        unused = []
        with self._lock:
            for handoff_id in handoff_ids:
                self._counts[handoff_id] -= 1
                if self._counts[handoff_id] <= 0:
                    del self._counts[handoff_id]
                    unused.append(handoff_id)
            return [one for one in reversed(unused) if one not in self._kept]


class Turns:
    """The state of one conversation.

    Args:
        start: id of the handoff that it starts from; None: it begins anew.
        unsaved: messages that no handoff holds yet; the first turn sends them.
        label: given to each handoff that it saves; the last one is kept. None: none is.
        keep: whether all that it saves is kept.
        save: whether it saves handoffs; False: each turn sends all messages since `start`.
    """

    def __init__(
        self,
        model: str,
        retries: Retries,
        *,
        start: str | None,
        unsaved: Iterable[Json] = (),
        label: str | None = None,
        keep: bool = False,
        save: bool = True,
        users: Users | None = None,
    ) -> None:
        self.handoff = start
        self._model = model
        self._retries = retries
        self._unsaved = list(unsaved)
        self._label = label
        self._keep = keep
        self._save = save
        self._users = users or Users()
        self._saved: list[str] = []
        self._borrowed = [start] if start is not None and self._users.knows(start) else []
        for handoff_id in self._borrowed:
            self._users.add(handoff_id)
        self._left = False

    def say(self, messages: Iterable[Json], fields: Mapping[str, Any]) -> Script[Answer]:
        """Send messages after the last handoff, and save the next.

        Args:
            fields: of the chat's body, and how its handoff is saved (see `SAVING`).

        Raises:
            NotFound: the last handoff has expired or was deleted by others.
            RuntimeError: the conversation has ended.
        """
        self._require_open()
        saving = {"label": self._label} | {name: fields[name] for name in SAVING if name in fields}
        rest = {name: value for name, value in fields.items() if name not in SAVING}
        sent = [*self._unsaved, *messages]
        call = routes.chat_call(
            self._model, sent, self.handoff, {}, save=self._save, saving=saving, fields=rest
        )
        answer = yield from exchange(call, self._retries)
        asked_to_keep = self._keep or fields.get("label") is not None or bool(fields.get("pin"))
        self._take(answer, sent, keep=asked_to_keep)
        return answer

    def _take(self, answer: Answer, sent: list[Json], *, keep: bool) -> None:
        """Go on from the answer's handoff; where it was not saved, from its messages."""
        saved = answer.handoff
        if saved is None or saved.state == "failed":
            self._unsaved = [*sent, answer.body["choices"][0]["message"]]
            return
        self.handoff, self._unsaved = saved.id, []
        self._users.add(saved.id)
        self._saved.append(saved.id)
        if keep:
            self._users.keep(saved.id)

    def fork(self, label: str | None) -> Turns:
        """Return another conversation at the same point.

        Raises:
            RuntimeError: the conversation has ended.
        """
        self._require_open()
        return Turns(
            self._model,
            self._retries,
            start=self.handoff,
            unsaved=self._unsaved,
            label=label,
            keep=self._keep,
            save=self._save,
            users=self._users,
        )

    def end(self) -> Script[None]:
        """Delete what it saved, but for what is kept and what its forks need; a second time nothing.

        Raises:
            BatonError: a handoff could not be deleted; the others were tried all the same.
        """
        self._left = True
        if self._label is not None and self._saved:
            self._users.keep(self._saved[-1])
        needed = [*self._borrowed, *self._saved]
        self._borrowed, self._saved = [], []
        failed: BatonError | None = None
        for handoff_id in self._users.release(needed):
            try:
                yield from delete(handoff_id, self._retries)
            except ConnectionLost:
                raise
            except BatonError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def _require_open(self) -> None:
        if self._left:
            raise RuntimeError(
                "This conversation has ended: fork it, or say more, before its `with` block does."
            )


def said(content: Content) -> list[Json]:
    """Write a message of the user."""
    return [{"role": "user", "content": content}]


def results_of(results: Mapping[str, Content]) -> list[Json]:
    """Write the messages that answer calls of tools.

    Args:
        results: what each tool returned, by the id of its call.

    Raises:
        ValueError: there are none.
    """
    if not results:
        raise ValueError("Give the result of each call of the last answer, by the call's id.")
    return [{"role": "tool", "tool_call_id": call, "content": found} for call, found in results.items()]


def first_turns(
    model: str,
    retries: Retries,
    system: str | None,
    start: Start | None,
    label: str | None,
    keep: bool,
    save: bool = True,
) -> Turns:
    """Return the state of a new conversation."""
    unsaved = [] if system is None else [{"role": "system", "content": system}]
    begin = None if start is None else routes.id_of(start)
    return Turns(model, retries, start=begin, unsaved=unsaved, label=label, keep=keep, save=save)
