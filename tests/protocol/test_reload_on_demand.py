"""Settings are read again where models come and go: they come, stay or go by the new ones, and who waits still does."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from protocol.test_on_demand import MIB, ROOM
from protocol.test_reload import File, ask, changes, reload, running, states
from support.gateways import FakeGateway
from support.raw_requests import metric, wait_for

COMING = '[[engines]]\nname = "{name}"\nmodel = "{model}"\nstart = "on_demand"\nmemory = "{memory}MiB"\n'
STAYING = '[[engines]]\nname = "{name}"\nmodel = "{model}"\n'


def coming(name: str, model: str = "one", memory: int = 100) -> str:
    return COMING.format(name=name, model=model, memory=memory)


@pytest.fixture
def file(tmp_path: Path) -> File:
    return File(tmp_path, coming("a") + coming("b"))


def until(gateway: FakeGateway, **wanted: str) -> None:
    wait_for(lambda: states(gateway) == wanted, f"states are {states(gateway)}, not {wanted}")


def test_a_model_on_demand_is_added_and_one_is_removed(file: File) -> None:
    with running(file, on_demand=ROOM) as gateway:
        assert ask(gateway, "a") == 200
        file.write(coming("b") + coming("c"))
        assert changes(reload(gateway)) == {"engines.a": "removed", "engines.c": "added"}
        until(gateway, b="unloaded", c="unloaded")
        assert ask(gateway, "a") == 404
        assert (ask(gateway, "b"), ask(gateway, "c")) == (200, 200)
        assert metric(gateway, 'baton_memory_budget_held_bytes{engine="c"}') == 100 * MIB
        with gateway.client() as client:
            held = [line for line in client.get("/metrics").text.splitlines() if "budget_held" in line]
        assert not [line for line in held if 'engine="a"' in line]


def test_a_model_that_runs_always_comes_on_demand_and_the_other_way_round(file: File) -> None:
    """Neither is started again for it: what runs goes on, and what is down is started."""
    file.write(coming("a") + STAYING.format(name="b", model="two"))
    with running(file, on_demand=ROOM) as gateway:
        until(gateway, a="unloaded", b="ready")
        file.write(STAYING.format(name="a", model="one") + coming("b", "two"))
        assert changes(reload(gateway)) == {"engines.a": "adjusted", "engines.b": "adjusted"}
        until(gateway, a="ready", b="ready")
        assert (gateway.engine("a").starts, gateway.engine("b").starts) == (1, 1)
        with gateway.client() as client:
            rows = {each["name"]: each["start"] for each in client.get("/v1/engines").json()["data"]}
        assert rows == {"a": "always", "b": "on_demand"}


def test_a_model_that_is_down_is_not_started_by_other_settings_of_it(file: File) -> None:
    with running(file, on_demand=ROOM) as gateway:
        file.write(coming("a", "another") + coming("b"))
        assert changes(reload(gateway)) == {"engines.a": "changed"}
        until(gateway, a="unloaded", b="unloaded")
        assert ask(gateway, "a") == 200
        assert gateway.engine("a").weights == "another"


def test_a_model_that_was_stopped_while_it_was_down_stays_stopped(file: File) -> None:
    with running(file, on_demand=ROOM) as gateway:
        with gateway.client() as client:
            client.post("/v1/engines/a/stop")
        until(gateway, a="stopped", b="unloaded")
        former = gateway.engine("a")
        file.write(coming("a", "another") + coming("b"))
        assert changes(reload(gateway)) == {"engines.a": "changed"}
        wait_for(lambda: gateway.engine("a") is not former, "it is not replaced")
        until(gateway, a="stopped", b="unloaded")
        assert (ask(gateway, "a"), gateway.engine("a").starts) == (503, 0)


def test_who_waits_for_a_model_that_is_replaced_gets_the_new_one(file: File) -> None:
    file.write(coming("a", "held") + coming("b"))
    with running(file, on_demand=ROOM) as gateway:
        answered: list[int] = []
        asking = threading.Thread(target=lambda: answered.append(ask(gateway, "a")))
        asking.start()
        wait_for(lambda: states(gateway)["a"] == "starting", "it does not start")
        file.write(coming("a", "quick") + coming("b"))
        assert changes(reload(gateway)) == {"engines.a": "changed"}
        file.held.release()
        asking.join()
        assert answered == [200]
        assert gateway.engine("a").weights == "quick"


def test_a_model_that_comes_back_before_it_has_gone_waits_for_its_end(file: File) -> None:
    """That is no start that failed: who asks meanwhile waits."""
    file.write(coming("a", "slow") + coming("b"))
    with running(file, on_demand=ROOM) as gateway:
        answered: list[int] = []
        asking = [threading.Thread(target=lambda: answered.append(ask(gateway, "a"))) for _ in range(2)]
        asking[0].start()
        wait_for(lambda: states(gateway)["a"] == "ready" and gateway.engine("a").active, "it is not asked")
        file.write(coming("b"))
        assert changes(reload(gateway)) == {"engines.a": "removed"}
        file.write(coming("a", "quick") + coming("b"))
        assert changes(reload(gateway)) == {"engines.a": "added"}
        assert states(gateway)["a"] == "unloading"
        asking[1].start()
        wait_for(lambda: metric(gateway, 'baton_engine_load_waiting{engine="a"}') == 1, "nobody waits")
        file.held.release()
        for each in asking:
            each.join()
        assert answered == [200, 200]


def test_a_model_that_could_never_be_loaded_changes_nothing(file: File) -> None:
    with running(file, on_demand=ROOM) as gateway:
        file.write(coming("a", memory=900) + coming("b"))
        refused = reload(gateway)
        assert refused.status_code == 422, refused.text
        said: dict[str, Any] = refused.json()["error"]
        assert "engines 'a'" in said["message"]
        assert "on_demand.budget" in said["message"]
        assert (ask(gateway, "a"), ask(gateway, "b")) == (200, 200)
