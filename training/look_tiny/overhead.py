"""Draw small scenes from above, like previews of satellite scenes, with water, fields, a road or clouds.

Far simpler than the scenes `flood-tiny` learns from: three colours, no physics; each feature is there or not.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from PIL import Image

from training.look_tiny.facts import FEATURES, Facts

LAND = np.array([(52, 84, 44), (88, 116, 62), (126, 112, 78), (110, 122, 84), (150, 136, 100)], float)
CROPS = np.array(
    [(196, 178, 112), (146, 166, 78), (92, 136, 58), (168, 136, 92), (214, 202, 150), (70, 108, 52)], float
)
WATER = np.array([(26, 54, 92), (34, 76, 120), (44, 84, 96), (18, 36, 60), (74, 110, 130)], float)
ASPHALT = np.array((222, 218, 208), float)
CLOUD = np.array((244, 246, 250), float)
# A map of classes laid over the scene: what a mask's preview looks like.
MAP_LAND, MAP_WATER = np.array((196, 180, 138), float), np.array((33, 102, 172), float)

Field = npt.NDArray[np.float64]


def draw_overhead(rng: np.random.Generator, width: int, height: int) -> tuple[Image.Image, Facts]:
    """Draw a scene from above, with each feature at even odds; return it with its facts."""
    has = {name: bool(rng.random() < 0.5) for name in FEATURES}
    shape = (height, width)
    scene = _land(rng, shape)
    if has["fields"]:
        scene = _fields(rng, scene)
    water = _water(rng, shape) if has["water"] else np.zeros(shape)
    scene = _over(scene, _water_colour(rng, shape), water)
    if has["road"]:
        scene = _road(rng, scene)
    if has["clouds"]:
        scene = _clouds(rng, scene)
    scene = scene * rng.uniform(0.8, 1.15) + rng.normal(0, rng.uniform(1, 5), (*shape, 1))
    if rng.random() < 0.25:
        scene = _mapped(scene, water)
    picture = Image.fromarray(np.clip(scene, 0, 255).astype(np.uint8))
    seen = frozenset(name for name, there in has.items() if there)
    return picture, Facts(scene=True, features=seen)


def smooth(rng: np.random.Generator, shape: tuple[int, int], cells: float) -> Field:
    """Return a smooth random field of mean 0, deviation 1 and about `cells` bumps along the longer side."""
    scale = cells / max(shape)
    coarse = rng.standard_normal((max(3, round(shape[0] * scale)), max(3, round(shape[1] * scale))))
    grown = Image.fromarray(coarse.astype(np.float32)).resize(shape[::-1], Image.Resampling.BICUBIC)
    field = np.asarray(grown, float)
    return np.asarray((field - field.mean()) / (field.std() + 1e-9))


def _rough(rng: np.random.Generator, shape: tuple[int, int], cells: float) -> Field:
    layers = sum(smooth(rng, shape, cells * 2**n) * 0.55**n for n in range(4))
    return np.asarray(layers) / 1.2


def _land(rng: np.random.Generator, shape: tuple[int, int]) -> Field:
    """Draw woods, grass and bare soil in patches."""
    one, two = rng.choice(len(LAND), size=2, replace=False)
    share = _step(_rough(rng, shape, rng.uniform(3, 7)), -0.6, 0.6)[:, :, None]
    tone = 1 + 0.09 * _rough(rng, shape, 14)[:, :, None]
    return np.asarray((LAND[one] * share + LAND[two] * (1 - share)) * tone)


def _fields(rng: np.random.Generator, scene: Field) -> Field:
    """Draw parcels of a turned grid, each of one crop, over a part of the land."""
    shape = (scene.shape[0], scene.shape[1])
    across, along = _turned(rng, shape)
    size = rng.uniform(0.09, 0.2)
    rows, columns = (
        np.floor(across / size).astype(int),
        np.floor(along / (size * rng.uniform(0.8, 1.8))).astype(int),
    )
    cell = (rows * 7919 + columns * 104_729) % 64
    colours = CROPS[rng.integers(len(CROPS), size=64)] * rng.uniform(0.8, 1.15, (64, 1))
    patches = smooth(rng, shape, rng.uniform(2, 4))
    start = float(np.quantile(patches, rng.uniform(0.0, 0.5)))
    return _over(scene, colours[cell], _step(patches, start, start + 0.1))


def _water(rng: np.random.Generator, shape: tuple[int, int]) -> Field:
    """Return the share of each pixel that is water (a river, lakes or a flood), 0 to 1."""
    kind = rng.choice(("river", "lakes", "flood"), p=(0.4, 0.25, 0.35))
    if kind == "river":
        across, _ = _turned(rng, shape)
        bend = rng.uniform(0.03, 0.1) * smooth(rng, shape, 4) + rng.uniform(-0.2, 0.2)
        width = rng.uniform(0.025, 0.07) * np.exp(0.2 * smooth(rng, shape, 6))
        return 1 - _step(np.abs(across + bend) - width, -0.008, 0.008)
    level = _rough(rng, shape, rng.uniform(2.5, 5) if kind == "lakes" else rng.uniform(1.5, 3))
    part = rng.uniform(0.05, 0.16) if kind == "lakes" else rng.uniform(0.15, 0.5)
    shore = float(np.quantile(level, 1 - part))
    return _step(level, shore - 0.03, shore + 0.03)


def _water_colour(rng: np.random.Generator, shape: tuple[int, int]) -> Field:
    one, two = rng.choice(len(WATER), size=2)
    share = _step(smooth(rng, shape, 4), -1, 1)[:, :, None]
    return np.asarray(WATER[one] * share + WATER[two] * (1 - share)) * rng.uniform(0.85, 1.15)


def _road(rng: np.random.Generator, scene: Field) -> Field:
    """Draw one road, or two that cross: narrow, pale, nearly straight, over land and water."""
    shape = (scene.shape[0], scene.shape[1])
    across, along = _turned(rng, shape)
    bend = rng.uniform(0, 0.03) * smooth(rng, shape, 3)
    width = rng.uniform(0.018, 0.028)
    lines = [np.abs(across + bend + rng.uniform(-0.25, 0.25))]
    if rng.random() < 0.35:
        lines.append(np.abs(along + bend + rng.uniform(-0.25, 0.25)))
    share = 1 - _step(np.minimum.reduce(lines) - width, -0.005, 0.005)
    return _over(scene, ASPHALT * rng.uniform(0.95, 1.25), share)


def _clouds(rng: np.random.Generator, scene: Field) -> Field:
    """Draw white patches with soft edges, and their shadows."""
    shape = (scene.shape[0], scene.shape[1])
    cover = _rough(rng, shape, rng.uniform(3, 6))
    start = float(np.quantile(cover, 1 - rng.uniform(0.1, 0.35)))
    opacity = _step(cover, start, start + rng.uniform(0.3, 0.7))
    shift = (max(1, shape[0] // 16), max(1, shape[1] // 20))
    shadow = np.roll(opacity, shift, (0, 1))
    return _over(scene * (1 - 0.45 * shadow[:, :, None]), CLOUD, 0.96 * opacity)


def _mapped(scene: Field, water: Field) -> Field:
    """Lay a map of water and land over the scene, with a legend, as a mask's preview does."""
    classes = np.where(water[:, :, None] > 0.5, MAP_WATER, MAP_LAND)
    blended = 0.6 * classes + 0.4 * (64 + 0.75 * scene)
    legend = scene.shape[0] // 14
    blended[-legend:] = 255
    return np.asarray(blended)


def _turned(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[Field, Field]:
    """Return two perpendicular coordinates at a random angle; the longer side is 1 long, the middle 0."""
    rows, columns = np.indices(shape, float)
    rows, columns = (rows - shape[0] / 2) / max(shape), (columns - shape[1] / 2) / max(shape)
    angle = rng.uniform(0, math.pi)
    across = rows * math.cos(angle) + columns * math.sin(angle)
    return across, columns * math.cos(angle) - rows * math.sin(angle)


def _over(below: Field, above: Field, share: Field) -> Field:
    return np.asarray(below + (above - below) * share[:, :, None])


def _step(field: Field, low: float, high: float) -> Field:
    ramp = np.clip((field - low) / (high - low), 0, 1)
    return np.asarray(ramp * ramp * (3 - 2 * ramp))
