"""Where the connector meets vLLM: a change of its interface fails here, by name."""

from __future__ import annotations

import dataclasses
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, VllmConfig
from vllm.config.multimodal import MultiModalConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA, supports_hma
from vllm.lora.request import LoRARequest
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
from vllm.v1.core.single_type_kv_cache_manager import MambaManager, SlidingWindowManager
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from baton.config.groups import EngineSettings
from baton.config.settings import load_settings
from baton.engines.vllm.arguments import engine_args
from baton.engines.vllm.build_fleet import transfer_config
from baton_kv import connector, engine_facts
from baton_kv.blocks import CacheGroup, HeadShard
from baton_kv.contract import (
    Transfer,
    TransferError,
    TransferFailure,
    TransferOutcome,
    new_key,
    transfer_params,
)
from baton_kv.load import PartLost
from baton_kv.settings import ConnectorSettings

OVERRIDDEN = [
    name
    for name, member in vars(connector.BatonConnector).items()
    if callable(getattr(connector.BatonConnector, name)) and not name.startswith("_")
    if name not in ("enable_moves", "warm")  # our own, for `baton_kv.extension`
]


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_every_hook_is_vllm_s_with_vllm_s_parameters(name: str) -> None:
    ours = inspect.signature(getattr(connector.BatonConnector, name))
    base = KVConnectorBase_V1 if hasattr(KVConnectorBase_V1, name) else SupportsHMA
    theirs = inspect.signature(getattr(base, name))
    assert list(ours.parameters) == list(theirs.parameters)


def test_windowed_layers_keep_groups_of_their_own() -> None:
    """Otherwise vLLM gives them blocks for all tokens."""
    assert supports_hma(connector.BatonConnector)


@pytest.mark.parametrize("tokens", range(1, 200, 7))
@pytest.mark.parametrize("window", [2, 16, 17, 64, 500])
def test_the_first_block_of_a_window_is_the_first_that_vllm_keeps(tokens: int, window: int) -> None:
    kept: Any = SimpleNamespace(sliding_window=window, extra_retained_tokens=0)
    keeps = SlidingWindowManager.get_num_skipped_tokens(kept, tokens)
    assert CacheGroup(window, 16).first_block(tokens) == keeps // 16
    assert CacheGroup(None, 16).first_block(tokens) == 0
    behind = MambaManager.get_num_skipped_tokens(kept, tokens)
    assert CacheGroup(None, 16, state=True).first_block(tokens) == max(0, behind) // 16


def test_a_prevented_save_makes_vllm_recompute_nothing() -> None:
    assert isinstance(KVConnectorBase_V1.requires_kv_delivery, property)
    assert connector.BatonConnector.requires_kv_delivery.fget(None) is False  # type: ignore[attr-defined]


def test_every_hook_vllm_requires_is_there() -> None:
    assert connector.BatonConnector.__abstractmethods__ == frozenset()


def test_what_is_read_of_a_request_is_there() -> None:
    """Asked of a request itself: one that is over, held a text, and came to its own end."""
    asked = transfer_params(save=new_key("local"), tag="a")
    params = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": asked})
    request = Request("a", prompt_token_ids=[5, 6, 7], sampling_params=params, pooling_params=None)
    request.append_output_token_ids(8)
    request.num_computed_tokens = 3
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    assert connector.images_of(request) == ()
    assert connector._ended_by_itself(request)
    assert (request.kv_transfer_params, list(request.all_token_ids)) == (asked, [5, 6, 7, 8])
    assert request.num_prompt_tokens == 3
    request.lora_request = LoRARequest("an-adapter", 1, "/nowhere")
    assert connector.images_of(request) is None, "token ids do not tell adapters"
    assert all(RequestStatus.is_finished(status) for status in connector.ENDED_BY_ITSELF)
    assert "kv_connector_worker_meta" in KVConnectorOutput.__dataclass_fields__


def config(**changes: Any) -> Any:
    plain = {
        "tp": 1,
        "pp": 1,
        "dcp": 1,
        "pcp": 1,
        "nodes": 1,
        "policy": "recompute",
        "images": None,
        "drafts": None,
        "second_runner": True,
        "prefixes": False,
        "replays": False,
    } | changes
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=plain["tp"],
            pipeline_parallel_size=plain["pp"],
            decode_context_parallel_size=plain["dcp"],
            prefill_context_parallel_size=plain["pcp"],
            nnodes=plain["nodes"],
        ),
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy=plain["policy"]),
        model_config=SimpleNamespace(multimodal_config=plain["images"]),
        speculative_config=plain["drafts"],
        use_v2_model_runner=plain["second_runner"],
        cache_config=SimpleNamespace(
            enable_prefix_caching=plain["prefixes"], use_replayssm=plain["replays"], use_kda_recoverssm=False
        ),
    )


@pytest.mark.parametrize(
    ("changes", "groups", "reason"),
    [
        ({"pp": 2}, 1, "use tensor_parallel_size"),
        ({"dcp": 2}, 1, "context parallelism"),
        ({"pcp": 2}, 1, "context parallelism"),
        ({"nodes": 2}, 1, "one host"),
        ({"tp": 2, "images": MultiModalConfig()}, 1, "take no images"),
        ({}, 0, "no KV cache"),
        ({"policy": "fail"}, 1, "recompute"),
    ],
)
def test_what_cannot_be_exact_is_refused_at_the_start(
    changes: dict[str, Any], groups: int, reason: str
) -> None:
    full = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=64, dtype=torch.float32)
    cache: Any = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=full)] * groups)
    with pytest.raises(ValueError, match=reason):
        engine_facts.require_supported(config(**changes), cache)
    one: Any = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=full)])
    engine_facts.require_supported(config(), one)
    engine_facts.require_supported(config(images=MultiModalConfig()), one)
    none = MultiModalConfig(limit_per_prompt={"image": 0})  # type: ignore[dict-item]  # as vLLM takes it
    engine_facts.require_supported(config(tp=2, images=none), one)
    window = SlidingWindowSpec(
        block_size=32, num_kv_heads=1, head_size=64, dtype=torch.float32, sliding_window=64
    )
    promoted = FullAttentionSpec(
        block_size=32, num_kv_heads=1, head_size=64, dtype=torch.float32, sliding_window=64
    )
    one.kv_cache_groups = [SimpleNamespace(kv_cache_spec=promoted)]
    engine_facts.require_supported(config(), one)  # Gemma 3: windows beside full attention, stored whole
    latent = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    one.kv_cache_groups = [SimpleNamespace(kv_cache_spec=latent)]
    with pytest.raises(ValueError, match="MLA"):
        engine_facts.require_supported(config(), one)
    other = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float32)
    differ = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"model": full, "draft": other})
    one.kv_cache_groups = [SimpleNamespace(kv_cache_spec=differ)]
    with pytest.raises(ValueError, match="draft model with the KV heads"):
        engine_facts.require_supported(config(drafts=object()), one)
    with pytest.raises(ValueError, match="set tensor_parallel_size to 1"):
        engine_facts.require_supported(config(tp=2), one)
    engine_facts.require_supported(config(), one)
    chunked = FullAttentionSpec(
        block_size=32, num_kv_heads=1, head_size=64, dtype=torch.float32, attention_chunk_size=64
    )
    one.kv_cache_groups = [SimpleNamespace(kv_cache_spec=chunked)]
    with pytest.raises(ValueError, match="chunked attention"):
        engine_facts.require_supported(config(), one)
    one.kv_cache_groups = [SimpleNamespace(kv_cache_spec=spec) for spec in (window, full, window)]
    engine_facts.require_supported(config(), one)
    groups = (CacheGroup(64, 32), CacheGroup(None, 32), CacheGroup(64, 32))
    assert engine_facts.cache_groups(one) == groups
    for differs in (dataclasses.replace(window, block_size=64), dataclasses.replace(window, num_kv_heads=2)):
        one.kv_cache_groups = [SimpleNamespace(kv_cache_spec=spec) for spec in (differs, full)]
        engine_facts.require_supported(config(), one)
        with pytest.raises(ValueError, match="set tensor_parallel_size to 1"):
            engine_facts.require_supported(config(tp=2), one)
    retained = dataclasses.replace(window, extra_retained_tokens=4)
    one.kv_cache_groups = [SimpleNamespace(kv_cache_spec=retained)]
    with pytest.raises(ValueError, match="no run has proved it"):
        engine_facts.require_supported(config(), one)


STATE = MambaSpec(
    block_size=64,
    shapes=((3, 160), (4, 32, 16)),
    dtypes=(torch.float32, torch.float32),
    mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
)


@pytest.mark.fault("B24")
@pytest.mark.parametrize(
    ("changes", "state", "reason"),
    [
        ({}, {"mamba_type": MambaAttentionBackendEnum.MAMBA1}, "no run has proved them"),
        ({}, {"mamba_type": MambaAttentionBackendEnum.LINEAR}, "no run has proved them"),
        ({}, {"mamba_type": MambaAttentionBackendEnum.SHORT_CONV}, "CPU backend"),
        ({}, {"num_speculative_blocks": 2}, "no run has proved them"),
        (
            {"prefixes": True},
            {"mamba_type": MambaAttentionBackendEnum.MAMBA2},
            "enable_prefix_caching = false",
        ),
        ({"tp": 2}, {}, "set tensor_parallel_size to 1"),
        ({"drafts": object()}, {}, "speculative decoding"),
        ({"replays": True}, {}, "use_replayssm"),
    ],
)
def test_states_that_are_not_proved_are_refused_at_the_start(
    changes: dict[str, Any], state: dict[str, Any], reason: str
) -> None:
    full = FullAttentionSpec(block_size=64, num_kv_heads=1, head_size=64, dtype=torch.float32)
    specs = [full, dataclasses.replace(STATE, **state)]
    cache: Any = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])
    with pytest.raises(ValueError, match=reason):
        engine_facts.require_supported(config(**changes), cache)
    cache.kv_cache_groups[1].kv_cache_spec = STATE
    alone: Any = SimpleNamespace(kv_cache_groups=cache.kv_cache_groups[1:])
    with pytest.raises(ValueError, match="running states alone"):
        engine_facts.require_supported(config(), alone)
    engine_facts.require_supported(config(prefixes=True), cache)
    assert engine_facts.cache_groups(cache) == (CacheGroup(None, 64), CacheGroup(None, 64, state=True))


def test_vllm_still_says_of_states_what_is_asked() -> None:
    """By these names: their kinds, the settings that change what a block holds, the offers of a step."""
    assert {"MAMBA2", "GDN_ATTN", "SHORT_CONV"} <= set(MambaAttentionBackendEnum.__members__)
    names = {field.name for field in dataclasses.fields(CacheConfig)}  # type: ignore[arg-type]  # decorated
    assert {"enable_prefix_caching", "use_replayssm", "use_kda_recoverssm"} <= names
    assert "boundary_state_offloads" in KVConnectorBlockState.__dataclass_fields__
    assert "kv_connector_block_state" in SchedulerOutput.__dataclass_fields__
    assert {"touch", "free_blocks"} <= set(dir(BlockPool))


def test_plain_mla_is_tried_on_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A latent vector a token, the same on every rank; sparse attention keeps an index beside it."""
    plain = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    cache: Any = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=plain)])
    with pytest.raises(ValueError, match="decodes them otherwise than it prefills"):
        engine_facts.require_supported(config(), cache, unproven_devices=True)
    monkeypatch.setattr(engine_facts, "current_platform", GPU)
    engine_facts.require_supported(config(), cache, unproven_devices=True)
    for changes in (
        {"model_version": "deepseek_v4"},
        {"tokens_per_state": 4},
        {"is_index_group_leader": True},
    ):
        cache.kv_cache_groups[0].kv_cache_spec = dataclasses.replace(plain, **changes)
        with pytest.raises(ValueError, match="sparse attention"):
            engine_facts.require_supported(config(), cache, unproven_devices=True)


FULL = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
GPU = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: True)


def test_vllm_still_tells_what_the_gate_for_gpus_asks() -> None:
    """By these names; the tests below make the facts themselves."""
    assert isinstance(VllmConfig.use_v2_model_runner, property)
    assert "speculative_config" in {field.name for field in dataclasses.fields(VllmConfig)}  # type: ignore[arg-type]  # decorated


def test_what_was_proved_on_a_gpu_needs_no_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_facts, "current_platform", GPU)
    cache: Any = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=FULL)])
    engine_facts.require_supported(config(), cache)
    text_only = MultiModalConfig(limit_per_prompt={"image": 0})  # type: ignore[dict-item]  # as vLLM takes it
    engine_facts.require_supported(config(images=text_only), cache)


@pytest.mark.parametrize(
    ("changes", "specs", "named"),
    [
        ({"tp": 2}, [FULL], "tensor parallelism"),
        ({"drafts": object()}, [FULL], "speculative decoding"),
        ({"images": MultiModalConfig()}, [FULL], "images"),
        ({"second_runner": False}, [FULL], "vLLM's first model runner"),
        ({}, [dataclasses.replace(FULL, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)], "quantised KV"),
        ({}, [dataclasses.replace(FULL, sliding_window=64)], "sliding windows"),
        (
            {},
            [
                FULL,
                SlidingWindowSpec(
                    block_size=16, num_kv_heads=8, head_size=128, dtype=torch.bfloat16, sliding_window=64
                ),
            ],
            "sliding windows",
        ),
        ({}, [MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)], "MLA"),
        ({"tp": 2, "drafts": object()}, [FULL], "tensor parallelism, speculative decoding"),
    ],
)
def test_what_was_not_proved_on_a_gpu_is_refused_by_name_unless_allowed(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], specs: list[Any], named: str
) -> None:
    monkeypatch.setattr(engine_facts, "current_platform", GPU)
    cache: Any = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])
    with pytest.raises(
        ValueError, match=f"not proved with {named}; .*handoffs.unproven_devices = true"
    ) as refused:
        engine_facts.require_supported(config(**changes), cache)
    assert "\n" not in str(refused.value)
    engine_facts.require_supported(config(**changes), cache, unproven_devices=True)


def test_other_devices_are_refused_whatever_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    other = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: False)
    monkeypatch.setattr(engine_facts, "current_platform", other)
    cache: Any = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=FULL)])
    with pytest.raises(ValueError, match="only CPUs and NVIDIA GPUs"):
        engine_facts.require_supported(config(), cache, unproven_devices=True)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_latent_vector_of_mla_is_one_head_that_every_rank_has(ranks: int) -> None:
    plain = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    cache: Any = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=plain)])
    ranked = config(tp=ranks)
    for rank in range(ranks):
        ranked.parallel_config.rank = rank
        shard = engine_facts.head_shard(ranked, cache)
        assert shard == HeadShard(0, 1, 1, rank, ranks)


def test_statistics_cross_a_process_as_plain_values_and_add_up() -> None:
    loaded = TransferOutcome("r", "k", Transfer.LOAD, "t", None, 10, 100, 0.1)
    lost = TransferOutcome("s", "k", Transfer.SAVE, None, TransferFailure.FULL)
    one, two = (connector.TransferStats({"outcomes": [told.message()]}) for told in (loaded, lost))
    both = connector.BatonConnector.build_kv_connector_stats(one.aggregate(two).to_dict())
    assert both is not None
    assert not both.is_empty()
    assert both.reduce() == {
        "load tokens": 10,
        "load bytes": 100,
        "save tokens": 0,
        "save bytes": 0,
        "failed": 1,
    }


def test_outcomes_cross_a_process_and_come_back_typed() -> None:
    """Through vLLM's own encoder, as the engine core sends them to the gateway."""
    told = [
        TransferOutcome("r", "k", kind, None, failure)
        for kind in Transfer
        for failure in (None, *TransferFailure)
    ]
    sent = MsgpackEncoder().encode({"outcomes": [each.message() for each in told]})
    received = MsgpackDecoder(dict[str, Any]).decode(sent)["outcomes"]
    assert [TransferOutcome.from_message(row) for row in received] == told


def test_a_reason_of_another_version_is_read_as_other() -> None:
    message = TransferOutcome("r", "k", Transfer.LOAD, None, TransferFailure.FULL).message()
    assert TransferOutcome.from_message(message | {"failure": "newer"}).failure is TransferFailure.OTHER
    assert TransferOutcome.from_message(message | {"another": 1}).failure is TransferFailure.FULL
    for bad in (message | {"kind": "newer"}, {"kind": "load"}):
        with pytest.raises(ValueError, match=r"newer|not a transfer"):
            TransferOutcome.from_message(bad)


def test_every_error_of_a_transfer_says_why() -> None:
    """None is reported as `other` because somebody forgot."""
    found = [TransferError]
    for kind in found:
        found += kind.__subclasses__()
    found.remove(PartLost)  # it has that of what is wrong with the part
    assert {kind.failure for kind in found[1:]} == {
        TransferFailure.MISSING,
        TransferFailure.CORRUPT,
        TransferFailure.INCOMPATIBLE,
        TransferFailure.FULL,
        TransferFailure.DEVICE,
        TransferFailure.GIVEN_UP,
        TransferFailure.BUSY,
    }


def test_an_engine_that_hands_over_gets_our_connector() -> None:
    settings = load_settings(handoffs={"store": "file:/somewhere"})
    engine = EngineSettings(name="a", model="m", handoff=True)
    made = engine_args(engine, "m", transfer_config(settings)).kv_transfer_config
    assert made is not None
    assert (made.kv_connector, made.kv_connector_module_path) == ("BatonConnector", "baton_kv.connector")
    assert made.kv_connector_extra_config["store"] == "file:/somewhere"
    assert made.kv_connector_extra_config["spare_adapter"] is True, "as `spare_slots` keeps one"
    of_avp = {"avp_source_model", "avp_target_model"}  # a user sets these
    assert set(made.kv_connector_extra_config) == set(ConnectorSettings.model_fields) - of_avp
    assert engine_args(engine, "m").kv_transfer_config is None


def test_a_step_s_output_tells_whether_it_computes_anything() -> None:
    assert "total_num_scheduled_tokens" in SchedulerOutput.__dataclass_fields__
