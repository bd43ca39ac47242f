"""Load published weights from `.safetensors` and `.pt` files into a model.

Our parameters have the published names. What differs between checkpoints is wrapping: `state_dict` tables as
Lightning saves them, prefixes such as `module.` and `model.`, 1.0's encoder without its `encoder.`, and the
pre-training's own decoder, which is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from baton_geo.prithvi.encoder import PrithviEncoder
from baton_geo.prithvi.model import PrithviSegmenter

TABLES = ("state_dict", "model_state_dict", "model")
WRAPPERS = ("module.", "model.", "_orig_mod.")
TIMM_WRAPPER = "_timm_module."  # between `encoder.` and the rest of the name
ENCODER = "encoder."
OF_A_SEGMENTER = (ENCODER, "decoder.", "head.", "skip.")
# The pre-training's decoder, with the names of 2.0 and of 1.0; then weights that only training uses.
DROPPED = (
    "decoder.decoder_", "decoder.mask_token", "decoder.temporal_embed_dec.", "decoder.location_embed_dec.",
    "decoder_", "mask_token", "temporal_embed_dec.", "location_embed_dec.",
    "criterion.", "aux_heads.",
)  # fmt: skip
POSITIONS = "encoder.pos_embed"
SUFFIXES = frozenset({".pt", ".pth", ".ckpt", ".bin"})
LISTED = 5


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a `.safetensors` or `.pt` (`.pth`, `.ckpt`, `.bin`) file to the CPU.

    A `.pt` file is unpickled with `weights_only`: no code in it is run.

    Raises:
        ValueError: the file is of another kind, is damaged, has more than weights, or has none.
        OSError: the file is missing or not readable.
    """
    if path.suffix == ".safetensors":
        held = _read(path, load_file)
    elif path.suffix in SUFFIXES:
        held = _read(path, lambda file: torch.load(file, map_location="cpu", weights_only=True))
    else:
        raise ValueError(f"{path.name}: neither .safetensors nor .pt")
    found = dict(_tensors(held.items())) if isinstance(held, Mapping) else {}
    if not found:
        raise ValueError(f"{path.name}: holds no table of tensors")
    return found


def _read(path: Path, reader: Callable[[Path], Any]) -> Any:
    try:
        return reader(path)
    except OSError:
        raise
    except Exception as error:  # damaged pickles raise nearly anything
        raise ValueError(f"{path.name}: not a readable checkpoint ({type(error).__name__})") from error


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
    model: PrithviSegmenter | PrithviEncoder, weights: Iterable[tuple[str, Tensor | Mapping[str, Any]]]
) -> set[str]:
    """Copy a checkpoint's weights into a model, in the model's dtype and on its device.

    The checkpoint must have every parameter once, in its shape, and nothing else. A position table that does
    not fit the model's time steps and size is not loaded, as in the published code: the model keeps its own.
    For a `PrithviEncoder` only the encoder's weights of a larger checkpoint are used.

    Args:
        weights: names and tensors; a table under `state_dict` counts as its entries (vLLM passes a `.pt` file
            like that).

    Returns:
        The names of the model's tensors that were loaded.

    Raises:
        ValueError: parameters are missing, unknown, given twice or of a wrong shape; the message names them.
    """
    prefix = ENCODER if isinstance(model, PrithviEncoder) else ""
    targets = {prefix + name: tensor for name, tensor in model.state_dict(keep_vars=True).items()}
    loaded: set[str] = set()
    wrong: list[str] = []
    for published, tensor in _tensors(weights):
        name = own_name(published)
        if name is None or not name.startswith(prefix):
            continue
        if name not in targets or name in loaded:
            wrong.append(f"{published}: {'given twice' if name in loaded else 'unknown'}")
        elif targets[name].shape == tensor.shape:
            with torch.no_grad():
                targets[name].copy_(tensor)
            loaded.add(name)
        elif name != POSITIONS:
            wrong.append(f"{published}: shape {tuple(tensor.shape)}, must be {tuple(targets[name].shape)}")
    needed = {prefix + name for name, _ in model.named_parameters()}
    wrong += [f"{name}: missing" for name in sorted(needed - loaded)]
    if wrong:
        more = f"; and {len(wrong) - LISTED} more" if len(wrong) > LISTED else ""
        raise ValueError("checkpoint: " + "; ".join(wrong[:LISTED]) + more)
    return {name.removeprefix(prefix) for name in loaded}
