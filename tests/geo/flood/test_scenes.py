"""The scene generator: deterministic, well-formed, and with everything in it that it promises."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from training.flood_scenes.scenes import LAND, PHENOMENA, UNKNOWN, WATER, make_scene
from training.flood_tiny.baselines import everything, ndwi
from training.flood_tiny.measure import draw_scenes, figures
from training.flood_tiny.seeds import HELD_OUT_SEEDS, TRAINING_SEEDS, VALIDATION_SEEDS

DIGEST = "cc64bf4e25742d99a2cb2fe872bfa956c2fda907b1a6299e387de4519e6e3252"
SEEDS = range(7, 13)  # between them they have everything


def digest(seed: int, *size: int) -> str:
    scene = make_scene(seed, *size)
    return hashlib.sha256(scene.pixels.tobytes() + scene.label.tobytes()).hexdigest()


def test_same_seed_same_bytes():
    """A seed gives the bytes it gave when the weights were trained."""
    assert digest(3, 96, 128) == DIGEST


def test_other_seed_other_bytes():
    """Two seeds give two scenes."""
    assert digest(4, 96, 128) != digest(3, 96, 128)


@pytest.mark.parametrize("size", [(16, 16), (96, 131), (64, 256)])
def test_shapes_and_values(size: tuple[int, int]):
    """Six bands of int16 and a label of the same size that says land, water or unknown; nothing else."""
    scene = make_scene(9, *size)
    assert scene.pixels.shape == (6, *size)
    assert scene.pixels.dtype == np.int16
    assert scene.label.shape == size
    assert scene.label.dtype == np.uint8
    assert set(np.unique(scene.label)) <= {LAND, WATER, UNKNOWN}
    known = scene.label != UNKNOWN
    assert (scene.pixels[:, ~known] == -9999).all()
    assert (scene.pixels[:, known] >= -2000).all()
    assert (scene.pixels[:, known] <= 20_000).all()


@pytest.mark.parametrize(
    ("seed", "height", "width", "without"),
    [(-1, 64, 64, ()), (1, 15, 64, ()), (1, 64, 15, ()), (1, 64, 64, ("snow",))],
)
def test_refuses_what_it_cannot_draw(seed, height, width, without):
    """A negative seed, a sliver of a scene and an unknown phenomenon are refused."""
    with pytest.raises(ValueError, match="a scene needs"):
        make_scene(seed, height, width, without=without)


@pytest.mark.parametrize("phenomenon", PHENOMENA)
def test_everything_promised_appears(phenomenon):
    """Each phenomenon changes some scene when it is left out, and leaves the rest of it in its place."""
    changed = []
    for seed in SEEDS:
        scene, plain = make_scene(seed, 128, 128), make_scene(seed, 128, 128, without=[phenomenon])
        known = (scene.label != UNKNOWN) & (plain.label != UNKNOWN)
        changed.append(float((scene.pixels != plain.pixels).any(axis=0)[known].mean()))
        if phenomenon not in {"mixed", "emergent", "cloud", "nodata"}:
            assert (scene.label == plain.label).all()
    if phenomenon == "nodata":
        assert any((make_scene(seed, 128, 128).label == UNKNOWN).any() for seed in SEEDS)
        assert max(changed) == 0
    else:
        assert max(changed) > 0.01


def test_clouds_hide_water_and_haze_does_not():
    """Water under an opaque cloud is land to the truth; water under haze stays water."""
    scene, clear = make_scene(2, 256, 256), make_scene(2, 256, 256, without=["cloud", "cloud_shadow"])
    hidden = (clear.label == WATER) & (scene.label == LAND)
    assert hidden.sum() > 50
    assert np.median(scene.pixels[0][hidden]) > 2500
    assert ((scene.label == WATER) <= (clear.label == WATER)).all()
    hazy, unhazy = make_scene(2, 256, 256), make_scene(2, 256, 256, without=["haze"])
    assert (hazy.label == unhazy.label).all()
    assert hazy.pixels[0].mean() > unhazy.pixels[0].mean()


def test_shadows_darken_and_turbid_water_is_bright():
    """Cloud shadow and shade take light away; sediment makes water brighter in red."""
    for what, darker in (("cloud_shadow", True), ("shade", True), ("turbid", False)):
        scene, plain = make_scene(5, 256, 256), make_scene(5, 256, 256, without=[what])
        gap = scene.pixels[2].astype(int) - plain.pixels[2]
        assert (gap.mean() < 0) == darker


def test_mixed_pixels_lie_on_shores():
    """Without mixing a pixel is water or land: only shores change."""
    scene = make_scene(1, 256, 256, without=["noise", "emergent", "shallow"])
    plain = make_scene(1, 256, 256, without=["noise", "emergent", "shallow", "mixed"])
    changed = np.abs(scene.pixels[3].astype(int) - plain.pixels[3]) > 100
    assert 0.001 < changed.mean() < 0.2


def test_seeds_are_apart():
    """No scene is in two of the three sets."""
    sets = [set(TRAINING_SEEDS), set(VALIDATION_SEEDS), set(HELD_OUT_SEEDS)]
    assert len(set.union(*sets)) == sum(len(seeds) for seeds in sets)


def test_ndwi_is_not_enough():
    """The scenes are hard: NDWI above 0 stays below 0.93, though far above chance."""
    scenes = draw_scenes(HELD_OUT_SEEDS[:4])
    reached = figures(ndwi, scenes)
    assert 2 * figures(everything, scenes).pooled < reached.pooled < 0.93
