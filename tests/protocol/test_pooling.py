"""`POST /pooling` through IO processor plugins, over a real socket, with a fake engine behind them (row F5)."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from support.gateways import Held, run_fake
from support.plugin_gateways import ask, ask_and_leave, notice_blocked_loops_soon, served, until
from support.sample_plugins import SECRET, Async, Classic, Current, Lazy, Swallowing

from baton.engines.fake.engine import FakeBehaviour, FakeEngine
from baton.errors import GenerationFailed


@pytest.mark.parametrize("kind", [Current, Lazy, Async])
def test_a_plugin_request_is_answered_in_vllms_shape(kind: type[Current]) -> None:
    """Synchronous, lazy and asynchronous plugins all answer `{request_id, created_at, data}`."""
    with served(kind()) as gateway:
        response = ask(gateway)
    answer = response.json()
    assert response.status_code == 200
    assert set(answer) == {"request_id", "created_at", "data"}
    assert answer["request_id"] == response.headers["x-request-id"]
    assert answer["data"]["sum"] == pytest.approx(0.06)


def test_a_classic_plugin_answers_by_its_own_contract() -> None:
    """`parse_request` gets the request, and `output_to_response` says what stands in `data`."""
    with served(Classic()) as gateway:
        answer = ask(gateway).json()
    assert answer["data"] == {"classic": pytest.approx(0.06)}
    assert answer["request_id"] != "theirs"


def test_synchronous_hooks_see_outputs_in_order_and_coroutines_as_they_come() -> None:
    """A prompt takes as long as its number says: coroutines meet the fastest first."""
    numbers = [0.3, 0.01, 0.15]
    with served(Current()) as gateway:
        assert ask(gateway, numbers=numbers).json()["data"]["order"] == numbers
    with served(Async()) as gateway:
        assert ask(gateway, numbers=numbers).json()["data"]["order"] == [1, 2, 0]


def test_what_answers_amount_to_is_counted() -> None:
    """In the plugin's own units, and only of what was answered."""

    class Counting(Current):
        def amounts(self, output: dict[str, Any]) -> dict[str, int]:
            return {"numbers": len(output["order"])}

    with served(Counting()) as gateway:
        assert [ask(gateway).status_code for _ in range(2)] == [200, 200]
        assert ask(gateway, **{"in": "pre", "do": "refuse"}).status_code == 422
        page = httpx.get(f"{gateway.url}/metrics").text
    assert 'baton_pooling_amounts_total{engine="geo",unit="numbers"} 6.0' in page


def test_no_hook_runs_on_the_gateways_loop() -> None:
    """Every hook meets a thread of its own kind."""
    for instance in (Current(), Async()):
        with served(instance) as gateway:
            assert ask(gateway).status_code == 200
        assert instance.threads
        assert all(name.startswith(("hook-", "hooks-")) for name in instance.threads)


@pytest.mark.parametrize(("room", "of_the_plugin"), [(2, None), (2, 5), (16, 2)])
def test_prompts_are_made_only_as_the_engine_has_room(room: int, of_the_plugin: int | None) -> None:
    """With room for two, a plugin of a hundred prompts has made three when the first is still in the engine.

    The room is the gateway's, or the plugin's own if that is less.
    """
    lazy, held = Lazy(), Held()
    if of_the_plugin is not None:
        vars(lazy)["prompts_at_once"] = of_the_plugin
    with served(lazy, FakeBehaviour(wait=held), prompts=room) as gateway, ThreadPoolExecutor() as pool:
        answer = pool.submit(ask, gateway, numbers=[6.0, 6.0, *[0.0] * 98])
        assert until(lambda: gateway.engine("geo").active == 2)
        time.sleep(0.1)
        assert lazy.made <= 3
        held.release()
        assert answer.result().json()["data"]["sum"] == 12.0


@pytest.mark.parametrize("kind", [Current, Async])
@pytest.mark.parametrize(
    ("hook", "do", "status", "code"),
    [
        ("parse", "raise", 500, "plugin_failed"),
        ("parse", "value", 400, "invalid_request"),
        ("parse", "refuse", 422, "too_cloudy"),
        ("parse", "exit", 500, "plugin_failed"),
        ("pre", "raise", 500, "plugin_failed"),
        ("pre", "value", 400, "invalid_request"),
        ("pre", "refuse", 422, "too_cloudy"),
        ("pre", "exit", 500, "plugin_failed"),
    ],
)
@pytest.mark.fault("F5")
def test_a_plugin_that_raises_fails_only_its_own_request(
    kind: type[Current], hook: str, do: str, status: int, code: str
) -> None:
    """The request gets the code, the text of a failure stays inside, and the next request is answered."""
    with served(kind()) as gateway:
        response = ask(gateway, **{"in": hook, "do": do})
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)
        assert SECRET not in response.text
        assert ask(gateway).status_code == 200


@pytest.mark.fault("F5")
def test_junk_from_a_plugin_is_a_plugin_failure() -> None:
    """Prompts that are none, no prompts at all, and answers that are no JSON."""
    with served(Current()) as gateway:
        assert ask(gateway, **{"in": "pre", "do": "junk"}).json()["error"]["code"] == "plugin_failed"
        assert ask(gateway, numbers=[]).json()["error"]["code"] == "plugin_failed"

    class Junk(Current):
        def post_process(self, model_output: Any, request_id: str | None = None) -> Any:
            return object()

    with served(Junk()) as gateway:
        response = ask(gateway)
        assert (response.status_code, response.json()["error"]["code"]) == (500, "plugin_failed")


@pytest.mark.parametrize("kind", [Current, Async])
@pytest.mark.fault("F5")
def test_a_plugin_that_blocks_fails_only_its_own_request(
    kind: type[Current], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one request blocks, others of the same plugin are answered; the blocked one ends in time."""
    noticed_s, deed = notice_blocked_loops_soon(monkeypatch), {"in": "pre", "do": "block", "seconds": 60.0}
    instance = kind()
    with served(instance) as gateway, ThreadPoolExecutor() as pool:
        blocked = pool.submit(ask, gateway, **deed)
        time.sleep(noticed_s)
        assert ask(gateway).status_code == 200
        assert not blocked.done()
        instance.release.set()
        assert blocked.result().status_code == 200
    instance = kind()
    with served(instance, time_limit_s=0.5) as gateway:
        response = ask(gateway, **deed)
        assert (response.status_code, response.json()["error"]["code"]) == (504, "plugin_timeout")
        assert until(lambda: ask(gateway).status_code == 200)
        instance.release.set()


@pytest.mark.fault("F5")
def test_threads_left_behind_are_counted_and_bounded() -> None:
    """Two threads stuck: the third request is told to come back, and all is well when they end."""
    instance = Current()
    with served(instance, threads=2, time_limit_s=0.2) as gateway:
        for _ in range(2):
            assert ask(gateway, **{"in": "parse", "do": "block", "seconds": 60.0}).status_code == 504
        page = httpx.get(f"{gateway.url}/metrics").text
        assert 'baton_pooling_threads_left_behind{engine="geo"} 2.0' in page
        response = ask(gateway)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "plugin_busy")
        assert int(response.headers["retry-after"]) >= 1
        instance.release.set()
        assert until(lambda: ask(gateway).status_code == 200)


@pytest.mark.parametrize("kind", [Current, Lazy, Async])
def test_a_client_that_goes_away_aborts_every_prompt(kind: type[Current]) -> None:
    """Nothing of the request stays in the engine, in the plugin's generator or in its books.

    There is room for three prompts of five, so the generator is not at its end: it must be closed.
    """
    instance = kind()
    with served(instance, prompts=3) as gateway:
        engine = gateway.engine("geo")
        ask_and_leave(gateway, [60.0] * 5, lambda: engine.active == 3)
        assert until(lambda: engine.active == 0 and engine.aborted == 3)
        assert until(lambda: len(instance.forgotten) == 1)
        if isinstance(instance, Lazy | Async):
            assert until(lambda: instance.closed == 1)


@pytest.mark.parametrize("kind", [Current, Async, Swallowing])
def test_an_engine_failure_stands_above_what_the_plugin_makes_of_it(kind: type[Current]) -> None:
    """Also where the plugin swallows it."""
    with served(kind(), FakeBehaviour(encode_error=GenerationFailed())) as gateway:
        response = ask(gateway)
        assert (response.status_code, response.json()["error"]["code"]) == (500, "generation_failed")
        assert gateway.engine("geo").active == 0


def test_a_prompt_that_cannot_be_made_ends_the_request_and_its_others() -> None:
    """A lazily raised refusal is the client's answer."""
    with served(Lazy()) as gateway:
        response = ask(gateway, numbers=[20, 20, 20], **{"in": "prompt 3", "do": "refuse"})
        assert (response.status_code, response.json()["error"]["param"]) == (422, "data.clouds")
        assert until(lambda: gateway.engine("geo").active == 0)


def test_admission_comes_before_any_of_the_plugins_code() -> None:
    """With one place and nobody may wait, the second request is a 503 and never parsed."""
    held = Held()
    limits: dict[str, Any] = {"requests": 1, "waiting": 0}
    with (
        served(Current(), FakeBehaviour(wait=held), **limits) as gateway,
        ThreadPoolExecutor() as pool,
    ):
        first = pool.submit(ask, gateway, numbers=[6.0])
        assert until(lambda: gateway.engine("geo").active == 1)
        response = ask(gateway, **{"in": "parse", "do": "raise"})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_overloaded")
        assert int(response.headers["retry-after"]) >= 1
        held.release()
        assert first.result().status_code == 200


def test_a_request_that_waits_for_the_plugin_too_long_is_told_to_come_back() -> None:
    """And never parsed; the place is not lost."""
    held = Held()
    limits: dict[str, Any] = {"requests": 1, "wait_s": 0.2}
    with (
        served(Current(), FakeBehaviour(wait=held), **limits) as gateway,
        ThreadPoolExecutor() as pool,
    ):
        first = pool.submit(ask, gateway, numbers=[6.0])
        assert until(lambda: gateway.engine("geo").active == 1)
        response = ask(gateway, **{"in": "parse", "do": "raise"})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_overloaded")
        assert "within 0.2 seconds" in response.json()["error"]["message"]
        assert int(response.headers["retry-after"]) >= 1
        held.release()
        assert first.result().status_code == 200
        assert ask(gateway).status_code == 200


def test_input_to_a_plugin_model_is_a_clear_400() -> None:
    """Where vLLM answers an empty 500, the error says what to send."""
    with served(Current()) as gateway, gateway.client() as client:
        response = client.post("/pooling", json={"model": "geo", "input": "hello"})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "input")
        assert "IO processor plugin 'current'" in response.json()["error"]["message"]
        assert client.post("/pooling", json={"model": "geo"}).json()["error"]["param"] == "data"
        response = client.post("/pooling", json={"model": "geo", "data": {}, "priority": "high"})
        assert response.json()["error"]["param"] == "priority"


def test_data_to_a_model_without_a_plugin_is_a_clear_400() -> None:
    """And its plain pooling is vLLM's."""
    with run_fake(FakeEngine("embed", pooling=True)) as gateway, gateway.client() as client:
        assert client.post("/pooling", json={"data": {"x": 1}}).json()["error"]["param"] == "data"
        assert client.post("/pooling", json={"input": ["a", "b"]}).json()["data"][1]["object"] == "pooling"
        sent = client.post("/pooling", content=b"II*", headers={"content-type": "image/tiff"})
        assert sent.json()["error"]["code"] == "operation_unsupported"


def test_metrics_tell_how_plugin_requests_ended() -> None:
    """One series an outcome, the prompts, and nothing under way in the end."""
    with served(Current()) as gateway:
        ask(gateway)
        ask(gateway, **{"in": "pre", "do": "raise"})
        ask(gateway, **{"in": "pre", "do": "refuse"})
        page = httpx.get(f"{gateway.url}/metrics").text
    for outcome in ("ok", "failed", "refused"):
        assert f'baton_pooling_requests_total{{engine="geo",outcome="{outcome}"}} 1.0' in page
    assert 'baton_pooling_prompts_total{engine="geo"} 3.0' in page
    assert 'baton_pooling_requests_running{engine="geo"} 0.0' in page


def test_sixteen_requests_at_once_each_get_their_own_answer() -> None:
    """The published reference plugin mixes them up; here nothing is shared."""
    with served(Async(), requests=16) as gateway, ThreadPoolExecutor(16) as pool:
        asked = [[n / 100, n / 200, n / 50] for n in range(1, 17)]
        answers = list(pool.map(lambda numbers: ask(gateway, numbers=numbers).json(), asked))
    for numbers, answer in zip(asked, answers, strict=True):
        assert answer["data"]["sum"] == pytest.approx(sum(numbers))
