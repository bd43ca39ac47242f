"""Normalise a file's numbers for the model, find valid pixels, and check the range of values."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from baton_geo.card import Card
from baton_geo.errors import RasterUnusable
from baton_geo.raster.pixels.calibration import Conversion

Pixels = npt.NDArray[Any]
Valid = npt.NDArray[np.bool_]
OUTSIDE_LIMIT = 0.01  # share of a band's pixels that may lie outside the card's range


class Scaling:
    """The normalisation (raw * times + plus - mean) / std, as one multiplication and one addition.

    Args:
        card: of the model.
        conversion: from the file's numbers to the units of the card's means.
    """

    def __init__(self, card: Card, conversion: Conversion) -> None:
        self._frames, self._bands = card.frames, len(card.bands)
        std = np.array([band.std for band in card.bands] * card.frames)
        mean = np.array([band.mean for band in card.bands] * card.frames)
        self._times = (conversion.times / std).astype(np.float32)[:, None, None]
        self._plus = ((conversion.plus - mean) / std).astype(np.float32)[:, None, None]

    def tile(self, raw: Pixels, valid: Valid, side: int) -> npt.NDArray[np.float32]:
        """Return the model's input for a tile.

        Args:
            raw: shape (rows, frames * bands, columns).
            valid: shape (rows, columns).
            side: of the tile, pixels; beyond the scene it is filled with the edge pixels.

        Returns:
            shape (bands, frames, side, side), contiguous; 0.0 at nodata.
        """
        rows, _, columns = raw.shape
        out = np.empty((self._frames * self._bands, side, side), np.float32)
        inner = out[:, :rows, :columns]
        np.multiply(raw.transpose(1, 0, 2), self._times, out=inner, casting="same_kind")
        inner += self._plus
        if not valid.all():
            inner[:, ~valid] = 0.0
        out[:, :rows, columns:] = out[:, :rows, columns - 1 : columns]
        out[:, rows:] = out[:, rows - 1 : rows]
        frames = out.reshape(self._frames, self._bands, side, side)
        return np.ascontiguousarray(frames.transpose(1, 0, 2, 3))


def find_valid(raw: Pixels, nodata: float | None) -> Valid:
    """Return the pixels where no band is nodata, NaN or infinite.

    Args:
        raw: shape (rows, bands, columns).
        nodata: of the file or the model; NaN has no further effect.

    Returns:
        shape (rows, columns).
    """
    good: Valid = np.ones((raw.shape[0], raw.shape[2]), np.bool_)
    for band in range(raw.shape[1]):
        values = raw[:, band]
        if raw.dtype.kind == "f":
            good &= np.isfinite(values)
            if nodata is not None:
                with np.errstate(over="ignore"):  # a float64's nodata in a float32 file is infinite there
                    good &= values != raw.dtype.type(nodata)
        elif nodata is not None and _holds(raw.dtype, nodata):
            good &= values != raw.dtype.type(int(nodata))
    return good


def _holds(dtype: np.dtype[Any], value: float) -> bool:
    """Return whether an integer type can hold this number."""
    limits = np.iinfo(dtype)
    return int(limits.min) <= value <= int(limits.max) and float(value).is_integer()


class RangeCheck:
    """Counts pixels outside the card's `valid_range` and refuses a scene with too many of them.

    Args:
        card: of the model.
        dtype: of the file.
        conversion: from the file's numbers to the units of the card's range.
    """

    def __init__(self, card: Card, dtype: np.dtype[Any], conversion: Conversion) -> None:
        self._names = [band.name for band in card.bands] * card.frames
        self._conversion = conversion
        self._range = card.valid_range
        self._bounds = _raw_bounds(card.valid_range, dtype, conversion)
        self._outside = np.zeros(len(self._names), np.int64)
        self._lowest = np.full(len(self._names), np.inf)
        self._highest = np.full(len(self._names), -np.inf)
        self.valid = 0

    def count(self, raw: Pixels, valid: Valid) -> None:
        """Count pixels in some rows: raw of shape (rows, bands, columns), valid of (rows, columns)."""
        self.valid += int(np.count_nonzero(valid))
        if self._bounds is None:
            return
        for band, (low, high) in enumerate(self._bounds):
            values = raw[:, band]
            outside = np.count_nonzero(((values < low) | (values > high)) & valid)
            if outside:
                seen = values[valid]
                self._outside[band] += outside
                self._lowest[band] = min(self._lowest[band], seen.min())
                self._highest[band] = max(self._highest[band], seen.max())

    def judge(self, pixels: int, share: float = OUTSIDE_LIMIT) -> None:
        """Refuse a scene with more than `share` of `pixels` outside in one band.

        Raises:
            RasterUnusable: a band has too many; the message names the band, its values and the scale.
        """
        for band, outside in enumerate(self._outside):
            if outside > share * pixels:
                raise RasterUnusable(self._out_of_range(band, int(outside) / pixels))

    def _out_of_range(self, band: int, share: float) -> str:
        times, plus = self._conversion.times[band], self._conversion.plus[band]
        ends = sorted((times * self._lowest[band] + plus, times * self._highest[band] + plus))
        low, high = self._range or (0.0, 0.0)
        adding = f" and adding {plus:g}" if plus else ""
        return (
            f"band '{self._names[band]}': {share:.1%} of the pixels are outside {low:g} to {high:g} after "
            f"multiplying by {times:g}{adding}: they go from {ends[0]:g} to {ends[1]:g}. Is the file in the "
            f"units the model knows (for instance reflectance x 10000 as integers, 0 to 1 as floats), and "
            f"is its nodata value marked? A request may give scale and offset: a number of the file times "
            f"scale plus offset is its value."
        )


def _raw_bounds(
    valid_range: tuple[float, float] | None, dtype: np.dtype[Any], conversion: Conversion
) -> list[tuple[Any, Any]] | None:
    """Return the lowest and highest number inside the range for each band, in the file's type."""
    if valid_range is None:
        return None
    pairs = zip(conversion.times, conversion.plus, strict=True)
    return [_inside(valid_range, dtype, float(times), float(plus)) for times, plus in pairs]


def _inside(
    valid_range: tuple[float, float], dtype: np.dtype[Any], times: float, plus: float
) -> tuple[Any, Any]:
    low, high = sorted((end - plus) / times for end in valid_range)
    if dtype.kind == "f":
        return dtype.type(low), dtype.type(high)
    limits = np.iinfo(dtype)
    slack = 1e-9 * max(abs(low), abs(high))  # 1.5 / 0.0001 is 14999.999999999998
    first, last = np.ceil(low - slack), np.floor(high + slack)
    inside = np.clip([first, last], int(limits.min), int(limits.max))
    if first > limits.max or last < limits.min:
        return dtype.type(1), dtype.type(0)  # nothing is inside
    return dtype.type(int(inside[0])), dtype.type(int(inside[1]))
