"""Where latent steps meet vLLM: a change of an internal fails here, by name."""

from __future__ import annotations

import dataclasses
import inspect
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import ModelRegistry
from vllm import _custom_ops as ops
from vllm.compilation import decorators
from vllm.config import CompilationConfig
from vllm.forward_context import ForwardContext
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from baton.config.groups import EngineSettings
from baton.config.settings import load_settings
from baton.engines.vllm.arguments import engine_args, placeholder_of
from baton.errors import SettingsError
from baton.models.store import ModelStore
from baton_kv.settings import AVP_SETTINGS, ConnectorSettings
from baton_latent import batch, latent_overrides, models, register, registration
from baton_latent.contract import LATENT_ARCHITECTURES, PLACEHOLDER_KEY
from baton_latent.memory import LatentMemory
from baton_latent.models import BatonLatentLlamaForCausalLM, LatentSteps


def test_registering_twice_registers_once() -> None:
    register()
    known = {name: ModelRegistry.models[name] for name in LATENT_ARCHITECTURES.values()}
    register()
    assert all(ModelRegistry.models[name] is model for name, model in known.items())


def test_every_architecture_has_its_class_before_vllm_s_own() -> None:
    for stock, latent in LATENT_ARCHITECTURES.items():
        ours, stands_before, theirs = getattr(models, latent).__mro__[:3]
        assert (ours.__name__, stands_before, theirs.__name__) == (latent, LatentSteps, stock)


def test_every_argument_of_the_scheduler_s_metadata_is_given() -> None:
    """A part of a batch gets metadata as vLLM's own builder makes it for the whole."""
    source = inspect.getsource(batch._metadata)
    for name in inspect.signature(ops.cpu_attn_get_scheduler_metadata).parameters:
        assert f"{name}=" in source, name
    built = inspect.getsource(cpu_attn.CPUAttentionMetadataBuilder.build)
    for name in inspect.signature(ops.cpu_attn_get_scheduler_metadata).parameters:
        assert f"{name}=" in built, name


def test_the_metadata_has_the_fields_that_are_replaced() -> None:
    known = {field.name for field in dataclasses.fields(cpu_attn.CPUAttentionMetadata)}
    assert known == {
        "num_actual_tokens",
        "max_query_len",
        "query_start_loc",
        "max_seq_len",
        "seq_lens",
        "block_table",
        "slot_mapping",
        "scheduler_metadata",
        "causal",
        "dynamic_causal",
        "use_sdpa_prefill",
        "num_decode_tokens",
        "sdpa_attn_masks",
        "sdpa_start_loc",
        "encoder_cache",
    }, "a new field may need a part's own value too"


def test_kv_is_written_where_the_forward_context_says() -> None:
    assert "forward_context.slot_mapping" in inspect.getsource(get_attention_context)
    known = {field.name for field in dataclasses.fields(ForwardContext)}
    assert {"attn_metadata", "slot_mapping", "no_compile_layers", "skip_compiled"} <= known
    assert "get_forward_context().skip_compiled" in inspect.getsource(decorators)
    assert "static_forward_context" in {field.name for field in dataclasses.fields(CompilationConfig)}


def test_a_layer_tells_what_its_metadata_needs() -> None:
    made = inspect.getsource(cpu_attn.CPUAttentionBackendImpl.__init__)
    for name in ("num_heads", "num_kv_heads", "head_size", "sliding_window", "kv_cache_dtype"):
        assert f"self.{name} =" in made, name
    assert "layer.isa = self.isa" in inspect.getsource(cpu_attn.CPUAttentionMetadataBuilder)
    assert "self.dtype =" in inspect.getsource(Attention.__init__)


def test_the_model_is_called_as_vllm_calls_its_own() -> None:
    stock = next(base for base in BatonLatentLlamaForCausalLM.__mro__[2:] if "forward" in vars(base))
    ours = list(inspect.signature(LatentSteps.forward).parameters)
    assert ours == list(inspect.signature(stock.forward).parameters)


def settings(**args: object) -> EngineSettings:
    return EngineSettings(name="t", model="smollm2", handoff=True, latent=True, args=args)


def test_an_engine_that_thinks_gets_its_class_and_its_placeholder() -> None:
    model = ModelStore(load_settings().models_folder).resolve("smollm2")
    args = engine_args(settings(), model)
    assert isinstance(args.hf_overrides, dict)
    assert args.hf_overrides["architectures"] == ["BatonLatentLlamaForCausalLM"]
    assert placeholder_of(args) == 16
    named = engine_args(settings(hf_overrides={PLACEHOLDER_KEY: 5}), model)
    assert placeholder_of(named) == 5
    assert engine_args(settings().model_copy(update={"latent": False}), model).hf_overrides == {}


@pytest.mark.parametrize(
    ("args", "model", "told"),
    [
        ({"tensor_parallel_size": 2}, None, "tensor_parallel_size above 1"),
        ({"pipeline_parallel_size": 2}, None, "pipeline_parallel_size above 1"),
        ({}, "some/hub-model", "in a local folder"),
    ],
)
def test_an_engine_that_cannot_think_is_refused(
    args: dict[str, object], model: str | None, told: str
) -> None:
    folder = model or ModelStore(load_settings().models_folder).resolve("smollm2")
    with pytest.raises(SettingsError, match=told):
        engine_args(settings(**args), folder)


def test_a_class_that_thinks_is_chosen_by_the_engine_s_setting_alone(tmp_path: Path) -> None:
    """By another way clients' own prompts could ask for steps, and nobody would count them."""
    model = ModelStore(load_settings().models_folder).resolve("smollm2")
    by_arguments = settings(hf_overrides=latent_overrides(model)).model_copy(update={"latent": False})
    with pytest.raises(SettingsError, match="set `latent = true`"):
        engine_args(by_arguments, model)
    shutil.copytree(model, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    thinker = config | {"architectures": ["BatonLatentLlamaForCausalLM"]}
    (tmp_path / "model" / "config.json").write_text(json.dumps(thinker))
    plain = settings().model_copy(update={"latent": False})
    with pytest.raises(SettingsError, match="set `latent = true`"):
        engine_args(plain, str(tmp_path / "model"))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline parallelism above 1"),
        ({"speculative_config": object()}, "speculative decoding"),
        ({"lora_config": object()}, "LoRA"),
        ({"runner_type": "pooling"}, "the runner `generate`"),
        ({"enable_prompt_embeds": True}, "enable_prompt_embeds"),
        (
            {"kv_transfer_config": SimpleNamespace(kv_connector="AnotherConnector")},
            "no KV connector but BatonConnector",
        ),
    ],
)
def test_the_model_refuses_what_it_cannot_do_right(changes: dict[str, Any], told: str) -> None:
    usual = {"pipeline_parallel_size": 1, "runner_type": "generate"}
    usual |= {"speculative_config": None, "lora_config": None, "enable_prompt_embeds": False}
    usual |= {"kv_transfer_config": SimpleNamespace(kv_connector="BatonConnector")}

    def config(**values: Any) -> Any:
        part = SimpleNamespace(**values)
        return SimpleNamespace(parallel_config=part, model_config=part, **values)

    models._require_supported(config(**usual))
    with pytest.raises(ValueError, match=told):
        models._require_supported(config(**(usual | changes)))


@pytest.mark.parametrize("token", [-1, 100, "16", True, 1.5])
def test_a_placeholder_is_a_token_of_the_model(token: object) -> None:
    model = SimpleNamespace(hf_config=SimpleNamespace(**{PLACEHOLDER_KEY: token}), get_vocab_size=lambda: 100)
    with pytest.raises(ValueError, match="must be a token id of the model"):
        models._placeholder(model)


def test_avp_s_variables_are_said_to_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(registration.logger, "warning", lambda text, *words: told.append(text % words))
    registration.warn_of_avp({"AVP_LATENT_STEPS": "20", "AVP_TARGET_MODEL": "", "PATH": "/bin"})
    assert len(told) == 1
    assert (
        "AVP_LATENT_STEPS is a variable of AVP and changes nothing here: each request asks for its steps"
        in told[0]
    )
    readme = (Path(registration.__file__).parent / "README.md").read_text()
    assert all(f"`{name}" in readme for name in registration.VARIABLES)


@pytest.mark.parametrize("name", AVP_SETTINGS)
def test_avp_s_settings_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is a setting of AVP"):
        ConnectorSettings.model_validate({"store": "file:/tmp/x", name: 1})


def test_mixtures_are_given_before_the_forward_pass_of_their_step() -> None:
    source = inspect.getsource(GPUModelRunner.execute_model)
    assert source.index("handle_preemptions(") < source.index("self._model_forward(")


def test_a_mixture_is_taken_once_by_the_first_token_of_its_context() -> None:
    memory = LatentMemory(8, torch.float32, torch.device("cpu"))
    memory.mix({32: ([5, 6], [0.5, 0.5]), 96: ([7], [1.0])})
    slots = torch.tensor([31, 32, 33, 64])
    first = torch.tensor([False, True, False, True])
    assert memory.take_mixtures(slots, ~first) == {}
    assert memory.take_mixtures(slots, first) == {1: ([5, 6], [0.5, 0.5])}
    memory.mix({})
    assert memory.take_mixtures(torch.tensor([96]), torch.tensor([True])) == {}, "that of a step before"
    assert memory.take_mixtures(slots, first) == {}
