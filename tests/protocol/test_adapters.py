"""LoRA adapters as models of their own, and the routes by which operators load them, without a model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.gateways import FakeGateway, run_fake

from baton.admission.api_keys import create_key
from baton.config.settings import load_settings
from baton.engines.adapters import Adapter, AdapterInvalid, KeptAdapter, KeptAdapters, read_adapter
from baton.engines.fake.engine import FakeEngine
from baton.engines.fleet import Fleet
from baton.errors import InvalidRequest, SettingsError

LOAD, UNLOAD, CHAT = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/chat/completions"
LONG = [{"role": "user", "content": "11 " * 200}]


def adapter_folder(folder: Path, weights: bytes = b"weights", **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8} | config))
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[FakeGateway]:
    engines = FakeEngine("a", supports_handoffs=True), FakeEngine("other", aliases=("alias",))
    kept = tmp_path / "kept" / "adapters.json"
    with run_fake(*engines, handoffs={"auto": "on"}, adapters_file=kept) as gateway:
        yield gateway


def load(gateway: FakeGateway, folder: Path, name: str = "french", **more: Any) -> httpx.Response:
    body = {"lora_name": name, "lora_path": str(folder), "model": "a"} | more
    with gateway.client() as client:
        return client.post(LOAD, json=body)


def chat(gateway: FakeGateway, model: str, **more: Any) -> dict[str, Any]:
    with gateway.client() as client:
        body = {"model": model, "messages": LONG, "max_tokens": 2} | more
        answer = client.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_an_adapter_is_a_model_with_a_parent_until_it_is_unloaded(
    gateway: FakeGateway, tmp_path: Path
) -> None:
    answer = load(gateway, adapter_folder(tmp_path / "f"))
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'french' added successfully.")
    with gateway.client() as client:
        cards = {card["id"]: card.get("parent") for card in client.get("/v1/models").json()["data"]}
        assert cards == {"a": None, "french": "a", "other": None, "alias": None}
        assert client.get("/v1/models/french").json()["parent"] == "a"
        chat(gateway, "french")
        chat(gateway, "a")
        used = [each and each.name for each in gateway.engine("a").adapted]
        assert used == ["french", None]
        assert client.post(UNLOAD, json={"lora_name": "french"}).status_code == 200
        gone = client.post(CHAT, json={"model": "french", "messages": LONG})
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
        again = client.post(UNLOAD, json={"lora_name": "french"})
        assert (again.status_code, again.json()["error"]["param"]) == (404, "lora_name")


def test_what_operators_loaded_is_in_a_file_of_this_user(gateway: FakeGateway, tmp_path: Path) -> None:
    folder = adapter_folder(tmp_path / "f")
    for name in ("one", "two"):
        assert load(gateway, folder, name).status_code == 200
    kept = KeptAdapters(gateway.settings.kept_adapters)
    assert [(each.engine, each.name, each.path) for each in kept.read()] == [
        ("a", "one", folder),
        ("a", "two", folder),
    ]
    assert gateway.settings.kept_adapters.stat().st_mode & 0o077 == 0
    with gateway.client() as client:
        client.post(UNLOAD, json={"lora_name": "one"})
    assert [each.name for each in kept.read()] == ["two"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"lora_name": "a b"}, "lora_name"),
        ({"lora_name": ""}, "lora_name"),
        ({"lora_path": "here"}, "lora_path"),
        ({"lora_path": "/nowhere"}, "lora_path"),
        ({"lora_path": 7}, "lora_path"),
        ({"lora_name": "other"}, "lora_name"),
        ({"lora_name": "alias"}, "lora_name"),
        ({"model": None}, "model"),
        ({"model": "none"}, "model"),
        ({"load_inplace": "yes"}, "load_inplace"),
        ({"is_3d_lora_weight": True}, None),
        ({"lora_names": "x"}, None),
    ],
)
def test_a_wrong_field_is_named(
    gateway: FakeGateway, tmp_path: Path, body: dict[str, Any], param: str | None
) -> None:
    answer = load(gateway, adapter_folder(tmp_path / "f"), **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert gateway.engine("a").adapters == {}
    assert not gateway.settings.kept_adapters.exists()


def test_a_name_is_taken_twice_only_in_place(gateway: FakeGateway, tmp_path: Path) -> None:
    first, second = adapter_folder(tmp_path / "1"), adapter_folder(tmp_path / "2", b"other weights")
    assert load(gateway, first).status_code == 200
    assert load(gateway, second).json()["error"]["param"] == "lora_name"
    before = gateway.engine("a").adapters["french"]
    assert load(gateway, second, load_inplace=True).status_code == 200
    assert gateway.engine("a").adapters["french"].digest != before.digest
    assert [each.path for each in KeptAdapters(gateway.settings.kept_adapters).read()] == [second]


async def test_of_two_loads_of_one_name_at_a_time_one_is_refused(tmp_path: Path) -> None:
    adapter, ends = read_adapter("x", adapter_folder(tmp_path / "f")), asyncio.Event()

    class Slow(FakeEngine):
        async def load_adapter(self, adapter: Adapter) -> None:
            await ends.wait()
            await super().load_adapter(adapter)

    fleet = Fleet([Slow("a")])
    loads = [asyncio.ensure_future(fleet.load_adapter(adapter, None, replace=False)) for _ in range(2)]
    await asyncio.sleep(0)
    ends.set()
    found = await asyncio.gather(*loads, return_exceptions=True)
    assert [type(each) for each in found] == [str, InvalidRequest]


@pytest.mark.fault("B19")
def test_kv_of_adapters_is_apart_and_their_handoffs_go_on_as_text(
    gateway: FakeGateway, tmp_path: Path
) -> None:
    """Within one adapter KV may be loaded, across adapters it never is; the tokens are the same."""
    engine = gateway.engine("a")
    for name, weights in (("french", b"1"), ("german", b"2")):
        assert load(gateway, adapter_folder(tmp_path / name, weights), name).status_code == 200
    made = {name: chat(gateway, name, handoff={"save": True})["handoff"] for name in ("a", "french")}
    assert [made[name]["model"] for name in made] == ["a", "french"]
    more = {"messages": [{"role": "user", "content": "22"}]}
    for left in made:
        for model in ("a", "french", "german"):
            engine.transfers.clear()
            source = chat(gateway, model, **more, handoff={"from": made[left]["id"]})["handoff"]["source"]
            (transfer,) = engine.transfers
            assert (transfer.load is not None) is (model == left), (left, model)
            assert (source["reason"] == "other_adapter") is (model != left), (left, model)
            assert transfer.prompt is not None
            assert transfer.prompt[: made[left]["tokens"] - 1].count(11) >= 200


@pytest.mark.fault("B19")
def test_automatic_reuse_stays_within_an_adapter(gateway: FakeGateway, tmp_path: Path) -> None:
    engine = gateway.engine("a")
    load(gateway, adapter_folder(tmp_path / "1"))
    other = [{"role": "user", "content": "33 " * 300}]
    for model in ("french", "a"):
        chat(gateway, model, messages=other)
    engine.transfers.clear()
    assert load(gateway, adapter_folder(tmp_path / "2", b"new"), load_inplace=True).status_code == 200
    chat(gateway, "french", messages=other)
    assert [each.load for each in engine.transfers if each.load is not None] == []


def test_only_an_operator_s_key_changes_what_is_served(tmp_path: Path) -> None:
    file, folder = tmp_path / "keys.json", adapter_folder(tmp_path / "f")
    keys = {name: create_key(file, "acme", operator=name == "operator") for name in ("operator", "tenant")}
    kept = tmp_path / "adapters.json"
    with run_fake(FakeEngine("a"), auth={"keys_file": file}, adapters_file=kept) as gateway:
        for path, body in (
            (LOAD, {"lora_name": "x", "lora_path": str(folder)}),
            (UNLOAD, {"lora_name": "x"}),
        ):
            for name, status in (("tenant", 403), ("operator", 200)):
                with gateway.client(headers={"Authorization": f"Bearer {keys[name]}"}) as client:
                    answer = client.post(path, json=body)
                assert answer.status_code == status, answer.text
                if status == 403:
                    assert answer.json()["error"]["code"] == "operator_key_needed"
            with gateway.client() as client:
                assert client.post(path, json=body).status_code == 401


@pytest.mark.parametrize(
    ("config", "weights", "reason"),
    [
        ("{", b"x", "not JSON"),
        ("[]", b"x", "no rank"),
        ('{"r": 0}', b"x", "no rank"),
        ('{"r": true}', b"x", "no rank"),
        ('{"r": 8, "rank_pattern": {"q": "8"}}', b"x", "no rank"),
        ('{"r": 8, "rank_pattern": 7}', b"x", "no rank"),
        ('{"peft_type": "IA3", "r": 8}', b"x", "not of a LoRA adapter"),
        ('{"r": 8}', None, "no adapter_model.safetensors"),
        (None, b"x", "no adapter_config.json"),
        ("[" * 100_000, b"x", "not JSON"),
        (" " * 2_000_000, b"x", "larger than"),
    ],
)
def test_a_folder_without_a_usable_adapter_says_why(
    tmp_path: Path, config: str | None, weights: bytes | None, reason: str
) -> None:
    if config is not None:
        (tmp_path / "adapter_config.json").write_text(config)
    if weights is not None:
        (tmp_path / "adapter_model.safetensors").write_bytes(weights)
    with pytest.raises(AdapterInvalid, match=reason):
        read_adapter("x", tmp_path)


def test_name_and_bytes_decide_whose_kv_it_is(tmp_path: Path) -> None:
    one, copy = adapter_folder(tmp_path / "1"), adapter_folder(tmp_path / "2")
    other = adapter_folder(tmp_path / "3", b"other")
    scaled = adapter_folder(tmp_path / "4", lora_alpha=99)
    weights = [read_adapter("x", folder).weights("base") for folder in (one, copy, other, scaled)]
    assert weights[0] == weights[1]
    assert len({*weights, read_adapter("y", one).weights("base")}) == 4
    assert read_adapter("x", adapter_folder(tmp_path / "5", rank_pattern={"q": 64})).rank == 64


def test_a_list_of_kept_adapters_that_is_none_is_a_line(tmp_path: Path) -> None:
    file = tmp_path / "adapters.json"
    file.write_text("{}")
    with pytest.raises(AdapterInvalid, match="no list of adapters"):
        KeptAdapters(file).read()
    file.unlink()
    file.mkdir()
    with pytest.raises(AdapterInvalid, match="directory"):
        KeptAdapters(file).add(KeptAdapter(engine="a", name="x", path=tmp_path))


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ({"runner": "pooling"}, "`adapters` are for engines that generate"),
        ({"latent": True, "handoff": True}, "without `latent`"),
        ({"aliases": ["x"]}, "given twice"),
        ({"url": "http://127.0.0.1:9"}, "`adapters` is for engines that run here"),
    ],
)
def test_adapters_are_for_engines_here_that_generate(engine: dict[str, Any], reason: str) -> None:
    with pytest.raises(SettingsError, match=reason):
        load_settings(engines=[{"name": "a", "model": "m", "adapters": {"x": "/f"}} | engine])


def test_an_adapter_of_the_settings_is_changed_there(tmp_path: Path) -> None:
    folder = adapter_folder(tmp_path / "f")
    engines = [{"name": "a", "model": "a", "adapters": {"french": str(folder)}}]
    with run_fake(FakeEngine("a"), engines=engines, adapters_file=tmp_path / "kept.json") as gateway:
        assert "engines.adapters" in load(gateway, folder).json()["error"]["message"]
        with gateway.client() as client:
            assert client.post(UNLOAD, json={"lora_name": "french"}).status_code == 400
