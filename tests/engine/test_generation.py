"""Generation on real weights, through unmodified SDKs, and equal to plain vLLM's."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from support.gateways import RealGateway
from support.offline_engines import completed

from baton.config.settings import load_settings
from baton.models.store import ModelStore

pytestmark = pytest.mark.engine
PROMPTS = [
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):",
    "Water boils at",
    "1, 2, 3, 4,",
    "The quick brown fox jumps over the lazy dog. " * 20,
]


@pytest.fixture
def sdk(real_gateway: RealGateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{real_gateway.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_capital_of_france_is_paris(sdk: openai.OpenAI) -> None:
    answer = sdk.completions.create(model="smollm2", prompt=PROMPTS[0], max_tokens=2, temperature=0)
    assert answer.choices[0].text.startswith(" Paris")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 5


def test_chat_streams_through_the_sdk(sdk: openai.OpenAI) -> None:
    question: list[Any] = [{"role": "user", "content": "Name the capital of France."}]
    options: dict[str, Any] = {"model": "smollm2", "messages": question, "temperature": 0, "max_tokens": 16}
    whole = sdk.chat.completions.create(**options)
    stream = sdk.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == whole.choices[0].message.content
    assert "Paris" in said
    assert chunks[-1].usage is not None


def test_sampling_options_do_what_they_say(sdk: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "smollm2", "prompt": "Once upon a time", "max_tokens": 12}
    first = sdk.completions.create(**options, n=3, seed=7, temperature=1.2)
    again = sdk.completions.create(**options, n=3, seed=7, temperature=1.2)
    assert [choice.text for choice in first.choices] == [choice.text for choice in again.choices]
    assert len({choice.text for choice in first.choices}) > 1
    logprobs = sdk.completions.create(**options, logprobs=2, temperature=0).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.top_logprobs is not None
    assert all(len(top) >= 2 for top in logprobs.top_logprobs)
    echoed = sdk.completions.create(**options, echo=True, temperature=0).choices[0].text
    assert echoed.startswith("Once upon a time")
    full = sdk.completions.create(**options, temperature=0).choices[0].text
    stop = full.strip().split()[1]
    stopped = sdk.completions.create(**options, temperature=0, stop=stop)
    assert stop not in stopped.choices[0].text
    assert stopped.choices[0].finish_reason == "stop"


def test_token_ids_serve_as_a_prompt(sdk: openai.OpenAI, real_gateway: RealGateway) -> None:
    with real_gateway.client() as client:
        ids = client.post("/tokenize", json={"model": "smollm2", "prompt": PROMPTS[0]}).json()["tokens"]
    by_ids = sdk.completions.create(model="smollm2", prompt=ids, max_tokens=6, temperature=0)
    by_text = sdk.completions.create(model="smollm2", prompt=PROMPTS[0], max_tokens=6, temperature=0)
    assert by_ids.choices[0].text == by_text.choices[0].text


def test_a_json_schema_binds_the_answer(sdk: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "sunny": {"type": "boolean"}},
        "required": ["city", "sunny"],
        "additionalProperties": False,
    }
    answer = sdk.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "Describe Paris as JSON."}],
        response_format={"type": "json_schema", "json_schema": {"name": "place", "schema": schema}},
        max_tokens=60,
        temperature=0,
    )
    place = json.loads(answer.choices[0].message.content or "")
    assert set(place) == {"city", "sunny"}


@pytest.mark.parametrize("field", ["background", "truncation", "parallel_tool_calls", "temperature", "top_p"])
def test_a_null_in_the_responses_api_means_the_default(sdk: openai.OpenAI, field: str) -> None:
    """vLLM takes these nulls, then fails to repeat some of them in its answer."""
    answer = sdk.responses.create(model="smollm2", input="Hi", max_output_tokens=2, extra_body={field: None})
    assert answer.usage is not None
    assert getattr(answer, field) is not None


def test_the_responses_api_answers_and_stores_what_it_said(sdk: openai.OpenAI) -> None:
    answer = sdk.responses.create(model="smollm2", input="Say hello.", max_output_tokens=8, temperature=0)
    assert answer.output_text
    assert sdk.responses.retrieve(answer.id).output_text == answer.output_text
    sdk.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(answer.id)
    with sdk.responses.stream(
        model="smollm2", input="Say hello.", max_output_tokens=8, temperature=0
    ) as stream:
        said = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert said == answer.output_text


def test_the_anthropic_sdk_answers_and_streams(real_gateway: RealGateway) -> None:
    options: dict[str, Any] = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Name the capital of France."}],
        "max_tokens": 16,
        "extra_body": {"temperature": 0},
    }
    with anthropic.Anthropic(base_url=real_gateway.url, api_key="none") as client:
        whole = client.messages.create(**options)
        with client.messages.stream(**options) as stream:
            said = "".join(stream.text_stream)
    assert whole.content[0].text == said  # type: ignore[union-attr]  # a text block, as asked
    assert "Paris" in said


def test_an_error_reaches_the_sdk_as_its_own_kind(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        sdk.completions.create(model="gpt-4", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        sdk.completions.create(model="smollm2", prompt="x", max_tokens=2, temperature=-1)
    assert bad.value.param == "temperature"


def test_an_answer_may_be_asked_for_that_is_longer_than_the_context(real_gateway: RealGateway) -> None:
    """Agents ask for 32,000 tokens whatever the model."""
    sent = {"model": "smollm2", "prompt": PROMPTS[0], "max_tokens": 10**6, "temperature": 0, "stop": ["."]}
    with real_gateway.client() as client:
        whole = client.post("/v1/completions", json=sent)
        streamed = client.post("/v1/completions", json=sent | {"stream": True})
    tokens = whole.json()["usage"]["prompt_tokens"]
    for answer in (whole, streamed):
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-baton-max-tokens"] == str(8192 - tokens)
    assert whole.json()["choices"][0]["finish_reason"] == "stop"


BAD_REQUESTS: list[dict[str, Any]] = [
    {"temperature": -1},
    {"temperature": "hot"},
    {"top_p": 2},
    {"logprobs": 10**6},
    {"n": 0},
    {"prompt": [10**9]},
    {"prompt": []},
    {"prompt": ""},
    {"structured_outputs": {"regex": "(("}},
    {"structured_outputs": {"json": "no schema"}},
    {"structured_outputs": {"choice": ["\U000465e2"]}},  # no token of the model begins with its first byte
    {"logit_bias": {"999999999": 1}},
    {"stop": [""]},
    {"min_tokens": 50, "max_tokens": 10},
    {"response_format": {"type": "json_schema"}},
]
LEAKS = re.compile(r"/\w+/\w+|0x[0-9a-f]{6,}|Traceback|\b\w+(Error|Exception)\b|site-packages|vllm\.")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wrong", BAD_REQUESTS, ids=lambda wrong: json.dumps(wrong)[:40])
def test_bad_input_is_a_4xx_that_shows_no_insides_and_harms_nothing(
    real_gateway: RealGateway, wrong: dict[str, Any], stream: bool
) -> None:
    sent = {"model": "smollm2", "prompt": "x", "max_tokens": 2, "stream": stream} | wrong
    with real_gateway.client() as client:
        response = client.post("/v1/completions", json=sent)
        assert 400 <= response.status_code < 500, response.text
        assert not LEAKS.search(response.json()["error"]["message"]), response.text
        assert client.get("/readyz").status_code == 200


@pytest.mark.parametrize(
    ("stream", "spelled"),
    [(False, ""), (True, ""), (True, "one, two, three, four, five, six, seven, eight, ")],
)
def test_an_answer_that_the_models_tokens_cannot_spell_to_its_end_is_the_requests_fault(
    real_gateway: RealGateway, stream: bool, spelled: str
) -> None:
    """The engine notices behind what it can spell: vLLM calls that an internal error."""
    choice = f"{spelled}9\U000465e2"
    wanted = {"model": "smollm2", "stream": stream, "structured_outputs": {"choice": [choice]}}
    with real_gateway.client() as client:
        body = wanted | {"messages": [{"role": "user", "content": "Say it."}]}
        response = client.post("/v1/chat/completions", json=body)
    assert '"code":"unprocessable"' in response.text.replace(": ", ":"), response.text
    assert "structured_outputs" in response.text
    begun = response.headers["content-type"].startswith("text/event-stream")
    assert response.status_code == (200 if begun else 422)
    assert begun or not spelled
    assert stream or not begun  # a stream begins unless its first event is the error


def test_steering_fields_change_nothing(real_gateway: RealGateway) -> None:
    plain = {"model": "smollm2-fp32", "prompt": PROMPTS[1], "max_tokens": 8, "temperature": 0}
    steering = {
        "kv_transfer_params": {"do_remote_prefill": True, "remote_engine_id": "x"},
        "ec_transfer_params": "text",
        "cache_salt": "mine",
        "vllm_xargs": {"kv_transfer_params": "a string where vLLM expects a dict"},
    }
    headers = {
        "X-data-parallel-rank": "7",
        "X-Session-ID": "s",
        "X-Vllm-Priority": "9",
        "X-Request-Id": "mine",
    }
    with real_gateway.client() as client:
        expected = client.post("/v1/completions", json=plain).json()
        answer = client.post("/v1/completions", json=plain | steering, headers=headers)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"] == expected["choices"]
        assert "mine" not in answer.text


def test_cached_tokens_are_told(sdk: openai.OpenAI) -> None:
    prompt = "A fixed beginning that is long enough to fill blocks. " * 40
    for _ in range(2):
        answer = sdk.completions.create(model="smollm2", prompt=prompt, max_tokens=1, temperature=0)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens_details.cached_tokens or 0) >= 128


def test_a_client_that_leaves_frees_its_engine_request(real_gateway: RealGateway) -> None:
    sent = {"model": "smollm2", "prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with real_gateway.client() as client, client.stream("POST", "/v1/completions", json=sent) as response:
        next(response.iter_lines())
    deadline = time.monotonic() + 20
    with real_gateway.client() as client:
        while (
            'vllm:num_requests_running{engine="0",model_name="smollm2"} 0.0'
            not in client.get("/metrics").text
        ):
            assert time.monotonic() < deadline, "the request still runs"
            time.sleep(0.1)


def test_a_client_that_leaves_before_the_answer_frees_its_engine_request(real_gateway: RealGateway) -> None:
    def running() -> float:
        page = client.get("/metrics").text
        return sum(map(float, re.findall(r"^vllm:num_requests_running\{.*\} (\S+)", page, re.MULTILINE)))

    sent = {"model": "smollm2", "prompt": "Once", "max_tokens": 4000, "ignore_eos": True}
    with real_gateway.client(timeout=1.0) as hasty, pytest.raises(httpx.ReadTimeout):
        hasty.post("/v1/completions", json=sent)
    with real_gateway.client() as client:
        deadline = time.monotonic() + 10
        while running():
            assert time.monotonic() < deadline, "the engine goes on"
            time.sleep(0.1)


def test_what_the_engine_refuses_has_its_status_on_every_streaming_route(real_gateway: RealGateway) -> None:
    sent = {"model": "smollm2", "stream": True, "logit_bias": {"999999": 1}, "max_tokens": 4}
    asked = {"prompt": "x", "input": "x", "messages": [{"role": "user", "content": "x"}]}
    with real_gateway.client() as client:
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
            answer = client.post(path, json=sent | asked)
            assert (path, answer.status_code) == (path, 400), answer.text
            assert answer.json()["error"]["code"] == "invalid_request"


WEATHER = {
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
FUNCTION = {"type": "function", "function": WEATHER}
CHAT_TOOL = {"messages": [{"role": "user", "content": "What is the weather in Oslo?"}], "tools": [FUNCTION]}
WITH_TOOLS: list[tuple[str, dict[str, Any]]] = [
    ("chat/completions", CHAT_TOOL),
    ("chat/completions", CHAT_TOOL | {"tool_choice": "auto"}),
    ("chat/completions", CHAT_TOOL | {"tool_choice": "required"}),
    (
        "messages",
        {
            "messages": CHAT_TOOL["messages"],
            "tools": [{"name": "weather", "input_schema": WEATHER["parameters"]}],
            "tool_choice": {"type": "auto"},
        },
    ),
    ("responses", {"input": "What is the weather in Oslo?", "tools": [{"type": "function", **WEATHER}]}),
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("route", "body"), WITH_TOOLS)
def test_the_embedded_model_takes_tools_without_a_setting(
    real_gateway: RealGateway, route: str, body: dict[str, Any], *, stream: bool
) -> None:
    longest = "max_output_tokens" if route == "responses" else "max_tokens"
    sent = {"model": "smollm2-fp32", longest: 48, "temperature": 0, "stream": stream} | body
    answer = httpx.post(f"{real_gateway.url}/v1/{route}", json=sent, timeout=60)
    assert answer.status_code == 200, answer.text
    assert '"error":{' not in answer.text.replace(" ", "")
    if body.get("tool_choice") == "required" and not stream:
        (call, *_) = answer.json()["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "weather"


def test_a_conversation_with_calls_goes_on(real_gateway: RealGateway) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    messages = [*CHAT_TOOL["messages"], said, {"role": "tool", "tool_call_id": "c", "content": "Rain."}]
    sent = CHAT_TOOL | {"model": "smollm2-fp32", "messages": messages, "max_tokens": 8}
    answer = httpx.post(f"{real_gateway.url}/v1/chat/completions", json=sent, timeout=60)
    assert answer.status_code == 200, answer.text


def test_the_model_s_card_says_which_parsers_were_chosen(real_gateway: RealGateway) -> None:
    card = httpx.get(f"{real_gateway.url}/v1/models/smollm2").json()
    assert card["tool_call_parser"]["name"] == "hermes"
    assert card["reasoning_parser"] == {"name": None, "why": "its chat template knows no thoughts"}
    chosen = next(line for line in real_gateway.log.splitlines() if "parsers_chosen" in line)
    assert json.loads(chosen)["tool_call_parser"] == card["tool_call_parser"]


async def test_two_engines_stream_at_once_each_with_its_own_series(real_gateway: RealGateway) -> None:
    def page() -> str:
        with real_gateway.client() as client:
            return client.get("/metrics").text

    def generated(told: str, name: str) -> float:
        pattern = rf'vllm:generation_tokens_total\{{engine="0",model_name="{re.escape(name)}"\}} (\S+)'
        found = re.search(pattern, told)
        assert found, name
        return float(found[1])

    async def ask(client: openai.AsyncOpenAI, name: str, prompt: str) -> str:
        stream = await client.completions.create(
            model=name,
            prompt=prompt,
            max_tokens=20,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    names = ("smollm2", "smollm2-fp32")
    async with openai.AsyncOpenAI(base_url=f"{real_gateway.url}/v1", api_key="none") as sdk:
        before = page()
        answers = await asyncio.gather(*(ask(sdk, name, prompt) for prompt in PROMPTS[:4] for name in names))
        after = page()
    assert all(answers)
    for name in names:
        assert generated(after, name) - generated(before, name) == 4 * 20


def test_no_request_left_a_traceback_or_its_words_in_the_log(real_gateway: RealGateway) -> None:
    log = real_gateway.log
    assert "Traceback" not in log
    assert "never retrieved" not in log
    shown = ("Name the capital of France.", PROMPTS[0])  # each once, in what is printed when it is ready
    for text in shown:
        log = log.replace(text, "", 1)
    assert "capital of France" not in log
    for line in log.splitlines():
        if line.startswith("{"):
            assert json.loads(line)["event"]


def test_greedy_output_equals_plain_vllm_s(real_gateway: RealGateway) -> None:
    expected = completed(ModelStore(load_settings().models_folder).resolve("smollm2"), PROMPTS)
    for prompt, (text, token_ids) in zip(PROMPTS, expected, strict=True):
        sent = {
            "model": "smollm2-fp32",
            "prompt": prompt,
            "max_tokens": 24,
            "temperature": 0,
            "return_token_ids": True,
        }
        answer = httpx.post(f"{real_gateway.url}/v1/completions", json=sent, timeout=60).json()
        assert answer["choices"][0]["token_ids"] == token_ids
        assert answer["choices"][0]["text"] == text
