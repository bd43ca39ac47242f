"""Draw land cover, and compute the reflectance of land and water under a clear sky."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from training.flood_scenes import spectra
from training.flood_scenes.ground import Ground
from training.flood_scenes.noise import Field, Shape, blur, fractal, grid, smoothstep
from training.flood_scenes.random_streams import RandomStreams

Cells = npt.NDArray[np.int64]
ROOF_SHARES = (0.3, 0.25, 0.25, 0.1, 0.1)  # in the order of spectra.ROOFS
TABLE = 1024  # kinds of parcel or roof drawn for a scene; each cell has one of them


def surface_reflectance(streams: RandomStreams, ground: Ground) -> Field:
    """Return the reflectance 0..1 of the mixed surface, (6, height, width)."""
    land = land_reflectance(streams, ground)
    water = water_reflectance(streams, ground, land)
    reeds = spectra.REED[:, None, None] * (1 - ground.plants) + 0.02 * ground.plants
    dry = np.maximum(1 - ground.water - ground.plants, 0)
    return np.asarray(dry * land + ground.water * water + ground.plants * reeds)


def land_reflectance(streams: RandomStreams, ground: Ground) -> Field:
    """Return the reflectance of the land without any water on it, (6, height, width)."""
    shape = (ground.plain.shape[0], ground.plain.shape[1])
    rng = streams.stream("land")
    land = _wild(rng, shape)
    land = _over(land, _parcels(rng, shape), 0.9 * ground.plain * smoothstep(_patches(rng, shape), -0.4, 0.2))
    land = land * np.exp(0.10 * fractal(rng, shape, largest=50, smallest=2, slope=2.0))
    land = _over(land, spectra.SAND[:, None, None], 0.6 * smoothstep(_patches(rng, shape), 1.6, 2.2))
    if streams.occurs("wet_soil"):
        land = land * np.exp(-spectra.SOIL_WATER[:, None, None] * _soil_water(streams, ground))
    return _town(streams, land) if streams.occurs("urban", 0.75) else land


def water_reflectance(streams: RandomStreams, ground: Ground, bottom: Field) -> Field:
    """Return the reflectance of the water with its bottom seen through it, (6, height, width).

    The bottom fades as exp(-k depth) into the reflectance of deep water, where k is the attenuation down and
    up (Lyzenga 1978, doi:10.1364/AO.17.000379).
    """
    shape = (ground.depth.shape[0], ground.depth.shape[1])
    rng = streams.stream("water")
    mud = np.zeros(shape)
    algae = np.zeros(shape)
    if streams.occurs("turbid", 0.85):
        base = rng.beta(1.2, 2.2)
        mud = np.clip(base + 0.12 * fractal(rng, shape, largest=200, smallest=12, slope=3.4), 0, 1)
        algae = rng.uniform(0, 0.8) * smoothstep(_patches(rng, shape), 0.2, 1.5) * (1 - mud)
    deep = _over(_blend(spectra.CLEAR_WATER, spectra.MUDDY_WATER, mud), _column(spectra.ALGAE_WATER), algae)
    seen = np.zeros((6, *shape))
    if "shallow" not in streams.without:
        attenuation = _column(spectra.CLEAR_ATTENUATION) + _column(spectra.MUDDY_ATTENUATION) * mud
        seen = np.exp(-attenuation * ground.depth)
    return _mirrored(streams, deep + (0.75 * bottom - deep) * seen)


def _mirrored(streams: RandomStreams, water: Field) -> Field:
    """Add the reflection of sky and sun, more where wind ruffles the water."""
    if not streams.occurs("glint", 0.7):
        return water
    rng = streams.stream("glint")
    shape = (water.shape[1], water.shape[2])
    ruffled = 0.6 + 0.4 * fractal(rng, shape, largest=150, smallest=6, slope=2.6)
    return np.asarray(water + rng.uniform(0.1, 0.9) * _column(spectra.GLINT) * np.clip(ruffled, 0, 2))


def _wild(rng: np.random.Generator, shape: Shape) -> Field:
    """Draw forest, grass, bare and dark soil in patches with soft borders, (6, height, width)."""
    kinds = (spectra.FOREST, spectra.GRASS, spectra.SOIL, spectra.DARK_SOIL)
    likely = rng.normal((0.6, 0.5, 0.0, -0.4), 0.5)
    weights = np.stack([np.exp(5 * (_patches(rng, shape) + bias)) for bias in likely])
    return np.asarray(np.einsum("khw,kb->bhw", weights / weights.sum(axis=0), np.stack(kinds)))


def _parcels(rng: np.random.Generator, shape: Shape) -> Field:
    """Draw farm fields, each between bare and full-grown, (6, height, width)."""
    across, along = _rotated_grid(rng, shape)
    size = rng.uniform(8, 40)
    cell = _cells(across / size, along / (size * rng.uniform(0.7, 2.5)))
    grown = rng.beta(0.6, 0.6, TABLE)[cell % TABLE]
    bare = np.where(
        (rng.random(TABLE) < 0.5)[cell % TABLE], spectra.SOIL[:, None, None], _column(spectra.STUBBLE)
    )
    tone = rng.uniform(0.75, 1.2, TABLE)[cell % TABLE]
    return blur(tone * (bare * (1 - grown) + _column(spectra.CROP) * grown), 0.5)


def _soil_water(streams: RandomStreams, ground: Ground) -> Field:
    """Return the soil's wetness, 0 dry to 1 saturated: near the water, and in patches of the plain."""
    rng = streams.stream("wet_soil")
    shape = (ground.above.shape[0], ground.above.shape[1])
    patches = smoothstep(_patches(rng, shape), rng.uniform(0.3, 1.5), 2.2) * ground.plain
    return np.asarray(np.clip(np.exp(-ground.above / rng.uniform(0.1, 0.5)) + patches, 0, 1))


def _town(streams: RandomStreams, land: Field) -> Field:
    """Add quarters of streets and roofs, and a road across the scene."""
    rng = streams.stream("urban")
    shape = (land.shape[1], land.shape[2])
    quarters = fractal(rng, shape, largest=130, smallest=14, slope=3)
    edge = float(np.quantile(quarters, 1 - rng.uniform(0.02, 0.18)))
    across, along = _rotated_grid(rng, shape)
    block = rng.uniform(4, 9)
    street = (across % block < 1.6) | (along % (1.4 * block) < 1.6)
    roofs = spectra.ROOFS.T[:, rng.choice(len(spectra.ROOFS), size=TABLE, p=ROOF_SHARES)]
    tone = rng.uniform(0.7, 1.15, TABLE)
    cell = _cells(across / block, along / (1.4 * block)) % TABLE
    built = np.where(street, _column(spectra.ASPHALT), (roofs * tone)[:, cell])
    land = _over(land, blur(built, 0.4), 0.85 * smoothstep(quarters, edge, edge + 0.15))
    bend = 14 * fractal(rng, shape, largest=300, smallest=60, slope=4)
    road = np.clip(1.6 - np.abs(across + bend - rng.uniform(-100, 100)), 0, 1)
    return _over(land, _column(spectra.ASPHALT), 0.8 * road)


def _patches(rng: np.random.Generator, shape: Shape) -> Field:
    return fractal(rng, shape, largest=120, smallest=4, slope=2.8)


def _rotated_grid(rng: np.random.Generator, shape: Shape) -> tuple[Field, Field]:
    """Return two coordinates in pixels, rotated by a random angle and slightly bent."""
    rows, columns = grid(shape)
    angle = rng.uniform(0, np.pi)
    bend = 3 * fractal(rng, shape, largest=200, smallest=80, slope=4)
    across = rows * np.cos(angle) + columns * np.sin(angle) + bend
    return np.asarray(across), np.asarray(columns * np.cos(angle) - rows * np.sin(angle))


def _cells(across: Field, along: Field) -> Cells:
    """Return a number for each cell of a grid; neighbours differ."""
    return np.asarray(np.floor(across).astype(np.int64) * 7919 + np.floor(along).astype(np.int64) * 104_729)


def _column(spectrum: Field) -> Field:
    return np.asarray(spectrum[:, None, None])


def _blend(one: Field, other: Field, share: Field) -> Field:
    return np.asarray(_column(one) * (1 - share) + _column(other) * share)


def _over(below: Field, above: Field, share: Field) -> Field:
    """Lay `above` over `below` with an opacity of `share`."""
    return np.asarray(below + (above - below) * share)
