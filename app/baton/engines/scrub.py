"""Scrub messages of libraries before a client sees them: no paths, addresses, stack frames or class names."""

from __future__ import annotations

import re

from baton.errors import InvalidRequest

PATH = re.compile(r"(?:/[\w.\-]+){2,}")
NATIVE = re.compile(r"\[\d\d:\d\d:\d\d\] \S+\.(?:cc|cpp|h):\d+: ")
"""The time and source line that xgrammar's native code puts before an error."""
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
CLASS_NAME = re.compile(r"\b(?:[\w]+\.)*[A-Z]\w*(?:Error|Exception)\b:? ?")
FRAME = re.compile(r'\n?\s*File "[^"]*", line \d+.*')
INTERPRETER = re.compile(
    r"object is not \w+|object has no attribute|has no attribute '|unsupported operand|not supported between"
    r"|unhashable type|indices must be|index out of range|keyword argument|positional argument"
    r"|object does not support|argument of type|not all arguments converted|cannot unpack|values to unpack"
    r"|multiple values for"
)
"""Python's messages about a value of the wrong type: they name our code, not the client's field."""
WRONG_KIND = "A field of the request holds a value of the wrong type; compare it with the API's schema."
MAX_MESSAGE = 1000
"""Characters of a message that are kept."""


def scrub(message: str) -> str:
    """Take file paths, memory addresses, stack frames and class names out of a message.

    A message of the Python interpreter becomes `WRONG_KIND`, an empty one `InvalidRequest.default_message`.
    """
    if INTERPRETER.search(message):
        return WRONG_KIND
    for pattern, text in ((NATIVE, ""), (FRAME, ""), (ADDRESS, ""), (PATH, "<path>"), (CLASS_NAME, "")):
        message = pattern.sub(text, message)
    return message.strip()[:MAX_MESSAGE] or InvalidRequest.default_message
