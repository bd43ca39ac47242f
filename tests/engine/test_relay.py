"""The relay end to end: the OpenAI SDK, the gateway, two real engines, and a restart."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from gateways import RealGateway

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
DOCUMENT = " ".join(f"Chapter {number} tells of {number * 37 % 101} birds." for number in range(60))
QUESTIONS = [" The first bird", " In the end", " Question: how many birds? Answer:", " x"]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("relay")
    text = (Path(__file__).parent / "relay_engines.toml").read_text()
    (folder / "baton.toml").write_text(text.format(folder=folder))
    return folder / "baton.toml"


@pytest.fixture(scope="module")
def gateway(config: Path) -> Iterator[RealGateway]:
    with RealGateway(["--config", str(config)], config.parent) as running:
        running.wait_until_ready()
        yield running


def ask(gateway: RealGateway, model: str, prompt: str | list[int], **more: Any) -> openai.types.Completion:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as sdk:
        return sdk.completions.create(
            model=model,
            prompt=prompt,
            max_tokens=8,
            temperature=0,
            extra_body={"return_token_ids": True} | more,
        )


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


@pytest.fixture(scope="module")
def read(gateway: RealGateway) -> tuple[dict[str, Any], list[int]]:
    """A has read the document: its handoff, and the token ids of its whole context."""
    answer = ask(gateway, "reader", DOCUMENT, handoff={"save": {"label": "the document"}})
    handoff = told(answer)
    prompt, said = ids(answer)
    assert (handoff["state"], handoff["tokens"]) == ("ready", len(prompt) + len(said))
    assert handoff["bytes"] > len(prompt) * 40_000
    return handoff, prompt + said


@pytest.mark.parametrize("model", ["reader", "writer"])
def test_b_answers_as_if_it_had_read_everything_itself(
    gateway: RealGateway, read: tuple[dict[str, Any], list[int]], model: str
) -> None:
    handoff, context = read
    for question in QUESTIONS:
        relayed = ask(gateway, model, question, handoff={"from": handoff["id"]})
        prompt, said = ids(relayed)
        assert prompt[: len(context)] == context
        plain = ask(gateway, "reader", prompt)
        assert said == ids(plain)[1]
        assert cached(plain) == 0
        source = told(relayed)["source"]
        assert source["outcome"] in ("loaded", "resident")
        assert source["loaded_tokens"] + source["resident_tokens"] == cached(relayed)
        assert cached(relayed) >= (len(context) - 1 if model == "reader" else 32 * (len(context) // 32))


def test_the_sdk_streams_and_gets_the_handoff_at_the_end(
    gateway: RealGateway, read: tuple[dict[str, Any], list[int]]
) -> None:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none") as sdk:
        stream = sdk.completions.create(
            model="writer",
            prompt=" And then",
            max_tokens=6,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"handoff": {"from": read[0]["id"], "save": True}},
        )
        chunks = list(stream)
    last = told(chunks[-1])
    assert (last["parent"], last["state"]) == (read[0]["id"], "ready")
    assert last["tokens"] > len(read[1]) + 6
    whole = ask(gateway, "reader", " And then", handoff={"from": read[0]["id"]}, max_tokens=6)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text


def test_many_start_from_one_handoff_at_once(
    gateway: RealGateway, read: tuple[dict[str, Any], list[int]]
) -> None:
    async def fan_out() -> list[openai.types.Completion]:
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none") as sdk:
            return await asyncio.gather(
                *(
                    sdk.completions.create(
                        model="reader",
                        prompt=f" Number {number}",
                        max_tokens=6,
                        temperature=0,
                        extra_body={"handoff": {"from": read[0]["id"]}, "return_token_ids": True},
                    )
                    for number in range(8)
                )
            )

    for answer in asyncio.run(fan_out()):
        prompt, said = ids(answer)
        assert told(answer)["source"]["outcome"] == "loaded"
        assert said == ids(ask(gateway, "reader", prompt, max_tokens=6))[1]


def test_a_chat_s_context_goes_on_as_a_completion(gateway: RealGateway) -> None:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none") as sdk:
        chat = sdk.chat.completions.create(
            model="reader",
            messages=[{"role": "user", "content": "Name a colour."}],
            max_tokens=8,
            temperature=0,
            extra_body={"handoff": {"save": True}},
        )
    left: dict[str, Any] = chat.handoff  # type: ignore[attr-defined]  # beyond OpenAI's own fields
    relayed = ask(gateway, "writer", " Another one is", handoff={"from": left["id"]})
    assert told(relayed)["source"]["outcome"] == "loaded"
    prompt, said = ids(relayed)
    assert said == ids(ask(gateway, "reader", prompt))[1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_context_where_the_answer_ends(gateway: RealGateway, stream: bool) -> None:
    """Stop strings are found outside the engine, which then aborts the request: its KV is kept all the same."""
    asked = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13,"
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none") as sdk:
        left = sdk.completions.create(
            model="reader",
            prompt=asked,
            max_tokens=40,
            temperature=0,
            stop=["16"],
            stream=stream,
            extra_body={"handoff": {"save": True}},
        )
        handoff = told(list(left)[-1] if isinstance(left, openai.Stream) else left)
    assert (handoff["state"], handoff["bytes"] > 0) == ("ready", True)
    relayed = ask(gateway, "writer", " and", handoff={"from": handoff["id"]})
    source = told(relayed)["source"]
    assert source["outcome"] == "loaded"
    assert source["loaded_tokens"] + source["resident_tokens"] >= handoff["tokens"] - 1
    prompt, said = ids(relayed)
    assert said == ids(ask(gateway, "reader", prompt))[1]


def test_a_damaged_entry_costs_only_its_reuse_and_the_usage_says_so(
    gateway: RealGateway, config: Path
) -> None:
    answer = ask(gateway, "reader", DOCUMENT[:700], handoff={"save": True})
    left = told(answer)
    (path,) = (config.parent / "store" / "entries").rglob(f"{left['id']}.kv")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    relayed = ask(gateway, "reader", " Next", handoff={"from": left["id"]})
    assert told(relayed)["source"]["outcome"] == "recomputed"
    assert told(relayed)["source"]["reason"] == "load_failed"
    assert cached(relayed) == 0
    prompt, said = ids(relayed)
    assert said == ids(ask(gateway, "reader", prompt))[1]


def test_what_a_client_sends_to_steer_the_store_changes_nothing(
    gateway: RealGateway, read: tuple[dict[str, Any], list[int]], config: Path
) -> None:
    entries = sorted((config.parent / "store" / "entries").rglob("*.kv"))
    (key,) = [f"{path.parent.name}/{path.stem}" for path in entries if path.stem == read[0]["id"]]
    forged = {"kv_transfer_params": {"baton_kv": {"load": key, "save": True}}}
    answer = ask(gateway, "reader", read[1] + [5], **forged)
    assert cached(answer) == 0
    assert sorted((config.parent / "store" / "entries").rglob("*.kv")) == entries
    assert key.split("/")[0] not in answer.model_dump_json()


def test_a_handoff_outlives_the_gateway(
    gateway: RealGateway, read: tuple[dict[str, Any], list[int]], config: Path, tmp_path: Path
) -> None:
    relayed = ask(gateway, "reader", QUESTIONS[0], handoff={"from": read[0]["id"]})
    children = psutil.Process(gateway.process.pid).children(recursive=True)
    assert gateway.stop() == 0
    psutil.wait_procs(children, timeout=20)
    assert "Traceback" not in gateway.log
    with RealGateway(["--config", str(config)], tmp_path) as again:
        again.wait_until_ready()
        after = ask(again, "writer", QUESTIONS[0], handoff={"from": read[0]["id"]})
        assert told(after)["source"]["outcome"] == "loaded"
        assert ids(after)[1] == ids(relayed)[1]
