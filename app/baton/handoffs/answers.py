"""Collect a chat's answer as the message that its client was given, whole or in chunks."""

from __future__ import annotations

from typing import Any

from baton.engines.port import Json
from baton.handoffs.history import answer_fingerprint


class ChatAnswer:
    """The message of a chat's one answer.

    Example:
        >>> answer = ChatAnswer()
        >>> answer.add({"choices": [{"delta": {"role": "assistant", "content": "Ro"}}]})
        >>> answer.add({"choices": [{"delta": {"content": "me"}}]})
        >>> answer.message["content"]
        'Rome'
    """

    def __init__(self) -> None:
        self._seen = False
        self._content: list[str] = []
        self._calls: dict[int, Json] = {}

    def add(self, answer: Json) -> None:
        """Take in a whole answer, or the next chunk of a streamed one; other objects hold nothing for it."""
        for choice in answer.get("choices") or ():
            said = choice.get("message") or choice.get("delta")
            if isinstance(said, dict):
                self._seen = True
                content = said.get("content")
                self._content.append(content if isinstance(content, str) else "")
                for index, call in enumerate(said.get("tool_calls") or ()):
                    self._add_call(call.get("index", index), call)

    @property
    def message(self) -> Json:
        """The message so far."""
        calls = [self._calls[index] for index in sorted(self._calls)]
        return {"role": "assistant", "content": "".join(self._content), "tool_calls": calls}

    @property
    def fingerprint(self) -> str | None:
        """What the message is recognised by when it is sent again; None: there was no answer of a chat."""
        return answer_fingerprint(self.message) if self._seen else None

    def _add_call(self, index: int, call: Json) -> None:
        known = self._calls.setdefault(index, {"id": None, "function": {"name": None, "arguments": ""}})
        known["id"] = call.get("id") or known["id"]
        function: dict[str, Any] = call.get("function") or {}
        known["function"]["name"] = function.get("name") or known["function"]["name"]
        known["function"]["arguments"] += function.get("arguments") or ""
