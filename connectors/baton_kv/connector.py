"""vLLM's `KVConnectorBase_V1`, thin: it translates vLLM's words into the two roles' and back.

This is the one file of the connector that imports vLLM.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import RequestStatus

from baton_kv.blocks import KVBlocks
from baton_kv.contract import TransferOutcome
from baton_kv.entry import MAX_IDENTIFIER, ImageSpan
from baton_kv.fingerprint import fingerprint, weights_digest
from baton_kv.messages import StepJobs
from baton_kv.scheduler_role import SchedulerRole
from baton_kv.secret import store_secret
from baton_kv.settings import ConnectorSettings
from baton_kv.stores.factory import open_store
from baton_kv.worker_role import Finished, WorkerRole
from baton_latent.contract import MEMORY_KEY

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)
OWN_END = (
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_REPETITION,
)
MAX_OUTCOMES = 1000


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Scheduler to worker, in vLLM's envelope."""

    jobs: StepJobs = field(default_factory=StepJobs)


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """Worker to scheduler, in vLLM's envelope."""

    outcomes: list[TransferOutcome] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, WorkerReport)
        return WorkerReport(self.outcomes + other.outcomes)


@dataclass
class TransferStats(KVConnectorStats):
    """Worker to whoever watches the engine: how its jobs ended, in vLLM's envelope.

    `data` is `{"outcomes": [TransferOutcome.message(), ...]}`, and of the time since the last report: for a
    model with latent steps `"latent"`, `{"steps": int, "seconds": float}`; for one that takes images
    `"encoded"`, how many images its encoder ran for. It crosses a process as plain values.
    """

    data: dict[str, Any] = field(default_factory=dict)

    @property
    def outcomes(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.data.setdefault("outcomes", [])
        return found

    def reset(self) -> None:
        self.data = {"outcomes": []}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        both = [*self.outcomes, *other.data.get("outcomes", [])]
        thoughts = [data["latent"] for data in (self.data, other.data) if "latent" in data]
        latent = {name: sum(thought[name] for thought in thoughts) for name in ("steps", "seconds")}
        encoded = sum(data.get("encoded", 0) for data in (self.data, other.data))
        return TransferStats(
            {"outcomes": both[-MAX_OUTCOMES:]}
            | ({"latent": latent} if thoughts else {})
            | ({"encoded": encoded} if encoded else {})
        )

    def reduce(self) -> dict[str, int | float]:
        rows = self.outcomes
        return {
            f"{kind} {name}": sum(row[name] for row in rows if row["kind"] == kind and not row["failure"])
            for kind in ("load", "save")
            for name in ("tokens", "bytes")
        } | {"failed": sum(1 for row in rows if row["failure"])}

    def is_empty(self) -> bool:
        return not self.outcomes and "latent" not in self.data and "encoded" not in self.data


class BatonConnector(KVConnectorBase_V1):
    """Leaves a finished request's KV behind as an entry, and lets others start from it.

    Raises:
        ValueError: at the engine's start, for a model or a layout whose KV it cannot move exactly.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _refuse_what_cannot_be_exact(vllm_config, kv_cache_config)
        settings = ConnectorSettings.model_validate(self._kv_transfer_config.kv_connector_extra_config)
        self._store = open_store(settings.store, budget=settings.budget, fsync=settings.fsync)
        self._secret = store_secret(Path(settings.store.partition(":")[2]))
        self._verify = settings.verify
        self._fingerprint = fingerprint(facts_of(vllm_config, kv_cache_config))
        self._scheduler: SchedulerRole | None = None
        self._worker: WorkerRole | None = None
        self._finished = Finished()
        self._latent_told = {"steps": 0.0, "seconds": 0.0}
        self._encoded = 0
        self._block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerRole(self._store, self._secret, self._fingerprint, self._block_size)

    # The worker's process.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        layers = list(kv_caches.values())
        if (memory := self._latent_memory()) is not None:  # what a latent step starts from goes with the KV
            layers += memory.layers_beside(layers[0], self._block_size)
        blocks = KVBlocks(layers)
        self._worker = WorkerRole(self._store, self._secret, self._fingerprint, blocks, verify=self._verify)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        if self._worker is not None and isinstance(metadata, StepMetadata):
            self._worker.start(metadata.jobs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads come to their end between steps."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Nothing: a request's blocks are saved when it is over."""

    def wait_for_save(self) -> None:
        """Nothing: the scheduler holds the blocks until the save is reported."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._worker is None:
            return None, None
        self._finished = self._worker.poll()
        return self._finished.saved or None, self._finished.loaded or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._finished.failed_blocks

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        outcomes = self._finished.outcomes
        return WorkerReport(outcomes) if outcomes else None

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        found = self._finished.outcomes if self._scheduler is None else self._scheduler.told()
        outcomes = [outcome.message() for outcome in found]
        latent = self._thought_since()
        encoded, self._encoded = self._encoded, 0
        if not outcomes and latent is None and not encoded:
            return None
        return TransferStats(
            {"outcomes": outcomes}
            | ({"latent": latent} if latent else {})
            | ({"encoded": encoded} if encoded else {})
        )

    def _latent_memory(self) -> Any:
        """The model's seeds, where it is one that thinks; see `baton_latent.memory.LatentMemory`."""
        return self._vllm_config.compilation_config.static_forward_context.get(MEMORY_KEY)

    def _thought_since(self) -> dict[str, float] | None:
        """Latent steps and their seconds since the last time; None: none."""
        memory = self._latent_memory() if self._worker is not None else None
        now = memory.counts() if memory is not None else self._latent_told
        before, self._latent_told = self._latent_told, now
        return {name: now[name] - before[name] for name in now} if now["steps"] > before["steps"] else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return TransferStats(data or {"outcomes": []})

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()

    # The scheduler's process.

    @property
    def _planning(self) -> SchedulerRole:
        assert self._scheduler is not None
        return self._scheduler

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        images = images_of(request)
        if images is None:
            return 0, False
        prompt = request.prompt_token_ids or []
        params = request.kv_transfer_params
        matched = self._planning.matched(request.request_id, params, prompt, num_computed_tokens, images)
        return matched, matched > 0

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if num_external_tokens > 0:
            self._planning.allocated(request.request_id, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        self._encoded += sum(map(len, scheduler_output.scheduled_encoder_inputs.values()))
        return StepMetadata(self._planning.step())

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self._planning.report(report.outcomes)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        images = images_of(request)
        return self._planning.finished(
            request.request_id,
            request.kv_transfer_params,
            tokens=list(request.all_token_ids),
            prompt=request.num_prompt_tokens,
            computed=request.num_computed_tokens,
            block_ids=block_ids,
            whole=_came_to_its_end(request) and images is not None,
            images=images or (),
        )


def _came_to_its_end(request: Request) -> bool:
    """Also when it was aborted, if it may have met a stop string: those are found outside the engine,
    which then aborts the request. So a request that was given up is saved too, as far as it came.
    """
    if request.status is RequestStatus.FINISHED_ABORTED:
        return bool(request.sampling_params is not None and request.sampling_params.stop)
    return request.status in OWN_END


def images_of(request: Request) -> tuple[ImageSpan, ...] | None:
    """The images that a request's token ids stand for; None: they stand for more than that.

    An image is known by the identifier that the engine's own caches know it by: the `uuid` it came with, or
    a hash of its pixels. Other media, embeddings and LoRA adapters are told by neither.
    """
    features = request.mm_features
    if request.prompt_embeds is not None or request.lora_request:
        return None
    if any(feature.modality != "image" for feature in features):
        return None
    if not all(0 < len(feature.identifier) <= MAX_IDENTIFIER for feature in features):
        return None
    spans = (
        ImageSpan(feature.identifier, feature.mm_position.offset, feature.mm_position.length)
        for feature in features
    )
    return tuple(sorted(spans, key=lambda span: span.offset))


def _refuse_what_cannot_be_exact(config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    parallel = config.parallel_config
    if parallel.tensor_parallel_size * parallel.pipeline_parallel_size > 1:
        raise ValueError("baton_kv: tensor and pipeline parallelism above 1 are not supported yet")
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if len(specs) != 1 or type(specs[0]) is not FullAttentionSpec or _is_windowed(specs[0]):
        raise ValueError("baton_kv: only models whose layers all attend to everything are supported")
    if not current_platform.is_cpu():
        raise ValueError("baton_kv: measured on CPUs only so far; copies on a GPU are not yet ordered")
    policy = config.kv_transfer_config.kv_load_failure_policy if config.kv_transfer_config else None
    if policy != "recompute":
        raise ValueError('baton_kv: set "kv_load_failure_policy": "recompute" in the KV transfer config')


def _is_windowed(spec: FullAttentionSpec) -> bool:
    """Layers with a window, promoted to full attention for the sake of one pool."""
    return spec.sliding_window is not None or spec.attention_chunk_size is not None


def facts_of(config: VllmConfig, kv_cache_config: KVCacheConfig) -> dict[str, Any]:
    """Everything that decides what the bytes of a block mean."""
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
    """What the engine's own settings make of an image before its encoder sees it."""
    settings = model.multimodal_config
    if settings is None:
        return None
    return repr((settings.mm_processor_kwargs, settings.media_io_kwargs))


def _long_rope(model: Any) -> int | None:
    """Models with two sets of rotary factors choose between them by the engine's longest context."""
    return int(model.max_model_len) if "long_factor" in repr(model.hf_config) else None


def _packing(dtype: torch.dtype, spec: Any, kv_dtype: str) -> str:
    """How the attention backend packs a block; on CPUs it follows the instruction set."""
    if not current_platform.is_cpu():
        return "plain"
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return str(_get_attn_isa(dtype, spec.block_size, spec.head_size, kv_dtype))
