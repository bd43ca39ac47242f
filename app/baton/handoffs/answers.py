"""Build the assistant's message from a chat's answer, whole or streamed."""

from __future__ import annotations

from typing import Any

from baton.engines.port import Json
from baton.handoffs.prompts.history import answer_fingerprint


class ChatAnswer:
    """Collects the one answer of a chat as a message.

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
        """Add a whole answer, or the next chunk of a streamed one; other objects add nothing."""
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
        """The fingerprint that recognises the message when a client sends it again; None: no answer came."""
        return answer_fingerprint(self.message) if self._seen else None

    def _add_call(self, index: int, call: Json) -> None:
        known = self._calls.setdefault(index, {"id": None, "function": {"name": None, "arguments": ""}})
        known["id"] = call.get("id") or known["id"]
        function: dict[str, Any] = call.get("function") or {}
        known["function"]["name"] = function.get("name") or known["function"]["name"]
        known["function"]["arguments"] += function.get("arguments") or ""
