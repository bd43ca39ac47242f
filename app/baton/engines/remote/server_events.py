"""Split the bytes of a stream into server-sent events (HTML standard, section 9.2.6)."""

from __future__ import annotations

from dataclasses import dataclass

from baton.engines.remote.refusals import not_an_answer

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class ServerEvent:
    """One event.

    Attributes:
        name: its `event`; empty: it has none.
        data: its `data`; several lines are joined.
    """

    name: str
    data: str

    def __str__(self) -> str:
        lines = "".join(f"data: {line}\n" for line in self.data.split("\n"))
        return f"event: {self.name}\n{lines}\n" if self.name else f"{lines}\n"


class EventSplitter:
    """Collects the bytes of a stream until an event is complete.

    Args:
        most: bytes that one event may have.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._rest = bytearray()
        self._searched = 0
        self._began = False
        self._return = False

    @property
    def held(self) -> int:
        """Bytes of an event that is not complete."""
        return len(self._rest)

    def feed(self, data: bytes) -> list[ServerEvent]:
        """Return the events that these bytes complete; comments are left out.

        Raises:
            RemoteFailed: an event is too long, or no text.
        """
        self._rest += self._with_line_feeds(data)
        self._drop_mark()
        events = []
        while (end := self._rest.find(b"\n\n", max(0, self._searched - 1))) >= 0:
            event = _event(bytes(self._rest[:end]))
            del self._rest[: end + 2]
            self._searched = 0
            if event is not None:
                events.append(event)
        self._searched = len(self._rest)
        if len(self._rest) > self._most:
            raise not_an_answer("an event that is too long")
        return events

    def _with_line_feeds(self, data: bytes) -> bytes:
        """Return bytes with a line feed at the end of each line, where the stream may have CR, or both."""
        if not data:
            return data
        if self._return and data[:1] == b"\n":
            data = data[1:]
        self._return = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if b"\r" in data else data

    def _drop_mark(self) -> None:
        if not self._began and len(self._rest) >= len(BYTE_ORDER_MARK):
            self._began = True
            if self._rest.startswith(BYTE_ORDER_MARK):
                del self._rest[: len(BYTE_ORDER_MARK)]


def _event(block: bytes) -> ServerEvent | None:
    """Return the event that a block of lines is; None: it has no data."""
    try:
        lines = block.decode().split("\n")
    except UnicodeDecodeError:
        raise not_an_answer("an event that is no text") from None
    name, data = "", []
    for line in lines:
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            data.append(value)
        elif field == "event":
            name = value
    return ServerEvent(name, "\n".join(data)) if data else None
