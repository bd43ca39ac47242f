"""Read a form with one file (`multipart/form-data`, RFC 7578) while it arrives, without holding the file."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from email.message import Message
from email.parser import HeaderParser

from baton.errors import InvalidRequest

MOST_HEAD_BYTES = 8 * 1024
"""Bytes of a part's headers."""
MOST_FIELDS = 16
MOST_FIELD_BYTES = 8 * 1024
LONGEST_BOUNDARY = 200
FILE = "file"


class FormReader:
    """Splits a form into its fields and its file.

    Args:
        content_type: the request's header.
        write: takes the file's bytes as they arrive.

    Attributes:
        fields: the fields, by name.
        filename: name of the file; None: there was none yet.

    Raises:
        InvalidRequest: the header names no boundary.
    """

    def __init__(self, content_type: str, write: Callable[[bytes], Awaitable[None]]) -> None:
        header = Message()
        header["content-type"] = content_type
        boundary = header.get_param("boundary")
        if not isinstance(boundary, str) or not 1 <= len(boundary) <= LONGEST_BOUNDARY:
            raise _malformed("its 'Content-Type' names no boundary")
        self._mark = b"\r\n--" + boundary.encode("latin-1", "replace")
        self._write = write
        self._held = bytearray(b"\r\n")  # the first boundary needs none before it
        self.fields: dict[str, str] = {}
        self.filename: str | None = None

    async def read(self, chunks: AsyncIterator[bytes]) -> None:
        """Read the whole form.

        Raises:
            InvalidRequest: it is no form, is cut off, or holds more than one file and a few small fields.
        """
        self._chunks = chunks
        if await self._until(self._mark, MOST_HEAD_BYTES):
            raise _malformed("something stands before its first part")
        while not await self._at_end():
            await self._part(await self._until(b"\r\n\r\n", MOST_HEAD_BYTES))
        async for _ in chunks:  # what may follow is to be ignored
            pass

    async def _at_end(self) -> bool:
        """Read what follows a boundary; return whether it was the last one."""
        while len(self._held) < 2:
            await self._more()
        follows = bytes(self._held[:2])
        if follows not in (b"--", b"\r\n"):
            raise _malformed("a boundary is followed by something else than a line's end")
        if follows == b"--":
            return True
        del self._held[:2]
        return False

    async def _part(self, head: bytes) -> None:
        headers = HeaderParser().parsestr(head.decode("utf-8", "replace"))
        name = headers.get_param("name", header="content-disposition")
        filename = headers.get_filename()
        if not isinstance(name, str):
            raise _malformed("a part has no name")
        if name == FILE:
            if self.filename is not None:
                raise InvalidRequest("Send one 'file'.", param=FILE)
            self.filename = filename or FILE
            await self._pass_file()
            return
        if len(self.fields) >= MOST_FIELDS:
            raise _malformed(f"it has more than {MOST_FIELDS} fields")
        if name in self.fields:
            raise InvalidRequest(f"The field '{name[:40]}' is given twice.", param=name[:40])
        self.fields[name] = (await self._until(self._mark, MOST_FIELD_BYTES)).decode("utf-8", "replace")

    async def _until(self, mark: bytes, most: int) -> bytes:
        """Read up to a mark, and skip the mark."""
        while (at := self._held.find(mark)) < 0:
            if len(self._held) > most + len(mark):
                break
            await self._more()
        if not 0 <= at <= most:
            raise _malformed("a field, or the head of a part, is too long")
        found = bytes(self._held[:at])
        del self._held[: at + len(mark)]
        return found

    async def _pass_file(self) -> None:
        """Write what comes before the next boundary, and skip the boundary."""
        while (at := self._held.find(self._mark)) < 0:
            sure = len(self._held) - len(self._mark) + 1
            if sure > 0:
                await self._write(bytes(self._held[:sure]))
                del self._held[:sure]
            await self._more()
        await self._write(bytes(self._held[:at]))
        del self._held[: at + len(self._mark)]

    async def _more(self) -> None:
        chunk = await anext(self._chunks, b"")
        if not chunk:
            raise _malformed("it is cut off")
        self._held += chunk


def _malformed(why: str) -> InvalidRequest:
    return InvalidRequest(f"The body is no form that can be read: {why}.")
