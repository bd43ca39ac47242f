"""Read the facts for a fingerprint from vLLM's configuration, and refuse unsupported configurations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec

from baton_kv.fingerprint import weights_digest

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def require_supported(config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Refuse a model or configuration whose KV the connector cannot move exactly.

    Raises:
        ValueError: the configuration is not supported; the message says what to change.
    """
    parallel = config.parallel_config
    if parallel.tensor_parallel_size * parallel.pipeline_parallel_size > 1:
        raise ValueError(
            "baton_kv: tensor and pipeline parallelism above 1 are not supported; set both sizes to 1"
        )
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if len(specs) != 1 or type(specs[0]) is not FullAttentionSpec or _is_windowed(specs[0]):
        raise ValueError(
            "baton_kv: only models with full attention in every layer are supported, not sliding windows"
        )
    if not current_platform.is_cpu():
        raise ValueError(
            "baton_kv: only CPUs are supported: copies on a GPU are not yet ordered with the model's stream"
        )
    policy = config.kv_transfer_config.kv_load_failure_policy if config.kv_transfer_config else None
    if policy != "recompute":
        raise ValueError('baton_kv: set "kv_load_failure_policy": "recompute" in the KV transfer config')


def _is_windowed(spec: FullAttentionSpec) -> bool:
    """Return whether layers have a window although vLLM stores them as full attention, to have one pool."""
    return spec.sliding_window is not None or spec.attention_chunk_size is not None


def facts_of(config: VllmConfig, kv_cache_config: KVCacheConfig) -> dict[str, Any]:
    """Return all facts that decide what the bytes of a block mean, by name; `fingerprint` digests them."""
    model, group = config.model_config, kv_cache_config.kv_cache_groups[0]
    spec = group.kv_cache_spec
    return {
        "vllm": vllm.__version__,
        "weights": weights_digest(model.model, model.revision),
        "revision": model.revision,
        "quantization": model.quantization,
        "dtype": str(model.dtype),
        "kv_dtype": config.cache_config.cache_dtype,
        "layers": list(group.layer_names),
        "spec": repr(spec),
        "platform": current_platform.device_name,
        "packing": _packing(model.dtype, spec, config.cache_config.cache_dtype),
        "hf_overrides": repr(model.hf_overrides),
        "load_format": str(config.load_config.load_format),
        "long_rope": _long_rope(model),
        "images": _image_settings(model),
    }


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
