"""LoRA adapters in vLLM: which arguments they take, who holds them, and a fault of its CPU kernels."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from blake3 import blake3
from vllm.lora.ops.torch_ops import bgmv_expand_slice, bgmv_shrink
from vllm.lora.request import LoRARequest
from vllm.v1.engine.exceptions import EngineDeadError

from baton.config.groups import EngineSettings
from baton.engines.adapters import READ_BYTES, Adapter, read_adapter
from baton.engines.vllm import arguments
from baton.engines.vllm.flags import read_command_line
from baton.engines.vllm.lora import LoadedAdapters, held, most_adapters, spare_slots
from baton.engines.vllm_version import installed_vllm, minor_of
from baton.errors import EngineUnavailable, InvalidRequest, ModelNotFound, OperationUnsupported, SettingsError


def folder_of(folder: Path, rank: int = 8, weights: bytes = b"weights") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


def mapped_digest(folder: Path) -> str:
    """The digest as it was made of memory maps, which handoffs of adapters were saved with."""
    digest = blake3()
    for file in (folder / "adapter_config.json", folder / "adapter_model.safetensors"):
        digest.update(f"{file.name}:{file.stat().st_size}:".encode())
        digest.update_mmap(file)
    return digest.hexdigest()


@pytest.mark.parametrize("pieces", [0.5, 1, 2.5])
def test_an_adapter_s_digest_is_of_all_its_bytes(tmp_path: Path, pieces: float) -> None:
    weights = random.Random(7).randbytes(int(pieces * READ_BYTES))
    folder = folder_of(tmp_path / "a", weights=weights)
    before = read_adapter("a", folder).digest
    assert before == mapped_digest(folder)
    folder_of(folder, weights=weights[:-1] + bytes([weights[-1] ^ 1]))
    assert read_adapter("a", folder).digest == mapped_digest(folder) != before


def test_weights_that_are_cut_while_they_are_read_end_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A memory map of them would end the gateway's process."""
    folder = folder_of(tmp_path / "a", weights=b"w" * 3 * READ_BYTES)
    whole = read_adapter("a", folder).digest

    class Cutting:
        AUTO = blake3.AUTO

        def __init__(self, **_: Any) -> None:
            self._digest = blake3()

        def update(self, piece: bytes) -> None:
            self._digest.update(piece)
            if len(piece) == READ_BYTES:
                os.truncate(folder / "adapter_model.safetensors", READ_BYTES)

        def hexdigest(self) -> str:
            return self._digest.hexdigest()

    monkeypatch.setattr("baton.engines.adapters.blake3", Cutting)
    assert read_adapter("a", folder).digest != whole


class Client:
    """What is told to an engine of its adapters.

    Attributes:
        held: the ids that it holds.
        refusal: raised by the next load.
    """

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.refusal: Exception | None = None
        self.loading = asyncio.Event()
        self.loading.set()

    async def add_lora(self, request: LoRARequest) -> bool:
        await self.loading.wait()
        self.held.add(request.lora_int_id)
        if self.refusal is not None:
            raise self.refusal
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        self.held.discard(lora_id)
        return True


class Engine:
    def __init__(self, most: int = 2) -> None:
        self.client, self.known = Client(), dict[str, LoRARequest]()
        client: Any = self.client
        self.adapters = LoadedAdapters(client, self.known, most)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
def adapters(tmp_path: Path) -> dict[str, Adapter]:
    return {
        name: read_adapter(name, folder_of(tmp_path / name, weights=name.encode()))
        for name in ("a", "b", "c")
    }


async def outputs_of(began: asyncio.Event, ends: asyncio.Event) -> AsyncGenerator[int, None]:
    began.set()
    yield 1
    await ends.wait()
    yield 2


@pytest.mark.fault("B20")
async def test_an_adapter_stays_until_its_last_request_has_ended(adapters: dict[str, Adapter]) -> None:
    engine, began, ends = Engine(), asyncio.Event(), asyncio.Event()
    await engine.adapters.load(adapters["a"])
    loaded = engine.adapters.of(adapters["a"])

    async def read() -> list[int]:
        return [each async for each in held(loaded, outputs_of(began, ends))]

    reading = asyncio.ensure_future(read())
    await began.wait()
    engine.adapters.unload("a")
    await settle()
    assert (engine.known, engine.client.held) == ({}, {1})
    with pytest.raises(ModelNotFound):
        engine.adapters.of(adapters["a"])
    with pytest.raises(ModelNotFound):
        [each async for each in held(loaded, outputs_of(began, ends))]
    ends.set()
    assert await reading == [1, 2]
    await settle()
    assert engine.client.held == set()


async def test_a_request_that_is_left_frees_its_adapter(adapters: dict[str, Adapter]) -> None:
    engine, began, ends = Engine(), asyncio.Event(), asyncio.Event()
    await engine.adapters.load(adapters["a"])
    outputs = held(engine.adapters.of(adapters["a"]), outputs_of(began, ends))
    await anext(outputs)
    engine.adapters.unload("a")
    await outputs.aclose()
    await settle()
    assert engine.client.held == set()


@pytest.mark.fault("B20")
async def test_there_is_never_more_than_may_be_and_who_leaves_counts(adapters: dict[str, Adapter]) -> None:
    engine, began, ends = Engine(most=2), asyncio.Event(), asyncio.Event()
    for name in ("a", "b"):
        await engine.adapters.load(adapters[name])
    with pytest.raises(InvalidRequest, match="max_loras"):
        await engine.adapters.load(adapters["c"])
    outputs = held(engine.adapters.of(adapters["a"]), outputs_of(began, ends))
    await anext(outputs)
    engine.adapters.unload("a")
    with pytest.raises(InvalidRequest, match="that requests still use"):
        await engine.adapters.load(adapters["c"])
    await outputs.aclose()
    await settle()
    await engine.adapters.load(adapters["c"])
    assert sorted(engine.known) == ["b", "c"]
    assert len(engine.client.held) == 2


async def test_an_engine_without_lora_says_what_to_set(adapters: dict[str, Adapter]) -> None:
    with pytest.raises(OperationUnsupported, match="enable_lora"):
        await Engine(most=0).adapters.load(adapters["a"])


async def test_loads_at_the_same_time_are_counted_together(adapters: dict[str, Adapter]) -> None:
    engine = Engine(most=2)
    engine.client.loading.clear()
    loads = [asyncio.ensure_future(engine.adapters.load(adapter)) for adapter in adapters.values()]
    await settle()
    engine.client.loading.set()
    found = await asyncio.gather(*loads, return_exceptions=True)
    assert [type(each).__name__ for each in found] == ["Adapter", "Adapter", "InvalidRequest"]


@pytest.mark.fault("B20")
async def test_one_in_the_place_of_another_is_another_to_vllm(
    adapters: dict[str, Adapter], tmp_path: Path
) -> None:
    engine = Engine()
    await engine.adapters.load(adapters["a"])
    new = read_adapter("a", folder_of(tmp_path / "new", weights=b"new"))
    await engine.adapters.load(new)
    await settle()
    assert (engine.known["a"].lora_int_id, engine.client.held) == (2, {2})
    assert engine.adapters.of(new).request is engine.known["a"]
    with pytest.raises(EngineUnavailable):
        engine.adapters.of(adapters["a"])


@pytest.mark.parametrize(
    ("refusal", "error"),
    [
        (ValueError("LoRA rank 99 is greater than max_lora_rank 16.\nmore"), InvalidRequest),
        (EngineDeadError(), EngineUnavailable),
    ],
)
async def test_a_load_that_fails_keeps_nothing(
    adapters: dict[str, Adapter], refusal: Exception, error: type[Exception]
) -> None:
    engine = Engine()
    engine.client.refusal = refusal
    with pytest.raises(error) as caught:
        await engine.adapters.load(adapters["a"])
    assert (engine.known, engine.client.held) == ({}, set())
    if error is InvalidRequest:
        assert "LoRA rank 99 is greater than max_lora_rank 16." in str(caught.value)
    engine.client.refusal = None
    await engine.adapters.load(adapters["a"])
    await engine.adapters.load(adapters["b"])


@pytest.mark.fault("B20")
async def test_files_that_change_while_they_are_loaded_are_not_served(adapters: dict[str, Adapter]) -> None:
    engine = Engine()
    folder_of(adapters["a"].path, weights=b"changed since")
    with pytest.raises(InvalidRequest, match="were changed"):
        await engine.adapters.load(adapters["a"])
    assert (engine.known, engine.client.held) == ({}, set())


async def test_a_client_that_leaves_while_it_loads_leaves_it_whole(adapters: dict[str, Adapter]) -> None:
    engine = Engine()
    engine.client.loading.clear()
    loading = asyncio.ensure_future(engine.adapters.load(adapters["a"]))
    await settle()
    loading.cancel()
    await asyncio.gather(loading, return_exceptions=True)
    engine.client.loading.set()
    for _ in range(100):
        if engine.known:
            break
        await asyncio.sleep(0.01)
    assert (sorted(engine.known), engine.client.held) == (["a"], {1})


def built(adapters: list[Adapter], names: dict[str, str] | None = None, **args: Any) -> Any:
    settings = EngineSettings.model_validate(
        {"name": "e", "model": "m", "adapters": names or {}, "args": args}
    )
    return arguments.engine_args(settings, "m", adapters=adapters)


def test_arguments_follow_the_adapters(tmp_path: Path) -> None:
    names = {"a": str(folder_of(tmp_path / "a", rank=40)), "b": str(folder_of(tmp_path / "b"))}
    adapters = [read_adapter(name, Path(folder)) for name, folder in names.items()]
    found = built(adapters, names)
    assert (found.enable_lora, found.max_lora_rank) == (True, 64)
    assert found.max_loras == found.max_cpu_loras == len(names) + 4 + spare_slots()
    assert built(adapters, names, max_lora_rank=128).max_lora_rank == 128
    assert built(adapters[1:], {"b": names["b"]}).max_lora_rank == 16
    assert built(adapters, names, max_loras=2).max_loras == 2 + spare_slots()
    with pytest.raises(SettingsError, match=r"args\.max_loras: 1, and there are 2 `adapters`"):
        built(adapters, names, max_loras=1)
    assert built([], enable_lora=True).max_loras == 4 + spare_slots()
    assert (built([]).enable_lora, built([]).max_loras) == (False, 1)
    with pytest.raises(SettingsError, match=r"args\.default_mm_loras: not supported"):
        built([], default_mm_loras={"image": "/f"})


@pytest.mark.parametrize("slots", [1, 3])
def test_one_slot_more_than_adapters_stays_empty(slots: int) -> None:
    config: Any = SimpleNamespace(lora_config=SimpleNamespace(max_loras=slots + spare_slots()))
    assert most_adapters(config) == slots
    nothing: Any = SimpleNamespace(lora_config=None)
    assert most_adapters(nothing) == 0


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        (["a=/f"], {"a": Path("/f")}),
        (["a=/f", "b=/g"], {"a": Path("/f"), "b": Path("/g")}),
        (['{"name": "a", "path": "/f"}'], {"a": Path("/f")}),
        (['{"name": "a", "path": "/f", "base_model_name": "other"}'], {"a": Path("/f")}),
    ],
)
def test_lora_modules_of_a_command_line_are_adapters(flags: list[str], found: dict[str, Path]) -> None:
    line = ["m", "--served-model-name", "m", "other", "--lora-modules", *flags]
    assert read_command_line(line).engine.adapters == found


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["a=/f", "a=/g"], "'a' is named twice"),
        (
            ['{"name": "a", "path": "/f", "base_model_name": "gpt"}'],
            "of the model 'gpt', which is not served",
        ),
        (['{"name": "a", "path": "/f", "is_3d_lora_weight": true}'], "is_3d_lora_weight"),
        (['{"name": "a"}'], "lora-modules"),
        (["a b=/f"], "adapters"),
    ],
)
def test_lora_modules_that_cannot_be_served_are_a_line(flags: list[str], reason: str) -> None:
    with pytest.raises(SettingsError, match=reason):
        read_command_line(["m", "--lora-modules", *flags])


def test_vllm_0_32_computes_a_request_without_an_adapter_with_the_last_slot() -> None:
    """Why one slot stays empty. 0.33 has mended it: `spare_slots` and `spare_adapter` may go with 0.32, with their docs."""
    takes_the_last = minor_of(str(installed_vllm())) == "0.32"
    slots = torch.zeros(3, 1, 4, 8)
    slots[2] = 1
    inputs, without = torch.ones(1, 8), torch.tensor([-1])
    inner = torch.zeros(1, 4)
    bgmv_shrink(inputs, slots, inner, without)
    assert torch.equal(inner, torch.full((1, 4), 8.0 if takes_the_last else 0.0))
    outer = torch.zeros(1, 8)
    bgmv_expand_slice(torch.full((1, 4), 8.0), torch.ones(3, 1, 8, 4), outer, without, 0, 8)
    assert bool(outer.abs().sum() > 0) is takes_the_last
    slots[2] = 0  # as a slot that was never filled is
    bgmv_shrink(inputs, slots, inner, without)
    assert torch.equal(inner, torch.zeros(1, 4))


def test_the_seams_are_where_they_were() -> None:
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
    from vllm.v1.engine.async_llm import AsyncLLM

    assert {"add_lora", "remove_lora"} <= set(dir(AsyncLLM))
    assert "lora_requests" in OpenAIServingModels.__init__.__code__.co_names
    assert "lora_index_to_id" in LoRAModelManager.activate_adapter.__code__.co_names, "the first free slot"
    assert "remove_oldest_adapter" in LRUCacheWorkerLoRAManager.add_adapter.__code__.co_names, (
        "above capacity alone"
    )
