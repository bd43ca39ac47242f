"""The Prithvi-EO family of models in plain torch: configuration, encoder, decoders, checkpoints."""

from baton_geo.prithvi.cards import card_of
from baton_geo.prithvi.checkpoint import load
from baton_geo.prithvi.config import DecoderConfig, PrithviConfig
from baton_geo.prithvi.model import PrithviEmbedder, PrithviSegmenter

__all__ = ["DecoderConfig", "PrithviConfig", "PrithviEmbedder", "PrithviSegmenter", "card_of", "load"]
