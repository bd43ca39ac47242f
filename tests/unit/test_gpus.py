"""Engines that share GPUs: what each may take of their memory, and what the doctor says of a machine with some."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.config.gpu_memory import gpu_shares, gpus_of
from baton.config.groups import EngineSettings
from baton.config.settings import Settings, load_settings
from baton.doctor import machine as doctor_gpus
from baton.doctor.findings import Finding
from baton.doctor.machine import examine_gpus
from baton.engines.hardware import NoGpu, read_gpus
from baton.errors import SettingsError

TWO_CARDS = """\
0, GPU-aaaa, NVIDIA H100 80GB HBM3, 81559, 80995, 580.65.06
1, GPU-bbbb, NVIDIA H100 80GB HBM3, 81559, 1200, 580.65.06
"""


def engine(name: str, *, share: float | None = None, handoff: bool = False, **args: Any) -> EngineSettings:
    return EngineSettings(name=name, model="m", gpu_share=share, handoff=handoff, args=args)


@pytest.fixture
def tool(tmp_path: Path) -> Path:
    """A program that answers as `nvidia-smi` does; what it prints is in the file beside it."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\ncat "{tmp_path}/says"; exit $(cat "{tmp_path}/exit")\n')
    program.chmod(0o755)
    (tmp_path / "says").write_text(TWO_CARDS)
    (tmp_path / "exit").write_text("0")
    return program


def findings(tool: Path, *engines: EngineSettings, **overrides: Any) -> dict[str, Finding]:
    settings: Settings = load_settings(engines=engines, **overrides)
    return {finding.subject: finding for finding in examine_gpus(settings, str(tool))}


def test_an_engine_alone_on_its_gpu_is_left_to_vllm() -> None:
    assert gpu_shares([engine("a"), engine("b", device_ids=[1])]) == {}


def test_engines_on_one_gpu_share_it_equally() -> None:
    assert gpu_shares([engine("a"), engine("b")]) == {"a": 0.46, "b": 0.46}


def test_what_a_named_share_leaves_is_for_the_others() -> None:
    shares = gpu_shares([engine("a", share=0.5), engine("b"), engine("c", gpu_memory_utilization=0.2)])
    assert shares == {"a": 0.5, "b": 0.22, "c": 0.2}


def on_demand(name: str, **more: Any) -> EngineSettings:
    return engine(name, **more).model_copy(update={"start": "on_demand"})


def test_engines_on_demand_may_have_more_than_a_gpu_together_but_not_beside_those_that_stay() -> None:
    assert gpu_shares([on_demand("a"), on_demand("b", share=0.5)]) == {"a": 0.92, "b": 0.5}
    shares = gpu_shares([engine("stays", share=0.3), on_demand("a"), on_demand("b", share=0.6)])
    assert shares == {"stays": 0.3, "a": 0.62, "b": 0.6}
    for staying, coming in (
        (engine("stays"), on_demand("a")),
        (engine("s", share=0.6), on_demand("a", share=0.5)),
    ):
        with pytest.raises(SettingsError, match="engines 'a': engines that always run leave"):
            gpu_shares([staying, coming])


def test_the_doctor_counts_engines_on_demand_one_at_a_time(tool: Path) -> None:
    found = findings(tool, on_demand("a", share=0.9), on_demand("b", share=0.9), engine("c", device_ids=[1]))
    assert [found[f"engine {name}"].bad for name in "abc"] == [False, False, True]


def test_an_engine_over_two_gpus_takes_what_the_fuller_one_has() -> None:
    shares = gpu_shares([engine("a", tensor_parallel_size=2), engine("b", device_ids=[1], share=0.7)])
    assert shares == {"a": 0.22, "b": 0.7}


@pytest.mark.parametrize(
    ("engines", "reason"),
    [
        ([engine("a", share=0.5, gpu_memory_utilization=0.5)], "mean the same"),
        ([engine("a", device_ids=["GPU-aaaa"]), engine("b")], "by UUID and others by number"),
        (
            [EngineSettings(name="a", model="m", kv_cache_memory="1GiB"), engine("b")],
            "set `gpu_share` instead",
        ),
        ([EngineSettings(name="a", model="m", kv_cache_memory="1GiB", gpu_share=0.3)], "instead"),
        ([engine("a", share=0.7), engine("b", share=0.4)], "a, b take 1.1 of the memory of GPU 0: lower"),
        ([engine("a", share=0.92), engine("b")], "leave nothing for b"),
    ],
)
def test_shares_that_cannot_be_are_refused(engines: list[EngineSettings], reason: str) -> None:
    with pytest.raises(SettingsError, match=reason):
        gpu_shares(engines)


def test_the_driver_s_tool_is_read(tool: Path) -> None:
    first, second = read_gpus(str(tool))
    assert (first.index, first.uuid, first.name) == ("0", "GPU-aaaa", "NVIDIA H100 80GB HBM3")
    assert (first.bytes_total, second.bytes_free) == (81559 * 2**20, 1200 * 2**20)


@pytest.mark.parametrize(
    ("says", "code", "reason"),
    [
        (
            "Failed to initialize NVML: Driver/library version mismatch",
            "18",
            "Driver/library version mismatch",
        ),
        ("", "3", "exit status 3"),
        ("", "0", "lists none"),
        ("0, GPU-a, Orin, [N/A], [N/A], 540.4.0", "0", "cannot be read"),
    ],
)
def test_a_tool_that_finds_none_says_why(tool: Path, says: str, code: str, reason: str) -> None:
    (tool.parent / "says").write_text(says)
    (tool.parent / "exit").write_text(code)
    with pytest.raises(NoGpu, match=reason.replace("/", ".")):
        read_gpus(str(tool))


def test_without_the_driver_s_tool_the_doctor_says_so(tmp_path: Path) -> None:
    (finding,) = findings(tmp_path / "none", engine("a")).values()
    assert finding.bad
    assert "is not installed" in finding.text
    assert "driver" in finding.mend


def test_a_machine_that_is_well_has_no_bad_finding(tool: Path) -> None:
    found = findings(tool, engine("a"), engine("b"))
    assert [finding for finding in found.values() if finding.bad] == []
    assert found["gpu 0"].text == "NVIDIA H100 80GB HBM3, 79.1 of 79.6 GiB free"
    assert found["engine a"].text == "GPU 0: 0.46 of it"


def test_what_is_wrong_is_found(tool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512,expandable_segments:True")
    monkeypatch.setattr(doctor_gpus, "installed", lambda *_names: "13.0.96")
    (tool.parent / "says").write_text(TWO_CARDS.replace("580.65.06", "570.10"))
    busy = engine("busy", share=0.5, device_ids=[1])
    found = findings(tool, engine("a", handoff=True), busy, engine("far", device_ids=[7]))
    bad = {name: finding.text + " " + finding.mend for name, finding in found.items() if finding.bad}
    assert set(bad) == {"driver", "engine busy", "engine far", "allocator"}
    assert "570.10 (torch needs 580 or newer)" in bad["driver"]
    assert "not free now" in bad["engine busy"]
    assert "no GPU 7" in bad["engine far"]
    assert "unset it" in bad["allocator"]


def test_what_is_free_is_counted_for_all_engines_of_a_gpu(tool: Path) -> None:
    assert findings(tool, engine("a", device_ids=[1]))["engine a"].bad, "vLLM itself would refuse to start"
    (tool.parent / "says").write_text(TWO_CARDS.replace("80995", "45000"))
    found = findings(tool, engine("a"), engine("b"))
    assert (found["engine a"].bad, found["engine b"].bad) == (False, True)


def test_numbers_count_the_gpus_that_the_process_sees(tool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    found = findings(tool, engine("a"), engine("b", device_ids=[1]), engine("c", device_ids=[2]))
    assert "not free now" in found["engine a"].text
    assert not found["engine b"].bad
    assert "no GPU 2" in found["engine c"].text


def test_engines_with_several_gpus_use_all_of_them() -> None:
    assert gpus_of(engine("a", tensor_parallel_size=2, pipeline_parallel_size=2)) == ("0", "1", "2", "3")


@pytest.mark.parametrize(
    ("runtime", "driver", "bad"),
    [
        ("13.0.96", "580.65.06", False),
        ("13.0.96", "570.10", True),
        ("12.8.90", "570.10", False),
        (None, "1", False),
    ],
)
def test_the_driver_is_as_new_as_torch_s_cuda_wants(
    tool: Path, monkeypatch: pytest.MonkeyPatch, runtime: str | None, driver: str, bad: bool
) -> None:
    monkeypatch.setattr(doctor_gpus, "installed", lambda *_names: runtime)
    (tool.parent / "says").write_text(TWO_CARDS.replace("580.65.06", driver))
    assert findings(tool, engine("a"))["driver"].bad is bad


@pytest.mark.parametrize(("allowed", "told"), [(False, "refused when the engine starts"), (True, "allowed")])
def test_the_doctor_says_which_handoffs_are_proved(tool: Path, allowed: bool, told: str) -> None:
    hands_over, other = engine("a", handoff=True), engine("b")
    found = findings(tool, hands_over, other, handoffs={"unproven_devices": allowed})
    assert not found["handoffs"].bad
    assert found["handoffs"].text.startswith("a: proved on GPUs with one rank, ")
    assert found["handoffs"].text.endswith(told)
    assert "handoffs" not in findings(tool, other)
