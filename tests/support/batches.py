"""Batches as tests make them: lines of an input file, and waiting for an end with the unmodified SDK."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any

from openai import OpenAI
from openai.types import Batch

CHAT = "/v1/chat/completions"
ENDS = ("completed", "failed", "expired", "cancelled")


def sdk(url: str, key: str = "none") -> OpenAI:
    """The SDK, which does not try again by itself."""
    return OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def chat(text: str, **fields: Any) -> dict[str, Any]:
    """The body of a chat."""
    return {"model": "a", "messages": [{"role": "user", "content": text}], "max_tokens": 2} | fields


def line(custom_id: object, body: object, url: str = CHAT, **fields: object) -> bytes:
    """A line of an input file."""
    row = {"custom_id": custom_id, "method": "POST", "url": url, "body": body} | fields
    return json.dumps(row).encode() + b"\n"


def chats(count: int, **fields: Any) -> bytes:
    """An input of chats, each with its own words."""
    return b"".join(line(f"c{number}", chat(f"n{number} m", **fields)) for number in range(count))


def begin(client: OpenAI, content: bytes, endpoint: Any = CHAT, **fields: Any) -> Batch:
    """Upload an input and make a batch of it."""
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint=endpoint, **({"completion_window": "24h"} | fields)
    )


def until(client: OpenAI, batch: Batch, statuses: Iterable[str] = ENDS, within_s: float = 60) -> Batch:
    """The batch, once it has one of these statuses."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if (now := client.batches.retrieve(batch.id)).status in statuses:
            return now
        time.sleep(0.01)
    raise AssertionError(f"after {within_s} s it is {now}")


def counts(client: OpenAI, batch: Batch) -> tuple[int, int, int]:
    """How many lines a batch has now, how many are answered, how many failed."""
    found = client.batches.retrieve(batch.id).request_counts
    assert found is not None
    return found.total, found.completed, found.failed


def errors(batch: Batch) -> list[tuple[str | None, int | None, str | None]]:
    """What is wrong with a batch: code, line and field of each error."""
    found = batch.errors.data if batch.errors is not None else None
    return [(error.code, error.line, error.param) for error in found or []]


def rows(client: OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    """The lines of an output or error file; none of a file that was not written."""
    if file_id is None:
        return []
    return [json.loads(text) for text in client.files.content(file_id).text.splitlines()]


def answered(client: OpenAI, batch: Batch) -> dict[str, dict[str, Any]]:
    """All that a batch wrote, by `custom_id`; none may be there twice."""
    found = [*rows(client, batch.output_file_id), *rows(client, batch.error_file_id)]
    by_id = {row["custom_id"]: row for row in found}
    assert len(by_id) == len(found), "a line was done twice"
    return by_id
