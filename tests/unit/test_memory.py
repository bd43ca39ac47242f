"""How much memory is left, read from made-up files (row E8: new work is refused before memory runs out)."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from baton.telemetry.memory import MemoryReader, MemoryWatch
from baton.telemetry.metrics import GatewayMetrics

MIB = 1024 * 1024


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def reader(folder: Path, membership: str, available_kib: int | None = 8 * 1024 * 1024) -> MemoryReader:
    (folder / "cgroup").write_text(membership)
    if available_kib is not None:
        (folder / "meminfo").write_text(
            f"MemTotal:  99 kB\nMemAvailable:  {available_kib} kB\nHugePages: 0\n"
        )
    return MemoryReader(folder / "fs", folder / "cgroup", folder / "meminfo")


@pytest.mark.fault("E8")
def test_a_cgroups_free_memory_is_its_limit_less_use_without_page_cache(tmp_path: Path) -> None:
    stat = f"anon 5\ninactive_file {30 * MIB}\nactive_file {20 * MIB}\nshmem 7\nslab_reclaimable {MIB}"
    write(tmp_path / "fs", memory__max=1000 * MIB, memory__current=900 * MIB, memory__stat=stat)
    assert reader(tmp_path, "0::/\n").available() == 151 * MIB


@pytest.mark.fault("E8")
def test_the_tightest_of_the_parent_cgroups_counts(tmp_path: Path) -> None:
    write(tmp_path / "fs/pod/main", memory__max="max", memory__current=MIB)
    write(tmp_path / "fs/pod", memory__max=100 * MIB, memory__current=40 * MIB)
    write(tmp_path / "fs", memory__max="max", memory__current=MIB)
    assert reader(tmp_path, "0::/pod/main\n").available() == 60 * MIB


@pytest.mark.fault("E8")
def test_the_first_version_of_cgroups_is_read_too(tmp_path: Path) -> None:
    write(
        tmp_path / "fs/memory/docker/1",
        memory__limit_in_bytes=500 * MIB,
        memory__usage_in_bytes=450 * MIB,
        memory__stat=f"inactive_file 1\ntotal_inactive_file {10 * MIB}\ntotal_active_file 0",
    )
    write(tmp_path / "fs/memory", memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=MIB)
    membership = "5:cpu,cpuacct:/docker/1\n4:memory:/docker/1\n0::/docker/1\n"
    assert reader(tmp_path, membership).available() == 60 * MIB


@pytest.mark.fault("E8")
def test_a_container_that_sees_only_its_own_top_is_read_there(tmp_path: Path) -> None:
    write(tmp_path / "fs", memory__max=100 * MIB, memory__current=90 * MIB)
    assert reader(tmp_path, "0::/kubepods/pod1/abc\n").available() == 10 * MIB


@pytest.mark.fault("E8")
def test_the_machines_own_memory_counts_where_it_is_less_or_no_limit_is_set(tmp_path: Path) -> None:
    write(tmp_path / "fs", memory__max=1000 * MIB, memory__current=0)
    assert reader(tmp_path, "0::/\n", available_kib=5 * 1024).available() == 5 * MIB
    write(tmp_path / "fs", memory__max="max")
    assert reader(tmp_path, "0::/\n", available_kib=7 * 1024).available() == 7 * MIB


@pytest.mark.fault("E8")
def test_unknown_memory_refuses_nothing(tmp_path: Path) -> None:
    nowhere = MemoryReader(tmp_path / "no", tmp_path / "no", tmp_path / "no")
    assert nowhere.available() is None
    metrics = GatewayMetrics()
    assert not MemoryWatch(nowhere, 1 << 60, metrics.memory).short
    assert math.isnan(metrics.registry.get_sample_value("baton_memory_available_bytes") or 0)


@pytest.mark.fault("E8")
def test_this_machines_memory_is_known() -> None:
    available = MemoryReader().available()
    assert available is not None
    assert available > 0


@pytest.mark.fault("E8")
def test_memory_is_short_below_the_reserve_and_no_longer_once_there_is_room(tmp_path: Path) -> None:
    write(tmp_path / "fs", memory__max=100 * MIB, memory__current=90 * MIB)
    metrics = GatewayMetrics()
    assert isinstance(metrics.registry, CollectorRegistry)
    watch = MemoryWatch(reader(tmp_path, "0::/\n"), 20 * MIB, metrics.memory)
    assert watch.short
    assert metrics.registry.get_sample_value("baton_memory_available_bytes") == 10 * MIB
    write(tmp_path / "fs", memory__current=80 * MIB)
    watch.look()
    assert not watch.short
    assert metrics.registry.get_sample_value("baton_memory_available_bytes") == 20 * MIB


@pytest.mark.parametrize("content", ["", "many", "-", "1 2"])
@pytest.mark.fault("E8")
def test_a_malformed_file_counts_as_missing(tmp_path: Path, content: str) -> None:
    write(tmp_path / "fs", memory__max=content, memory__current=0)
    assert reader(tmp_path, "0::/\nnonsense\n", available_kib=7).available() == 7 * 1024
