"""Send and receive frames on a child's socket.

A frame is `<II` with the lengths of header and body, the header (a JSON object), and the body (raw array
bytes).
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

LENGTHS = struct.Struct("<II")
HEADER_LIMIT = 8 * 1024 * 1024
Buffer = bytes | bytearray | memoryview


def _arm(sock: socket.socket, deadline: float | None) -> None:
    if deadline is None:
        return
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    sock.settimeout(left)


def send(
    sock: socket.socket, header: dict[str, Any], body: Buffer = b"", deadline: float | None = None
) -> None:
    """Send one frame.

    Args:
        sock: blocking, or with a deadline.
        header: JSON-serialisable.
        body: contiguous bytes.
        deadline: seconds on the monotonic clock; None: no limit.

    Raises:
        TimeoutError: the deadline has passed.
        OSError: the other side has closed the socket.
    """
    text = json.dumps(header).encode()
    _arm(sock, deadline)
    sock.sendall(LENGTHS.pack(len(text), memoryview(body).nbytes) + text)
    if body:
        _arm(sock, deadline)
        sock.sendall(body)


def receive_into(sock: socket.socket, target: memoryview, deadline: float | None = None) -> None:
    """Receive exactly the bytes that fill `target`.

    Raises:
        EOFError: the other side has closed the socket.
        TimeoutError: the deadline has passed.
    """
    filled = 0
    while filled < len(target):
        _arm(sock, deadline)
        got = sock.recv_into(target[filled:])
        if not got:
            raise EOFError
        filled += got


def receive(
    sock: socket.socket, room: Callable[[int], memoryview], deadline: float | None = None
) -> tuple[dict[str, Any], int]:
    """Receive a frame: return its header and the length of its body, which is in the buffer that `room` gave.

    Args:
        sock: as in `send`.
        room: returns the buffer for a body of a length; raises ValueError for an unexpected length.
        deadline: as in `send`.

    Raises:
        EOFError: the other side has closed the socket.
        TimeoutError: the deadline has passed.
        ValueError: the frame is malformed or its body unexpected.
    """
    lengths = bytearray(LENGTHS.size)
    receive_into(sock, memoryview(lengths), deadline)
    header_length, body_length = LENGTHS.unpack(lengths)
    if header_length > HEADER_LIMIT:
        raise ValueError("header too long")
    text = bytearray(header_length)
    receive_into(sock, memoryview(text), deadline)
    if body_length:
        receive_into(sock, room(body_length), deadline)
    header = json.loads(text)
    if not isinstance(header, dict):
        raise ValueError("header is no object")
    return header, body_length
