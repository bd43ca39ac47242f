"""Gateways killed at any moment of their batches: every line is in the output once, and nothing else stays."""

from __future__ import annotations

import contextlib
import json
import random
import time
from pathlib import Path

import httpx
import openai
import pytest
from openai.types import Batch
from support.batches import CHAT, answered, chat, counts, line, sdk, until
from support.gateways import FakeProcess
from support.raw_requests import wait_for

pytestmark = [pytest.mark.chaos, pytest.mark.fault("H9"), pytest.mark.timeout(1800)]
KILLS = 60
LINES = 120
LONGEST_LIFE_S = 2.0


def test_a_gateway_killed_at_any_moment_loses_no_line_and_does_none_twice(tmp_path: Path) -> None:
    """While it reads inputs, asks lines, writes output, takes uploads, or starts."""
    settings = {"batches": {"folder": str(tmp_path / "b"), "lines": 6}, "responses": {"budget": 0}}
    content = b"".join(line(f"c{number}", chat(f"n{number} m", model="alpha")) for number in range(LINES))
    moments, begun = random.Random(11), list[Batch]()
    ended, statuses = set[str](), list[str]()
    for _ in range(KILLS):
        with FakeProcess(tmp_path, {"token_seconds": 0.004}, **settings) as process:
            client = sdk(process.url)
            life = time.monotonic() + moments.uniform(0, LONGEST_LIFE_S)
            wait_for(lambda: httpx.get(f"{process.url}/readyz").status_code == 200, "it never was ready", 60)
            while time.monotonic() < life:
                if len(begun) - len(ended) < 3:
                    begun.append(begin(client, content))
                for batch in begun:
                    found = client.batches.retrieve(batch.id)
                    if found.status in ("completed", "failed"):
                        ended.add(batch.id)
                statuses += [
                    client.batches.retrieve(batch.id).status for batch in begun if batch.id not in ended
                ]
            process.process.kill()
    with FakeProcess(tmp_path, **settings) as process:
        client = sdk(process.url)
        for batch in begun:
            done = until(client, batch, within_s=120)
            assert (done.status, counts(client, done)) == ("completed", (LINES, LINES, 0))
            found = answered(client, done)
            assert set(found) == {f"c{number}" for number in range(LINES)}
            for name, row in found.items():
                said = row["response"]["body"]["choices"][0]["message"]["content"]
                assert said == f"n{name[1:]} m"
        known = {file.id for file in client.files.list()}
    left = {path.name for path in (tmp_path / "b/files").iterdir()}
    assert left == known
    told = {status: statuses.count(status) for status in sorted(set(statuses))}
    print(json.dumps({"kills": KILLS, "batches": len(begun), "lines": len(begun) * LINES, "seen": told}))


def begin(client: openai.OpenAI, content: bytes) -> Batch:
    """A batch; whoever is killed in the middle of an upload has none."""
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")


def test_an_upload_that_is_cut_off_leaves_nothing(tmp_path: Path) -> None:
    """Killed in the middle of twenty uploads, the next start has none of their bytes."""
    settings = {"batches": {"folder": str(tmp_path / "b")}, "responses": {"budget": 0}}
    with FakeProcess(tmp_path, **settings) as process:
        wait_for(lambda: httpx.get(f"{process.url}/readyz").status_code == 200, "it never was ready", 60)
        kept = sdk(process.url).files.create(file=("x", b"{}"), purpose="batch")

        def endless():  # type: ignore[no-untyped-def]
            yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
            for number in range(200):
                if number == 20:
                    process.process.kill()
                yield b"x" * 262_144

        with contextlib.suppress(httpx.HTTPError):
            httpx.post(
                f"{process.url}/v1/files",
                content=endless(),
                headers={"content-type": "multipart/form-data; boundary=b"},
            )
    assert len(list((tmp_path / "b/files").iterdir())) == 2
    with FakeProcess(tmp_path, **settings) as process:
        client = sdk(process.url)
        wait_for(lambda: len(list((tmp_path / "b/files").iterdir())) == 1, "it was not removed", 60)
        assert [file.id for file in client.files.list()] == [kept.id]
