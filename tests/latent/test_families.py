"""Every family thinks as HuggingFace's model does, and one that does not think is vLLM's own, bit by bit."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from latent.reference import Reference
from latent.thinkers import SAID, Thinker
from support.offline_engines import OfflineEngine, prompt

from baton.config.settings import load_settings
from baton.models.store import ModelStore
from baton_latent import latent_overrides
from baton_latent.contract import PLACEHOLDER_KEY

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300), pytest.mark.chaos]
FAMILIES = ("qwen2", "mistral", "gemma", "llama")
PROBE = {"worker_extension_cls": "latent.latent_probe.Probe"}


def thinking(folder: Path, model: str, **args: Any) -> OfflineEngine:
    usual: dict[str, Any] = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "max_model_len": 512}
    usual |= {"kv_transfer_config": None, "num_gpu_blocks_override": 40, "enable_prefix_caching": True}
    return OfflineEngine(folder / "store", model=model, **(usual | args))


@pytest.mark.parametrize("family", [*FAMILIES, "smollm2"])
def test_without_steps_it_is_vllm_s_own(tiny_models: Path, tmp_path: Path, family: str) -> None:
    """The KV is the same to the last bit, and so is what is said.

    A log probability may be larger, by what the placeholder's own would be: that is never said.
    """
    model = str(tiny_models / family)
    if family == "smollm2":
        model = ModelStore(load_settings().models_folder).resolve("smollm2")
    asked = [prompt(length, seed=5) for length in (1, 16, 53)]
    written = []
    for overrides in ({}, latent_overrides(model)):
        with thinking(tmp_path, model, hf_overrides=overrides, **PROBE) as engine:
            engine.call("watch")
            for (
                one
            ) in asked:  # alone: in what batches several go hangs on when they arrive, and so does rounding
                (answer,) = engine.ask((one, SAID, None))
                engine.call("dump", answer["id"], str(tmp_path / "dump.pt"))
                written.append((answer, torch.load(tmp_path / "dump.pt")))
    for (stock, of_stock), (same, of_same), given in zip(written[:3], written[3:], asked, strict=True):
        assert same["tokens"] == stock["tokens"]
        for ours, theirs in zip(same["logprobs"], stock["logprobs"], strict=True):
            assert -1e-6 < ours - theirs < 1e-3
        count = len(given) + SAID - 1
        for kind in ("keys", "values"):
            assert torch.equal(of_same[kind][:, :count], of_stock[kind][:, :count])


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_a_compiled_model_thinks_the_same(tiny_models: Path, tmp_path: Path, family: str) -> None:
    model = str(tiny_models / family)
    overrides = latent_overrides(model)
    placeholder = overrides[PLACEHOLDER_KEY]
    with thinking(tmp_path, model, hf_overrides=overrides, enforce_eager=False, **PROBE) as engine:
        engine.call("watch", "seeds")
        thinker = Thinker(engine, Reference(model, placeholder), placeholder, tmp_path)
        for steps in (0, 1, 9):
            asked = [*prompt(30 + steps, seed=steps), *thinker.steps(steps), *prompt(4, seed=2)]
            (answer,) = engine.ask((asked, SAID, None))
            thinker.require(answer, asked, written=False)
        engine.call("require_compiled")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two processes need a core each")
@pytest.mark.parametrize("family", ["qwen2", "llama", "gemma"])
def test_a_model_in_two_processes_thinks_the_same(tiny_models: Path, tmp_path: Path, family: str) -> None:
    """Tensor parallelism, which shards the vocabulary: of a tied model, of one with a head of its own, of a scaled one."""
    model = str(tiny_models / family)
    overrides = latent_overrides(model)
    placeholder = overrides[PLACEHOLDER_KEY]
    with thinking(tmp_path, model, hf_overrides=overrides, tensor_parallel_size=2, **PROBE) as engine:
        engine.call("watch", "seeds")
        thinker = Thinker(engine, Reference(model, placeholder), placeholder, tmp_path)
        asked = [
            [*prompt(30 + steps, seed=steps), *thinker.steps(steps), *prompt(4, seed=2)]
            for steps in (0, 1, 9)
        ]
        for answer, context in zip(engine.ask(*((one, SAID, None) for one in asked)), asked, strict=True):
            thinker.require(answer, context, written=False)


def test_a_model_finds_its_placeholder_by_itself(tiny_models: Path, tmp_path: Path) -> None:
    """Plain vLLM needs the class alone: `--hf-overrides '{"architectures": [...]}'`."""
    model = str(tiny_models / "llama")
    overrides = latent_overrides(model)
    assert json.loads((tiny_models / "llama" / "config.json").read_text())["architectures"] == [
        "LlamaForCausalLM"
    ]
    placeholder = overrides.pop(PLACEHOLDER_KEY)
    with thinking(tmp_path, model, hf_overrides=overrides, **PROBE) as engine:
        engine.call("watch")
        thinker = Thinker(engine, Reference(model, placeholder), placeholder, tmp_path)
        asked = [*prompt(20, seed=8), *thinker.steps(5)]
        (answer,) = engine.ask((asked, SAID, None))
        thinker.require(answer, asked, written=False)
