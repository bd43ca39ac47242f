"""The pipeline that servers' masks are held against, held against the product's raster code without an engine."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from geo.raster.made import read_tile
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file
from support.rasters import RGB, geotiff, opened
from support.torch_pipeline import torch_chances, torch_mask

from baton_geo.card import Card
from baton_geo.prithvi import PrithviConfig, PrithviSegmenter, load
from baton_geo.raster.decoders import Decoders
from baton_geo.raster.messages import SceneRequest


def changed(model: Path, folder: Path, **card: Any) -> Path:
    """The same weights with another card."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    config["baton_geo"] |= card
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def through_the_product(model_folder: Path, content: bytes, scratch: Path) -> NDArray[np.uint8]:
    """The mask by way of a raster child, one torch forward a tile instead of an engine."""
    config = json.loads((model_folder / "config.json").read_text())
    model = PrithviSegmenter(PrithviConfig.from_hf(config)).eval()
    load(model, load_file(model_folder / "model.safetensors").items())
    scratch.mkdir()
    (scratch / "scene").write_bytes(content)
    decoders = Decoders(1, 5, scratch)
    try:
        card = Card.model_validate(config["baton_geo"])
        with decoders.open(scratch / "scene", SceneRequest(card=card)) as scene, torch.inference_mode():
            for tile in range(scene.info.tiles):
                if (pixels := read_tile(scene, tile)) is not None:
                    scene.write(tile, model(torch.from_numpy(pixels)[None])[0].numpy())
            mask = scene.finish().mask
            assert mask is not None
            (classes,), _ = opened(mask.read_bytes())
    finally:
        decoders.close()
    return np.asarray(classes, np.uint8)


def noise(bands: int, height: int, width: int, dtype: str = "uint8", seed: int = 0) -> NDArray[Any]:
    values = np.random.default_rng(seed).integers(0, 256, (bands, height, width))
    return values.astype(dtype)


@pytest.mark.parametrize(
    ("height", "width"), [(64, 64), (200, 333), (30, 150), (150, 30), (1, 1), (65, 64), (120, 121)]
)
def test_every_size_gives_the_same_mask(rgb: Path, tmp_path: Path, height: int, width: int) -> None:
    """Smaller than a tile, a tile, one pixel more, many tiles."""
    content = geotiff(noise(3, height, width, seed=height), RGB)
    expected = torch_mask(rgb, content)
    assert np.array_equal(through_the_product(rgb, content, tmp_path / "a"), expected)
    assert expected.shape == (height, width)


def test_nodata_nan_order_and_alpha_give_the_same_mask(rgb: Path, tmp_path: Path) -> None:
    """Where a band is nodata or not a number, nothing is known; bands are found by their names."""
    marked = noise(3, 100, 140, "int16", 1)
    marked[1, 20:50, 30:90] = -7
    shuffled = geotiff(marked, ("GREEN", "BLUE", "RED"), nodata=-7)
    floats = noise(3, 90, 80, "float32", 2)
    floats[0, :20] = np.nan
    floats[2, 40, 40] = np.inf
    clear = np.concatenate([noise(3, 70, 90, seed=3), np.full((1, 70, 90), 255, "uint8")])
    clear[3, 10:30] = 0
    image = io.BytesIO()
    Image.fromarray(clear.transpose(1, 2, 0), "RGBA").save(image, "PNG")
    for number, content in enumerate((shuffled, geotiff(floats, RGB), image.getvalue())):
        expected = torch_mask(rgb, content)
        assert np.array_equal(through_the_product(rgb, content, tmp_path / str(number)), expected)
        assert {255} < set(np.unique(expected).tolist())


def test_scale_offset_and_overlap_give_the_same_mask(rgb: Path, tmp_path: Path) -> None:
    """Integers are scaled, floats are not, and both are shifted."""
    card = {"scale": 0.01, "float_scale": 1.0, "offset": -3.0, "nodata": 0.0, "overlap": 20}
    folder = changed(rgb, tmp_path / "model", **card)
    integers = noise(3, 130, 170, "uint16", 4) * 100
    integers[:, 40:60, 30:90] = 0
    floats = integers.astype("float32") / 100
    masks = []
    for number, pixels in enumerate((integers, floats)):
        content = geotiff(pixels, RGB)
        masks.append(torch_mask(folder, content))
        assert np.array_equal(through_the_product(folder, content, tmp_path / str(number)), masks[-1])
    assert np.array_equal(masks[0], masks[1])
    assert set(np.unique(masks[0])) == {0, 1, 2, 255}
    assert not np.array_equal(masks[0], torch_mask(rgb, geotiff(floats, RGB, nodata=0)))


def test_the_model_tells_scenes_apart(rgb: Path) -> None:
    """The test of the tests: another scene, or another blend, is another mask."""
    chances, valid = torch_chances(rgb, geotiff(noise(3, 200, 200, seed=5), RGB))
    assert valid.all()
    assert np.allclose(chances.sum(axis=0), 1)
    mask = chances.argmax(axis=0)
    assert np.bincount(mask.ravel(), minlength=3).min() > 0.1 * mask.size
    other = torch_mask(rgb, geotiff(noise(3, 200, 200, seed=6), RGB))
    assert (mask != other).mean() > 0.1
    second, first = np.sort(chances, axis=0)[-2:]
    assert 0.001 < (first - second < 0.01).mean() < 0.1
