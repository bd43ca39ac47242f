"""Asking a gateway's relay with the OpenAI SDK, and reading what it told."""

from __future__ import annotations

import time
from typing import Any

import openai

from support.gateways import RealGateway


def ask(gateway: RealGateway, model: str, prompt: str | list[int], **more: Any) -> openai.types.Completion:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as sdk:
        return sdk.completions.create(
            model=model,
            prompt=prompt,
            max_tokens=8,
            temperature=0,
            extra_body={"return_token_ids": True} | more,
            extra_headers=nothing_automatic(more),
        )


def nothing_automatic(fields: dict[str, Any]) -> dict[str, str]:
    """The header of a request without a handoff, whose whole prompt is to be computed."""
    return {} if "handoff" in fields else {"X-Baton-Handoff": "off"}


def ids(answer: openai.types.Completion) -> tuple[list[int], list[int]]:
    choice: Any = answer.choices[0]
    return choice.prompt_token_ids, choice.token_ids


def cached(answer: openai.types.Completion) -> int:
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0


def told(answer: openai.types.Completion) -> dict[str, Any]:
    found: dict[str, Any] = answer.handoff  # type: ignore[attr-defined]  # beyond OpenAI's own fields
    return found


def once_saved(gateway: RealGateway, handoff: dict[str, Any], within_s: float = 60) -> dict[str, Any]:
    """The handoff once it is no longer pending: an answer on a busy machine does not wait for its save."""
    deadline = time.monotonic() + within_s
    with gateway.client() as client:
        while handoff["state"] == "pending" and time.monotonic() < deadline:
            time.sleep(0.05)
            handoff = client.get(f"/v1/handoffs/{handoff['id']}").json()
    return handoff
