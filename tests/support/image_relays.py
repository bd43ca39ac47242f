"""A gateway whose engines hand images over, and HuggingFace's model in fp32 that its answers are held against."""

from __future__ import annotations

import io
import json
import re
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import torch
from PIL import Image
from transformers import LlavaForConditionalGeneration, LlavaProcessor

from baton.images.image import ClientImage
from support.gateways import RealGateway
from support.relay_requests import once_saved

CHAT, TEXT, COMPUTE = "/v1/chat/completions", "/v1/completions", "/v1/handoffs"
SAID = 6


class Seer:
    """HuggingFace's model: greedy answers to token ids and images."""

    def __init__(self, folder: Path) -> None:
        self._model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        self._processor = LlavaProcessor.from_pretrained(folder)
        self.image_token = self._model.config.image_token_index

    @torch.inference_mode()
    def says(self, prompt: list[int], pictures: list[ClientImage], count: int = SAID) -> list[int]:
        ids = list(prompt)
        given: dict[str, Any] = {}
        if pictures:
            images = [Image.open(io.BytesIO(each.data)).convert("RGB") for each in pictures]
            given = dict(self._processor.image_processor(images, return_tensors="pt"))
        for _ in range(count):
            logits = self._model(input_ids=torch.tensor([ids]), **given).logits[0, -1]
            logits[self.image_token] = -torch.inf
            ids.append(int(logits.argmax()))
        return ids[len(prompt) :]


@dataclass
class Eyes:
    """The gateway, and what its answers are held against."""

    gateway: RealGateway
    seer: Seer
    store: Path

    def ask(self, model: str, body: dict[str, Any], path: str = CHAT) -> Answer:
        """One request: its prompt's and its answer's token ids, and its handoff."""
        options = {"max_tokens": SAID, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        options["logit_bias"] = {str(self.seer.image_token): -100}  # random weights might say it
        with self.gateway.client() as client:
            response = client.post(path, json={"model": model} | options | body)
        assert response.status_code == 200, response.text
        answer = _streamed(response) if body.get("stream") else _whole(response.json())
        if answer.handoff is None or "id" not in answer.handoff:
            return answer
        return replace(answer, handoff=answer.handoff | once_saved(self.gateway, answer.handoff))

    def compute(self, model: str, body: dict[str, Any]) -> dict[str, Any]:
        with self.gateway.client() as client:
            response = client.post(COMPUTE, json={"model": model} | body)
        assert response.status_code == 201, response.text
        told: dict[str, Any] = response.json()
        return told

    def encoded(self, model: str) -> int:
        """Images that an engine's encoder has run for."""
        with self.gateway.client() as client:
            page = client.get("/metrics").text
        (value,) = re.findall(rf'^baton_images_encoded_total{{engine="{model}"}} (\S+)$', page, re.MULTILINE)
        return int(float(value))

    def encodes(self, model: str, before: int, expected: int) -> None:
        """Check that the count of encoded images has gone up by so many, no more."""
        deadline = time.monotonic() + 20
        while self.encoded(model) - before < expected and time.monotonic() < deadline:
            time.sleep(0.05)
        assert self.encoded(model) - before == expected

    def saved_by_itself(self, before: int) -> None:
        """Wait until one more automatic handoff is stored than before."""
        deadline = time.monotonic() + 20
        while self.automatic <= before:
            assert time.monotonic() < deadline, "nothing was saved"
            time.sleep(0.05)

    @property
    def automatic(self) -> int:
        """Number of automatic handoffs that are stored."""
        return sum('"automatic":true' in path.read_text() for path in (self.store / "records").glob("*.json"))

    def forget_kv(self, handoff: str) -> None:
        """Its entry is evicted: nothing is left but its tokens and images."""
        (path,) = (self.store / "entries").rglob(f"{handoff}.kv")
        path.unlink()


@dataclass(frozen=True)
class Answer:
    prompt: list[int]
    said: list[int]
    handoff: dict[str, Any] | None
    cached: int = 0

    @property
    def left(self) -> str:
        assert self.handoff is not None
        assert self.handoff["state"] == "ready"
        return str(self.handoff["id"])

    @property
    def source(self) -> dict[str, Any]:
        assert self.handoff is not None
        found: dict[str, Any] = self.handoff["source"]
        return found


def _whole(body: dict[str, Any]) -> Answer:
    choice = body["choices"][0]
    prompt = body.get("prompt_token_ids") or choice.get("prompt_token_ids")
    cached = (body["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Answer(prompt, choice["token_ids"], body.get("handoff"), cached)


def _streamed(response: httpx.Response) -> Answer:
    lines = [
        line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: {")
    ]
    prompt: list[int] = []
    said: list[int] = []
    handoff = None
    for chunk in map(json.loads, lines):
        handoff = chunk.get("handoff", handoff)
        prompt = prompt or chunk.get("prompt_token_ids") or []
        for choice in chunk["choices"]:
            prompt = prompt or choice.get("prompt_token_ids") or []
            said += choice.get("token_ids") or []
    return Answer(prompt, said, handoff)
