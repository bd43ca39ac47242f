"""`LLM.encode` with only the distribution installed, each case in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file
from support.engine_threads import VARIABLE, engine_cores
from support.rasters import RGB, geotiff, opened
from support.torch_pipeline import as_torch_says

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
SCRIPT = Path(__file__).parent / "offline_geo.py"
TESTS = Path(__file__).parents[2]


def offline(folder: Path, *args: str, plugins: str | None = None) -> subprocess.CompletedProcess[str]:
    (folder / "spool").mkdir()
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TORCHDYNAMO_DISABLE": "1"}
    quiet |= {VARIABLE: engine_cores(), "TMPDIR": str(folder / "spool"), "PYTHONPATH": str(TESTS)}
    quiet |= {"VLLM_RPC_BASE_PATH": tempfile.gettempdir()}  # a socket's path has 107 characters at most
    quiet |= {"VLLM_LOGGING_LEVEL": "WARNING"} | ({} if plugins is None else {"VLLM_PLUGINS": plugins})
    return subprocess.run(
        [sys.executable, str(SCRIPT), *args],
        cwd=folder,
        env=os.environ | quiet,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


def scenes(folder: Path) -> dict[str, bytes]:
    """Of several sizes, one with nodata, by the name of the file they are written to."""
    made = {}
    for number, (height, width) in enumerate([(100, 130), (40, 64), (200, 90)]):
        pixels = np.random.default_rng(number).integers(1, 256, (3, height, width)).astype(np.uint8)
        pixels[:, 10:20, 30:50] = 0
        made[f"scene{number or ''}.tif"] = geotiff(pixels, RGB, nodata=0)
    for name, content in made.items():
        (folder / name).write_bytes(content)
    return made


def root_cause(stderr: str) -> str:
    """What the engine's process said, and the end of it all."""
    said = [line for line in stderr.splitlines() if " ERROR " in line or "Error: " in line]
    return "\n".join([*said[-30:], stderr[-1500:]])


def report_of(folder: Path, done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, root_cause(done.stderr)
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


def assert_right(folder: Path, model: Path, report: dict[str, Any], classes: list[str]) -> None:
    """Every scene has its own mask, and nothing of any is left."""
    for name in sorted(folder.glob("scene*.tif")):
        (mask,), _ = opened(name.with_suffix(".mask").read_bytes())
        assert as_torch_says(mask, model, name.read_bytes())
    assert report["answers"] == [{"kind": "GeoAnswer", "format": "png", "classes": classes}] * 3
    assert all("truncated or damaged" in refusal for refusal in report["refusals"])
    assert len(report["servers"]) == 1
    assert (report["children"], report["files"]) == (0, [])
    assert [path for kind in ("scene-*", "baton-geo-*") for path in (folder / "spool").glob(kind)] == []
    deadline = time.monotonic() + 20
    while any(psutil.pid_exists(pid) for pid in report["servers"]):
        assert time.monotonic() < deadline, "a process is left behind"
        time.sleep(0.05)


@pytest.mark.chaos
def test_the_code_shown_runs_and_more_scenes_after_it(rgb: Path, tmp_path: Path) -> None:
    """Entry points called again and again, VLLM_PLUGINS naming ours: each scene's mask is plain torch's."""
    made = scenes(tmp_path)
    done = offline(tmp_path, str(rgb), plugins="baton_geo")
    report = report_of(tmp_path, done)
    assert_right(tmp_path, rgb, report, ["kind 0", "kind 1", "kind 2"])
    (mask,), _ = opened((tmp_path / "mask.tif").read_bytes())
    assert as_torch_says(mask, rgb, made["scene.tif"])
    assert "ClassArea(value=0, name='kind 0'" in done.stdout


@pytest.mark.chaos
def test_a_published_config_and_a_pt_checkpoint_load(rgb: Path, tmp_path: Path) -> None:
    """TerraTorch's layout, no model_type, no card, weights as Lightning saves them."""
    model = tmp_path / "published"
    model.mkdir()
    config = json.loads((rgb / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(as_published(config)))
    weights = {f"model.{name}": tensor for name, tensor in load_file(rgb / "model.safetensors").items()}
    torch.save({"state_dict": weights}, model / "Prithvi_fine_tuned.pt")
    scenes(tmp_path)
    args = {"config_format": "baton_prithvi", "io_processor_plugin": "baton_geo", "dtype": "float32"}
    report = report_of(tmp_path, offline(tmp_path, str(model), json.dumps(args)))
    assert_right(tmp_path, rgb, report, ["class 0", "class 1", "class 2"])


def as_published(config: dict[str, Any]) -> dict[str, Any]:
    """The same model as TerraTorch describes one; its means and deviations, and no card of ours."""
    sizes, bands = config["pretrained_cfg"], config["baton_geo"]["bands"]
    decoder = sizes["segmentation"]
    kept = ("img_size", "num_frames", "patch_size", "embed_dim", "depth", "num_heads", "mlp_ratio")
    model_args = {f"backbone_{name}": sizes[name] for name in kept} | {
        "backbone": "prithvi_eo_tiny",
        "backbone_bands": [band["name"] for band in bands],
        "decoder": decoder["decoder"],
        "decoder_channels": decoder["channels"],
        "head_channel_list": decoder["head_channels"],
        "num_classes": decoder["num_classes"],
    }
    scaling = {f"{name}s": [band[name] for band in bands] for name in ("mean", "std")}
    published = {"model_args": model_args, "data": {"init_args": scaling}}
    return {"architectures": ["PrithviGeoSpatialMAE"], "num_classes": 0, "pretrained_cfg": published}


@pytest.mark.chaos
def test_vllm_plugins_filters_ours(rgb: Path, tmp_path: Path) -> None:
    """Where it names another plugin, vLLM does not know the model and says so."""
    done = offline(tmp_path, str(rgb), json.dumps({"dtype": "float32"}), plugins="elsewhere")
    assert done.returncode != 0
    assert "baton_prithvi" in done.stderr
    assert "does not recognize this architecture" in done.stderr
