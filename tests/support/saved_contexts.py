"""Wait until the context of one request is saved, by the records in a store's folder.

Records come late and go again: one of an earlier request may be written meanwhile, and one that another goes on
from is deleted. So neither their number nor the newest one's age says which context is there.
"""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import httpx

from baton.library.handoff import Handoff
from support.raw_requests import wait_for

WITHIN_S = 60
LAST_TOKENS = 4
"""So many tokens at the end of an answer may not be saved with it: the last one, and one that ends it."""


class SavedContexts:
    """A tenant's contexts in a store.

    Args:
        store: its folder.
        tenant: the owner. Contexts of others may come late, and be as long.
    """

    def __init__(self, store: Path, tenant: str = "local") -> None:
        self._records = store / "records"
        self._tenant = tenant

    def names(self) -> set[str]:
        """Return the names of the records that are there."""
        return {path.name for path in self._records.glob("*.json")}

    def wait_for(self, before: set[str], least: int, most: int) -> None:
        """Wait until a context of so many tokens is there.

        The gateway finds a context before its record is there.

        Args:
            before: names of records that do not count.
            least: fewest tokens.
            most: most tokens.
        """
        wait_for(
            lambda: any(least <= len(each) <= most for each in self._tokens(before)),
            f"no context of {least} to {most} tokens was saved",
            WITHIN_S,
        )

    def _tokens(self, before: set[str]) -> list[array[int]]:
        found = []
        for name in self.names() - before:
            try:
                record = Handoff.model_validate_json((self._records / name).read_bytes())
            except FileNotFoundError:  # one that another goes on from was deleted
                continue
            if record.tenant == self._tenant:
                found.append(record.tokens)
        return found


def total_tokens(answer: httpx.Response | dict[str, Any]) -> int:
    """Return the number of a prompt's and its answer's tokens, by the answer, or by the end of its stream."""
    usage = answer["usage"] if isinstance(answer, dict) else _usage(answer)
    if "total_tokens" in usage:
        return int(usage["total_tokens"])
    cached = usage.get("cache_read_input_tokens") or 0  # Anthropic's input tokens are without those
    return int(usage["input_tokens"] + usage["output_tokens"] + cached)


def _usage(answer: httpx.Response) -> dict[str, Any]:
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return dict(answer.json()["usage"])
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    return dict(chunks[-1]["usage"])
