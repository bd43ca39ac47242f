"""Installed plugins are found as vLLM finds them, with the reason why one is left out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from baton.engines.installed_plugins import GROUPS, InstalledPlugin, installed_plugins


def found(group: str, name: str) -> InstalledPlugin:
    return next(plugin for plugin in installed_plugins() if (plugin.group, plugin.name) == (group, name))


def installed(folder: Path, group: str, value: str) -> None:
    """A distribution of one entry point, as pip would leave it."""
    info = folder / "stranger-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[{group}]\nstrange = {value}\n")


def test_ours_are_found_with_where_they_come_from() -> None:
    """Name, value, distribution and version of both entry points."""
    for group in ("vllm.general_plugins", "vllm.io_processor_plugins"):
        plugin = found(group, "baton_geo")
        assert plugin.value.startswith("baton_geo:")
        assert (plugin.distribution, plugin.allowed, plugin.reason) == ("vllm-baton", True, "")


def test_what_vllm_plugins_leaves_out_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list is vLLM's: names with commas between."""
    monkeypatch.setenv("VLLM_PLUGINS", "lora_filesystem_resolver,other")
    assert found("vllm.general_plugins", "baton_geo").reason == "VLLM_PLUGINS does not name it"
    assert found("vllm.general_plugins", "lora_filesystem_resolver").allowed


@pytest.mark.parametrize("group", GROUPS)
def test_every_group_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str) -> None:
    """A stranger's plugin of each group is listed; one whose package is not there says so."""
    installed(tmp_path, group, "no_such_package_here:register")
    monkeypatch.syspath_prepend(str(tmp_path))
    plugin = found(group, "strange")
    assert (plugin.distribution, plugin.version, plugin.allowed) == ("stranger", "1.2", False)
    expected = "endpoint plugins" if group == "vllm.endpoint_plugins" else "no_such_package_here"
    assert expected in plugin.reason


def test_the_command_lists_them() -> None:
    """As a table for people, and as JSON for programs, without importing vLLM."""
    table = subprocess.run(
        [sys.executable, "-m", "baton.cli", "plugins"], capture_output=True, text=True, check=True
    ).stdout
    assert "baton_geo" in table
    rows = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "baton.cli", "plugins", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert {"name", "group", "value", "distribution", "version", "loaded", "reason"} == set(
        json.loads(rows.stdout)[0]
    )
    assert "| vllm\n" not in rows.stderr
