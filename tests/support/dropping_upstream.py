"""A server in place of a gateway that counts requests, and goes away before it answers."""

from __future__ import annotations

import socket
import struct
import threading
from collections import Counter
from typing import Any

READY = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: closing sends a reset, as the end of a process with unread data does."""


class LosingUpstream:
    """Answers `/readyz` and paths that end in `/kept`; of every other request it reads all, and resets the connection.

    Attributes:
        port: of 127.0.0.1.
        seen: how many requests of each method arrived in full.
        heads: their request heads.
    """

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.seen: Counter[str] = Counter()
        self.heads: list[str] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> LosingUpstream:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as incoming:
            head = self._read(incoming)
            if not head:
                return
            method, path = head.split()[:2]
            if path != "/readyz":
                self.seen[method] += 1
                self.heads.append(head)
            if path == "/readyz" or path.endswith("/kept"):
                connection.sendall(READY)
            else:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)

    @staticmethod
    def _read(incoming: Any) -> str:
        """The head of one request, once its body has been read too."""
        lines = []
        while (line := incoming.readline().decode("latin-1")).strip():
            lines.append(line)
        length = next(
            (int(line.split(":")[1]) for line in lines if line.lower().startswith("content-len")), 0
        )
        incoming.read(length)
        return "".join(lines)

    def headers(self) -> dict[str, str]:
        """The headers of the last request."""
        pairs = (line.split(": ", 1) for line in self.heads[-1].splitlines()[1:])
        return {name.lower(): value for name, value in pairs}
