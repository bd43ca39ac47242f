"""A command line as people type it for `vllm serve`, with its YAML file and TLS; and `baton chat` with that gateway."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.certificates import trusting, write_certificate
from support.gateways import BATON, RealGateway

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
FLAGS = """
model: smollm2
served-model-name: [small, gpt]
max-model-len: 2k
max_logprobs: 30
sse-keep-alive-interval: 7
root-path: /llm
allowed-origins: '["https://app.example"]'
"""


def test_vllm_s_flags_act_and_the_terminal_talks_to_the_gateway(tmp_path: Path) -> None:
    flags = tmp_path / "x.yaml"
    flags.write_text(FLAGS)
    cert, key = write_certificate(tmp_path, "tls")
    line = ["--config", str(flags), "--max-model-len", "1024", "--handoff"]
    line += ["--ssl-certfile", str(cert), "--ssl-keyfile", str(key)]
    store = {"BATON_HANDOFFS__STORE": f"file:{tmp_path}/store", "BATON_HANDOFFS__AUTO": "off"}
    with RealGateway(line, tmp_path, store, forked=True) as gateway:
        gateway.wait_until_ready()
        assert gateway.url.startswith("https://127.0.0.1:")
        assert gateway.url.endswith("/llm")
        ask: dict[str, Any] = {"model": "gpt", "temperature": 0, "max_tokens": 16}
        question = {"role": "user", "content": "Name the capital of France."}
        with gateway.client(verify=trusting(cert)) as client:
            cards = client.get("/v1/models").json()["data"]
            assert [(card["id"], card["max_model_len"]) for card in cards] == [("small", 1024), ("gpt", 1024)]
            likely = client.post(
                "/v1/chat/completions",
                json=ask | {"messages": [question], "logprobs": True, "top_logprobs": 30},
            )
            assert len(likely.json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 30
            page = client.get("/v1/models", headers={"Origin": "https://app.example"})
            assert page.headers["access-control-allow-origin"] == "https://app.example"
            said = likely.json()["choices"][0]["message"]["content"]
        command = [
            BATON,
            "chat",
            "--url",
            gateway.url,
            "-m",
            "gpt",
            "--max-tokens",
            "16",
            "--temperature",
            "0",
        ]
        typed = "Name the capital of France.\n/fork\nHow large is it?\n/back\nWhich river flows there?\n"
        done = subprocess.run(
            command,
            input=typed,
            text=True,
            capture_output=True,
            check=True,
            timeout=120,
            env=os.environ | {"SSL_CERT_FILE": str(cert)},
        )
        assert said.strip() in done.stdout
        assert "error" not in done.stdout
        assert "/back returns to this point." in done.stdout
        chats = [entry for entry in gateway.log.splitlines() if '"route": "/v1/chat/completions"' in entry]
        assert len(chats) == 4
        with gateway.client(verify=trusting(cert)) as client:
            assert client.get("/v1/handoffs").json()["data"] == []
            figures = httpx.get(f"{gateway.metrics_url}/metrics", verify=trusting(cert)).text
        consumed = [row for row in figures.splitlines() if row.startswith("baton_handoff_consumed_total{")]
        assert sum(float(row.rsplit(" ", 1)[1]) for row in consumed) == 2, (
            "the fork and the last turn started from one"
        )
