"""What a fingerprint is of: every fact that decides what the bytes of a block mean, and no other."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig, LoRAConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.lora.ops.torch_ops import bgmv_expand_slice, bgmv_shrink
from vllm.lora.request import LoRARequest
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
from vllm.v1.request import Request, RequestStatus

from baton.config.groups import EngineSettings
from baton.engines.vllm.arguments import engine_args
from baton_kv import connector, engine_facts
from baton_kv.connector import WorkerLayout
from baton_kv.fingerprint import fingerprint, weights_digest
from baton_kv.format import LayerShape


def test_other_weights_under_the_same_name_have_another_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"\0" * 1000)
    before = weights_digest(str(tmp_path))
    weights.write_bytes(b"\0" * 999 + b"\1")
    assert weights_digest(str(tmp_path)) != before
    weights.rename(tmp_path / "model.gguf")
    single = weights_digest(str(tmp_path / "model.gguf"))
    (tmp_path / "model.gguf").write_bytes(b"\2")
    assert weights_digest(str(tmp_path / "model.gguf")) != single


@pytest.mark.fault("B16")
def test_a_folder_without_weights_names_no_model(tmp_path: Path) -> None:
    """vLLM leaves one for a model in object storage: two fine-tunes of one configuration would be equal."""
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="no weights in"):
        weights_digest(str(tmp_path))


def test_a_hub_id_stands_for_the_commit_in_the_cache_and_without_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="not in the local"):
        weights_digest("org/model")
    for commit in ("a" * 40, "b" * 40):
        snapshot = tmp_path / "models--org--model" / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text("{}")
        refs = tmp_path / "models--org--model" / "refs"
        refs.mkdir(exist_ok=True)
        (refs / "main").write_text(commit)
        assert weights_digest("org/model") == f"hub:org/model@{commit}"


FULL = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=32, dtype=torch.float32)
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "dtype": "bfloat16",
}


@dataclass
class Configured:
    """vLLM's own configuration of a model folder, made without an engine.

    Attributes:
        folder: of the model.
        vllm: the configuration.
        cache: how its KV is laid out.
    """

    folder: Path
    vllm: VllmConfig
    cache: Any

    def facts(self) -> dict[str, Any]:
        return engine_facts.facts_of(self.vllm, self.cache)


@pytest.fixture(scope="module")
def configured(tmp_path_factory: pytest.TempPathFactory) -> Configured:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(TINY))
    (folder / "model.safetensors").write_bytes(b"\0" * 1000)
    engine = EngineSettings(name="a", model=str(folder), args={"skip_tokenizer_init": True})
    group = SimpleNamespace(layer_names=["layer.0", "layer.1"], kv_cache_spec=FULL)
    vllm_config = engine_args(engine, str(folder)).create_engine_config()
    return Configured(folder, vllm_config, SimpleNamespace(kv_cache_groups=[group]))


SEES = SimpleNamespace(mm_processor_kwargs={"size": 7}, media_io_kwargs={})
CHANGES = {
    "vllm": ("module.vllm.__version__", "0.99"),
    "draft": ("module._draft_digest", lambda *_: "another"),
    "revision": ("vllm.model_config.revision", "another"),
    "quantization": ("vllm.model_config.quantization", "fp8"),
    "dtype": ("vllm.model_config.dtype", torch.float16),
    "kv_dtype": ("vllm.cache_config.cache_dtype", "fp8"),
    "specs": ("group.kv_cache_spec", dataclasses.replace(FULL, block_size=64)),
    "platform": ("module.current_platform.device_name", "another"),
    "packing": ("module._packing", lambda *_: "another"),
    "hf_overrides": ("vllm.model_config.hf_overrides", {"rope_theta": 7}),
    "load_format": ("vllm.load_config.load_format", "dummy"),
    "model_weights": ("vllm.model_config.model_weights", "s3://models/tuned"),
    "loader": ("vllm.load_config.model_loader_extra_config", {"tensorizer_uri": "s3://models/tuned.tensors"}),
    "long_rope": ("module._long_rope", lambda _: 7),
    "images": ("vllm.model_config.multimodal_config", SEES),
}
"""Each fact but the weights, and what to change of a real configuration."""


def test_no_fact_is_left_out_of_these_tests(configured: Configured) -> None:
    assert set(configured.facts()) == {"weights", *CHANGES}


@pytest.mark.parametrize("fact", CHANGES)
def test_every_fact_of_a_real_configuration_counts(
    configured: Configured, monkeypatch: pytest.MonkeyPatch, fact: str
) -> None:
    """A change must show in its fact, and in the fingerprint."""
    before = configured.facts()
    path, value = CHANGES[fact]
    first, *names, last = path.split(".")
    owners = {"vllm": configured.vllm, "group": configured.cache.kv_cache_groups[0], "module": engine_facts}
    owner = functools.reduce(getattr, names, owners[first])
    monkeypatch.setattr(owner, last, value)  # of a name that is there already
    after = configured.facts()
    assert after[fact] != before[fact]
    assert fingerprint(after) != fingerprint(before)
    assert fingerprint(before | {fact: after[fact]}) != fingerprint(before)


def test_a_block_s_packing_and_the_longest_context_of_two_sets_of_rotary_factors_are_facts(
    configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = configured.vllm.model_config
    assert configured.facts()["long_rope"] is None
    assert configured.facts()["packing"] == cpu_attn._get_attn_isa(model.dtype, 32, 32, "auto")
    monkeypatch.setattr(model.hf_config, "rope_scaling", {"long_factor": [1.0]}, raising=False)
    assert configured.facts()["long_rope"] == model.max_model_len == 512
    monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda *_: "another")
    assert configured.facts()["packing"] == "another"


@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json", "processor_config.json"])
def test_a_model_s_configuration_files_count_as_its_weights_do(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 1000)
    digests = [weights_digest(str(tmp_path))]
    for text in ('{"size": 224}', '{"size": 336}'):
        (tmp_path / name).write_text(text)
        digests.append(weights_digest(str(tmp_path)))
    assert len(set(digests)) == 3


@pytest.mark.parametrize(
    "spec",
    [
        dataclasses.replace(FULL, head_size=64),
        dataclasses.replace(FULL, head_size_v=64),
        dataclasses.replace(FULL, dtype=torch.bfloat16),
        dataclasses.replace(FULL, sliding_window=64),
        MLAAttentionSpec(block_size=32, num_kv_heads=1, head_size=32, dtype=torch.float32),
    ],
)
def test_what_a_slab_means_is_a_fact(configured: Configured, spec: Any) -> None:
    facts = configured.facts()
    assert facts | {"specs": [engine_facts._spec_facts(spec)]} != facts


def test_a_draft_model_s_weights_are_a_fact_and_drafts_without_weights_are_none(
    configured: Configured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With n-grams vLLM gives the model itself as the draft model."""

    def fact(draft: str) -> str | None:
        speculative = SimpleNamespace(draft_model_config=SimpleNamespace(model=draft, revision=None))
        monkeypatch.setattr(configured.vllm, "speculative_config", speculative)
        found: str | None = configured.facts()["draft"]
        return found

    assert configured.facts()["draft"] is None
    assert fact(configured.vllm.model_config.model) is None
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 1000)
    before = fact(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"\1" * 1000)
    assert before is not None
    assert fact(str(tmp_path)) not in (None, before)


LORA_CHANGES: dict[str, Any] = {
    "fully_sharded_loras": True,
    "lora_dtype": torch.float16,
    "target_modules": ["q_proj"],
    "default_mm_loras": {"image": "/adapters/image"},
    "enable_tower_connector_lora": True,
    "specialize_active_lora": True,
    "enable_mixed_moe_lora_format": True,
    "enable_moe_shared_loras": True,
    "max_lora_cls_labels": 7,
}
LORA_ROOM: dict[str, Any] = {"max_loras": 3, "max_cpu_loras": 9, "max_lora_rank": 64}


def lora_facts(configured: Configured, monkeypatch: pytest.MonkeyPatch, **changed: Any) -> dict[str, Any]:
    monkeypatch.setattr(configured.vllm, "lora_config", LoRAConfig(**changed))
    return configured.facts()


def test_every_field_of_vllm_s_lora_settings_is_decided() -> None:
    """A field that is new must be put into one of the two, and into `NOT_OF_ADAPTERS` with reason alone."""
    assert {each.name for each in dataclasses.fields(LoRAConfig)} == {*LORA_CHANGES, *LORA_ROOM}
    assert set(LORA_ROOM) == engine_facts.NOT_OF_ADAPTERS


@pytest.mark.fault("B19")
@pytest.mark.parametrize("name", LORA_CHANGES)
def test_lora_settings_that_change_what_an_adapter_computes_make_another_fingerprint(
    configured: Configured, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As other target modules do: the same adapter then changes other layers."""
    without, usual = configured.facts(), lora_facts(configured, monkeypatch)
    changed = lora_facts(configured, monkeypatch, **{name: LORA_CHANGES[name]})
    assert "lora" not in without, "an engine without LoRA has the fingerprint that it had"
    assert len({fingerprint(each) for each in (without, usual, changed)}) == 3


@pytest.mark.fault("B19")
def test_the_order_of_target_modules_and_room_for_adapters_are_no_facts(
    configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = (["q_proj", "v_proj"], ["v_proj", "q_proj"])
    one, other = (lora_facts(configured, monkeypatch, target_modules=each) for each in orders)
    assert one == other != lora_facts(configured, monkeypatch, target_modules=["q_proj"])
    assert lora_facts(configured, monkeypatch, **LORA_ROOM) == lora_facts(configured, monkeypatch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_up_to_the_largest_rank_change_no_bit(dtype: torch.dtype) -> None:
    """Why `max_lora_rank` is no fact, by vLLM's own CPU kernels."""
    generator = torch.Generator().manual_seed(7)
    inputs, down, up = (torch.randn(*shape, generator=generator) for shape in ((7, 576), (8, 576), (576, 8)))
    rows, found = torch.zeros(7, dtype=torch.long), []
    for rank in (8, 16, 256):
        narrow, wide = torch.zeros(1, 1, rank, 576, dtype=dtype), torch.zeros(1, 1, 576, rank, dtype=dtype)
        narrow[0, 0, :8], wide[0, 0, :, :8] = down, up
        inner, outer = torch.zeros(7, rank), torch.zeros(7, 576, dtype=dtype)
        bgmv_shrink(inputs.to(dtype), narrow, inner, rows)
        bgmv_expand_slice(inner, wide, outer, rows, 0, 576)
        found.append(outer)
    assert found[0].any()
    assert all(torch.equal(found[0], each) for each in found)


def test_how_many_heads_one_rank_holds_is_no_fact(configured: Configured) -> None:
    facts = configured.facts()
    one_rank_s = engine_facts._spec_facts(dataclasses.replace(FULL, num_kv_heads=2))
    assert facts | {"specs": [one_rank_s]} == facts


LAYOUT = WorkerLayout(("layer.0", "layer.1"), (LayerShape(4, 1024), LayerShape(4, 1024)), (1, 1))


def made_connector(
    configured: Configured,
    store: Path,
    ranks: int = 1,
    role: KVConnectorRole = KVConnectorRole.SCHEDULER,
    **extra: Any,
) -> connector.BatonConnector:
    """The connector of a real configuration with so many ranks."""
    transfer = KVTransferConfig(
        kv_connector="BatonConnector",
        kv_connector_module_path="baton_kv.connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"store": f"file:{store}"} | extra,
    )
    parallel = dataclasses.replace(configured.vllm.parallel_config)
    parallel.tensor_parallel_size = ranks
    whole, cache = copy.copy(configured.vllm), copy.copy(configured.cache)
    cache.num_blocks = 64
    whole.kv_transfer_config, whole.parallel_config = transfer, parallel
    return connector.BatonConnector(whole, role, cache)


def test_the_fingerprint_is_of_what_all_workers_hold(configured: Configured, tmp_path: Path) -> None:
    """The same for any number of ranks, another for other layers, another order or other heads."""
    found = set()
    for ranks in (1, 2):
        made = made_connector(configured, tmp_path / "store", ranks)
        made.set_xfer_handshake_metadata_pp_aware({(0, rank): LAYOUT for rank in range(ranks)})
        found.add(made._planning._fingerprint)
    assert len(found) == 1
    others = [
        WorkerLayout(LAYOUT.names[::-1], LAYOUT.shapes, (1, 1)),
        WorkerLayout(LAYOUT.names, LAYOUT.shapes, (1, 2)),
        WorkerLayout(LAYOUT.names, (LayerShape(2, 2048), LayerShape(4, 1024)), (1, 1)),
        WorkerLayout(LAYOUT.names[:1], LAYOUT.shapes[:1], (1,)),
        WorkerLayout(LAYOUT.names, LAYOUT.shapes, (1, 1), (("another.Backend",),)),
    ]
    for other in others:
        made = made_connector(configured, tmp_path / "store")
        made.set_xfer_handshake_metadata({0: other})
        found.add(made._planning._fingerprint)
    assert len(found) == 1 + len(others)


@pytest.mark.parametrize(
    "layouts",
    [
        {},
        {0: LAYOUT},
        {0: LAYOUT, 1: WorkerLayout(LAYOUT.names, (LayerShape(4, 1024), LayerShape(4, 512)), (1, 1))},
        {0: LAYOUT, 1: LAYOUT, 2: LAYOUT},
    ],
)
def test_workers_that_are_missing_or_differ_end_the_start(
    configured: Configured, tmp_path: Path, layouts: dict[int, Any]
) -> None:
    made = made_connector(configured, tmp_path / "store", 2)
    with pytest.raises(ValueError, match="cannot be exact"):
        made.set_xfer_handshake_metadata(layouts)


def test_the_order_of_facts_is_no_fact(configured: Configured) -> None:
    facts = configured.facts()
    assert fingerprint(dict(reversed(facts.items()))) == fingerprint(facts)


def test_a_group_s_attention_backends_are_those_of_its_layers(
    configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = cpu_attn.CPUAttentionBackend
    layers = {name: SimpleNamespace(get_attn_backend=lambda: backend) for name in ("layer.0", "layer.1")}
    monkeypatch.setattr(configured.vllm.compilation_config, "static_forward_context", layers)
    (group,) = engine_facts.backends_of(configured.vllm, configured.cache)
    assert group == (f"{backend.__module__}.{backend.__qualname__}",)


@pytest.mark.fault("B17")
def test_replaced_weights_have_a_fingerprint_that_no_other_engine_has(
    configured: Configured, tmp_path: Path
) -> None:
    """vLLM's pause before an update of the weights resets the connector's cache too."""
    made = made_connector(configured, tmp_path / "store")
    made.set_xfer_handshake_metadata({0: LAYOUT})
    found = [made._planning._fingerprint]
    for _ in range(2):
        assert made.reset_cache()
        found.append(made._planning._fingerprint)
        assert made._planning._planner._fingerprint == found[-1]
    assert len(set(found)) == 3


@pytest.mark.parametrize(("ranks", "savers", "resident"), [(1, 4, 1000), (2, 2, 500), (8, 1, 125)])
def test_ranks_share_an_engine_s_cores_and_its_resident_memory(
    configured: Configured,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    savers: int,
    resident: int,
) -> None:
    """The cores are those that the engine may run on, however many the machine has."""
    layers = {
        name: SimpleNamespace(get_attn_backend=lambda: cpu_attn.CPUAttentionBackend)
        for name in ("layer.0", "layer.1")
    }
    monkeypatch.setattr(configured.vllm.compilation_config, "static_forward_context", layers)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr("os.cpu_count", lambda: 96)
    found: dict[str, Any] = {}
    monkeypatch.setattr(connector, "WorkerRole", lambda *_, **given: found.update(given))
    made = made_connector(configured, tmp_path / "store", ranks, KVConnectorRole.WORKER, resident=1000)
    made.register_kv_caches({name: torch.zeros(64, 1, 32, 64) for name in layers})
    assert (found["ranks"], found["savers"], found["resident"]) == (ranks, savers, resident)


class Planning:
    """A scheduler role that would load seven tokens of every request.

    Attributes:
        looked: the requests for which it was asked.
        whole: whether each finished request's KV may be kept.
    """

    def __init__(self) -> None:
        self.looked: list[str] = []
        self.whole: list[bool] = []

    def matched(self, request_id: str, *_: Any) -> int:
        self.looked.append(request_id)
        return 7

    def finished(self, *_: Any, whole: bool, **__: Any) -> tuple[bool, None]:
        self.whole.append(whole)
        return whole, None


@pytest.mark.fault("B19")
@pytest.mark.parametrize(
    ("lora", "cpu", "extra", "kept"),
    [
        (True, True, {}, False),
        (True, True, {"spare_adapter": False}, False),
        (True, True, {"spare_adapter": True}, True),
        (True, False, {"unproven_devices": True}, True),
        (False, True, {}, True),
    ],
)
def test_requests_without_an_adapter_keep_kv_only_where_vllm_computes_them_without_one(
    configured: Configured,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lora: bool,
    cpu: bool,
    extra: dict[str, bool],
    kept: bool,
) -> None:
    """`test_lora` shows what vLLM's CPU kernels do; those with an adapter are not concerned."""
    monkeypatch.setattr(configured.vllm, "lora_config", LoRAConfig() if lora else None)
    device = SimpleNamespace(is_cpu=lambda: cpu, is_cuda=lambda: not cpu)
    monkeypatch.setattr(engine_facts, "current_platform", device)
    made = made_connector(configured, tmp_path / "store", **extra)
    planning: Any = Planning()
    made._scheduler = planning
    for name, used in (("without", None), ("with", LoRARequest("an-adapter", 1, "/nowhere"))):
        request = Request(
            name,
            prompt_token_ids=[5, 6, 7],
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            lora_request=used,
        )
        expected = kept if used is None else lora
        assert made.get_num_new_matched_tokens(request, 0) == ((7, True) if expected else (0, False))
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        assert made.request_finished(request, [1]) == (expected, None)
    assert planning.looked == [name for name, yes in (("without", kept), ("with", lora)) if yes]
    assert planning.whole == [kept, lora]
