"""Register Prithvi models and their configuration with vLLM; no other module touches its registries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig
from vllm import ModelRegistry
from vllm.transformers_utils.config import get_config_parser, register_config_parser
from vllm.transformers_utils.config_parser_base import ConfigParserBase

from baton_geo.scenes import SERIALS

MODEL_TYPE = "baton_prithvi"
ARCHITECTURES = ("BatonPrithviSegmenter", "PrithviGeoSpatialMAE")
"""Our own name, and the one that vLLM used for such models before TerraTorch took them over."""
MODEL_CLASS = "baton_geo.model:PrithviForSegmentation"


class PrithviHfConfig(PretrainedConfig):
    """A published config.json as transformers reads it; `PrithviConfig` parses its contents."""

    model_type = MODEL_TYPE

    def __init__(self, pretrained_cfg: dict[str, Any] | None = None, **others: Any) -> None:
        published = pretrained_cfg or {}
        others.setdefault("hidden_size", published.get("embed_dim", 1))
        others.setdefault("num_attention_heads", published.get("num_heads", 1))
        others.setdefault("num_hidden_layers", published.get("depth", 1))
        others.setdefault("vocab_size", SERIALS + 1)  # a prompt is one token: a serial number
        others.setdefault("max_position_embeddings", 1)
        self.pretrained_cfg = published
        super().__init__(**others)


class PrithviConfigParser(ConfigParserBase):
    """The parser for `--config-format baton_prithvi`: published models, as they are.

    Without it, transformers takes them for timm models and requires timm.
    """

    def parse(
        self,
        model: str | Path,
        trust_remote_code: bool,
        revision: str | None = None,
        code_revision: str | None = None,
        **options: Any,
    ) -> tuple[dict[str, Any], PretrainedConfig]:
        read, _ = PretrainedConfig.get_config_dict(model, revision=revision)
        read["model_type"] = MODEL_TYPE
        if not set(read.get("architectures") or ()) <= set(ARCHITECTURES):
            read["architectures"] = [ARCHITECTURES[0]]  # `Terratorch` would ask for that package
        return read, PrithviHfConfig.from_dict(read)


def register_model() -> None:
    """Register configuration and model; a second call changes nothing."""
    CONFIG_MAPPING.register(MODEL_TYPE, PrithviHfConfig, exist_ok=True)
    if not _parser_known():
        register_config_parser(MODEL_TYPE)(PrithviConfigParser)
    for architecture in ARCHITECTURES:
        if architecture not in ModelRegistry.models:
            ModelRegistry.register_model(architecture, MODEL_CLASS)


def _parser_known() -> bool:
    try:
        return isinstance(get_config_parser(MODEL_TYPE), PrithviConfigParser)
    except ValueError:
        return False
