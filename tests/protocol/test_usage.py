"""`GET /v1/usage` is the sum of what answers said; keys have models, an end and budgets; priorities order one's own."""

from __future__ import annotations

import json
import random
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.event_streams import Following
from support.gateways import FakeGateway, FakeProcess, Held, run_fake
from support.raw_requests import metric, wait_for
from support.sample_plugins import Current, plugin

from baton.admission.api_keys import create_key, read_keys
from baton.engines.adapters import Adapter
from baton.engines.fake.engine import FakeBehaviour, FakeEngine
from baton.errors import GenerationFailed

SAID = {
    "prompt_tokens": ("prompt_tokens", "input_tokens"),
    "completion_tokens": ("completion_tokens", "output_tokens"),
}
TOKENS = tuple(SAID)


def noon(day: str) -> float:
    return datetime.fromisoformat(f"{day}T12:00:00+00:00").replace(tzinfo=UTC).timestamp()


class Wall:
    """Unix time that a test sets."""

    def __init__(self, day: str) -> None:
        self.now = noon(day)

    def __call__(self) -> float:
        return self.now


def tokens_of(usage: dict[str, Any]) -> Counter[str]:
    return Counter(
        {ours: next((usage[name] for name in names if name in usage), 0) for ours, names in SAID.items()}
    )


def usage_of(answer: httpx.Response) -> Counter[str]:
    """The tokens of an answer's `usage`, also of a stream: the last that it says."""
    if "event-stream" not in answer.headers["content-type"]:
        return tokens_of(answer.json().get("usage") or {})
    said: Counter[str] = Counter()
    for line in answer.text.splitlines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        for place in (event, event.get("response") or {}, event.get("message") or {}):
            if usage := place.get("usage"):
                said |= tokens_of(usage)
    return said


BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "one two three", "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "one two"}], "max_tokens": 3},
    "/v1/responses": {"input": "one two three four", "max_output_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "one"}], "max_tokens": 5},
}
POOLED: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": ["one two", "three"]},
    "/pooling": {"input": "one two three"},
    "/classify": {"input": "one two"},
    "/score": {"queries": "one", "documents": ["two three"]},
    "/v1/rerank": {"query": "one two", "documents": ["three"]},
}


def streamed(path: str, body: dict[str, Any]) -> dict[str, Any]:
    asks = path in ("/v1/completions", "/v1/chat/completions")
    return body | {"stream": True} | ({"stream_options": {"include_usage": True}} if asks else {})


@contextmanager
def counting(folder: Path, *engines: FakeEngine, **settings: Any) -> Iterator[FakeGateway]:
    usage = {"file": folder / "usage.sqlite"}
    with run_fake(*engines, **({"usage": usage} | settings)) as gateway:
        yield gateway


def shown(client: httpx.Client, **asked: Any) -> dict[str, Any]:
    answer = client.get("/v1/usage", params=asked)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.fault("G18")
def test_usage_is_the_sum_of_the_answers_by_tenant_key_and_model(tmp_path: Path) -> None:
    """Of every operation, whole and streamed, at two models, with three keys of two tenants."""
    file = tmp_path / "keys.json"
    keys = {
        name: create_key(file, tenant) for name, tenant in (("k1", "acme"), ("k2", "acme"), ("k3", "globex"))
    }
    keys["ops"] = create_key(file, "ops", operator=True)
    ids = dict(zip(keys, (key.id for key in read_keys(file)), strict=True))
    said: dict[tuple[str, str], Counter[str]] = {}
    chance = random.Random(7)
    engines = FakeEngine("a"), FakeEngine("b"), FakeEngine("e", pooling=True)
    with counting(tmp_path, *engines, auth={"keys_file": file}) as gateway:
        clients = {name: gateway.client(headers=bearer(key)) for name, key in keys.items()}
        for _ in range(120):
            name, path = chance.choice(["k1", "k2", "k3"]), chance.choice([*BODIES, *POOLED])
            model = "e" if path in POOLED else chance.choice("ab")
            body = (BODIES.get(path) or POOLED[path]) | {"model": model}
            if path in BODIES and chance.random() < 0.5:
                body = streamed(path, body)
            answer = clients[name].post(path, json=body)
            assert answer.status_code == 200, answer.text
            said.setdefault((name, model), Counter()).update(usage_of(answer) + Counter(requests=1))
        for bad in ({"prompt": "x", "max_tokens": -1}, {"prompt": "x", "n": 10_000}, {"nothing": 1}):
            assert clients["k1"].post("/v1/completions", json=bad | {"model": "a"}).status_code == 400
        assert clients["k1"].post("/v1/completions", json={"model": "zz", "prompt": "x"}).status_code == 404
        rows = shown(clients["ops"])["data"]
        counted = {
            (row["key"], row["model"]): {name: row[name] for name in (*TOKENS, "requests")} for row in rows
        }
        expected = {
            (ids[name], model): {each: n[each] for each in (*TOKENS, "requests")}
            for (name, model), n in said.items()
        }
        expected[ids["k1"], "a"]["requests"] += (
            2  # refused by the engine or by its limits; not one that is no request
        )
        assert counted == expected
        assert sum(row["failed"] for row in rows) == 2
        own = shown(clients["k3"], by="tenant")
        assert [row["tenant"] for row in own["data"]] == ["globex"]
        assert own["total"]["total_tokens"] == sum(
            said[key][each] for key in said if key[0] == "k3" for each in TOKENS
        )
        for name in clients:
            clients[name].close()


@pytest.mark.fault("G18")
def test_a_stream_that_fails_or_is_left_counts_what_it_had_used(tmp_path: Path) -> None:
    held = Held()
    failing = FakeEngine("f", behaviour=FakeBehaviour(stream_error=GenerationFailed(), stream_error_after=3))
    slow = FakeEngine("s", behaviour=FakeBehaviour(token_seconds=1, wait=held))
    with (
        counting(tmp_path, failing, slow, edge={"keep_alive_s": 0.05}) as gateway,
        gateway.client() as client,
    ):
        body = BODIES["/v1/completions"] | {"stream": True, "max_tokens": 8}
        answer = client.post("/v1/completions", json=body | {"model": "f"})
        assert "event: error" in answer.text
        with client.stream("POST", "/v1/completions", json=body | {"model": "s"}):
            wait_for(lambda: slow.active, "it does not run")
        wait_for(lambda: slow.aborted, "it was not left")
        rows = {row["model"]: row for row in shown(client)["data"]}
    told = {name: [row[each] for each in ("requests", "failed", *TOKENS)] for name, row in rows.items()}
    assert told == {"f": [1, 1, 3, 4], "s": [1, 0, 3, 0]}


def test_a_handoff_that_is_still_computed_when_it_is_answered_counts_in_the_end(tmp_path: Path) -> None:
    held = Held()
    engine = FakeEngine("a", supports_handoffs=True, behaviour=FakeBehaviour(token_seconds=1, wait=held))
    settings = {"handoffs": {"wait_s": 0.0, "store": f"file:{tmp_path / 'store'}"}}
    with counting(tmp_path, engine, **settings) as gateway, gateway.client() as client:
        answer = client.post("/v1/handoffs", json={"model": "a", "prompt": "one two three"})
        if answer.status_code != 202:
            pytest.fail(f"it is not pending: {answer.text}")
        assert shown(client)["data"] == []
        held.release()
        wait_for(lambda: shown(client)["data"], "it was not counted")
        (row,) = shown(client)["data"]
    assert (row["requests"], row["prompt_tokens"]) == (1, 3)


def test_what_a_join_computes_after_its_answer_counts_too(tmp_path: Path) -> None:
    engine, held = FakeEngine("a", supports_handoffs=True), Held()
    settings = {"handoffs": {"wait_s": 0.0, "store": f"file:{tmp_path / 'store'}"}}
    with counting(tmp_path, engine, **settings) as gateway, gateway.client() as client:
        parts = [client.post("/v1/handoffs", json={"model": "a", "prompt": text}).json() for text in "xy"]
        ids = [part["id"] for part in parts]
        for each in ids:
            path = f"/v1/handoffs/{each}"
            wait_for(lambda path=path: client.get(path).json()["state"] == "ready", "it is not ready")
        wait_for(
            lambda: [row["prompt_tokens"] for row in shown(client)["data"]] == [2], "they were not counted"
        )
        engine.behaviour = FakeBehaviour(token_seconds=1, wait=held)
        assert client.post("/v1/handoffs", json={"model": "a", "from": ids}).status_code == 202
        held.release()
        wait_for(lambda: shown(client)["data"][0]["prompt_tokens"] > 2, "it was not counted")


def test_a_follow_up_is_counted_as_its_own_models(tmp_path: Path) -> None:
    class Describing(Current):
        def describe(self, output: dict[str, Any]) -> tuple[str, None]:
            return f"The sum is {output['sum']:.2f}.", None

    engines = FakeEngine("geo", pooling=True, plugin=plugin(Describing())), FakeEngine("chat")
    with counting(tmp_path, *engines) as gateway, gateway.client() as client:
        messages = [{"role": "user", "content": "what is it?"}]
        body = {
            "model": "geo",
            "data": {"numbers": [0.03]},
            "follow_up": {"model": "chat", "messages": messages},
        }
        answer = client.post("/pooling", json=body).json()
        rows = {row["model"]: row for row in shown(client)["data"]}
    assert tokens_of(answer["follow_up"]["usage"]) == Counter({each: rows["chat"][each] for each in TOKENS})
    assert (rows["geo"]["requests"], rows["geo"]["total_tokens"]) == (1, 0)


@pytest.mark.fault("G18")
def test_over_restarts_and_kills_nothing_is_lost_that_was_shown_nor_counted_twice(tmp_path: Path) -> None:
    """Each time the gateway is killed in the middle of requests, or ended, and goes on with the same file."""
    file = tmp_path / "usage.sqlite"
    chance, said = random.Random(11), Counter[str]()
    most: Counter[str] = Counter()
    for number in range(4):
        with (
            FakeProcess(tmp_path, usage={"file": str(file)}, responses={"budget": 0}) as gateway,
            gateway.client() as client,
        ):
            before = counted_in(client)
            assert said <= before <= most, "it is not what it was"
            said, most = before, before.copy()
            for _ in range(15):
                path = chance.choice(list(BODIES))
                body = BODIES[path] | {"model": chance.choice(["alpha", "beta"])}
                answer = client.post(path, json=streamed(path, body) if chance.random() < 0.5 else body)
                said += usage_of(answer)
            assert counted_in(client) == said, "it is not the sum of the answers"
            most = said.copy()
            for _ in range(5):  # which nobody has seen counted
                most += usage_of(
                    client.post("/v1/completions", json=BODIES["/v1/completions"] | {"model": "alpha"})
                )
            gateway.signal(signal.SIGTERM if number % 2 else signal.SIGKILL)
            gateway.process.wait(20)
            if number % 2:
                said = most.copy()  # a gateway that ends writes all of it
    print(f"G18: {said.total()} tokens over 2 kills and 2 restarts, 0 lost that were shown, 0 counted twice")


def counted_in(client: httpx.Client) -> Counter[str]:
    total = shown(client)["total"]
    return Counter({each: total[each] for each in TOKENS})


def test_two_gateways_count_in_one_file_and_hold_a_key_to_one_budget(tmp_path: Path) -> None:
    """What the other one wrote is known once one has written itself, which each look at the usage does."""
    keys = tmp_path / "keys.json"
    headers = bearer(create_key(keys, "acme", day_tokens=60))
    settings = {"auth": {"keys_file": keys}}
    statuses: list[int] = []
    with (
        counting(tmp_path, FakeEngine("a"), **settings) as one,
        counting(tmp_path, FakeEngine("a"), **settings) as other,
        one.client(headers=headers) as first,
        other.client(headers=headers) as second,
    ):
        for client in [first, second] * 12:  # each request takes 7
            answer = client.post("/v1/completions", json=BODIES["/v1/completions"] | {"model": "a"})
            statuses.append(answer.status_code)
            shown(client)
        total = shown(first)["total"]["total_tokens"]
    assert set(statuses) == {200, 429}
    assert total == 7 * statuses.count(200)
    assert 60 <= total <= 60 + 2 * 7


@pytest.mark.fault("G19")
def test_a_budget_that_is_spent_is_refused_until_the_next_day_and_the_next_month(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    key = create_key(file, "acme", day_tokens=14, month_tokens=28)
    other = create_key(file, "acme")
    wall = Wall("2030-01-30")
    body = BODIES["/v1/completions"] | {"model": "a"}  # 3 tokens and 4
    with counting(tmp_path, FakeEngine("a"), auth={"keys_file": file}) as gateway:
        usage = gateway.app.state.gateway.usage
        usage._wall = wall
        with gateway.client(headers=bearer(key)) as client:
            statuses = [client.post("/v1/completions", json=body).status_code for _ in range(3)]
            refused = client.post("/v1/completions", json=body)
            assert statuses == [200, 200, 429]
            error = refused.json()["error"]
            assert (error["code"], error["type"]) == ("budget_spent", "rate_limit_error")
            day = {"period": "day", "tokens": 14, "used": 14, "resets_at": "2030-01-31T00:00:00Z"}
            assert error["budget"] == day
            assert refused.headers["retry-after"] == str(12 * 3600)
            assert client.get("/v1/models").status_code == 200, "what takes no tokens is not refused"
            assert day in shown(client)["budgets"]
            wall.now = noon("2030-01-31")
            statuses = [client.post("/v1/completions", json=body).status_code for _ in range(2)]
            assert statuses == [200, 200]
            error = client.post("/v1/completions", json=body).json()["error"]
            assert error["budget"]["period"] in ("day", "month")
            wall.now = noon("2030-02-01")
            assert client.post("/v1/completions", json=body).status_code == 200
            wall.now = noon("2030-01-31")
            error = client.post("/v1/completions", json=body).json()["error"]
            assert error["budget"]["used"] == 14, "a clock that is set back finds what was used then"
            rows = shown(client, **{"from": "2030-01-01", "to": "2030-12-31"}, by="day")["data"]
            assert {row["day"]: row["total_tokens"] for row in rows} == {
                "2030-01-30": 14,
                "2030-01-31": 14,
                "2030-02-01": 7,
            }
        with gateway.client(headers=bearer(other)) as client:
            assert client.post("/v1/completions", json=body).status_code == 200, "it is another key's budget"


@pytest.mark.fault("G19")
def test_requests_under_way_count_for_the_budget(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    key = create_key(file, "acme", day_tokens=5)
    held = Held()
    engine = FakeEngine("a", behaviour=FakeBehaviour(token_seconds=1, wait=held))
    with (
        counting(tmp_path, engine, auth={"keys_file": file}) as gateway,
        gateway.client(headers=bearer(key)) as client,
    ):
        body = {"model": "a", "prompt": "one two three four five", "max_tokens": 2}
        asking = threading.Thread(target=client.post, args=("/v1/completions",), kwargs={"json": body})
        asking.start()
        wait_for(lambda: engine.active, "it does not run")
        with gateway.client(headers=bearer(key)) as second:
            assert second.post("/v1/completions", json=body).status_code == 429
            held.release()
            asking.join()
            assert shown(second)["total"]["total_tokens"] == 7


@pytest.mark.fault("G19")
def test_a_key_with_a_budget_is_refused_where_nothing_is_counted(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    key = create_key(file, "acme", month_tokens=10**6)
    with (
        run_fake(FakeEngine("a"), auth={"keys_file": file}) as gateway,
        gateway.client(headers=bearer(key)) as client,
    ):
        refused = client.post("/v1/completions", json=BODIES["/v1/completions"] | {"model": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "budget_spent")
        assert "usage.keep_days" in refused.json()["error"]["message"]
        assert client.get("/v1/usage").json()["error"]["code"] == "operation_unsupported"


@pytest.mark.fault("G20")
def test_a_file_that_cannot_be_written_costs_no_request_and_no_count(tmp_path: Path) -> None:
    with counting(tmp_path, FakeEngine("a")) as gateway, gateway.client() as client:
        file = gateway.app.state.gateway.usage._file
        body = BODIES["/v1/completions"] | {"model": "a"}
        file._database.execute(
            "PRAGMA query_only = ON"
        )  # what a full device is to SQLite: an error at the write
        assert [client.post("/v1/completions", json=body).status_code for _ in range(4)] == [200] * 4
        refused = client.get("/v1/usage")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "usage_unavailable")
        assert metric(gateway, "baton_usage_unwritten") == 1
        file._database.execute("PRAGMA query_only = OFF")
        assert shown(client)["total"]["total_tokens"] == 28
        assert metric(gateway, "baton_usage_unwritten") == 0


def test_where_the_usual_place_cannot_be_written_the_gateway_runs_and_counts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "state").write_text("no folder, as on a read-only root")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with run_fake(FakeEngine("a"), usage={}) as gateway, gateway.client() as client:
        assert (
            client.post("/v1/completions", json=BODIES["/v1/completions"] | {"model": "a"}).status_code == 200
        )
        assert "usage.file" in client.get("/v1/usage").json()["error"]["message"]


def test_a_file_that_is_none_ends_the_start(tmp_path: Path) -> None:
    from baton.errors import SettingsError

    (tmp_path / "usage.sqlite").write_text("no database" * 1000)
    with (
        pytest.raises(SettingsError, match=r"usage\.file: .*not a database"),
        counting(tmp_path, FakeEngine("a")),
    ):
        pass


@pytest.mark.fault("G21")
def test_a_tenant_sees_its_own_usage_alone_whatever_it_asks_for(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    acme, globex = create_key(file, "acme"), create_key(file, "globex")
    operators = create_key(file, "ops", operator=True)
    with counting(tmp_path, FakeEngine("a"), auth={"keys_file": file}) as gateway:
        with gateway.client(headers=bearer(acme)) as client:
            assert (
                client.post("/v1/completions", json=BODIES["/v1/completions"] | {"model": "a"}).status_code
                == 200
            )
        with gateway.client(headers=bearer(globex)) as client:
            acme_id = read_keys(file)[0].id
            asked: tuple[dict[str, str], ...] = (
                {},
                {"key": acme_id},
                {"model": "a"},
                {"tenant": "globex"},
                {"by": "day"},
            )
            for each in asked:
                found = shown(client, **each)
                assert (found["data"], found["total"]["requests"]) == ([], 0)
            refused = client.get("/v1/usage", params={"tenant": "acme"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "operator_key_needed")
            for name, wrong in (
                *(("from", "yesterday"), ("to", "2030-02-30"), ("by", "tenant,colour"), ("limit", "0")),
                *(("tenant", "x" * 200), ("offset", "-1")),
            ):
                answer = client.get("/v1/usage", params={name: wrong})
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, name), answer.text
        with gateway.client(headers=bearer(operators)) as client:
            assert [row["tenant"] for row in shown(client)["data"]] == ["acme"]
            assert shown(client, tenant="acme")["total"]["requests"] == 1
            hostile = shown(client, tenant="' OR 1=1 --", by="model")
            assert (hostile["data"], hostile["total"]["requests"]) == ([], 0)


def test_rows_come_in_pages(tmp_path: Path) -> None:
    engines = [FakeEngine(name) for name in "abcde"]
    with counting(tmp_path, *engines) as gateway, gateway.client() as client:
        for name in "abcde":
            client.post("/v1/completions", json=BODIES["/v1/completions"] | {"model": name})
        pages = [shown(client, limit=2, offset=offset) for offset in (0, 2, 4)]
    assert [[row["model"] for row in page["data"]] for page in pages] == [["a", "b"], ["c", "d"], ["e"]]
    assert [page["has_more"] for page in pages] == [True, True, False]
    assert pages[0]["total"]["requests"] == 5


# What a key may.


@pytest.mark.fault("G22")
def test_a_key_uses_the_models_that_it_names_and_no_others(tmp_path: Path) -> None:
    """By name, by alias, by a pattern, on every route that picks an engine."""
    file = tmp_path / "keys.json"
    key = create_key(file, "acme", models=("a", "nick", "small-*"))
    engines = (
        *(FakeEngine("a"), FakeEngine("b", aliases=("other",)), FakeEngine("c", aliases=("nick",))),
        *(FakeEngine("small-1"), FakeEngine("e", pooling=True)),
        FakeEngine("geo", pooling=True, plugin=plugin(Current())),
    )
    bodies = BODIES | {path: body for path, body in POOLED.items() if path != "/v1/rerank"}
    bodies |= {"/tokenize": {"prompt": "x"}, "/v1/handoffs": {"prompt": "x"}}
    with (
        counting(tmp_path, *engines, auth={"keys_file": file}) as gateway,
        gateway.client(headers=bearer(key)) as client,
    ):
        for path, body in bodies.items():
            refused = ("e",) if path in POOLED else ("b", "other")
            for model in refused:
                answer = client.post(path, json=body | {"model": model})
                error = answer.json()["error"]
                assert (answer.status_code, error["code"]) == (403, "model_not_allowed"), (
                    path,
                    model,
                    answer.text,
                )
                assert error["param"] == "model"
        for path, body in BODIES.items():
            for model in ("a", "nick", "c", "small-1"):
                assert client.post(path, json=body | {"model": model}).status_code == 200, (path, model)
        upload = client.post("/pooling?model=geo", content=b"x", headers={"content-type": "image/tiff"})
        assert upload.json()["error"]["code"] == "model_not_allowed"
        assert client.get("/v1/models/b").json()["error"]["code"] == "model_not_allowed"
        listed = {card["id"] for card in client.get("/v1/models").json()["data"]}
        assert listed == {"a", "c", "nick", "small-1"}
        assert all(not gateway.engine(name).bodies for name in ("b", "e"))


@pytest.mark.fault("G22")
def test_a_key_for_an_adapter_is_none_for_its_engine_nor_the_other_way_round(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    adapted, plain = (create_key(file, "acme", models=(name,)) for name in ("tuned", "a"))
    engine = FakeEngine("a")
    engine.adapters["tuned"] = Adapter("tuned", tmp_path, "0" * 64, 8)
    body = BODIES["/v1/completions"]
    with counting(tmp_path, engine, auth={"keys_file": file}) as gateway:
        for key, own, other in ((adapted, "tuned", "a"), (plain, "a", "tuned")):
            with gateway.client(headers=bearer(key)) as client:
                assert client.post("/v1/completions", json=body | {"model": own}).status_code == 200
                assert client.post("/v1/completions", json=body | {"model": other}).status_code == 403
                assert [card["id"] for card in client.get("/v1/models").json()["data"]] == [own]
                statuses = [client.get(f"/v1/models/{name}").status_code for name in (own, other)]
                assert statuses == [200, 403]
                assert [
                    row["model"] for row in shown(client, key=read_keys(file)[key == plain].id)["data"]
                ] == [own]


@pytest.mark.fault("G22")
def test_a_follow_up_may_not_use_another_model(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    key = create_key(file, "acme", models=("geo",))
    engines = FakeEngine("geo", pooling=True, plugin=plugin(Current())), FakeEngine("chat")
    with (
        run_fake(*engines, auth={"keys_file": file}) as gateway,
        gateway.client(headers=bearer(key)) as client,
    ):
        messages = [{"role": "user", "content": "what is it?"}]
        body = {
            "model": "geo",
            "data": {"numbers": [0.03]},
            "follow_up": {"model": "chat", "messages": messages},
        }
        refused = client.post("/pooling", json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "model_not_allowed")
        assert client.post("/pooling", json={"model": "geo", "data": {"numbers": [0.03]}}).status_code == 200


@pytest.mark.fault("G22")
def test_a_key_that_has_expired_opens_nothing_and_ends_its_streams_of_events(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    wall = Wall("2030-01-31")
    key = create_key(file, "acme", expires_at=int(wall.now) + 60)
    with (
        run_fake(FakeEngine("a"), auth={"keys_file": file}) as gateway,
        Following(gateway.url, key) as following,
    ):
        keyring = keyring_of(gateway)
        keyring._wall = wall
        with gateway.client(headers=bearer(key)) as client:
            assert client.get("/v1/models").status_code == 200
            wall.now += 60
            for path in ("/v1/models", "/v1/usage"):
                answer = client.get(path)
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
                assert "expired" in answer.json()["error"]["message"]
        wait_for(lambda: following.ended or not following._thread.is_alive(), "it still gets events")


def keyring_of(gateway: FakeGateway) -> Any:
    from baton.http.middleware.gate import AuthMiddleware

    (auth,) = (each for each in gateway.app.user_middleware if each.cls is AuthMiddleware)
    return auth.kwargs["keyring"]


# Who goes first.


def waiting_in_order(
    gateway: FakeGateway, held: Held, asked: list[tuple[dict[str, str], dict[str, Any]]]
) -> list[str]:
    """Send requests one after the other while the only place is taken, and return the order they were served in."""
    engine = gateway.engine("a")
    first = threading.Thread(target=send, args=(gateway, {}, {"prompt": "first"}))
    first.start()
    wait_for(lambda: engine.active, "it does not run")
    threads = [first]
    for number, (headers, body) in enumerate(asked, 1):
        threads.append(threading.Thread(target=send, args=(gateway, headers, body)))
        threads[-1].start()
        wait_for(
            lambda number=number: metric(gateway, 'baton_admission_waiting{engine="a"}') == number,
            "it does not wait",
        )
    held.release()
    for each in threads:
        each.join()
    return [str(body["prompt"]) for body in engine.bodies[1:]]


def send(gateway: FakeGateway, headers: dict[str, str], body: dict[str, Any]) -> None:
    with gateway.client(headers=headers) as client:
        client.post("/v1/completions", json={"model": "a", "max_tokens": 1} | body).raise_for_status()


def test_priority_and_service_tier_order_a_tenants_own_requests() -> None:
    held = Held()
    engine = FakeEngine("a", behaviour=FakeBehaviour(token_seconds=1, wait=held, slots=1))
    with run_fake(engine, admission={"engine_requests": 1}) as gateway:
        served = waiting_in_order(
            gateway,
            held,
            [
                ({}, {"prompt": "usual"}),
                ({}, {"prompt": "later", "priority": 5}),
                ({}, {"prompt": "flex", "service_tier": "flex", "priority": -100}),
                ({}, {"prompt": "sooner", "priority": -5}),
                ({}, {"prompt": "tier", "service_tier": "priority"}),
                ({}, {"prompt": "usual too", "service_tier": "default", "priority": 0}),
            ],
        )
        assert served == ["tier", "sooner", "usual", "usual too", "later", "flex"]
        assert all("priority" not in body for body in engine.bodies), "the engine does not get it"


def test_a_priority_takes_no_turn_of_another_tenant(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    acme, globex = (bearer(create_key(file, tenant)) for tenant in ("acme", "globex"))
    held = Held()
    engine = FakeEngine("a", behaviour=FakeBehaviour(token_seconds=1, wait=held, slots=1))
    settings = {"admission": {"engine_requests": 1}, "auth": {"keys_file": file}}
    with run_fake(engine, **settings) as gateway:
        asking = threading.Thread(target=send, args=(gateway, acme, {"prompt": "first"}))
        asking.start()
        wait_for(lambda: engine.active, "it does not run")
        threads = [asking]
        asked = [(globex, "calm", 0), (acme, "loud 1", -9), (acme, "loud 2", -9), (globex, "calm 2", 0)]
        second = threading.Thread(
            target=send, args=(gateway, globex, {"prompt": "second"})
        )  # the reserve's place
        second.start()
        threads.append(second)
        wait_for(lambda: metric(gateway, 'baton_admission_running{engine="a"}') == 2, "it has no place")
        for number, (headers, prompt, priority) in enumerate(asked, 1):
            body = {"prompt": prompt, "priority": priority}
            threads.append(threading.Thread(target=send, args=(gateway, headers, body)))
            threads[-1].start()
            wait_for(
                lambda number=number: metric(gateway, 'baton_admission_waiting{engine="a"}') == number,
                "it has a place",
            )
        held.release()
        for each in threads:
            each.join()
        served = [str(body["prompt"]).partition(" ")[0] for body in engine.bodies[2:]]
        assert served in (["loud", "calm", "loud", "calm"], ["calm", "loud", "calm", "loud"])


@pytest.mark.parametrize("wrong", ["high", 1.5, True, [1], {}])
def test_a_priority_that_is_no_whole_number_is_a_400(wrong: object) -> None:
    with run_fake(FakeEngine("a")) as gateway, gateway.client() as client:
        answer = client.post("/v1/completions", json={"model": "a", "prompt": "x", "priority": wrong})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "priority")


# Who did what.


@pytest.mark.fault("G17")
def test_the_audit_log_has_operators_acts_and_deletions_and_nothing_that_was_said(tmp_path: Path) -> None:
    file, log = tmp_path / "keys.json", tmp_path / "logs" / "audit.jsonl"
    log.parent.mkdir()
    plain, operators = create_key(file, "acme"), create_key(file, "ops", operator=True)
    ids = [key.id for key in read_keys(file)]
    settings = {
        "auth": {"keys_file": file, "audit_file": log},
        "handoffs": {"store": f"file:{tmp_path / 'store'}"},
    }
    secret = "the-secret-prompt"
    with run_fake(FakeEngine("a", supports_handoffs=True), FakeEngine("b"), **settings) as gateway:
        with gateway.client(headers=bearer(plain)) as client:
            body = {"model": "a", "prompt": secret, "max_tokens": 1, "handoff": {"save": True}}
            made = client.post("/v1/completions", json=body).json()["handoff"]["id"]
            assert client.delete(f"/v1/handoffs/{made}").status_code == 204
            assert client.delete(f"/v1/handoffs/{made}").status_code == 404
            assert client.post("/v1/engines/b/stop").status_code == 403
            assert (
                client.post(
                    "/v1/load_lora_adapter", json={"lora_name": secret, "lora_path": "/x"}
                ).status_code
                == 403
            )
            assert client.delete("/v1/nothing-here").status_code == 404
        with gateway.client(headers=bearer(operators)) as client:
            assert client.post("/v1/engines/b/stop").status_code == 202
            assert client.post("/v1/unload_lora_adapter", json={"lora_name": "x"}).status_code == 404
            moved = log.rename(log.with_suffix(".1"))  # as logrotate does
            assert client.post("/v1/engines/b/start").status_code == 202
        with gateway.client() as client:
            assert client.delete(f"/v1/handoffs/{made}").status_code == 401
    lines = [json.loads(line) for each in (moved, log) for line in each.read_text().splitlines()]
    assert [(each["act"], each["what"], each["outcome"], each["key"]) for each in lines] == [
        ("delete", f"/v1/handoffs/{made}", "done", ids[0]),
        ("delete", f"/v1/handoffs/{made}", "refused", ids[0]),
        ("engine.stop", "/v1/engines/b/stop", "refused", ids[0]),
        ("adapter.load", "/v1/load_lora_adapter", "refused", ids[0]),
        ("engine.stop", "/v1/engines/b/stop", "done", ids[1]),
        ("adapter.unload", "x", "refused", ids[1]),
        ("engine.start", "/v1/engines/b/start", "done", ids[1]),
    ]
    assert all(each["at"].endswith("Z") and each["request_id"] and each["tenant"] for each in lines)
    told = moved.read_text() + log.read_text()
    assert not any(each in told for each in (secret, plain, operators))
    assert oct(log.stat().st_mode & 0o777) == "0o600"


@pytest.mark.fault("G17")
def test_an_audit_log_that_cannot_be_written_is_a_line_of_the_log_and_a_metric(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "audit.jsonl"
    log.parent.mkdir()
    with run_fake(FakeEngine("a"), auth={"audit_file": log}) as gateway, gateway.client() as client:
        log.unlink()
        log.parent.rmdir()
        assert client.post("/v1/engines/a/restart").status_code == 202
        assert metric(gateway, "baton_audit_lines_lost_total") == 1


def test_a_gateway_does_not_start_without_its_audit_log(tmp_path: Path) -> None:
    from baton.errors import SettingsError

    with (
        pytest.raises(SettingsError, match=r"auth\.audit_file: .*No such file"),
        run_fake(FakeEngine("a"), auth={"audit_file": tmp_path / "no" / "audit"}),
    ):
        pass


def test_behind_a_proxy_nobody_is_an_operator_without_a_key(tmp_path: Path) -> None:
    """A gateway on loopback that a proxy shows to others, by a path or a name: everybody comes from this machine."""
    for settings in ({"root_path": "/llm"}, {"edge": {"allowed_hosts": ["llm.example.org"]}}):
        with run_fake(FakeEngine("a"), **settings) as gateway, gateway.client() as client:
            for path in ("/v1/engines/a/stop", "/v1/settings/reload", "/v1/unload_lora_adapter"):
                answer = client.post(path, json={"lora_name": "x"})
                assert (answer.status_code, answer.json()["error"]["code"]) == (403, "operator_key_needed")
            assert client.get("/v1/engines").json()["operator"] is False
            assert client.get("/v1/usage", params={"tenant": "x"}).status_code in (400, 403)
