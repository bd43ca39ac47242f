"""Normalise a file's numbers for the model, find valid pixels, and check the range of values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from baton_geo.card import Card
from baton_geo.errors import RasterUnusable
from baton_geo.raster.messages import CARRIED, Carried, note, tile_bytes
from baton_geo.raster.pixels.calibration import Conversion

Pixels = npt.NDArray[Any]
Valid = npt.NDArray[np.bool_]
OUTSIDE_LIMIT = 0.01  # share of a band's pixels that may lie outside the card's range
HIDDEN_LIMIT = 0.001  # share of the pixels that may be hidden for an odd reason without a note
FILL_DEVIATIONS = 1e6  # a number this many standard deviations off is no measurement: it is hidden as NaN is
LOOKED_AT = 1_000_000  # pixels; of a larger scene only every fourth row and column is compared with these:
# Reflectances, and shares of pixels; on eight scenes of Sentinel-2, of its pixels 0 to 4 % have a band below
# DARK with the offset of baseline 04.00 in the numbers, 74 to 96 % without. Landsat's collection 2 has its
# zero at 0.7.
DARK, OFFSET_SHARE = 0.1, 0.05
LANDSAT, LANDSAT_SHARE = 0.7, 0.01
# On ten made scenes 52 to 84 % have a band above BRIGHT, as reflectance x 2500 only 5 to 12 %, x 1000 none.
BRIGHT, BRIGHT_SHARE = 0.1, 0.15
HOPELESS, HOPELESS_SHARE = 0.01, 0.01  # no scene on Earth is that dark
NEGATIVE, NEGATIVE_SHARE = -0.02, 0.05


class Scaling:
    """The normalisation (raw * times + plus - mean) / std, as one multiplication and one addition.

    The model does it for integers that float32 holds, from `numbers`; other tiles are normalised here.

    Attributes:
        carried: type in which tiles reach the model.
    """

    def __init__(self, card: Card, conversion: Conversion, dtype: np.dtype[Any]) -> None:
        self._frames, self._bands = card.frames, len(card.bands)
        self.carried: Carried = next((name for name in CARRIED if name == dtype.name), "float32")
        std = np.array([band.std for band in card.bands] * card.frames)
        mean = np.array([band.mean for band in card.bands] * card.frames)
        self._times = (conversion.times / std)[:, None, None]
        self._plus = ((conversion.plus - mean) / std)[:, None, None]
        self._empty = np.zeros((len(mean), 1), np.float32)
        if card.nodata_replace is not None:
            units = [card.scale if band.scale is None else band.scale for band in card.bands] * card.frames
            plus = [card.offset if band.scale is None else 0.0 for band in card.bands] * card.frames
            self._empty[:, 0] = (card.nodata_replace * np.array(units) + plus - mean) / std

    @property
    def numbers(self) -> tuple[float, ...]:
        """`SceneInfo.scaling`: all in float32, in the model's order, bands first and then time steps."""
        lines = np.stack([self._times[:, 0], self._plus[:, 0], self._empty]).astype(np.float32)
        in_order = lines.reshape(3, self._frames, self._bands).transpose(0, 2, 1)
        return tuple(in_order.ravel().tolist())

    def tile(self, raw: Pixels, valid: Valid, side: int) -> npt.NDArray[np.uint8]:
        """Return a tile as `tile_bytes` says, its numbers of shape (bands, frames, side, side).

        Args:
            side: of the tile, pixels; beyond the scene it is filled with the edge pixels.
        """
        if self.carried == "float32":
            return self._normalised(raw, valid, side).reshape(-1).view(np.uint8)
        rows, _, columns = raw.shape
        size, more = tile_bytes(self._bands * self._frames, side, self.carried)
        out = np.empty(size + more, np.uint8)
        numbers = out[:size].view(self.carried).reshape(self._bands, self._frames, side, side)
        steps = raw.transpose(1, 0, 2).reshape(self._frames, self._bands, rows, columns)
        _fill(numbers, steps.transpose(1, 0, 2, 3))
        out[size:] = 0
        if not valid.all():
            hidden = np.empty((side, side), np.bool_)
            _fill(hidden, ~valid)
            bits = np.packbits(hidden)
            out[size : size + len(bits)] = bits
        return out

    def _normalised(self, raw: Pixels, valid: Valid, side: int) -> npt.NDArray[np.float32]:
        """Normalise a tile; at nodata it is 0.0, or what the card replaces it by."""
        out = np.empty((self._frames * self._bands, side, side), np.float32)
        exact = np.promote_types(raw.dtype, np.float32)  # float64 for what float32 does not hold
        scaled = np.multiply(raw.transpose(1, 0, 2), self._times.astype(exact), dtype=exact, casting="unsafe")
        scaled += self._plus.astype(exact)
        if not valid.all():
            scaled[:, ~valid] = self._empty
        _fill(out, scaled)
        frames = out.reshape(self._frames, self._bands, side, side)
        return np.ascontiguousarray(frames.transpose(1, 0, 2, 3))


def _fill(out: Pixels, inner: Pixels) -> None:
    """Fill the last two axes with `inner`, and beyond it with its edge."""
    rows, columns = inner.shape[-2:]
    out[..., :rows, :columns] = inner
    out[..., :rows, columns:] = out[..., :rows, columns - 1 : columns]
    out[..., rows:, :] = out[..., rows - 1 : rows, :]


class PixelCheck:
    """Finds the pixels that hold data, and judges a scene's numbers by all of them.

    Args:
        nodata: of the file, else of the card, or one for each band in use; NaN has no further effect.
        nodata_of_card: whether it is the card's.

    Attributes:
        valid: pixels that were counted as data.
        fill: the first number that was hidden as a fill value, and its band; "": none was.
    """

    def __init__(
        self,
        card: Card,
        dtype: np.dtype[Any],
        conversion: Conversion,
        nodata: float | tuple[float | None, ...] | None,
        *,
        nodata_of_card: bool = False,
        pixels: int = 0,
    ) -> None:
        self._of_step = len(card.bands)
        self._names = [band.name for band in card.bands] * card.frames
        self._conversion = conversion
        self._ranges = [
            card.valid_range if band.scale is None else band.valid_range for band in card.bands
        ] * card.frames
        self._bounds = _bounds(self._ranges, dtype, conversion)
        self._fills = _fill_bounds(card, dtype, conversion)
        each = nodata if isinstance(nodata, tuple) else (nodata,) * len(self._names)
        self._nodatas = [None if own is None or math.isnan(own) else _as_type(dtype, own) for own in each]
        self._nodata = next((own for own in self._nodatas if own is not None), None)
        self._nodata_of_card = nodata_of_card
        self._outside = np.zeros(len(self._names), np.int64)
        self._lowest = np.full(len(self._names), np.inf)
        self._highest = np.full(len(self._names), -np.inf)
        self._seen = self._alone = self._marked = self._filled = 0
        self.fill = ""
        self._looks = _looks(card, dtype, conversion)
        self._step = 1 if pixels <= LOOKED_AT else 4
        self._looked = 0
        self._found = dict.fromkeys(self._looks, 0)
        self.valid = 0

    def find(self, raw: Pixels) -> Valid:
        """Return the pixels that hold data, shape (rows, columns), of raw of shape (rows, bands, columns).

        A pixel holds none where a band is nodata, NaN, infinite, or so far off that it can only be a fill
        value. 0 is a reflectance as well: as nodata it hides a pixel only where all bands of a time step are
        0.
        """
        good: Valid = np.ones((raw.shape[0], raw.shape[2]), np.bool_)
        some, empty = np.zeros_like(good), np.zeros_like(good)
        every = np.ones_like(good)
        hidden = some if self._nodata != 0 and len(set(self._nodatas)) == 1 else np.zeros_like(good)
        for band in range(raw.shape[1]):
            values = raw[:, band]
            if self._nodata is not None:
                own = self._nodatas[band]
                marked = values == own if own is not None else np.zeros_like(good)
                some |= marked
                every &= marked
                if own != 0:
                    hidden |= marked
                if (band + 1) % self._of_step == 0:
                    empty |= every
                    every[:] = True
            if self._fills is not None:
                low, high = self._fills[band]
                sound = (values >= low) & (values <= high)  # neither is true of NaN
                if not sound.all():
                    self._count_fills(values, ~sound, band)
                    good &= sound
        self._seen += good.size
        if self._nodata is not None:
            self._marked += int(np.count_nonzero(some))
            self._alone += int(np.count_nonzero(some & ~empty))
            good &= ~(hidden | empty)
        return good

    def _count_fills(self, values: Pixels, odd: Valid, band: int) -> None:
        found = values[odd & (values == values)]  # not NaN
        found = found[np.isfinite(found) & (True if self._nodata is None else found != self._nodata)]
        self._filled += len(found)
        if len(found) and not self.fill:
            self.fill = f"{float(found[0]):g} in band '{self._names[band]}'"

    def count(self, raw: Pixels, valid: Valid) -> None:
        """Count pixels in some rows: raw of shape (rows, bands, columns), valid of (rows, columns)."""
        self.valid += int(np.count_nonzero(valid))
        self._look(raw[:: self._step, :, :: self._step], valid[:: self._step, :: self._step])
        for band, (low, high) in self._bounds.items():
            values = raw[:, band]
            outside = np.count_nonzero(((values < low) | (values > high)) & valid)
            if outside:
                seen = values[valid]
                self._outside[band] += outside
                self._lowest[band] = min(self._lowest[band], seen.min())
                self._highest[band] = max(self._highest[band], seen.max())

    def _look(self, raw: Pixels, valid: Valid) -> None:
        """Count the pixels that have a band below or above the bounds of `_looks`."""
        self._looked += int(np.count_nonzero(valid))
        for look, bounds in self._looks.items():
            any_band = np.zeros_like(valid)
            for band, bound in bounds.items():
                any_band |= raw[:, band] < bound if look.below else raw[:, band] > bound
            self._found[look] += int(np.count_nonzero(any_band & valid))

    def notes(self, *, scale_said: bool, offset_said: bool) -> list[str]:
        """Note what all pixels together say against the way the file was read.

        Args:
            scale_said: whether the request has a scale: then it is meant.
            offset_said: whether the request has an offset, or the file one that is not 0.
        """
        found = [*self._hidden_notes()]
        if not self._looks or not self._looked:
            return found
        dark, of_landsat, bright, _, negative = (self._found[look] / self._looked for look in self._looks)
        if not (scale_said or offset_said) and of_landsat < LANDSAT_SHARE:
            text = (
                "hardly a pixel has a band below 0.7: the numbers are like those of Landsat collection 2 "
                "level 2; give scale=0.0000275 and offset=-0.2 if they are"
            )
            found.append(note("values_of_landsat", text))
        elif not offset_said and dark < OFFSET_SHARE:
            text = (
                f"only {dark:.1%} of the pixels have a band below 0.1: the numbers are like those of "
                "Sentinel-2 since processing baseline 04.00, which hold 1,000 too much; give offset=-1000 if "
                "they are"
            )
            found.append(note("offset_suspected", text))
        if not scale_said and bright < BRIGHT_SHARE:
            text = (
                f"only {bright:.1%} of the pixels have a band above a reflectance of 0.1: open water, or "
                "numbers in a smaller unit than the model's; give scale if they are"
            )
            found.append(note("values_dark", text))
        if negative > NEGATIVE_SHARE:
            text = (
                f"{negative:.1%} of the pixels have a band below 0: an offset may have been taken off twice"
            )
            found.append(note("values_negative", text))
        return found

    def _hidden_notes(self) -> Iterator[str]:
        if self._filled:
            text = f"{self._filled} numbers like {self.fill} are no measurements; they are hidden as NaN is"
            yield note("fill_hidden", text)
        if self._nodata is None or not self._seen:
            return
        alone, marked = self._alone / self._seen, self._marked / self._seen
        if alone > HIDDEN_LIMIT and self._nodata == 0:
            text = (
                f"{alone:.1%} of the pixels are 0, which is nodata, in some bands only; they are used as "
                "values"
            )
            yield note("nodata_zero_kept", text)
        elif alone > HIDDEN_LIMIT:
            text = (
                f"{alone:.1%} of the pixels are hidden because some bands only are nodata ({self._nodata:g})"
            )
            yield note("nodata_of_one_band", text)
        if self._nodata_of_card and marked > HIDDEN_LIMIT:
            text = (
                f"{marked:.1%} of the pixels are {self._nodata:g}, the model's own nodata; the file states "
                "none"
            )
            yield note("nodata_of_card", text)

    def judge_unit(self, *, scale_said: bool) -> None:
        """Refuse a scene that was read to its end and is darker than any scene on Earth.

        Raises:
            RasterUnusable: hardly a pixel has a band above a reflectance of `HOPELESS`, and the request has
            no scale.
        """
        if scale_said or not self._looks or not self._looked:
            return
        seen = self._found[HOPELESS_LOOK] / self._looked
        if seen < HOPELESS_SHARE:
            times = self._conversion.times[next(iter(self._looks[HOPELESS_LOOK]))]
            raise RasterUnusable(
                f"the numbers are too small to be what the model takes: multiplied by {times:g}, only "
                f"{seen:.1%} of the pixels have a band above {HOPELESS:g} of full reflectance; give scale (a "
                "number of the file times scale is its value, in reflectance or in reflectance x 10000), or "
                "scale=1 if they are meant as they are",
                param="scale",
            )

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
        low, high = self._ranges[band] or (0.0, 0.0)
        adding = f" and adding {plus:g}" if plus else ""
        return (
            f"band '{self._names[band]}': {share:.1%} of the pixels are outside {low:g} to {high:g} after "
            f"multiplying by {times:g}{adding}: they go from {ends[0]:g} to {ends[1]:g}. Is the file in the "
            f"units the model knows (for instance reflectance x 10000 as integers, 0 to 1 as floats), and "
            f"is its nodata value marked? A request may give scale and offset: a number of the file times "
            f"scale plus offset is its value."
        )


@dataclass(frozen=True)
class Look:
    """A reflectance that pixels are compared with: has one a band below (or above) it?"""

    reflectance: float
    below: bool


HOPELESS_LOOK = Look(HOPELESS, below=False)
LOOKS = (
    Look(DARK, below=True),
    Look(LANDSAT, below=True),
    Look(BRIGHT, below=False),
    HOPELESS_LOOK,
    Look(NEGATIVE, below=True),
)


def _looks(card: Card, dtype: np.dtype[Any], conversion: Conversion) -> dict[Look, dict[int, Any]]:
    """Return each band's number for the reflectances of `LOOKS`; empty if the card is not of reflectance."""
    one = card.reflectance
    if one is None:
        return {}
    lines = {
        band: (float(times), float(plus))
        for band, (times, plus) in enumerate(zip(conversion.times, conversion.plus, strict=True))
        if not card.own_units[band % len(card.bands)]
    }
    return {
        look: {
            band: _clipped(dtype, (look.reflectance * one - plus) / times, up=look.below)
            for band, (times, plus) in lines.items()
        }
        for look in LOOKS
    }


def _fill_bounds(card: Card, dtype: np.dtype[Any], conversion: Conversion) -> list[tuple[Any, Any]] | None:
    """Return the least and greatest number of each band that can be a measurement; None: all can."""
    stds = [band.std for band in card.bands] * card.frames
    means = [band.mean for band in card.bands] * card.frames
    ends = [
        [(mean + sign * FILL_DEVIATIONS * std - plus) / times for sign in (-1, 1)]
        for mean, std, times, plus in zip(means, stds, conversion.times, conversion.plus, strict=True)
    ]
    if dtype.kind != "f":
        limits = np.iinfo(dtype)
        if all(low <= limits.min and high >= limits.max for low, high in ends):
            return None
    return [(_clipped(dtype, low, up=True), _clipped(dtype, high, up=False)) for low, high in ends]


def _bounds(
    ranges: list[tuple[float, float] | None], dtype: np.dtype[Any], conversion: Conversion
) -> dict[int, tuple[Any, Any]]:
    """Return the lowest and highest number inside the range of each band that has one, in the file's type."""
    lines = enumerate(zip(ranges, conversion.times, conversion.plus, strict=True))
    return {
        band: _inside(valid_range, dtype, float(times), float(plus))
        for band, (valid_range, times, plus) in lines
        if valid_range is not None
    }


def _inside(
    valid_range: tuple[float, float], dtype: np.dtype[Any], times: float, plus: float
) -> tuple[Any, Any]:
    low, high = sorted((end - plus) / times for end in valid_range)
    if dtype.kind == "f":
        return _clipped(dtype, low, up=True), _clipped(dtype, high, up=False)
    limits = np.iinfo(dtype)
    slack = 1e-9 * max(abs(low), abs(high))  # 1.5 / 0.0001 is 14999.999999999998
    if np.ceil(low - slack) > limits.max or np.floor(high + slack) < limits.min:
        return dtype.type(1), dtype.type(0)  # nothing is inside
    return _clipped(dtype, low - slack, up=True), _clipped(dtype, high + slack, up=False)


def _clipped(dtype: np.dtype[Any], number: float, *, up: bool) -> Any:
    """Return a bound in a file's type: of integers the next whole one up or down, never beyond the type."""
    if dtype.kind == "f":
        greatest = float(np.finfo(dtype).max)
        return dtype.type(min(max(number, -greatest), greatest))
    limits = np.iinfo(dtype)
    if not limits.min < number < limits.max:
        return dtype.type(limits.min if number <= limits.min else limits.max)
    return dtype.type(math.ceil(number) if up else math.floor(number))


def _as_type(dtype: np.dtype[Any], value: float) -> Any:
    """Return nodata in the file's type; None if no number of an integer file can be it."""
    if dtype.kind == "f":
        with np.errstate(over="ignore"):  # a float64's nodata in a float32 file is infinite there
            return dtype.type(value)
    limits = np.iinfo(dtype)
    holds = int(limits.min) <= value <= int(limits.max) and float(value).is_integer()
    return dtype.type(int(value)) if holds else None
