"""Asking a gateway's relay with the OpenAI SDK, and reading what it told."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import openai

from support.gateways import RealGateway

DOCUMENT = " ".join(f"Chapter {number} tells of {number * 37 % 101} birds." for number in range(60))
"""A context of A's, of several blocks of KV."""


@dataclass(frozen=True)
class Served:
    """One engine that a relay goes over: the gateway that is asked, and its name there."""

    gateway: RealGateway
    model: str

    def ask(self, prompt: str | list[int], **more: Any) -> openai.types.Completion:
        return ask(self.gateway, self.model, prompt, **more)

    def once_saved(self, answer: openai.types.Completion) -> dict[str, Any]:
        return once_saved(self.gateway, told(answer))


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


def once_saved(gateway: RealGateway, handoff: dict[str, Any], tenant: str | None = None) -> dict[str, Any]:
    """The handoff once it is no longer pending: an answer on a busy machine does not wait for its save."""
    deadline = time.monotonic() + 60
    with gateway.client(tenant) as client:
        while handoff["state"] == "pending" and time.monotonic() < deadline:
            time.sleep(0.05)
            handoff = client.get(f"/v1/handoffs/{handoff['id']}").json()
    return handoff


def relay_there_and_back(here: Served, there: Served) -> openai.types.Completion:
    """A here, B there, and back: each loads what the other computed, and says what computing it says.

    Returns B's answer.
    """
    saved = here.once_saved(here.ask(DOCUMENT, handoff={"save": True}))
    relayed = there.ask(" In the end", handoff={"from": saved["id"], "save": True})
    prompt, said = ids(relayed)
    source = told(relayed)["source"]
    assert (source["outcome"], source["loaded_tokens"]) == ("loaded", saved["tokens"] - 1), source
    assert cached(relayed) == saved["tokens"] - 1
    plain = here.ask(prompt)
    assert (said, cached(plain)) == (ids(plain)[1], 0)
    # What continues it shares its file, of which the first machine has the beginning.
    longer = there.once_saved(relayed)
    again = here.ask(" The first bird", handoff={"from": longer["id"]})
    assert told(again)["source"]["outcome"] == "loaded"
    assert ids(again)[1] == ids(here.ask(ids(again)[0]))[1]
    return relayed
