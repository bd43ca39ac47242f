"""What must never stand in an answer: where our code lies, what it is called, who runs it."""

from __future__ import annotations

import getpass
import re
import socket
from pathlib import Path

import httpx

ROUTES = r"/(?:v1|v2|pooling|classify|score|rerank|tokenize|detokenize|livez|readyz|health|version|metrics)\b"
LEAKS = {
    "path": re.compile(rf"(?<![\w:/.])(?!{ROUTES})/(?:[\w.@+-]+/)+[\w.@+-]+"),
    "address": re.compile(r"0x[0-9a-fA-F]{4,}"),
    "class": re.compile(r"\b\w+\.[A-Z]\w+|\b[A-Z]\w*(?:Error|Exception)\b|<class |Error'>|object at "),
    "module": re.compile(
        r"\b(?:baton_\w+|starlette|uvicorn|fastapi|pydantic\w*|jiter|structlog|asyncio|h11|xgrammar|site-packages)\b"
        r"|\b(?:vllm|baton|python3?)\.\w+|\w\.py\b"
    ),
    "trace": re.compile(r"Traceback|File \"|line \d+, in "),
    "user": re.compile(rf"\b{re.escape(getpass.getuser())}\b|{re.escape(str(Path.home()))}\b"),
    "host": re.compile(rf"\b{re.escape(socket.gethostname())}\b"),
}


def leaks(response: httpx.Response) -> list[str]:
    """What an answer gives away, in its body or its headers."""
    texts = [response.text, *(f"{name}: {value}" for name, value in response.headers.items())]
    return [
        f"{what}: {found[0]}"
        for text in texts
        for what, rule in LEAKS.items()
        if (found := rule.search(text))
    ]
