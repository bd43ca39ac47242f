"""Which dtype a CPU engine gets on which processor, and what is said of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.config.groups import EngineSettings
from baton.config.settings import load_settings
from baton.doctor import machine
from baton.engines.hardware import Processor, dtype_for, read_processor
from baton.telemetry.memory import MemoryReader

AVX2 = "fpu sse4_2 fma avx avx2 f16c"
AVX512 = f"{AVX2} avx512f avx512bw avx512_vnni"
SAPPHIRE = f"{AVX512} avx512_bf16 amx_bf16 amx_tile amx_int8"
ZEN4 = f"{AVX512} avx512_bf16"
GIB = 1024**3
SMOLLM2 = {
    "dtype": "bfloat16",
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
}


def cpuinfo(folder: Path, flags: str, name: str = "Some(R) Processor @ 2.80GHz") -> Path:
    """A file as the kernel writes it on x86, of two cores."""
    core = f"processor\t: 0\nvendor_id\t: X\nmodel\t\t: 106\nmodel name\t: {name}\nflags\t\t: {flags}\n\n"
    (folder / "cpuinfo").write_text(core * 2)
    return folder / "cpuinfo"


def model(folder: Path, config: dict[str, Any], weights: int = 1000) -> Path:
    place = folder / "model"
    place.mkdir()
    (place / "config.json").write_text(json.dumps(config))
    with (place / "model.safetensors").open("wb") as file:
        file.truncate(weights)
    return place


@pytest.mark.parametrize(
    ("flags", "architecture", "dtype"),
    [
        (AVX2, "x86_64", "float32"),
        (AVX512, "x86_64", "float32"),
        (ZEN4, "x86_64", None),
        (SAPPHIRE, "x86_64", None),
        (f"{AVX512} amx_bf16", "x86_64", None),
        ("", "x86_64", None),  # the kernel does not tell
        (AVX2, "aarch64", None),  # vLLM knows better
    ],
)
def test_float32_where_the_processor_has_no_bfloat16(
    tmp_path: Path, flags: str, architecture: str, dtype: str | None
) -> None:
    processor = read_processor(cpuinfo(tmp_path, flags), architecture)
    engine = EngineSettings(name="a", model="x")
    assert dtype_for(engine, model(tmp_path, SMOLLM2), processor, memory=16 * GIB) == dtype


@pytest.mark.parametrize(
    ("settings", "config", "chosen"),
    [
        ({}, SMOLLM2, True),
        ({}, SMOLLM2 | {"dtype": None, "torch_dtype": "float16"}, True),
        ({}, {"text_config": SMOLLM2, "model_type": "llava"}, True),
        ({"args": {"dtype": "bfloat16"}}, SMOLLM2, False),
        ({"args": {"dtype": "auto"}}, SMOLLM2, False),  # vLLM's own choice, asked for
        ({"model": "flood-tiny"}, SMOLLM2, False),  # the embedded model names one
        ({}, SMOLLM2 | {"dtype": "float32"}, False),
        ({}, {}, False),
        ({}, SMOLLM2 | {"quantization_config": {"quant_method": "awq"}}, False),
        ({"args": {"quantization": "awq"}}, SMOLLM2, False),
        # The KV of the longest context is 46,080 bytes a token: 360 MiB of the 512 that are the default.
        ({}, SMOLLM2 | {"max_position_embeddings": 16_384}, False),
        ({"args": {"max_model_len": 4096}}, SMOLLM2 | {"max_position_embeddings": 16_384}, True),
        ({"kv_cache_memory": "1GiB"}, SMOLLM2 | {"max_position_embeddings": 16_384}, True),
        ({"kv_cache_memory": "256MiB"}, SMOLLM2, False),
        ({}, {"dtype": "bfloat16", "hidden_size": 576}, False),  # nothing tells what its KV takes
    ],
)
def test_only_where_nothing_else_is_said_and_it_fits(
    tmp_path: Path, settings: dict[str, Any], config: dict[str, Any], *, chosen: bool
) -> None:
    processor = Processor("x", "x86_64", frozenset(AVX2.split()))
    engine = EngineSettings.model_validate({"name": "a", "model": "x"} | settings)
    found = dtype_for(engine, model(tmp_path, config), processor, memory=16 * GIB)
    assert found == ("float32" if chosen else None)


@pytest.mark.parametrize(("weights", "chosen"), [(4 * GIB, True), (5 * GIB, False)])
def test_weights_that_would_take_more_than_half_of_the_memory_stay_as_they_are(
    tmp_path: Path, weights: int, *, chosen: bool
) -> None:
    processor = Processor("x", "x86_64", frozenset(AVX2.split()))
    folder = model(tmp_path, SMOLLM2, weights)
    found = dtype_for(EngineSettings(name="a", model="x"), folder, processor, memory=16 * GIB)
    assert found == ("float32" if chosen else None)


def test_a_processor_is_named_with_what_decides_its_speed(tmp_path: Path) -> None:
    assert str(read_processor(cpuinfo(tmp_path, ZEN4), "x86_64")) == (
        "Some(R) Processor @ 2.80GHz (avx2, avx512f, avx512_bf16)"
    )


def test_an_arm_processor_is_read_too(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nFeatures\t: fp asimd bf16 sve\nCPU part\t: 0xd40\n")
    processor = read_processor(tmp_path / "cpuinfo", "aarch64")
    assert str(processor) == "aarch64 (asimd, bf16, sve)"
    assert not processor.emulates_bfloat16


def test_a_machine_without_proc_has_a_processor_nobody_knows(tmp_path: Path) -> None:
    processor = read_processor(tmp_path / "none", "x86_64")
    assert (str(processor), processor.emulates_bfloat16) == ("x86_64", False)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (AVX2, "(avx2), no bfloat16 instructions; dtype: float32 for a, unless `args` name another"),
        (ZEN4, "(avx2, avx512f, avx512_bf16); dtype: as each model or its settings say"),
    ],
)
def test_the_doctor_names_the_processor_and_the_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, told: str
) -> None:
    found = read_processor(cpuinfo(tmp_path, flags), "x86_64")
    monkeypatch.setattr(machine, "read_processor", lambda: found)
    monkeypatch.setattr(machine, "is_cpu_build", lambda: True)
    engines = (
        EngineSettings(name="a", model=str(model(tmp_path, SMOLLM2))),
        EngineSettings(name="b", model="/nowhere"),
    )
    (finding,) = machine._processor(load_settings(engines=engines))
    assert (finding.subject, finding.bad) == ("processor", False)
    assert finding.text == f"Some(R) Processor @ 2.80GHz {told}"


def test_on_a_gpu_the_doctor_says_nothing_of_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "is_cpu_build", lambda: False)
    (finding,) = machine._processor(load_settings())
    assert "dtype" not in finding.text


@pytest.mark.parametrize(
    ("limits", "total"),
    [
        ({}, 8 * GIB),
        ({"a": 2 * GIB}, 2 * GIB),
        ({"a": 2 * GIB, "a/b": GIB}, GIB),
        ({"a/b": 16 * GIB}, 8 * GIB),
    ],
)
def test_the_memory_there_is_in_all_is_the_least_that_is_allowed(
    tmp_path: Path, limits: dict[str, int], total: int
) -> None:
    (tmp_path / "meminfo").write_text(f"MemTotal: {8 * GIB // 1024} kB\nMemAvailable: 1024 kB\n")
    (tmp_path / "membership").write_text("0::/a/b\n")
    for name in ("a", "a/b"):
        folder = tmp_path / "cgroups" / name
        folder.mkdir(parents=True)
        (folder / "memory.max").write_text(str(limits.get(name, "max")))
    reader = MemoryReader(tmp_path / "cgroups", tmp_path / "membership", tmp_path / "meminfo")
    assert reader.total() == total
