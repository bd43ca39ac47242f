"""Run a Prithvi segmentation model as a multimodal pooling model of vLLM: tiles in, class scores out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import BatchFeature
from vllm.config import VllmConfig
from vllm.config.multimodal import MultiModalDummyOptions
from vllm.inputs import ModalityData, MultiModalDataDict, MultiModalInput, mm_input
from vllm.model_executor.layers.pooler import IdentityPooler
from vllm.model_executor.models.interfaces import IsAttentionFree, MultiModalEmbeddings, SupportsMultiModal
from vllm.model_executor.models.interfaces_base import attn_type
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange
from vllm.multimodal.parse import ModalityDataItems, MultiModalDataItems, MultiModalDataParser
from vllm.multimodal.processing import (
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
    ProcessorInputs,
    PromptUpdate,
    TimingContext,
)
from vllm.sequence import IntermediateTensors

from baton_geo.prithvi import PrithviConfig, PrithviEmbedder, PrithviSegmenter, card_of, load
from baton_geo.raster.messages import CARRIED, STRIP, Carried, tile_bytes
from baton_geo.scenes import normalised

MODALITY = "image"
TILES, CARRIED_AS, SCALING = "tiles", "carried", "scaling"
TIMES, PLACES = "temporal_coords", "location_coords"
AT_ONCE = 4  # tiles; more gain nothing on a CPU, and take memory


class StripShapes:
    """The shapes of the fields of a strip of a model's tiles, which `scenes.prompt` made.

    Attributes:
        tile: (bands, frames, side, side).
        fields: of the fields whose shape is always the same.

    Raises:
        ValueError: the card's tile does not suit the model.
    """

    def __init__(self, config: PrithviConfig, tile: int) -> None:
        self.tile = (config.in_chans, config.num_frames, tile, tile)
        config.check_pixels((1, *self.tile))
        self.fields: dict[str, tuple[int, ...]] = {SCALING: (3 * config.in_chans * config.num_frames,)}
        if "time" in config.coords_encoding:
            self.fields[TIMES] = (config.num_frames, 2)
        if "location" in config.coords_encoding:
            self.fields[PLACES] = (2,)

    @property
    def names(self) -> set[str]:
        """The fields that every strip has."""
        return {TILES, CARRIED_AS, *self.fields}

    def empty(self) -> dict[str, torch.Tensor]:
        """Make a strip of zeros of the greatest length: the worst case."""
        tiles = torch.zeros((STRIP, self._bytes(CARRIED[0])), dtype=torch.uint8)
        fields = {name: torch.zeros(shape) for name, shape in self.fields.items()}
        return {TILES: tiles, CARRIED_AS: torch.tensor([0]), **fields}

    def _bytes(self, carried: Carried) -> int:
        return sum(tile_bytes(self.tile[0] * self.tile[1], self.tile[-1], carried))

    def check(self, data: Mapping[str, torch.Tensor]) -> None:
        """Refuse a strip on which the model would fail inside the engine.

        Raises:
            ValueError: a field is missing, unknown, of a wrong shape or dtype, or not finite.
        """
        if set(data) != self.names:
            raise ValueError(f"a strip has the fields {sorted(self.names)}, not {sorted(map(str, data))}")
        _check(CARRIED_AS, data[CARRIED_AS], (1,), torch.int64)
        if not 0 <= (number := int(data[CARRIED_AS].numpy()[0])) < len(CARRIED):
            raise ValueError(f"{CARRIED_AS}: must be from 0 to {len(CARRIED) - 1}, not {number}")
        for name, shape in self.fields.items():
            _check(name, data[name], shape, torch.float32)
            _check_finite(name, data[name].numpy())
        tiles, each = data[TILES], self._bytes(CARRIED[number])
        count = tiles.shape[0] if isinstance(tiles, torch.Tensor) and tiles.ndim else STRIP
        count = min(max(count, 1), STRIP)
        _check(TILES, tiles, (count, each), torch.uint8)
        if CARRIED[number] == "float32":
            _check_finite(TILES, tiles.numpy().view(np.float32))


def _check(name: str, value: object, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != shape:
        given = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise ValueError(f"{name}: must be a tensor of shape {shape}, not {given}")
    if value.dtype != dtype:
        wanted, given = (str(one).removeprefix("torch.") for one in (dtype, value.dtype))
        raise ValueError(f"{name}: must be {wanted}, not {given}")


def _check_finite(name: str, numbers: NDArray[np.float32]) -> None:
    if not np.isfinite(numbers).all():  # torch would start a thread pool
        raise ValueError(f"{name}: holds NaN or infinity")


class StripItems(ModalityDataItems[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]):
    """One strip of tiles with its coordinates; a prompt has exactly one."""

    def get_count(self) -> int:
        return 1

    def get(self, index: int) -> Mapping[str, torch.Tensor]:
        if index != 0:
            raise IndexError(index)  # ends iteration over the items
        strip: Mapping[str, torch.Tensor] = self.data
        return strip

    def get_processor_data(self) -> Mapping[str, object]:
        return {}

    def get_passthrough_data(self) -> Mapping[str, object]:
        return self.get(0)


class StripParser(MultiModalDataParser):
    """A parser that takes `{"image": {"tiles": ..., ...}}` and nothing else."""

    def __init__(self, shapes: StripShapes, **options: Any) -> None:
        super().__init__(**options)
        self._shapes = shapes

    def _parse_image_data(self, data: ModalityData[Any]) -> ModalityDataItems[Any, Any] | None:
        if not isinstance(data, dict):
            raise ValueError("an image must be a dict of tensors: tiles, as the IO processor cuts them")
        self._shapes.check(data)
        return StripItems(data, MODALITY)


class PrithviProcessingInfo(BaseProcessingInfo):
    @cached_property
    def shapes(self) -> StripShapes:
        hf_config = self.get_hf_config()
        config = PrithviConfig.from_hf(hf_config.to_dict())
        return StripShapes(config, card_of(hf_config.to_dict()).tile)

    def get_data_parser(self) -> MultiModalDataParser:
        return StripParser(self.shapes, expected_hidden_size=self._get_expected_hidden_size())

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {MODALITY: 1}


class PrithviDummyInputs(BaseDummyInputsBuilder[PrithviProcessingInfo]):
    """Dummy strips of zeros: every tile costs the same, so any is the worst case."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return ""

    def get_dummy_mm_data(
        self,
        seq_len: int,
        mm_counts: Mapping[str, int],
        mm_options: MultiModalDummyOptions,
    ) -> MultiModalDataDict:
        return {MODALITY: self.info.shapes.empty()}


class PrithviProcessor(BaseMultiModalProcessor[PrithviProcessingInfo]):
    """A processor that passes strips through: the model normalises them, and prompts have no placeholders."""

    requires_tokenizer = False

    def _get_mm_fields_config(
        self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        return {name: MultiModalFieldConfig.batched(MODALITY) for name in self.info.shapes.names}

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargsItems,
    ) -> Sequence[PromptUpdate]:
        return []

    def apply(self, inputs: ProcessorInputs, timing_ctx: TimingContext) -> MultiModalInput:
        strip = inputs.mm_data_items[MODALITY].get(0)
        features = BatchFeature({name: value.unsqueeze(0) for name, value in strip.items()})
        fields = self._get_mm_fields_config(features, inputs.hf_processor_mm_kwargs)
        algorithm = self.info.ctx.get_mm_config().mm_hasher_algorithm
        serial = inputs.prompt if isinstance(inputs.prompt, list) and inputs.prompt else [0]
        return mm_input(
            prompt_token_ids=serial,
            mm_kwargs=MultiModalKwargsItems.from_hf_inputs(features, fields),
            mm_hashes=inputs.get_mm_hashes(self.info.model_id, algorithm),
            mm_placeholders={MODALITY: [PlaceholderRange(offset=0, length=0)]},
        )


@attn_type("attention_free")
@MULTIMODAL_REGISTRY.register_processor(
    PrithviProcessor, info=PrithviProcessingInfo, dummy_inputs=PrithviDummyInputs
)
class PrithviForSegmentation(nn.Module, IsAttentionFree, SupportsMultiModal):
    """A Prithvi model behind vLLM's interface: a prompt is a strip of tiles, an output their probabilities or
    values.

    No exception may leave `forward`: it would kill the engine for every client. Input that could raise one is
    refused where strips are parsed (`StripShapes`).
    """

    supports_multimodal_raw_input_only = True
    is_pooling_model = True

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        if modality.startswith("image"):
            return None
        raise ValueError("Only image modality is supported")

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        model_config = vllm_config.model_config
        self.config = PrithviConfig.from_hf(model_config.hf_config.to_dict())
        alone = self.config.decoder is None
        self.model = PrithviEmbedder(self.config) if alone else PrithviSegmenter(self.config)
        self.pooler = IdentityPooler()
        self._values = self.config.decoder is None or self.config.decoder.task == "regression"
        self._hidden_size = model_config.get_hidden_size()
        self._dtype = model_config.dtype
        self._shape = StripShapes(self.config, card_of(model_config.hf_config.to_dict()).tile).tile
        self._at_once = max(AT_ONCE, vllm_config.scheduler_config.max_num_seqs)

    def embed_input_ids(
        self,
        input_ids: Tensor,
        multimodal_embeddings: MultiModalEmbeddings | None = None,
        *,
        is_multimodal: Tensor | None = None,
    ) -> Tensor:
        """Return zeros: a prompt's only token is a serial number, which the model does not use."""
        return torch.zeros((input_ids.shape[0], self._hidden_size), device=input_ids.device)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
        tiles: Tensor | Sequence[Tensor] | None = None,
        carried: Tensor | None = None,
        scaling: Tensor | None = None,
        temporal_coords: Tensor | None = None,
        location_coords: Tensor | None = None,
        **kwargs: object,
    ) -> Tensor:
        """Compute the classes' probabilities, or the values, of every tile of the step.

        Args:
            input_ids: (tokens,): one per strip.
            positions: (tokens,).
            intermediate_tensors: unused; there is one pipeline stage.
            tiles: (tiles, bytes) of each strip; one tensor if all have one shape. None in vLLM's dry runs.
            carried: (strips, 1) types of the numbers, see `CARRIED`.
            scaling: (strips, 3 * C * T), see `SceneInfo`.
            temporal_coords: (strips, T, 2) [year, day of year] for models that encode time.
            location_coords: (strips, 2) [latitude, longitude] for models that encode place.

        Returns:
            (strips, tiles, classes, H, W) uint8 probabilities, 255 being 1; a pixel without finite scores has
            0 for all classes. Of a regression (strips, tiles, 1, H, W) float32 values, of an encoder alone
            (strips, tiles, D, h, w) float32 vectors. What is beyond a shorter strip's end is 0. In a dry run
            (tokens, hidden size) zeros.
        """
        if tiles is None or carried is None or scaling is None:
            return torch.zeros((positions.shape[-1], self._hidden_size), device=positions.device)
        lengths, most = [len(strip) for strip in tiles], self._at_once
        starts = list(accumulate(lengths, initial=0))
        strips = list(zip(tiles, carried[:, 0].tolist(), scaling, starts[:-1], strict=True))
        repeats = torch.tensor(lengths, device=positions.device)
        times, places = (
            None if each is None else each.repeat_interleave(repeats, dim=0)
            for each in (temporal_coords, location_coords)
        )
        done = []
        for first in range(
            0, starts[-1], most
        ):  # few tiles are floats at once, however many strips there are
            parts = [
                normalised(strip[max(first - start, 0) : first + most - start], number, line, self._shape)
                for strip, number, line, start in strips
                if first - len(strip) < start < first + most
            ]
            own = (None if each is None else each[first : first + most] for each in (times, places))
            done.append(self._answers(torch.cat(parts).to(self._dtype), *own))
        answers = torch.cat(done)
        if len(set(lengths)) == 1:
            return answers.unflatten(0, (len(lengths), lengths[0]))
        return pad_sequence(answers.split(lengths), batch_first=True)

    def _answers(self, pixels: Tensor, times: Tensor | None, places: Tensor | None) -> Tensor:
        scores: Tensor = self.model(pixels, times, places)
        if self._values:
            return scores.float()
        chances = scores.float().softmax(dim=1).nan_to_num(nan=0.0)
        return chances.mul_(255).add_(0.5).to(torch.uint8)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return {f"model.{name}" for name in load(self.model, weights)}
