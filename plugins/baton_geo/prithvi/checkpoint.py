"""Load published weights into a model, in the names and wrappings of `.safetensors` and `.pt` files.

Our parameters have the published names. What differs between checkpoints is wrapping: `state_dict` tables as
Lightning saves them, prefixes such as `module.` and `model.`, 1.0's encoder without its `encoder.`, and the
pre-training's own decoder, which is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from baton_geo.prithvi.model import PrithviEmbedder, PrithviSegmenter

TABLES = ("state_dict", "model_state_dict", "model")
WRAPPERS = ("module.", "model.", "_orig_mod.")
TIMM_WRAPPER = "_timm_module."  # between `encoder.` and the rest of the name
ENCODER = "encoder."
OF_A_SEGMENTER = (ENCODER, "neck.", "decoder.", "head.", "skip.")
# The pre-training's decoder, with the names of 2.0 and of 1.0; then weights that only training uses.
DROPPED = (
    "decoder.decoder_", "decoder.mask_token", "decoder.temporal_embed_dec.", "decoder.location_embed_dec.",
    "decoder_", "mask_token", "temporal_embed_dec.", "location_embed_dec.",
    "criterion.", "aux_heads.",
)  # fmt: skip
POSITIONS = "encoder.pos_embed"
MEASURED = (
    ".running_mean",
    ".running_var",
)  # of batch norms: no parameters, but without them scores are nonsense
LISTED = 5


def _tensors(weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    for name, value in weights:
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, Mapping) and name in TABLES:
            yield from _tensors(value.items())


def own_name(name: str) -> str | None:
    """Return our name of a published checkpoint's tensor; None if a segmentation model does not have it."""
    while name.startswith(WRAPPERS):
        name = name.partition(".")[2]
    name = name.replace(TIMM_WRAPPER, "")
    if name.startswith(DROPPED):
        return None
    return name if name.startswith(OF_A_SEGMENTER) else ENCODER + name


def load(
    model: PrithviSegmenter | PrithviEmbedder, weights: Iterable[tuple[str, Tensor | Mapping[str, Any]]]
) -> set[str]:
    """Copy a checkpoint's weights into a model, in the model's dtype and on its device.

    The checkpoint must have every parameter once, in its shape, and nothing else. A position table that does
    not fit the model's time steps and size is not loaded, as in the published code: the model keeps its own.

    Args:
        weights: names and tensors; a table under `state_dict` counts as its entries (vLLM passes a `.pt` file
            like that).

    Returns:
        The names of the model's tensors that were loaded.

    Raises:
        ValueError: parameters are missing, unknown, given twice or of a wrong shape; the message names them.
    """
    targets = model.state_dict(keep_vars=True)
    loaded: set[str] = set()
    wrong: list[str] = []
    for published, tensor in _tensors(weights):
        name = own_name(published)
        if name is None:
            continue
        if name not in targets or name in loaded:
            wrong.append(f"{published}: {'given twice' if name in loaded else 'unknown'}")
        elif targets[name].shape == tensor.shape:
            with torch.no_grad():
                targets[name].copy_(tensor)
            loaded.add(name)
        elif name != POSITIONS:
            wrong.append(f"{published}: shape {tuple(tensor.shape)}, must be {tuple(targets[name].shape)}")
    measured = {name for name in targets if name.endswith(MEASURED)}
    needed = {name for name, _ in model.named_parameters()} | measured
    wrong += [f"{name}: missing" for name in sorted(needed - loaded)]
    if wrong:
        more = f"; and {len(wrong) - LISTED} more" if len(wrong) > LISTED else ""
        raise ValueError("checkpoint: " + "; ".join(wrong[:LISTED]) + more)
    return loaded
