"""`/v1/responses` with stored answers: continued, shown, listed, deleted; other tenants; limits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from support.gateways import FakeGateway, run_fake

from baton.admission.api_keys import create_key
from baton.engines.fake.engine import FakeEngine
from baton.errors import GenerationFailed


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[FakeGateway]:
    with run_fake(FakeEngine("a"), FakeEngine("b"), responses={"folder": tmp_path / "kept"}) as gateway:
        yield gateway


def ask(gateway: FakeGateway, text: str, previous: str | None = None, **fields: Any) -> httpx.Response:
    body = {"model": "a", "input": text, "max_output_tokens": 2} | fields
    if previous is not None:
        body["previous_response_id"] = previous
    with gateway.client() as client:
        return client.post("/v1/responses", json=body)


def prompts(gateway: FakeGateway) -> list[Any]:
    """The texts that the engine got last, in order."""
    items = gateway.engine("a").bodies[-1]["input"]
    assert isinstance(items, list)
    return [part["text"] if isinstance(content, list) else content for content in (item["content"] for item in items)
            for part in (content if isinstance(content, list) else [content])]  # fmt: skip


def test_a_conversation_goes_on_by_id_with_the_unmodified_sdk(gateway: FakeGateway) -> None:
    client = OpenAI(base_url=f"{gateway.url}/v1", api_key="none")
    first = client.responses.create(model="a", input="11 22", max_output_tokens=2)
    second = client.responses.create(
        model="a", input="33", max_output_tokens=2, previous_response_id=first.id
    )
    third = client.responses.create(
        model="a", input="44", max_output_tokens=2, previous_response_id=second.id
    )
    assert prompts(gateway) == ["11 22", "11 22", "33", "11 22", "44"]
    assert (third.previous_response_id, third.to_dict()["store"]) == (second.id, True)
    assert client.responses.retrieve(third.id).output_text == third.output_text
    listed = client.responses.input_items.list(second.id, order="asc")
    assert [item.to_dict()["role"] for item in listed] == ["user", "assistant", "user"]
    client.responses.delete(third.id)
    with pytest.raises(Exception, match="There is no stored response"):
        client.responses.retrieve(third.id)


def test_instructions_are_not_carried_over(gateway: FakeGateway) -> None:
    first = ask(gateway, "11", instructions="be brief").json()
    ask(gateway, "22", first["id"])
    assert "instructions" not in gateway.engine("a").bodies[-1]
    assert prompts(gateway) == ["11", "11 11", "22"]


def test_a_streamed_answer_is_stored_before_its_last_event(gateway: FakeGateway) -> None:
    first = ask(gateway, "11").json()["id"]
    with gateway.client() as client:
        body = {"model": "a", "input": "22", "stream": True, "previous_response_id": first}
        events = client.post("/v1/responses", json=body).text.split("\n\n")
        said = [json.loads(event.partition("data: ")[2]) for event in events if event]
        assert said[0]["response"]["previous_response_id"] == first
        last = said[-1]["response"]
        assert (last["previous_response_id"], last["store"]) == (first, True)
        assert client.get(f"/v1/responses/{last['id']}").json() == last
    assert ask(gateway, "33", last["id"]).status_code == 200


def test_a_stream_that_fails_is_not_stored(gateway: FakeGateway) -> None:
    gateway.engine("a").behaviour.stream_error = GenerationFailed()
    with gateway.client() as client:
        text = client.post("/v1/responses", json={"model": "a", "input": "1", "stream": True}).text
        name = json.loads(text.split("\n\n")[0].partition("data: ")[2])["response"]["id"]
        assert client.get(f"/v1/responses/{name}").status_code == 404


def test_nothing_is_stored_where_the_request_says_so(gateway: FakeGateway) -> None:
    answer = ask(gateway, "11", store=False).json()
    assert answer["store"] is False
    refused = ask(gateway, "22", answer["id"])
    assert refused.status_code == 404
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("response_not_found", "previous_response_id")


def test_an_answer_goes_on_with_another_model_and_forks(gateway: FakeGateway) -> None:
    first = ask(gateway, "11").json()["id"]
    assert ask(gateway, "22", first, model="b").status_code == 200
    assert ask(gateway, "33", first).status_code == 200
    assert prompts(gateway) == ["11", "11 11", "33"]


def test_items_of_any_type_are_given_back_as_they_came(gateway: FakeGateway) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "11"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "5"},
    ]
    first = ask(gateway, "", input=items).json()["id"]
    ask(gateway, "22", first)
    sent = gateway.engine("a").bodies[-1]["input"]
    assert sent[:3] == items
    assert (sent[3]["role"], sent[4]) == ("assistant", {"type": "message", "role": "user", "content": "22"})


def test_pages_of_items(gateway: FakeGateway) -> None:
    last = None
    for number in range(4):
        last = ask(gateway, str(number), last).json()["id"]
    with gateway.client() as client:
        path = f"/v1/responses/{last}/input_items"
        seen: list[str] = []
        after: dict[str, str] = {}
        while True:
            page = client.get(path, params={"limit": 2, "order": "asc"} | after).json()
            seen += [item["id"] for item in page["data"]]
            if not page["has_more"]:
                break
            after = {"after": page["last_id"]}
        assert len(seen) == len(set(seen)) == 7
        newest = client.get(path).json()
        assert [item["id"] for item in newest["data"]] == seen[::-1]
        assert client.get(path, params={"after": "no"}).json()["error"]["param"] == "after"
        assert client.get(path, params={"limit": 101}).status_code == 400
        assert client.get(path, params={"order": "up"}).status_code == 400


@pytest.mark.parametrize("field", ["background", "conversation"])
def test_what_is_not_supported_is_refused(gateway: FakeGateway, field: str) -> None:
    error = ask(gateway, "11", **{field: "yes"}).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_request", field)


@pytest.mark.parametrize("given", [5, None, {"role": "user", "content": "x"}, ["What now?"]])
def test_no_input_is_lost_silently(gateway: FakeGateway, given: Any) -> None:
    first = ask(gateway, "11").json()["id"]
    error = ask(gateway, "", first, input=given).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_request", "input")


@pytest.mark.parametrize("store", ["false", "no", 2, []])
def test_store_is_true_or_false(gateway: FakeGateway, store: Any) -> None:
    error = ask(gateway, "11", store=store).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_request", "store")


def test_what_is_shown_counts_against_the_tenants_limits(tmp_path: Path) -> None:
    admission = {"tenant_rate": 3, "tenant_burst": 3}
    with run_fake(FakeEngine("a"), admission=admission, responses={"folder": tmp_path / "kept"}) as gateway:
        name = ask(gateway, "11").json()["id"]
        with gateway.client() as client:
            statuses = [client.get(f"/v1/responses/{name}").status_code for _ in range(4)]
    assert statuses == [200, 200, 429, 429]


@pytest.mark.parametrize("previous", [5, ["resp_1"], {"id": "resp_1"}])
def test_an_id_is_a_text(gateway: FakeGateway, previous: Any) -> None:
    error = ask(gateway, "11", previous_response_id=previous).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_request", "previous_response_id")


@pytest.mark.parametrize("name", ["resp_unknown", "..%2f..%2fetc", "%00", "' OR 1=1 --", "r" * 4000])
def test_unknown_ids_are_not_found(gateway: FakeGateway, name: str) -> None:
    with gateway.client() as client:
        for call in (client.get, client.delete):
            assert call(f"/v1/responses/{name}").status_code == 404
        assert client.get(f"/v1/responses/{name}/input_items").status_code == 404
        assert client.post(f"/v1/responses/{name}/cancel").status_code == 404


def test_a_stored_response_is_neither_streamed_nor_cancelled(gateway: FakeGateway) -> None:
    name = ask(gateway, "11").json()["id"]
    with gateway.client() as client:
        assert client.get(f"/v1/responses/{name}?stream=true").json()["error"]["param"] == "stream"
        assert client.post(f"/v1/responses/{name}/cancel").status_code == 400


def test_another_tenant_gets_404_everywhere(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    secrets = [create_key(keys, tenant) for tenant in ("one", "two")]
    with run_fake(
        FakeEngine("a"), auth={"keys_file": keys}, responses={"folder": tmp_path / "kept"}
    ) as gateway:
        mine, others = (
            httpx.Client(base_url=gateway.url, headers={"Authorization": f"Bearer {secret}"})
            for secret in secrets
        )
        with mine, others:
            body = {"model": "a", "input": "11"}
            name = mine.post("/v1/responses", json=body).json()["id"]
            path = f"/v1/responses/{name}"
            unknown = others.get("/v1/responses/resp_unknown").json()["error"]
            for answer in (
                others.get(path),
                others.delete(path),
                others.get(f"{path}/input_items"),
                others.post(f"{path}/cancel"),
                others.post("/v1/responses", json=body | {"previous_response_id": name}),
            ):
                assert answer.status_code == 404
                error = answer.json()["error"]
                assert (error["message"], error["code"]) == (unknown["message"], unknown["code"])
            assert mine.get(path).status_code == 200


def test_responses_outlive_the_gateway(tmp_path: Path) -> None:
    kept = {"folder": tmp_path / "kept"}
    with run_fake(FakeEngine("a"), responses=kept) as gateway:
        name = ask(gateway, "11 22").json()["id"]
    with run_fake(FakeEngine("a"), responses=kept) as gateway:
        assert ask(gateway, "33", name).status_code == 200
        assert prompts(gateway) == ["11 22", "11 22", "33"]


def test_without_a_store_the_refusal_says_what_to_do(tmp_path: Path) -> None:
    with run_fake(FakeEngine("a"), responses={"budget": 0, "folder": tmp_path / "kept"}) as gateway:
        answer = ask(gateway, "11").json()
        assert answer["store"] is False
        error = ask(gateway, "22", answer["id"]).json()["error"]
        assert "responses.budget" in error["message"]
        assert not (tmp_path / "kept").exists()


def test_a_full_store_still_answers(tmp_path: Path) -> None:
    with run_fake(FakeEngine("a"), responses={"budget": 8192, "folder": tmp_path / "kept"}) as gateway:
        answer = ask(gateway, "x" * 9000)
        assert (answer.status_code, answer.json()["store"]) == (200, False)
        with gateway.client() as client:
            page = client.get("/metrics").text
        assert 'baton_responses_stored_total{result="not_stored"} 1.0' in page


def test_a_folder_that_vanishes_costs_no_answer(gateway: FakeGateway, tmp_path: Path) -> None:
    ask(gateway, "11")
    shutil.rmtree(tmp_path / "kept")
    assert ask(gateway, "22").status_code == 200


def test_a_conversation_counts_as_if_it_was_sent_again(tmp_path: Path) -> None:
    limits = {"body_bytes": 4096, "bodies_bytes": 8192}
    with run_fake(FakeEngine("a"), limits=limits, responses={"folder": tmp_path / "kept"}) as gateway:
        first = ask(gateway, "x" * 900).json()["id"]
        assert ask(gateway, "y", first, input=[{"role": "user", "content": "y"}]).status_code == 200
        error = ask(gateway, "y" * 3000, first).json()["error"]
        assert (error["code"], error["param"]) == ("invalid_request", "previous_response_id")
        assert "limits.body_bytes" in error["message"]


def test_many_values_in_many_turns_are_too_many(tmp_path: Path) -> None:
    limits = {"body_values": 1000}
    with run_fake(FakeEngine("a"), limits=limits, responses={"folder": tmp_path / "kept"}) as gateway:
        last = ask(gateway, "," * 600).json()["id"]
        error = ask(gateway, "," * 600, last).json()["error"]
        assert (error["code"], "limits.body_values" in error["message"]) == ("invalid_request", True)


def test_many_requests_at_once_go_on_from_one(gateway: FakeGateway) -> None:
    first = ask(gateway, "11").json()["id"]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda number: ask(gateway, str(number), first), range(40)))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["id"] for answer in answers}) == 40
    with gateway.client() as client:
        assert "baton_responses 41.0" in client.get("/metrics").text
