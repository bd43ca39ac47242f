"""Implement vLLM's `KVConnectorBase_V1` by delegating to the scheduler role and the worker role.

Only this module, `engine_facts`, `extension` and `joins.supported` import vLLM.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.platforms import current_platform
from vllm.v1.request import RequestStatus

from baton_kv.blocks import KVBlocks, LayoutRefused
from baton_kv.contract import TransferOutcome
from baton_kv.copies import cores_for
from baton_kv.engine_facts import (
    adapters_proved,
    backends_of,
    cache_groups,
    facts_of,
    head_shard,
    layers_of,
    packings_of,
    require_supported,
    without_adapter_exact,
)
from baton_kv.fingerprint import KnownDigests, fingerprint
from baton_kv.folders import store_secret
from baton_kv.format import MAX_IDENTIFIER, ImageRef, LayerShape
from baton_kv.messages import StepJobs
from baton_kv.scheduler_role import SchedulerRole
from baton_kv.settings import ConnectorSettings
from baton_kv.stores.factory import open_store
from baton_kv.worker_role import FinishedJobs, WorkerRole, savers_for
from baton_latent.contract import MEMORY_KEY

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)
ENDED_BY_ITSELF = (
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_REPETITION,
)
MAX_HELD_SHARE = 0.5
"""Share of the engine's blocks that saves may keep from other requests."""
MAX_OUTCOMES = 1000
"""Outcomes kept in one report; older ones are dropped."""


@dataclass
class StepMetadata(KVConnectorMetadata):
    """The jobs of one step, from the scheduler to the worker.

    Attributes:
        jobs: the jobs.
        idle: whether the step computes nothing.
    """

    jobs: StepJobs = field(default_factory=StepJobs)
    idle: bool = False


@dataclass(frozen=True)
class WorkerLayout(KVConnectorHandshakeMetadata):
    """The layers whose KV a worker holds, from the worker to the scheduler, once at the start.

    Attributes:
        names: name of each layer.
        shapes: shape of each layer in the whole model.
        rows_a_block: rows (kernel blocks) that one block of the pool is split into, by layer; on CPUs each
            packs its K and V by itself.
        backends: from `engine_facts.backends_of`.
        packing_told: whether entries tell how they are packed, so that fingerprints need not.
    """

    names: tuple[str, ...]
    shapes: tuple[LayerShape, ...]
    rows_a_block: tuple[int, ...]
    backends: tuple[tuple[str, ...], ...] = ()
    packing_told: bool = False

    def facts(self) -> list[tuple[str, int, int, int]]:
        """Return name, heads, bytes and rows a block of each layer, for the fingerprint."""
        return [
            (name, shape.heads, shape.slab_bytes, rows)
            for name, shape, rows in zip(self.names, self.shapes, self.rows_a_block, strict=True)
        ]


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """The outcomes of the worker's jobs, from the worker to the scheduler."""

    outcomes: list[TransferOutcome] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, WorkerReport)
        return WorkerReport(self.outcomes + other.outcomes)


@dataclass
class TransferStats(KVConnectorStats):
    """The connector's report to vLLM's stat loggers; plain values, since it crosses a process.

    Attributes:
        data: `{"outcomes": [TransferOutcome.message(), ...]}`, and since the last report: for a model with
            latent steps `"latent": {"steps": int, "seconds": float}`, for a model with an image encoder
            `"encoded": int`, the number of images it encoded.
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
        reports = [data["latent"] for data in (self.data, other.data) if "latent" in data]
        latent = {name: sum(report[name] for report in reports) for name in ("steps", "seconds")}
        encoded = sum(data.get("encoded", 0) for data in (self.data, other.data))
        return TransferStats(
            {"outcomes": both[-MAX_OUTCOMES:]}
            | ({"latent": latent} if reports else {})
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


class PoolPins:
    """Blocks of vLLM's pool that stay as they are although no request uses them."""

    def __init__(self) -> None:
        self.pool: BlockPool | None = None

    def pin(self, block: int) -> None:
        assert self.pool is not None
        self.pool.touch([self.pool.blocks[block]])

    def unpin(self, block: int) -> None:
        assert self.pool is not None
        self.pool.free_blocks([self.pool.blocks[block]])


class BatonConnector(KVConnectorBase_V1, SupportsHMA):
    """Saves finished requests' KV as entries and loads entries into later requests.

    Raises:
        ValueError: the model, its KV layout or the configuration is not supported.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = ConnectorSettings.model_validate(self._kv_transfer_config.kv_connector_extra_config)
        require_supported(vllm_config, kv_cache_config, unproven_devices=settings.unproven_devices)
        self._store = open_store(settings.store, budget=settings.budget, fsync=settings.fsync)
        folder = Path(settings.store.partition(":")[2])
        self._secret = store_secret(folder)
        self._digests = KnownDigests(folder / "weights.json")
        self._verify = settings.verify
        self._resident = int(settings.resident)
        self._adapters = adapters_proved(vllm_config, unproven_devices=settings.unproven_devices)
        self._plain = without_adapter_exact(vllm_config, spare=settings.spare_adapter)
        if not self._plain and role is KVConnectorRole.SCHEDULER:
            logger.warning(
                "baton_kv: with LoRA on CPUs the KV of requests without an adapter is neither saved nor "
                "loaded, as vLLM may compute them with one; if fewer adapters than max_loras are ever "
                "loaded, set spare_adapter in kv_connector_extra_config"
            )
        self._ranks = vllm_config.parallel_config.tensor_parallel_size
        self._scheduler: SchedulerRole | None = None
        self._worker: WorkerRole | None = None
        self._finished = FinishedJobs()
        self._latent_reported = {"steps": 0.0, "seconds": 0.0}
        self._encoded = 0
        self._groups = cache_groups(kv_cache_config)
        self._block_size = next((each for each in self._groups if each.keeps_all), self._groups[0]).tokens
        self._layout: WorkerLayout | None = None
        self._pins = PoolPins()

    @property
    def requires_kv_delivery(self) -> bool:
        """Return False: a save that a preemption prevents is a cache miss later, and nobody waits for it."""
        return False

    # Called in the worker's process.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        config = self._kv_cache_config
        layers, group_of = layers_of(config, kv_caches)
        shard = head_shard(self._vllm_config, config)
        if (memory := self._latent_memory()) is not None:  # hidden states from which latent steps start
            if self._ranks > 1:
                raise ValueError(
                    "baton_kv: latent steps with tensor parallelism are not supported; "
                    "set tensor_parallel_size to 1"
                )
            if len({(group.state, group.tokens) for group in self._groups}) > 1:
                raise ValueError(
                    "baton_kv: latent steps of models with running states, or with blocks of several sizes, "
                    "are not supported; set latent = false"
                )
            first = next(iter(layers.values()))
            if first.shape[0] != config.num_blocks:
                raise ValueError(
                    "baton_kv: latent steps with split blocks are not supported; reduce block_size"
                )
            seeds = memory.layers_like(first, self._block_size)
            layers |= {f"latent.{number}": seed for number, seed in enumerate(seeds)}
            group_of += [0] * len(seeds)
        packings = packings_of(self._vllm_config, layers)
        try:
            blocks = KVBlocks(
                list(layers.values()), config.num_blocks, shard, self._groups, group_of, packings
            )
        except LayoutRefused as error:
            raise ValueError(f"baton_kv: this model's KV cannot be handed over: {error}") from None
        backends = backends_of(self._vllm_config, config)
        told = packings is not None
        self._layout = WorkerLayout(tuple(layers), blocks.shapes, blocks.rows_a_block, backends, told)
        self._worker = WorkerRole(
            self._store,
            self._secret,
            blocks,
            verify=self._verify,
            rank=self._vllm_config.parallel_config.rank,
            ranks=self._ranks,
            resident=self._resident // self._ranks,
            savers=savers_for(len(cores_for(blocks.device)), self._ranks),
        )

    def enable_moves(self, model: torch.nn.Module) -> str | None:
        """Enable moves of KV of several entries into one context; return why KV cannot be moved, or None."""
        assert self._worker is not None
        assert self._layout is not None
        if not current_platform.is_cpu():
            return "KV is moved on CPUs only"
        if len(self._groups) > 1:
            return "the model's layers keep KV of different tokens, or running states"
        from baton_kv.joins.supported import MovesUnsupported, make_mover  # which knows the CPU backend

        try:
            mover, forward = make_mover(model, self._vllm_config, max(self._layout.rows_a_block))
        except MovesUnsupported as error:
            return str(error)
        except Exception as error:  # vLLM's internals: an engine that cannot move KV still serves
            logger.exception("baton_kv: KV cannot be moved")
            return f"looking at its model failed ({type(error).__name__}); the engine's log says more"
        self._worker.enable_moves(mover, forward.run)
        return None

    def warm(self, key: str) -> dict[str, Any] | None:
        """Bring an entry into the worker's memory; see `WorkerRole.warm`."""
        assert self._worker is not None
        found = self._worker.warm(key, self._block_size)
        return found.message() if found is not None else None

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._layout

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Pass the mixtures of the step to the model: this hook alone comes before the forward pass."""
        memory = self._latent_memory()
        if memory is not None and isinstance(kv_connector_metadata, StepMetadata):
            mixtures = kv_connector_metadata.jobs.mixtures
            memory.mix({each.slot: (each.mixture.tokens, each.mixture.weights) for each in mixtures})

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        if self._worker is not None and isinstance(metadata, StepMetadata):
            self._worker.start(metadata.jobs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: loads end between steps."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Do nothing: a request's blocks are saved when it has finished."""

    def wait_for_save(self) -> None:
        """Do nothing: the scheduler holds the blocks until the save is reported."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the requests whose save or load has ended, and those whose load failed.

        Failures are never reported by block: block ids are unique in one cache group only, so vLLM ends an
        engine with several groups that is told of failed blocks.
        """
        if self._worker is None:
            return KVConnectorTransferResults()
        metadata = self._get_connector_metadata()
        if isinstance(metadata, StepMetadata) and metadata.idle:
            self._worker.rest()
        self._finished = self._worker.poll()
        return KVConnectorTransferResults(
            finished_sending=self._finished.saved,
            finished_recving=self._finished.loaded,
            failed_recving=self._finished.failed,
        )

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        outcomes = self._finished.outcomes
        return WorkerReport(outcomes) if outcomes else None

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        found = [] if self._scheduler is None else self._scheduler.take_outcomes()
        outcomes = [outcome.message() for outcome in found]
        latent = self._new_latent_steps()
        encoded, self._encoded = self._encoded, 0
        if not outcomes and latent is None and not encoded:
            return None
        return TransferStats(
            {"outcomes": outcomes}
            | ({"latent": latent} if latent else {})
            | ({"encoded": encoded} if encoded else {})
        )

    def _latent_memory(self) -> Any:
        """Return the model's `baton_latent.memory.LatentMemory`; None for a model without latent steps."""
        return self._vllm_config.compilation_config.static_forward_context.get(MEMORY_KEY)

    def _new_latent_steps(self) -> dict[str, float] | None:
        """Return the latent steps and their seconds since the last call; None if there were none."""
        memory = self._latent_memory() if self._worker is not None else None
        now = memory.counts() if memory is not None else self._latent_reported
        before, self._latent_reported = self._latent_reported, now
        return {name: now[name] - before[name] for name in now} if now["steps"] > before["steps"] else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return TransferStats(data or {"outcomes": []})

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()
        if self._scheduler is not None:
            self._scheduler.shutdown()

    # Called in the scheduler's process.

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._pins.pool = gpu_block_pool

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Compute the fingerprint from what the workers hold; vLLM calls this before the first request.

        Raises:
            ValueError: a worker is missing, or two of them do not hold the same layers.
        """
        layouts = set(metadata.values())
        if (
            len(metadata) != self._ranks
            or len(layouts) != 1
            or not isinstance(layout := layouts.pop(), WorkerLayout)
        ):
            raise ValueError(
                f"baton_kv: {len(metadata)} of {self._ranks} workers have described their KV cache, "
                "or they differ; handoffs cannot be exact"
            )
        facts = facts_of(self._vllm_config, self._kv_cache_config, self._digests)
        facts |= {"layers": layout.facts(), "backends": layout.backends}
        if layout.packing_told:
            facts["packing"] = "told"
        self._scheduler = SchedulerRole(
            self._store,
            self._secret,
            fingerprint(facts),
            self._block_size,
            self._ranks,
            groups=self._groups,
            held_blocks=int(self._kv_cache_config.num_blocks * MAX_HELD_SHARE),
            most_computed=self._vllm_config.scheduler_config.max_num_batched_tokens,
            pins=self._pins,
        )

    @property
    def _planning(self) -> SchedulerRole:
        assert self._scheduler is not None
        return self._scheduler

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        images = images_of(request, adapters=self._adapters, plain=self._plain)
        if images is None:
            return 0, False
        prompt = request.prompt_token_ids or []
        params = request.kv_transfer_params
        matched = self._planning.matched(
            request.request_id,
            params,
            prompt,
            num_computed_tokens,
            images,
            request.cache_salt,
            _adapter_of(request),
        )
        return matched, matched > 0

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if num_external_tokens > 0:
            self._planning.allocated(request.request_id, blocks.get_block_ids(), num_external_tokens)
        elif request.kv_transfer_params:
            params, salt = request.kv_transfer_params, request.cache_salt
            self._planning.placed(params, blocks.get_block_ids(), salt)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        self._encoded += sum(map(len, scheduler_output.scheduled_encoder_inputs.values()))
        if (blocks := scheduler_output.kv_connector_block_state) is not None:
            for request_id, states in blocks.boundary_state_offloads.items():
                self._planning.offered(request_id, states)
        return StepMetadata(self._planning.step(), idle=scheduler_output.total_num_scheduled_tokens == 0)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self._planning.report(report.outcomes)

    def has_pending_block_frees(self) -> bool:
        """Return whether saves will soon free blocks; vLLM then waits instead of preempting a request."""
        return self._planning.blocks_free_soon

    def reset_cache(self) -> bool:
        """Use no KV from before, and save none: vLLM calls this where weights are replaced."""
        self._planning.renew()
        return True

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        images = images_of(request, adapters=self._adapters, plain=self._plain)
        return self._planning.finished(
            request.request_id,
            request.kv_transfer_params,
            tokens=list(request.all_token_ids),
            prompt=request.num_prompt_tokens,
            computed=request.num_computed_tokens,
            block_ids=block_ids,
            whole=_ended_by_itself(request) and images is not None,
            images=images or (),
            adapter=_adapter_of(request),
        )


def _ended_by_itself(request: Request) -> bool:
    """Return whether a request ended by itself, or was aborted but has stop strings.

    vLLM finds stop strings outside the engine and then aborts the request, so an aborted request with stop
    strings cannot be distinguished from one that met them; it is saved as far as it was computed.
    """
    if request.status is RequestStatus.FINISHED_ABORTED:
        return bool(request.sampling_params is not None and request.sampling_params.stop)
    return request.status in ENDED_BY_ITSELF


def _adapter_of(request: Request) -> str | None:
    """Return the name of the LoRA adapter that a request is computed with."""
    return request.lora_request.lora_name if request.lora_request else None


def images_of(request: Request, *, adapters: bool = False, plain: bool = True) -> tuple[ImageRef, ...] | None:
    """Return the images of a request, in order; None if token ids and images do not determine its KV.

    That is the case with other media and prompt embeddings, and with LoRA adapters beside images, whose
    encoder they may change. An image is identified as in vLLM's own caches: by the `uuid` it came with, or a
    hash of its pixels.

    Args:
        adapters: whether the KV of requests with LoRA adapters may be kept, apart for each.
        plain: whether that of requests without one may be kept.
    """
    features = request.mm_features
    kept = adapters and not features if request.lora_request else plain
    if request.prompt_embeds is not None or not kept:
        return None
    if any(feature.modality != "image" for feature in features):
        return None
    if not all(0 < len(feature.identifier) <= MAX_IDENTIFIER for feature in features):
        return None
    refs = (
        ImageRef(feature.identifier, feature.mm_position.offset, feature.mm_position.length)
        for feature in features
    )
    return tuple(sorted(refs, key=lambda ref: ref.offset))
