"""Read the facts for a fingerprint from vLLM's configuration, and refuse unsupported configurations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from baton_kv.blocks import CacheGroup, HeadShard, LayoutRefused
from baton_kv.families import Family
from baton_kv.fingerprint import KnownDigests, kv_version, weights_digest
from baton_kv.joins.packing import Packings, PackingUnknown, SlabPacking

NOT_OF_A_SLAB = frozenset(
    ("num_kv_heads", "max_tp_shards", "dcp_sharded", "page_size_padded", "block_stride_alignment")
)
"""Fields of a spec that do not change what a slab holds: how heads are shared out, where blocks begin."""

NOT_OF_ADAPTERS = frozenset(("max_loras", "max_cpu_loras", "max_lora_rank"))
"""Fields of a `LoRAConfig` that do not change what is computed: how many may be held, and the rank up to
which matrices are filled up with zeros."""

SPARSE_MLA = ("tokens_per_state", "model_version", "cache_role", "is_index_group_leader", "alignment")
"""Fields of a spec that tell DeepSeek's sparse attention from plain MLA."""

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec


def require_supported(
    config: VllmConfig, kv_cache_config: KVCacheConfig, *, unproven_devices: bool = False
) -> None:
    """Refuse a model or configuration whose KV the connector cannot move exactly.

    With `unproven_devices`, NVIDIA GPUs are allowed where handoffs on them are not proved.

    Raises:
        ValueError: the configuration is not supported; the message says what to change.
    """
    specs = _specs_of(kv_cache_config)
    _require_parallel(config)
    _require_caches(config, specs)
    if not current_platform.is_cpu() and not current_platform.is_cuda():
        raise ValueError("baton_kv: only CPUs and NVIDIA GPUs are supported; set handoff = false")
    if current_platform.is_cuda() and not unproven_devices and (unproved := _unproved_on_gpus(config, specs)):
        raise ValueError(
            f"baton_kv: on GPUs handoffs are not proved with {', '.join(unproved)}; to try it set "
            "handoffs.unproven_devices = true (with plain vLLM unproven_devices in kv_connector_extra_config)"
        )
    policy = config.kv_transfer_config.kv_load_failure_policy if config.kv_transfer_config else None
    if policy != "recompute":
        raise ValueError('baton_kv: set "kv_load_failure_policy": "recompute" in the KV transfer config')


def adapters_proved(config: VllmConfig, *, unproven_devices: bool = False) -> bool:
    """Return whether the KV of requests with LoRA adapters may be kept: on one CPU rank, without drafts."""
    plain = config.parallel_config.tensor_parallel_size == 1 and config.speculative_config is None
    return config.lora_config is not None and plain and (current_platform.is_cpu() or unproven_devices)


def without_adapter_exact(config: VllmConfig, *, spare: bool) -> bool:
    """Return whether vLLM computes the KV of requests without a LoRA adapter as it should.

    On CPUs it computes them, in a step that has requests with one, with what is in the last slot for
    adapters: with nothing only where that is `spare`, which the connector cannot see for later.
    """
    return config.lora_config is None or not current_platform.is_cpu() or spare


def _unproved_on_gpus(config: VllmConfig, specs: Sequence[Any]) -> list[str]:
    """List the features of a configuration that no run on a GPU has proved; see `docs/results/gpu.md`."""
    images = config.model_config.multimodal_config
    found = {
        "tensor parallelism": config.parallel_config.tensor_parallel_size > 1,
        "quantised KV": any(
            getattr(spec, "kv_quant_mode", KVQuantMode.NONE) is not KVQuantMode.NONE for spec in specs
        ),
        "MLA": any(isinstance(spec, MLAAttentionSpec) for spec in specs),
        "sliding windows": any(getattr(spec, "sliding_window", None) for spec in specs),
        "running states": any(isinstance(spec, MambaSpec) for spec in specs),
        "groups of different shape": _differ(specs),
        "speculative decoding": config.speculative_config is not None,
        "images": images is not None and images.get_limit_per_prompt("image") > 0,
        "vLLM's first model runner": not config.use_v2_model_runner,
    }
    return [name for name, there in found.items() if there]


def _require_parallel(config: VllmConfig) -> None:
    """Refuse ways to share a model out over processes that are not supported."""
    parallel = config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        raise ValueError(
            "baton_kv: pipeline parallelism is not supported; set pipeline_parallel_size to 1 and use "
            "tensor_parallel_size"
        )
    if max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1:
        raise ValueError(
            "baton_kv: context parallelism is not supported; set decode_context_parallel_size and "
            "prefill_context_parallel_size to 1"
        )
    if parallel.nnodes > 1:
        raise ValueError("baton_kv: several nodes a model are not supported; run all its ranks on one host")
    images = config.model_config.multimodal_config
    if parallel.tensor_parallel_size > 1 and images is not None and images.get_limit_per_prompt("image"):
        raise ValueError(
            "baton_kv: images with tensor parallelism are not supported; set tensor_parallel_size to 1, or "
            "take no images with limit_mm_per_prompt = { image = 0 }"
        )


def _specs_in(group: KVCacheGroupSpec) -> list[Any]:
    """Return the spec of a cache group, or those of its layers, of one class, where they differ."""
    spec = group.kv_cache_spec
    return [*spec.kv_cache_specs.values()] if type(spec) is UniformTypeKVCacheSpecs else [spec]


def _specs_of(kv_cache_config: KVCacheConfig) -> list[Any]:
    """Return the specs of all cache groups."""
    return [spec for group in kv_cache_config.kv_cache_groups for spec in _specs_in(group)]


def _require_caches(config: VllmConfig, specs: Sequence[Any]) -> None:
    """Refuse KV caches that cannot be moved exactly."""
    found = {family_of(spec) for spec in specs}
    families = [family for family in Family if family in found]
    if not families:
        raise ValueError("baton_kv: the model has no KV cache; set handoff = false")
    for family in families:
        support = family.value
        reason = support.refused or (support.refused_on_cpus if current_platform.is_cpu() else "")
        if reason:
            raise ValueError(
                f"baton_kv: {support.holds[0].lower()}{support.holds[1:]} ({support.models}): not supported, "
                f"as {reason}; set handoff = false"
            )
    states = any(isinstance(spec, MambaSpec) for spec in specs)
    what = "running states" if states else "layers whose KV heads, head sizes or block sizes differ"
    if not states and not _differ(specs):
        return
    if config.parallel_config.tensor_parallel_size > 1:
        raise ValueError(
            f"baton_kv: {what} with tensor parallelism are not supported; set tensor_parallel_size to 1"
        )
    if config.speculative_config is not None:
        raise ValueError(
            f"baton_kv: {what} with speculative decoding are not supported; use none, or a draft model with "
            "the KV heads and head size of the model, or n-grams"
        )
    if not states:
        return
    if all(isinstance(spec, MambaSpec) for spec in specs):
        raise ValueError(
            "baton_kv: models of running states alone are not supported, as no run has proved them; set "
            "handoff = false"
        )
    cache = config.cache_config
    if Family.MAMBA2 in families and current_platform.is_cpu() and cache.enable_prefix_caching:
        raise ValueError(
            "baton_kv: with Mamba 2 and a prefix cache vLLM's CPU backend ends at the first prompt of more "
            "than a block, also without handoffs; set enable_prefix_caching = false"
        )
    if cache.use_replayssm or cache.use_kda_recoverssm:
        raise ValueError("baton_kv: states that vLLM replays are not supported; set use_replayssm to false")


def _differ(specs: Sequence[Any]) -> bool:
    """Return whether layers with KV differ in their heads, head sizes or block sizes."""
    kept = [spec for spec in specs if not isinstance(spec, MambaSpec)]
    return len({(spec.block_size, spec.num_kv_heads, spec.head_size) for spec in kept}) > 1


def family_of(spec: Any) -> Family:
    """Return the family of a layer's cache: by its class itself, as what is derived holds something else."""
    if type(spec) is SlidingWindowSpec:
        return Family.OTHER if spec.extra_retained_tokens else Family.WINDOWS
    if type(spec) is MLAAttentionSpec:
        plain = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=16, dtype=spec.dtype)
        same = all(getattr(spec, name) == getattr(plain, name) for name in SPARSE_MLA)
        return Family.MLA if same else Family.SPARSE
    if type(spec) is MambaSpec:
        proved = spec.num_speculative_blocks == 0 and not spec.tp_replicated
        name = spec.mamba_type.name
        return Family[name] if proved and name in Family.__members__ else Family.OTHER_STATES
    if type(spec) is FullAttentionSpec:
        return Family.FULL if spec.attention_chunk_size is None else Family.CHUNKS
    return Family.OTHER


def cache_groups(kv_cache_config: KVCacheConfig) -> tuple[CacheGroup, ...]:
    """Return the model's cache groups.

    Without several groups, vLLM stores windowed layers as full attention
    (`vllm.v1.core.kv_cache_utils.unify_hybrid_kv_cache_specs`); the layers keep their windows.
    """
    specs = [_specs_in(group)[0] for group in kv_cache_config.kv_cache_groups]
    return tuple(
        CacheGroup(
            spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None,
            spec.block_size,
            isinstance(spec, MambaSpec),
        )
        for spec in specs
    )


def facts_of(
    config: VllmConfig, kv_cache_config: KVCacheConfig, known: KnownDigests | None = None
) -> dict[str, Any]:
    """Collect all facts that decide what the bytes of a block mean, by name; `fingerprint` digests them.

    Raises:
        ValueError: the weights cannot be identified.
    """
    model, groups = config.model_config, kv_cache_config.kv_cache_groups
    return {
        "vllm": kv_version(vllm.__version__),
        "weights": weights_digest(model.model, model.revision, known),
        "draft": _draft_digest(config, known),
        "revision": model.revision,
        "quantization": model.quantization,
        "dtype": str(model.dtype),
        "kv_dtype": config.cache_config.cache_dtype,
        "specs": [_spec_facts(group.kv_cache_spec) for group in groups],
        "platform": current_platform.device_name,
        "packing": _packing(model.dtype, _specs_of(kv_cache_config), config.cache_config.cache_dtype),
        "hf_overrides": repr(model.hf_overrides),
        "load_format": str(config.load_config.load_format),
        "model_weights": str(model.model_weights),
        "loader": repr(config.load_config.model_loader_extra_config),
        "long_rope": _long_rope(model),
        "images": _image_settings(model),
    } | ({"lora": _lora_facts(config.lora_config)} if config.lora_config is not None else {})


def _lora_facts(lora: Any) -> dict[str, str]:
    """Collect the settings of an engine's LoRA layers that change what they compute, whatever the adapter."""
    names = (field.name for field in fields(lora) if field.name not in NOT_OF_ADAPTERS)
    found = {name: str(getattr(lora, name)) for name in names}
    return found | {"target_modules": str(lora.target_modules and sorted(set(lora.target_modules)))}


def _draft_digest(config: VllmConfig, known: KnownDigests | None) -> str | None:
    """Return the digest of the draft model's weights; None where drafts need no weights but the model's own.

    The KV of a draft model's layers is saved with the model's.
    """
    draft = config.speculative_config.draft_model_config if config.speculative_config else None
    if draft is None or draft.model == config.model_config.model:
        return None
    return weights_digest(draft.model, draft.revision, known)


def _spec_facts(spec: Any) -> dict[str, str]:
    """Collect the fields of a spec, without those of one rank or of the pool alone."""
    names = (field.name for field in fields(spec) if field.name not in NOT_OF_A_SLAB)
    return {"class": type(spec).__name__} | {name: str(getattr(spec, name)) for name in names}


def backends_of(config: VllmConfig, kv_cache_config: KVCacheConfig) -> tuple[tuple[str, ...], ...]:
    """Return the classes of the attention backends of each cache group: each packs a block as it likes.

    Only workers know them, whose layers choose their backends.
    """
    layers = config.compilation_config.static_forward_context
    return tuple(
        tuple(
            sorted({".".join(layers[name].get_attn_backend().full_cls_name()) for name in group.layer_names})
        )
        for group in kv_cache_config.kv_cache_groups
    )


def head_shard(config: VllmConfig, kv_cache_config: KVCacheConfig) -> HeadShard | None:
    """Return the KV heads that this rank holds; None without tensor parallelism.

    Raises:
        ValueError: the heads cannot be divided equally over the ranks.
    """
    ranks = config.parallel_config.tensor_parallel_size
    if ranks == 1:
        return None
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    if getattr(spec, "num_head_slots", None) is not None:
        raise ValueError("baton_kv: this model's heads cannot be shared out; set tensor_parallel_size to 1")
    mla = isinstance(spec, MLAAttentionSpec)  # every rank has the one latent vector a token
    total = 1 if mla else config.model_config.get_total_num_kv_heads()
    try:
        return HeadShard.of_rank(total, config.parallel_config.rank, ranks)
    except LayoutRefused as error:
        raise ValueError(f"baton_kv: {error}; set another tensor_parallel_size") from None


def layers_of(
    kv_cache_config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Return the KV tensors by name and the index of each one's cache group.

    They are in the order of the cache groups, then of the model. Layers of one group that share a tensor
    appear once; layers of several groups may share memory, where each has blocks of its own.

    Raises:
        ValueError: a layer has no tensor.
    """
    found: dict[tuple[int, int], str] = {}
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        for name in group.layer_names:
            if name not in kv_caches:
                raise ValueError(f"baton_kv: vLLM has not given the KV cache of layer '{name}'")
            found.setdefault((number, kv_caches[name].data_ptr()), name)
    return {name: kv_caches[name] for name in found.values()}, [number for number, _ in found]


def _image_settings(model: Any) -> str | None:
    """Return the engine's settings for preparing images, as text; None for a model without images."""
    settings = model.multimodal_config
    if settings is None:
        return None
    return repr((settings.mm_processor_kwargs, settings.media_io_kwargs))


def _long_rope(model: Any) -> int | None:
    """Return `max_model_len` if it selects the rotary factors (LongRoPE), else None."""
    return int(model.max_model_len) if "long_factor" in repr(model.hf_config) else None


def _packing(dtype: torch.dtype, specs: Sequence[Any], kv_dtype: str) -> str:
    """Return how the backends pack blocks, one word if all do alike; on CPUs by the instruction set."""
    if not current_platform.is_cpu():
        return "plain"
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    found = [
        f"state-{torch.backends.cpu.get_cpu_capability()}"
        if isinstance(spec, MambaSpec)
        else str(_get_attn_isa(dtype, spec.block_size, spec.head_size, kv_dtype))
        for spec in specs
    ]
    return found[0] if len(set(found)) == 1 else " ".join(found)


def packings_of(config: VllmConfig, kv_caches: Mapping[str, torch.Tensor]) -> Packings | None:
    """Find how the layers pack keys and values, which each entry then tells; None: not as is known.

    The backend's own function is asked. Machines with other instructions read such entries too.

    Args:
        kv_caches: the KV tensors that are moved, by layer; hidden states among them are the same everywhere.
    """
    if not current_platform.is_cpu():
        return None
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, _get_attn_isa

    learned: dict[tuple[str, int, int, torch.dtype], SlabPacking] = {}

    def packing(layer: Any, tokens: int) -> SlabPacking:
        isa = str(_get_attn_isa(layer.dtype, tokens, layer.head_size, config.cache_config.cache_dtype))
        shape = (isa, tokens, layer.head_size, layer.dtype)

        def write(keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor) -> None:
            key_cache, value_cache = cache.view(1, 1, 2 * tokens, -1).chunk(2, dim=2)
            slots = torch.arange(tokens)
            ops.cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, slots, isa)

        if shape not in learned:
            learned[shape] = SlabPacking.learn(tokens, layer.head_size, layer.dtype, write)
        return learned[shape]

    layers = config.compilation_config.static_forward_context
    found: list[SlabPacking | None] = []
    for name, cache in kv_caches.items():
        layer = layers.get(name)
        if layer is None:
            found.append(None)
            continue
        impl: Any = getattr(layer, "impl", None)
        if type(impl) is not CPUAttentionBackendImpl or impl.is_fp8_kv_cache:
            return None
        if cache.dim() != 4 or cache.shape[3] != 2 * layer.head_size or cache.dtype != layer.dtype:
            return None
        try:
            found.append(packing(layer, cache.shape[2]))
        except PackingUnknown:
            return None
    return Packings.of(found)
