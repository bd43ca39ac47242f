"""Make and filter the random fields from which synthetic flood scenes are drawn, in float64.

Two processors may differ in the last bit of a sine; in float64 that never reaches an int16 pixel.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Field: TypeAlias = npt.NDArray[np.float64]
Shape: TypeAlias = tuple[int, int]


def fractal(
    rng: np.random.Generator, shape: Shape, *, largest: float, smallest: float, slope: float = 3.0
) -> Field:
    """Make a periodic Gaussian random field with features between two sizes; mean 0, standard deviation 1.

    Args:
        rng: source of the noise.
        shape: (height, width), pixels.
        largest: size of the largest features, pixels.
        smallest: size of the smallest, pixels; softly cut off.
        slope: power falls as frequency ** -slope. 2 is rough, 4 is smooth.
    """
    frequency = _frequencies(shape)
    amplitude = np.maximum(frequency, 1 / largest) ** (-slope / 2) * np.exp(
        -((frequency * smallest / 2) ** 2)
    )
    amplitude[0, 0] = 0
    field = np.fft.irfft2(np.fft.rfft2(rng.standard_normal(shape)) * amplitude, s=shape)
    return np.asarray((field - field.mean()) / (field.std() + 1e-12))


def blur(field: Field, sigma: float) -> Field:
    """Blur the last two axes with a periodic Gaussian; `sigma` in pixels."""
    shape = (field.shape[-2], field.shape[-1])
    response = np.exp(-2 * (np.pi * sigma * _frequencies(shape)) ** 2)
    return np.asarray(np.fft.irfft2(np.fft.rfft2(field) * response, s=shape))


def smoothstep(field: Field, low: float, high: float) -> Field:
    """Return 0 below `low`, 1 above `high`, a smooth rise between."""
    ramp = np.clip((field - low) / (high - low), 0, 1)
    return np.asarray(ramp * ramp * (3 - 2 * ramp))


def covered(level: Field) -> Field:
    """Estimate the share of each pixel where a smooth field is above 0, from its value and slope; 0..1."""
    down, right = np.gradient(level)
    return np.asarray(np.clip(0.5 + level / (np.hypot(down, right) + 1e-9), 0, 1))


def shrink(field: Field, factor: int) -> Field:
    """Average blocks of `factor` x `factor` pixels over the last two axes."""
    *lead, height, width = field.shape
    blocks = field.reshape(*lead, height // factor, factor, width // factor, factor)
    return np.asarray(blocks.mean(axis=(-3, -1)))


def grid(shape: Shape, spacing: float = 1.0) -> tuple[Field, Field]:
    """Return row and column of each pixel's centre from the middle of the scene, in pixels / `spacing`."""
    rows, columns = np.indices(shape, dtype=np.float64)
    return (rows + 0.5) * spacing - shape[0] * spacing / 2, (columns + 0.5) * spacing - shape[1] * spacing / 2


def _frequencies(shape: Shape) -> Field:
    """Return the cycles per pixel of each coefficient of `rfft2`."""
    return np.asarray(np.hypot(np.fft.fftfreq(shape[0])[:, None], np.fft.rfftfreq(shape[1])[None, :]))
