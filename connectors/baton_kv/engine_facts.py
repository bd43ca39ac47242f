"""Read the facts for a fingerprint from vLLM's configuration, and refuse unsupported configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, UniformTypeKVCacheSpecs

from baton_kv.blocks import HeadShard, LayoutRefused
from baton_kv.fingerprint import weights_digest
from baton_kv.known_digests import KnownDigests

NOT_OF_A_SLAB = frozenset(
    ("num_kv_heads", "max_tp_shards", "dcp_sharded", "page_size_padded", "block_stride_alignment")
)
"""Fields of a spec that do not change what a slab holds: how heads are shared out, where blocks begin."""

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def require_supported(
    config: VllmConfig, kv_cache_config: KVCacheConfig, *, unproven_devices: bool = False
) -> None:
    """Refuse a model or configuration whose KV the connector cannot move exactly.

    Args:
        config: the engine's configuration.
        kv_cache_config: its KV cache.
        unproven_devices: whether NVIDIA GPUs are allowed, on which the connector has never run.

    Raises:
        ValueError: the configuration is not supported; the message says what to change.
    """
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
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if len(specs) == 1 and type(specs[0]) is UniformTypeKVCacheSpecs:
        raise ValueError(
            "baton_kv: layers whose KV heads or head sizes differ are not supported; with speculative "
            "decoding use a draft model with the KV heads and head size of the model, or n-grams"
        )
    if any(isinstance(spec, MLAAttentionSpec) for spec in specs):
        raise ValueError(
            "baton_kv: models with MLA (DeepSeek) are not supported: with their KV loaded, vLLM's CPU "
            "backend gave other answers; set handoff = false"
        )
    if len(specs) != 1 or not _is_stored_whole(specs[0]):
        raise ValueError(
            "baton_kv: only models with full attention are supported, or with full attention beside sliding "
            "windows; not windows or running states alone, and no chunked attention"
        )
    if not current_platform.is_cpu() and not (unproven_devices and current_platform.is_cuda()):
        raise ValueError(
            "baton_kv: measured on CPUs only. For NVIDIA GPUs it was written to vLLM's contract and never "
            "run: to try it set handoffs.unproven_devices = true (with plain vLLM unproven_devices in "
            "kv_connector_extra_config). Other devices are not supported"
        )
    policy = config.kv_transfer_config.kv_load_failure_policy if config.kv_transfer_config else None
    if policy != "recompute":
        raise ValueError('baton_kv: set "kv_load_failure_policy": "recompute" in the KV transfer config')


def _is_stored_whole(spec: Any) -> bool:
    """Return whether the KV of every token stays in the pool as long as its request runs.

    vLLM stores windowed layers beside full ones as full attention if a connector is no `SupportsHMA`
    (`vllm.v1.core.kv_cache_utils.unify_hybrid_kv_cache_specs`); the layers keep their windows.
    """
    return type(spec) is FullAttentionSpec and spec.attention_chunk_size is None


def facts_of(
    config: VllmConfig, kv_cache_config: KVCacheConfig, known: KnownDigests | None = None
) -> dict[str, Any]:
    """Return all facts that decide what the bytes of a block mean, by name; `fingerprint` digests them.

    Args:
        config: the engine's configuration.
        kv_cache_config: its KV cache.
        known: digests of weights that were computed before.

    Raises:
        ValueError: the weights cannot be identified.
    """
    model, group = config.model_config, kv_cache_config.kv_cache_groups[0]
    spec = group.kv_cache_spec
    return {
        "vllm": vllm.__version__,
        "weights": weights_digest(model.model, model.revision, known),
        "draft": _draft_digest(config, known),
        "revision": model.revision,
        "quantization": model.quantization,
        "dtype": str(model.dtype),
        "kv_dtype": config.cache_config.cache_dtype,
        "spec": _spec_facts(spec),
        "platform": current_platform.device_name,
        "packing": _packing(model.dtype, spec, config.cache_config.cache_dtype),
        "hf_overrides": repr(model.hf_overrides),
        "load_format": str(config.load_config.load_format),
        "long_rope": _long_rope(model),
        "images": _image_settings(model),
    }


def _draft_digest(config: VllmConfig, known: KnownDigests | None) -> str | None:
    """Return the digest of the draft model's weights; None where drafts need no weights but the model's own.

    The KV of a draft model's layers is saved with the model's.
    """
    draft = config.speculative_config.draft_model_config if config.speculative_config else None
    if draft is None or draft.model == config.model_config.model:
        return None
    return weights_digest(draft.model, draft.revision, known)


def _spec_facts(spec: Any) -> dict[str, str]:
    """Return all that a spec says but what is of one rank or of the pool alone."""
    names = (field.name for field in fields(spec) if field.name not in NOT_OF_A_SLAB)
    return {"class": type(spec).__name__} | {name: str(getattr(spec, name)) for name in names}


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
    total = config.model_config.get_total_num_kv_heads()
    try:
        return HeadShard.of_rank(total, config.parallel_config.rank, ranks)
    except LayoutRefused as error:
        raise ValueError(f"baton_kv: {error}; set another tensor_parallel_size") from None


def layers_of(
    kv_cache_config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the KV tensors by name, in the model's order; layers that share one tensor appear once.

    Raises:
        ValueError: a layer has no tensor.
    """
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for group in kv_cache_config.kv_cache_groups:
        for name in group.layer_names:
            if name not in kv_caches:
                raise ValueError(f"baton_kv: vLLM has not given the KV cache of layer '{name}'")
            found.setdefault(kv_caches[name].data_ptr(), (name, kv_caches[name]))
    return dict(found.values())


def _image_settings(model: Any) -> str | None:
    """Return the engine's settings for preparing images, as text; None for a model without images."""
    settings = model.multimodal_config
    if settings is None:
        return None
    return repr((settings.mm_processor_kwargs, settings.media_io_kwargs))


def _long_rope(model: Any) -> int | None:
    """Return `max_model_len` if it selects the rotary factors (LongRoPE), else None."""
    return int(model.max_model_len) if "long_factor" in repr(model.hf_config) else None


def _packing(dtype: torch.dtype, spec: Any, kv_dtype: str) -> str:
    """Return how the attention backend packs a block; on CPUs this depends on the instruction set."""
    if not current_platform.is_cpu():
        return "plain"
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return str(_get_attn_isa(dtype, spec.block_size, spec.head_size, kv_dtype))
