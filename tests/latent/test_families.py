"""Every family thinks as HuggingFace's model does, and one that does not think is vLLM's own, bit by bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from latent.reference import Reference
from latent.thinkers import SAID, Thinker
from offline_engines import OfflineEngine, prompt

from baton.models.store import ModelStore
from baton.settings import load_settings
from baton_latent import latent_overrides
from baton_latent.contract import PLACEHOLDER_KEY

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300), pytest.mark.chaos]
CALM = "0.12"
"""How far random weights spread: with more, rounding decides what is thought (see test_engine.py)."""
FAMILIES = ("qwen2", "mistral", "gemma", "llama")
TINY = Path(__file__).parents[1] / "connector" / "tiny_models.py"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    source = ModelStore(load_settings().models_folder).resolve("smollm2")
    subprocess.run([sys.executable, str(TINY), source, str(folder), CALM], check=True, capture_output=True)
    return folder


def thinking(folder: Path, model: str, **args: Any) -> OfflineEngine:
    usual: dict[str, Any] = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "max_model_len": 512}
    usual |= {"kv_transfer_config": None, "num_gpu_blocks_override": 40, "enable_prefix_caching": True}
    return OfflineEngine(folder / "store", model=model, **(usual | args))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_thinks(models: Path, tmp_path: Path, family: str) -> None:
    model = str(models / family)
    overrides = latent_overrides(model)
    probe = {"worker_extension_cls": "latent.latent_probe.Probe"}
    plain, asked = prompt(53, seed=5), []
    with thinking(tmp_path, model, **probe) as engine:
        engine.call("watch")
        (stock,) = engine.ask((plain, SAID, None))
        engine.call("dump", stock["id"], str(tmp_path / "stock.pt"))
    with thinking(tmp_path, model, hf_overrides=overrides, **probe) as engine:
        engine.call("watch")
        thinker = Thinker(
            engine, Reference(model, overrides[PLACEHOLDER_KEY]), overrides[PLACEHOLDER_KEY], tmp_path
        )
        (same,) = engine.ask((plain, SAID, None))
        require_stock(thinker, same, stock, len(plain) + SAID - 1)
        for length, steps, tail in ((37, 8, 5), (70, 0, 0), (5, 20, 0), (50, 3, 30)):
            asked.append([*prompt(length, seed=0), *thinker.steps(steps), *prompt(tail, seed=1)])
        for answer, context in zip(engine.ask(*((one, SAID, None) for one in asked)), asked, strict=True):
            thinker.require(answer, context)
        (again,) = engine.ask((asked[-1], SAID, None))
        assert again["cached"] == 64
        thinker.require(again, asked[-1])


def require_stock(thinker: Thinker, same: Any, stock: Any, count: int) -> None:
    """Without steps the KV is the same to the last bit, and so is what is said."""
    assert same["tokens"] == stock["tokens"]
    written = torch.load(thinker.folder / "stock.pt")
    found = thinker.dump(same)
    for kind in ("keys", "values"):
        assert torch.equal(found[kind][:, :count], written[kind][:, :count])


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_a_compiled_model_thinks_the_same(models: Path, tmp_path: Path, family: str) -> None:
    model = str(models / family)
    overrides = latent_overrides(model)
    placeholder = overrides[PLACEHOLDER_KEY]
    with thinking(tmp_path, model, hf_overrides=overrides, enforce_eager=False) as engine:
        thinker = Thinker(engine, Reference(model, placeholder), placeholder, tmp_path)
        for steps in (0, 1, 9):
            asked = [*prompt(30 + steps, seed=steps), *thinker.steps(steps), *prompt(4, seed=2)]
            (answer,) = engine.ask((asked, SAID, None))
            thinker.require(answer, asked, written=False)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two processes need a core each")
@pytest.mark.parametrize("family", ["qwen2", "llama", "gemma"])
def test_a_model_in_two_processes_thinks_the_same(models: Path, tmp_path: Path, family: str) -> None:
    """Tensor parallelism, which shards the vocabulary: of a tied model, of one with a head of its own, of a scaled one."""
    model = str(models / family)
    overrides = latent_overrides(model)
    placeholder = overrides[PLACEHOLDER_KEY]
    with thinking(tmp_path, model, hf_overrides=overrides, tensor_parallel_size=2) as engine:
        thinker = Thinker(engine, Reference(model, placeholder), placeholder, tmp_path)
        asked = [
            [*prompt(30 + steps, seed=steps), *thinker.steps(steps), *prompt(4, seed=2)]
            for steps in (0, 1, 9)
        ]
        for answer, context in zip(engine.ask(*((one, SAID, None) for one in asked)), asked, strict=True):
            thinker.require(answer, context, written=False)


def test_a_model_finds_its_placeholder_by_itself(models: Path, tmp_path: Path) -> None:
    """Plain vLLM needs the class alone: `--hf-overrides '{"architectures": [...]}'`."""
    model = str(models / "llama")
    overrides = latent_overrides(model)
    assert json.loads((models / "llama" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    placeholder = overrides.pop(PLACEHOLDER_KEY)
    with thinking(tmp_path, model, hf_overrides=overrides) as engine:
        thinker = Thinker(engine, Reference(model, placeholder), placeholder, tmp_path)
        asked = [*prompt(20, seed=8), *thinker.steps(5)]
        (answer,) = engine.ask((asked, SAID, None))
        thinker.require(answer, asked, written=False)
