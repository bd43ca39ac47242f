"""A scene's mask as a person would compute it by hand: rasterio, numpy and one plain torch forward a tile.

Written apart from the product, so that the product can be held against it: of `baton_geo` it takes the model
(its parity with the published source is tested elsewhere) and the card, and none of the raster code. Scenes have
to fit into memory.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from rasterio.enums import ColorInterp
from rasterio.errors import NotGeoreferencedWarning
from rasterio.io import DatasetReader, MemoryFile
from safetensors.torch import load_file

from baton_geo.card import Card
from baton_geo.prithvi import PrithviConfig, PrithviSegmenter, load

TILES_A_FORWARD = 8
TIE = 1 / 255
"""Difference of two probabilities that may be turned round: engines give them as bytes."""
HALF_TIE = 0.02
"""The same of an engine that computes in half precision, as vLLM does where nothing else is said."""


def torch_mask(model_folder: Path, content: bytes) -> npt.NDArray[np.uint8]:
    """Class of each pixel, the card's `mask_nodata` where it is nodata, transparent, or a band NaN or infinite.

    Args:
        model_folder: config.json with a `baton_geo` table, and model.safetensors; a model that wants no dates and
            no place.
        content: a GeoTIFF or PNG whose bands have the card's names, or come in its order.

    Returns:
        (height, width) uint8.
    """
    chances, valid = torch_chances(model_folder, content)
    mask: npt.NDArray[np.uint8] = chances.argmax(axis=0).astype(np.uint8)
    mask[~valid] = _card(model_folder).mask_nodata
    return mask


def as_torch_says(
    mask: npt.NDArray[np.generic], model_folder: Path, content: bytes, tie: float = TIE
) -> bool:
    """Whether a mask is torch's, but for pixels where torch itself finds two classes equally likely.

    Equally, that is, within a byte: engines give probabilities as bytes, and some processors round otherwise where
    an engine computes other batches than `torch_mask` does.
    """
    chances, valid = torch_chances(model_folder, content)
    expected = torch_mask(model_folder, content)
    rows, columns = np.nonzero(mask != expected)
    if not valid[rows, columns].all():
        return False
    found = np.asarray(mask[rows, columns], np.intp)
    if (found >= len(chances)).any():
        return False
    ahead = chances[expected[rows, columns], rows, columns] - chances[found, rows, columns]
    return bool((ahead < tie).all())


def torch_chances(
    model_folder: Path, content: bytes
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """The blended probabilities, (classes, height, width), and where pixels are known, (height, width)."""
    card = _card(model_folder)
    model = _model(model_folder)
    scaled, valid = _scene(card, content)
    height, width = valid.shape
    side = card.tile
    padded = np.pad(
        scaled, ((0, 0), (0, 0), (0, max(0, side - height)), (0, max(0, side - width))), mode="edge"
    )
    corners = [(y, x) for y in _steps(height, card) for x in _steps(width, card)]
    total = np.zeros((len(card.classes), *padded.shape[-2:]))
    weight = np.zeros(padded.shape[-2:])
    ramp = np.outer(_ramp(min(side, height), card), _ramp(min(side, width), card))
    rows, columns = ramp.shape
    for first in range(0, len(corners), TILES_A_FORWARD):
        some = corners[first : first + TILES_A_FORWARD]
        tiles = np.stack([padded[:, :, y : y + side, x : x + side] for y, x in some])
        with torch.inference_mode():
            chances = model(torch.from_numpy(tiles)).double().softmax(dim=1).numpy()
        for (y, x), tile in zip(some, chances, strict=True):
            total[:, y : y + rows, x : x + columns] += tile[:, :rows, :columns] * ramp
            weight[y : y + rows, x : x + columns] += ramp
    return (total[:, :height, :width] / weight[:height, :width]), valid


def _card(folder: Path) -> Card:
    return Card.model_validate(json.loads((folder / "config.json").read_text())["baton_geo"])


def _model(folder: Path) -> PrithviSegmenter:
    model = PrithviSegmenter(PrithviConfig.from_hf(json.loads((folder / "config.json").read_text())))
    load(model, load_file(folder / "model.safetensors").items())
    model.eval().float()
    return model


def _scene(card: Card, content: bytes) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    """Normalised pixels (bands, frames, height, width), 0 where unknown; and where they are known."""
    with warnings.catch_warnings(), MemoryFile(content) as memory:
        warnings.simplefilter("ignore", NotGeoreferencedWarning)
        file = memory.open()
        raw = file.read([1 + band for band in _bands(card, file)])
        nodata = card.nodata if file.nodata is None else file.nodata
        clear = np.ones(raw.shape[1:], np.bool_)
        if ColorInterp.alpha in file.colorinterp:
            clear = file.read(1 + file.colorinterp.index(ColorInterp.alpha)) > 0
        file.close()
    valid = np.isfinite(raw).all(axis=0) & clear
    if nodata is not None:  # 0 is a value too, unless all bands are 0
        valid &= (raw != 0).any(axis=0) if nodata == 0 else (raw != nodata).all(axis=0)
    scale = card.scale if np.issubdtype(raw.dtype, np.integer) else card.float_scale
    mean = np.array([band.mean for band in card.bands] * card.frames)[:, None, None]
    std = np.array([band.std for band in card.bands] * card.frames)[:, None, None]
    with np.errstate(invalid="ignore"):
        scaled = (raw.astype(np.float64) * scale + card.offset - mean) / std
    scaled[:, ~valid] = 0
    stepped = scaled.reshape(card.frames, len(card.bands), *valid.shape).swapaxes(0, 1)
    return np.ascontiguousarray(stepped, np.float32), valid


def _bands(card: Card, file: DatasetReader) -> list[int]:
    """Numbers from 0 of the card's bands, one time step after the other."""
    names = [(name or "").casefold() for name in file.descriptions]
    known = [{band.name.casefold(), *(alias.casefold() for alias in band.aliases)} for band in card.bands]
    found = [[number for number, name in enumerate(names) if name in wanted] for wanted in known]
    if all(found):
        return [places[frame] for frame in range(card.frames) for places in found]
    return list(range(len(card.bands) * card.frames))


def _steps(length: int, card: Card) -> list[int]:
    """First pixels of the tiles along an axis; the last tile is moved back to the edge."""
    places = [0]
    while places[-1] + card.tile < length:
        places.append(min(places[-1] + card.tile - card.overlap, length - card.tile))
    return places


def _ramp(length: int, card: Card) -> npt.NDArray[np.float64]:
    """1, 2, ... up to one more than the overlap, and down again at the other end."""
    to_an_end = np.minimum(np.arange(length), np.arange(length)[::-1])
    return np.asarray(np.minimum(to_an_end, card.overlap) + 1.0)
