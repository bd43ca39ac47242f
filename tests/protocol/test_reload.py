"""Settings are read again while the gateway runs: what changed is touched, what has an error changes nothing."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.event_streams import Following
from support.gateways import FakeGateway, FakeProcess, Held, run_fake
from support.handoff_requests import TEXT, post
from support.raw_requests import metric, wait_for

from baton.admission.api_keys import create_key, read_keys, revoke_key
from baton.config.settings import Settings, load_settings
from baton.engines.engine import Engine
from baton.engines.fake.engine import FakeBehaviour, FakeEngine
from baton.errors import SettingsError, StartError

TWO = """
[[engines]]
name = "a"
model = "one"

[[engines]]
name = "b"
model = "two"
"""
NOT_OURS: dict[str, Any] = {
    **{
        "responses": {"budget": 0},
        "usage": {"keep_days": 0},
        "scenes": {"budget": 0},
        "metrics": {"port": 0},
        "port": 0,
    },
    "edge": {"keep_alive_s": 0.05},
}


class File:
    """A settings file, and the engines that are built of it: fakes, whose model's name says how they behave."""

    def __init__(self, folder: Path, text: str = TWO) -> None:
        self.path = folder / "baton.toml"
        self.held = Held()
        self.built: list[str] = []
        self.write(text)

    def write(self, text: str) -> None:
        self.path.write_text(text)

    def read(self) -> Settings:
        return load_settings(self.path, **NOT_OURS)

    def build(self, settings: Settings, names: Collection[str]) -> list[Engine]:
        chosen = [each for each in settings.engines if each.name in names]
        if broken := [each.name for each in chosen if each.model == "broken"]:
            raise SettingsError(f"engines '{broken[0]}': args.nonsense: unknown argument")
        self.built += [each.name for each in chosen]
        slow, held = (
            FakeBehaviour(token_seconds=1, wait=self.held),
            FakeBehaviour(start_seconds=1, wait=self.held),
        )
        behaviours = {"slow": slow, "held": held}
        return [
            FakeEngine(
                each.name,
                aliases=each.aliases,
                default=each.default,
                weights=each.model,
                behaviour=behaviours.get(each.model, FakeBehaviour()),
            )
            for each in chosen
        ]


@contextmanager
def running(file: File, **settings: Any) -> Iterator[FakeGateway]:
    began = file.read()
    engines = file.build(began, [each.name for each in began.engines])
    file.built.clear()
    overrides = {"engines": began.engines, "edge": {"keep_alive_s": 0.05}} | settings
    with run_fake(*engines, reread=file.read, build=file.build, **overrides) as gateway:
        yield gateway


@pytest.fixture
def file(tmp_path: Path) -> File:
    return File(tmp_path)


def reload(gateway: FakeGateway, key: str = "") -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with gateway.client(headers=headers) as client:
        return client.post("/v1/settings/reload")


def changes(answer: httpx.Response) -> dict[str, str]:
    assert answer.status_code == 200, answer.text
    return {each["setting"]: each["change"] for each in answer.json()["changed"]}


def states(gateway: FakeGateway) -> dict[str, str]:
    with gateway.client() as client:
        return {each["name"]: each["state"] for each in client.get("/v1/engines").json()["data"]}


def ask(gateway: FakeGateway, model: str) -> int:
    return post(gateway, TEXT | {"model": model}).status_code


def test_a_file_that_is_as_it_was_changes_nothing(file: File) -> None:
    with running(file) as gateway:
        assert reload(gateway).json() == {"object": "settings.reload", "changed": [], "needs_restart": []}
        assert (file.built, gateway.engine("a").starts) == ([], 1)


@pytest.mark.fault("G13")
def test_an_engine_that_is_added_changed_or_removed_is_touched_and_no_other(file: File) -> None:
    with running(file) as gateway, Following(gateway.url) as following:
        kept, former = gateway.engine("a"), gateway.engine("b")
        file.write(TWO.replace('"two"', '"three"') + '[[engines]]\nname = "c"\nmodel = "four"\n')
        assert changes(reload(gateway)) == {"engines.b": "changed", "engines.c": "added"}
        following.wait_for_state("c", "ready")
        wait_for(lambda: states(gateway) == dict.fromkeys("abc", "ready"), "they are not ready")
        assert file.built == ["b", "c"]
        assert (kept.starts, gateway.engine("a") is kept) == (1, True)
        assert (former.starts, gateway.engine("b").weights) == (1, "three")
        assert [ask(gateway, name) for name in "abc"] == [200, 200, 200]
        file.write('[[engines]]\nname = "a"\nmodel = "one"\n')
        assert changes(reload(gateway)) == {"engines.b": "removed", "engines.c": "removed"}
        assert [ask(gateway, name) for name in "abc"] == [200, 404, 404]
        wait_for(lambda: not shown(gateway, "b"), "it has series")
        assert kept.starts == 1
    assert metric_of_reloads(gateway) == {"changed": 2}


def shown(gateway: FakeGateway, engine: str) -> bool:
    """Whether the metrics have series of an engine that tell how it is."""
    with gateway.client() as client:
        page = client.get(f"{gateway.metrics_url}/metrics").text
    told = (
        "baton_engine_up",
        "baton_admission_running",
        "baton_engine_last_progress_seconds",
        "baton_engine_state",
    )
    return any(line.startswith(told) and f'engine="{engine}"' in line for line in page.splitlines())


def metric_of_reloads(gateway: FakeGateway) -> dict[str, float]:
    samples = gateway.fleet.metrics.usage.reloads.collect()[0].samples
    return {each.labels["outcome"]: each.value for each in samples if each.name.endswith("_total")}


@pytest.mark.fault("G13")
@pytest.mark.parametrize("there", [True, False], ids=["changed", "removed"])
def test_a_stream_ends_as_it_would_before_its_engine_does(file: File, there: bool) -> None:
    file.write(TWO.replace('"two"', '"slow"'))
    with running(file) as gateway, gateway.client() as client:
        former = gateway.engine("b")
        with client.stream("POST", "/v1/completions", json=TEXT | {"model": "b", "stream": True}) as stream:
            wait_for(lambda: former.active, "it does not run")
            file.write(
                TWO.replace('"two"', '"three"') if there else TWO.partition('[[engines]]\nname = "b"')[0]
            )
            assert changes(reload(gateway)) == {"engines.b": "changed" if there else "removed"}
            assert ask(gateway, "b") == (503 if there else 404)
            assert ask(gateway, "a") == 200
            assert former.state.value == "ready", "it was stopped under its stream"
            file.held.release()
            assert stream.read().endswith(b"data: [DONE]\n\n")
        wait_for(lambda: former.state.value == "stopped", "it was not stopped")
        if there:
            wait_for(lambda: ask(gateway, "b") == 200, "the new one does not answer")


@pytest.mark.fault("G13")
def test_aliases_and_the_default_change_without_a_start(file: File) -> None:
    with running(file) as gateway:
        engines = [gateway.engine(name) for name in "ab"]
        assert ask(gateway, "x") == 404
        file.write(TWO + 'aliases = ["x", "y-*"]\ndefault = true\n')
        assert changes(reload(gateway)) == {"engines.b": "renamed"}
        assert [ask(gateway, name) for name in ("x", "y-1")] == [200, 200]
        body = post(gateway, TEXT | {"model": "x"}).json()
        assert (body["model"], engines[1].bodies[-1]["model"]) == ("x", "b")
        assert post(gateway, {key: value for key, value in TEXT.items() if key != "model"}).status_code == 200
        with gateway.client() as client:
            listed = [card["id"] for card in client.get("/v1/models").json()["data"]]
        assert listed == ["a", "b", "x"]
        file.write(TWO)
        assert changes(reload(gateway)) == {"engines.b": "renamed"}
        assert ask(gateway, "x") == 404
        assert [each.starts for each in engines] == [1, 1]


def start(file: File) -> None:
    """What the start does with the file."""
    began = file.read()
    file.build(began, [each.name for each in began.engines])


WRONG = {
    "no TOML": ("[[engines]\n", "not valid TOML"),
    "an unknown key": (TWO + "modle = 1\n", "engines.1.modle: unknown setting; did you mean 'model'?"),
    "a wrong value": ("[limits]\nn = 0\n" + TWO, "limits.n: input should be greater than or equal to 1"),
    "a name twice": (TWO + 'aliases = ["a"]\n', "engines: the name 'a' is given twice"),
    "an engine that cannot be": (
        TWO.replace("two", "broken"),
        "engines 'b': args.nonsense: unknown argument",
    ),
    "nothing served": ("engines = []\n", "engines: name at least one"),
}


@pytest.mark.fault("G14")
@pytest.mark.parametrize("kind", WRONG)
def test_a_file_with_an_error_changes_nothing_and_says_where_as_the_start_does(file: File, kind: str) -> None:
    """Beside the error there is a change that would be fine."""
    text, said = WRONG[kind]
    with running(file) as gateway:
        before = gateway.app.state.gateway.settings
        file.write(text.replace('"one"', '"other"'))
        answer = reload(gateway)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (422, "settings_refused")
        assert said in error["message"], error["message"]
        with pytest.raises(SettingsError) as at_start:
            start(file)
        assert at_start.value.message in error["message"], "the start says it in other words"
        assert gateway.app.state.gateway.settings is before
        assert (states(gateway), gateway.engine("a").starts) == ({"a": "ready", "b": "ready"}, 1)
        assert ask(gateway, "a") == 200
        file.write(TWO)
        assert changes(reload(gateway)) == {}


@pytest.mark.fault("G14")
def test_a_file_that_is_half_written_does_not_put_the_embedded_models_in_the_engines_place(
    file: File,
) -> None:
    with running(file) as gateway:
        for text in ("", "[limits]\nn = 3\n"):
            file.write(text)
            refused = reload(gateway)
            assert (refused.status_code, refused.json()["error"]["code"]) == (422, "settings_refused")
            assert "none is named any more" in refused.json()["error"]["message"]
        assert states(gateway) == {"a": "ready", "b": "ready"}


@pytest.mark.fault("G14")
def test_what_cannot_change_while_the_gateway_runs_is_named_and_the_rest_changes(file: File) -> None:
    with running(file) as gateway:
        file.write(
            'log_level = "debug"\nroot_path = "/x"\n[admission]\nwait_s = 5.0\ntenant_rate = 1.0\n'
            '[handoffs]\nttl_s = 5\n[limits]\nn = 2\n[auth]\nkeys_file = "/nowhere"\n' + TWO
        )
        for _ in range(2):  # they are named until there was a restart
            answer = reload(gateway)
            assert sorted(answer.json()["needs_restart"]) == [
                *("admission.wait_s", "auth.keys_file", "handoffs.ttl_s", "log_level", "root_path")
            ]
        settings = gateway.app.state.gateway.settings
        assert (settings.admission.wait_s, settings.handoffs.ttl_s, settings.log_level) == (60, 3600, "info")
        assert (settings.limits.n, settings.admission.tenant_rate) == (2, 1.0)


def test_limits_hold_from_then_on(file: File) -> None:
    with running(file) as gateway:
        assert post(gateway, TEXT | {"n": 3}).status_code == 200
        file.write(
            '[limits]\nn = 2\nbody_bytes = "1KiB"\n[admission]\ntenant_rate = 60\ntenant_burst = 4\n' + TWO
        )
        assert set(changes(reload(gateway))) == {
            *("limits.n", "limits.body_bytes", "admission.tenant_rate", "admission.tenant_burst")
        }
        refused = post(gateway, TEXT | {"n": 3})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
        assert post(gateway, TEXT | {"prompt": "x" * 2000}).status_code == 413
        assert [post(gateway, TEXT).status_code for _ in range(3)] == [200, 200, 429]
        file.write(TWO)
        assert post_reload_with_patience(gateway).status_code == 200
        assert [post(gateway, TEXT).status_code for _ in range(5)] == [200] * 5


def post_reload_with_patience(gateway: FakeGateway) -> httpx.Response:
    answers: list[httpx.Response] = []

    def accepted() -> bool:
        answers.append(reload(gateway))
        return answers[-1].status_code != 429

    wait_for(accepted, "the tenant's rate holds for ever")
    return answers[-1]


def test_more_places_serve_those_who_wait(file: File) -> None:
    few = "[admission]\nengine_requests = 1\n"
    file.write(few + TWO.replace('"two"', '"slow"'))
    settings = {"admission": {"engine_requests": 1}}
    with running(file, **settings) as gateway:
        engine = gateway.engine("b")
        asking = [threading.Thread(target=ask, args=(gateway, "b")) for _ in range(4)]
        for each in asking:
            each.start()
        wait_for(lambda: metric(gateway, 'baton_admission_waiting{engine="b"}') == 3, "three do not wait")
        file.write(file.path.read_text().replace("= 1", "= 4"))
        assert changes(reload(gateway)) == {"admission.engine_requests": "changed"}
        wait_for(lambda: engine.active == 4, "they wait although there is room")
        file.held.release()
        for each in asking:
            each.join()


@pytest.mark.fault("G16")
def test_two_reloads_at_once_are_one_after_the_other(file: File) -> None:
    """The file is what it is when each of them reads it; the last one holds."""
    with running(file) as gateway:
        answers: list[httpx.Response] = []
        models = [f"m{number}" for number in range(8)]

        def change(model: str) -> None:
            file.write(TWO.replace("two", model))
            answers.append(reload(gateway))

        threads = [threading.Thread(target=change, args=(model,)) for model in models]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        reload(gateway)
        assert {answer.status_code for answer in answers} <= {200, 422}  # a file half written is refused
        settled = file.read().engines[1].model
        wait_for(lambda: gateway.engine("b").weights == settled, "another file's engine runs")
        wait_for(lambda: states(gateway) == {"a": "ready", "b": "ready"}, "it is not ready")
        assert gateway.engine("a").starts == 1
        assert ask(gateway, "b") == 200


@pytest.mark.fault("G16")
@pytest.mark.parametrize("then", ["changed", "removed"])
def test_a_reload_in_the_middle_of_a_start_ends_that_start(file: File, then: str) -> None:
    with running(file) as gateway:
        file.write(TWO + '[[engines]]\nname = "c"\nmodel = "held"\n')
        assert changes(reload(gateway)) == {"engines.c": "added"}
        wait_for(lambda: states(gateway)["c"] == "starting", "it does not start")
        former = gateway.engine("c")
        wait_for(lambda: former.starts, "it does not start")
        file.write(TWO + ('[[engines]]\nname = "c"\nmodel = "four"\n' if then == "changed" else ""))
        assert changes(reload(gateway)) == {"engines.c": then}
        if then == "changed":
            wait_for(lambda: ask(gateway, "c") == 200, "the new one does not answer")
            assert gateway.engine("c").weights == "four"
        else:
            wait_for(lambda: not shown(gateway, "c"), "it has series")
        assert former.state.value == "stopped"
        assert [ask(gateway, name) for name in "ab"] == [200, 200]


@pytest.mark.fault("G16")
def test_a_reload_while_the_gateway_itself_starts(tmp_path: Path) -> None:
    file = File(tmp_path, TWO.replace('"two"', '"held"'))
    began = file.read()
    engines = file.build(began, ["a", "b"])
    with run_fake(*engines, wait=False, reread=file.read, build=file.build, engines=began.engines) as gateway:
        wait_for(lambda: gateway.engine("b").starts, "it does not start")
        file.write(TWO + '[[engines]]\nname = "c"\nmodel = "four"\n')
        assert changes(reload(gateway)) == {"engines.b": "changed", "engines.c": "added"}
        wait_for(lambda: states(gateway) == dict.fromkeys("abc", "ready"), "they are not ready")
        with gateway.client() as client:
            wait_for(lambda: client.get("/readyz").status_code == 200, "the gateway is not ready")


@pytest.mark.fault("G16")
def test_an_engine_that_comes_back_while_it_leaves_starts_once_the_former_has_ended(file: File) -> None:
    file.write(TWO.replace('"two"', '"slow"'))
    with running(file) as gateway, gateway.client() as client:
        former = gateway.engine("b")
        with client.stream("POST", "/v1/completions", json=TEXT | {"model": "b", "stream": True}) as stream:
            wait_for(lambda: former.active, "it does not run")
            for _ in range(2):  # and once more, before the first one has ended
                file.write(TWO.partition('[[engines]]\nname = "b"')[0])
                assert changes(reload(gateway)) == {"engines.b": "removed"}
                file.write(TWO)
                assert changes(reload(gateway)) == {"engines.b": "added"}
            assert (gateway.engine("b").starts, ask(gateway, "b")) == (0, 503)
            file.held.release()
            assert stream.read().endswith(b"data: [DONE]\n\n")
        wait_for(lambda: ask(gateway, "b") == 200, "it did not come back")
        assert former.state.value == "stopped"


@pytest.mark.fault("G16")
def test_a_gateway_ends_while_engines_leave_and_wait_for_one_that_leaves(file: File) -> None:
    """Nothing starts after its end, and nothing that was there is left running."""
    file.write(TWO.replace('"two"', '"slow"'))
    with running(file, drain_timeout_s=0) as gateway, gateway.client() as client:
        former = gateway.engine("b")
        with client.stream("POST", "/v1/completions", json=TEXT | {"model": "b", "stream": True}):
            wait_for(lambda: former.active, "it does not run")
            file.write(TWO.partition('[[engines]]\nname = "b"')[0] + "\n")
            file.write("drain_timeout_s = 3600\n" + file.path.read_text())
            assert "engines.b" in changes(reload(gateway))
            file.write("drain_timeout_s = 0\n" + TWO)
            assert changes(reload(gateway))["engines.b"] == "added"
            waiting = gateway.engine("b")
    assert (former.state.value, waiting.starts) == ("stopped", 0)


@pytest.mark.fault("G16")
def test_an_operators_stop_holds_over_a_reload(file: File) -> None:
    with running(file) as gateway, gateway.client() as client:
        client.post("/v1/engines/b/stop")
        wait_for(lambda: states(gateway)["b"] == "stopped", "it was not stopped")
        file.write(TWO.replace('"two"', '"three"'))
        assert changes(reload(gateway)) == {"engines.b": "changed"}
        wait_for(lambda: gateway.engine("b").weights == "three", "it was not replaced")
        assert (states(gateway)["b"], gateway.engine("b").starts) == ("stopped", 0)
        client.post("/v1/engines/b/start")
        wait_for(lambda: ask(gateway, "b") == 200, "it does not start")


def test_an_added_engine_that_cannot_start_is_failed_and_an_operator_may_try_again(file: File) -> None:
    class Failing(File):
        def build(self, settings: Settings, names: Collection[str]) -> list[Engine]:
            built = super().build(settings, names)
            for each in built:
                if each.name == "c":
                    assert isinstance(each, FakeEngine)
                    each.behaviour = FakeBehaviour(start_error=StartError("no memory"))
            return built

    failing = Failing(file.path.parent)
    with running(failing) as gateway, gateway.client() as client:
        failing.write(TWO + '[[engines]]\nname = "c"\nmodel = "four"\n')
        assert changes(reload(gateway)) == {"engines.c": "added"}
        wait_for(lambda: states(gateway)["c"] == "failed", "it has not failed")
        assert [ask(gateway, name) for name in "abc"] == [200, 200, 503]
        gateway.engine("c").behaviour.start_error = None
        client.post("/v1/engines/c/start")
        wait_for(lambda: ask(gateway, "c") == 200, "it does not start")


@pytest.mark.fault("G17")
def test_only_operators_read_settings_again_and_the_audit_log_says_who_tried(
    file: File, tmp_path: Path
) -> None:
    keys, log = tmp_path / "keys.json", tmp_path / "audit.jsonl"
    plain, operators = create_key(keys, "acme"), create_key(keys, "ops", operator=True)
    ids = [key.id for key in read_keys(keys)]
    with running(file, auth={"keys_file": keys, "audit_file": log}) as gateway:
        refused = reload(gateway, plain)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "operator_key_needed")
        assert reload(gateway, operators).status_code == 200
        file.write("[[")
        assert reload(gateway, operators).status_code == 422
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(each["act"], each["outcome"], each["tenant"], each["key"]) for each in lines] == [
        ("settings.reload", "refused", "acme", ids[0]),
        ("settings.reload", "done", "ops", ids[1]),
        ("settings.reload", "refused", "ops", ids[1]),
    ]
    assert lines[2]["code"] == "settings_refused"


@pytest.mark.fault("G14")
def test_keys_are_read_at_once_and_a_keys_file_with_an_error_changes_nothing(
    file: File, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.json"
    operators = create_key(keys, "ops", operator=True)
    with running(file, auth={"keys_file": keys}) as gateway:
        created = create_key(keys, "acme")
        new = read_keys(keys)[-1].id
        answer = reload(gateway, operators)
        whole = keys.read_text()
        assert {"setting": "keys", "change": "changed", "ids": [new]} in answer.json()["changed"]
        with gateway.client(headers={"Authorization": f"Bearer {created}"}) as client:
            assert client.get("/v1/models").status_code == 200
        keys.write_text(whole.replace('"tenant": "acme"', '"tenant": "a c m e"'))
        file.write(TWO.replace('"two"', '"three"'))
        refused = reload(gateway, operators)
        assert refused.status_code == 422
        assert "1.tenant: String should match pattern" in refused.json()["error"]["message"]
        assert gateway.engine("b").weights == "two"
        keys.write_text(whole)
        revoke_key(keys, new)
        assert set(changes(reload(gateway, operators))) == {"engines.b", "keys"}


def test_the_first_keys_of_all_need_a_restart(file: File) -> None:
    with running(file) as gateway:
        create_key(gateway.settings.keys_file, "acme")
        try:
            assert reload(gateway).json()["needs_restart"] == ["keys"]
        finally:
            gateway.settings.keys_file.unlink()


def test_without_a_second_look_the_answer_says_so() -> None:
    with run_fake(FakeEngine("a")) as gateway:
        answer = reload(gateway)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "operation_unsupported")


@pytest.mark.fault("G14")
def test_sighup_reads_them_again_and_an_error_is_a_line_of_the_log(file: File, tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    with running(file, auth={"audit_file": log}) as gateway:

        def hang_up() -> None:
            loop: Callable[..., object] = gateway.server._hang_up
            gateway.app.state.started.get_loop().call_soon_threadsafe(loop)

        def outcomes() -> list[str]:
            return [json.loads(line)["outcome"] for line in log.read_text().splitlines()]

        gateway.server._terminal = False
        file.write(TWO.replace('"two"', '"three"'))
        hang_up()
        wait_for(lambda: outcomes() == ["done"], "it did nothing")
        wait_for(lambda: gateway.engine("b").weights == "three", "it changed nothing")
        file.write("[[")
        hang_up()
        wait_for(lambda: outcomes() == ["done", "refused"], "it did nothing")
        assert ask(gateway, "b") == 200
        assert json.loads(log.read_text().splitlines()[0])["what"] == "SIGHUP"


@pytest.mark.fault("G14")
def test_a_hang_up_does_not_end_a_gateway(tmp_path: Path) -> None:
    """One of its own process, by the signal itself; it cannot read its settings again, and says so."""
    with FakeProcess(tmp_path) as gateway, gateway.client() as client:
        gateway.signal(signal.SIGHUP)
        wait_for(lambda: "settings_not_reloaded" in gateway.log, "it says nothing")
        assert client.get("/readyz").status_code == 200


@pytest.mark.fault("G13")
async def test_a_hundred_reloads_under_load_lose_no_request(file: File) -> None:
    """Requests of an engine that stays are all answered, and those of one that changes, or are told why not."""
    with running(file) as gateway:
        seen: dict[str, set[int]] = {"a": set(), "b": set()}
        over = asyncio.Event()

        async def load(client: httpx.AsyncClient, model: str) -> None:
            while not over.is_set():
                answer = await client.post("/v1/completions", json=TEXT | {"model": model})
                seen[model].add(answer.status_code)

        async with httpx.AsyncClient(base_url=gateway.url, timeout=30) as client:
            loading = [asyncio.create_task(load(client, model)) for model in "aabb"]
            for number in range(100):
                file.write(TWO.replace('"two"', f'"m{number}"'))
                answer = await client.post("/v1/settings/reload")
                assert changes(answer) == {"engines.b": "changed"}
            over.set()
            await asyncio.gather(*loading)
        assert (seen["a"], seen["b"] - {200, 503}) == ({200}, set())
        wait_for(lambda: gateway.engine("b").weights == "m99", "the last one does not run")
        assert gateway.engine("a").starts == 1
