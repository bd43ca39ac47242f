"""`baton-haproxy`: Ray Serve's own configuration of HAProxy, edited, as HAProxy takes it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.ray_cluster import shipped_environment, with_ray

from baton import haproxy
from baton.config.settings import load_settings

COMMAND = Path(sys.executable).parent / "baton-haproxy"
WRITE = """
import sys
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
folder = sys.argv[1]
cfg = HAProxyConfig(socket_path=f"{folder}/admin.sock", server_state_base=folder, server_state_file=f"{folder}/s")
api = HAProxyApi(cfg=cfg, config_file_path=f"{folder}/haproxy.cfg")
api.set_backend_configs({"b": BackendConfig(
    name="b", path_prefix="/", app_name="a", servers=[ServerConfig(name="s", host="127.0.0.1", port=30000)]
)})
api._generate_config_file_internal()
"""


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """The file as the installed Ray Serve writes it, with what is shipped for it."""
    environment = os.environ | shipped_environment()
    command = [sys.executable, "-c", WRITE, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return tmp_path / "haproxy.cfg"


@with_ray
def test_what_ray_serve_leaves_open_is_closed(written: Path) -> None:
    before = written.read_text()
    assert "bind :9101" in before
    assert "bind *:8404" in before
    done = subprocess.run(
        [COMMAND, "-c", "-V", "-f", str(written)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Configuration file is valid" in done.stdout
    after = written.read_text()
    binds = [line.split()[1] for line in after.splitlines() if line.split()[:1] == ["bind"]]
    assert sorted(binds) == ["*:8000", "127.0.0.1:8404", "127.0.0.1:9101"]
    assert "mode 600 level admin" in after
    assert "mode 666" not in after
    assert "errorfile" not in after
    assert "hash-type consistent" in after
    assert "hard-stop-after 3600s" in after, "a stream that runs while replicas come or go"
    assert f"timeout http-request {load_settings().edge.header_s:g}s" in after


@with_ray
def test_a_file_is_edited_once(written: Path) -> None:
    once = haproxy.edited(written.read_text())
    assert haproxy.edited(once) == once


@with_ray
@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("bind :9101", "bind :::9101", "metrics port"),
        ("bind *:8404", "bind 0.0.0.0:8404", "statistics port"),
        ("mode 666", "mode 777", "admin socket"),
        ("timeout client ", "timeout  client ", "time for a head"),
        ("bind *:8000", "bind *:8000 ssl", "clients' port"),
        ("errorfile 503", "errorfiles 503", "error 503"),
        ("listen stats\n", "frontend new\n  bind *:8001\nlisten stats\n", "new listens on *:8001"),
    ],
)
def test_a_file_with_anything_unknown_is_refused(written: Path, old: str, new: str, what: str) -> None:
    """So a later Ray Serve opens nothing unnoticed."""
    config = written.read_text()
    assert config.count(old) == 1
    written.write_text(config.replace(old, new))
    done = subprocess.run([COMMAND, "-c", "-f", str(written)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert what in done.stderr
