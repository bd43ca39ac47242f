"""Find the conversion `number * times + plus` from a file's numbers to the units of the model's means.

The request decides, else the file, else the model's card alone. A card has two units: that of integer files
(`Card.scale`, for instance reflectance x 10000) and that of float files (`Card.float_scale`, for instance
reflectance). The result of `number * scale + offset` may be in either.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from baton_geo.card import OFFSET_LIMIT, SCALE_LIMITS, Card
from baton_geo.errors import RasterUnusable, RequestInvalid

UNIT_FACTOR = 100.0  # a scale that is off by more than this from both units of the card leads to neither
ADVICE = "give scale and offset in the request: a number of the file times scale plus offset is its value"
EFFECT = 0.01  # standard deviations: an offset that moves no band by as much changes no answer


@dataclass(frozen=True)
class ScaleOffset:
    """A scale and an offset as GDAL defines them: value = number * scale + offset."""

    scale: float = 1.0
    offset: float = 0.0

    def __str__(self) -> str:
        return f"a scale of {self.scale:g} and an offset of {self.offset:g}"


@dataclass(frozen=True)
class Stated:
    """The scales and offsets that a file states.

    Attributes:
        bands: of each of the file's bands; `ScaleOffset()` where the file states nothing.
        shifted: the product that the file names itself, if its numbers are known to contain an offset; a band
            without an offset in `bands` then lacks it. None: no such product is named.
    """

    bands: tuple[ScaleOffset, ...]
    shifted: str | None = None


@dataclass(frozen=True)
class Conversion:
    """The conversion to the units of the card's `mean`: number * times + plus.

    Attributes:
        times: factors, float64, one per band used.
        plus: summands, float64, one per band used.
        notes: assumptions, one sentence each.
    """

    times: npt.NDArray[np.float64]
    plus: npt.NDArray[np.float64]
    notes: tuple[str, ...] = ()


def conversion(
    card: Card,
    dtype: np.dtype[Any],
    bands: tuple[int, ...],
    stated: Stated,
    *,
    scale: float | None = None,
    offset: float | None = None,
) -> Conversion:
    """Find the conversion by the request, else by the file, else by the card alone.

    Args:
        card: of the model.
        dtype: of the file.
        bands: indices from 0 of the bands used, in the model's order.
        stated: scales and offsets of the file.
        scale: of the request.
        offset: of the request.

    Raises:
        RequestInvalid: the offset is too small to change anything.
        RasterUnusable: the file states an impossible scale or offset, or is known to need an offset that
            neither the file nor the request has.
    """
    own = _unit_of_type(card, dtype)
    lines = [stated.bands[band] for band in bands]
    if offset is None:
        _check_offset_is_given(lines, stated, dtype, scale)
    if scale is not None or offset is not None:
        requested = ScaleOffset(1.0 if scale is None else scale, offset or 0.0)
        _check_has_effect(card, requested, own)
        return _conversion(card, own, [requested] * len(bands), f"the request says {requested}")
    if any(line != ScaleOffset() for line in lines):
        return _by_file(card, own, lines)
    return _conversion(card, own, lines)


def _check_offset_is_given(
    lines: list[ScaleOffset], stated: Stated, dtype: np.dtype[Any], scale: float | None
) -> None:
    """Refuse a request without `offset` where the file's numbers contain one that would be ignored."""
    odd = next((line for line in lines if line.offset), None)
    if scale is not None and odd is not None:
        raise RasterUnusable(
            f"the file states an offset of {odd.offset:g}, and the request a scale alone; give offset "
            "too, or leave both out",
            param="offset",
        )
    silent = scale is not None or any(line.offset == 0 for line in lines)
    if (
        stated.shifted is not None and silent and dtype.itemsize > 1
    ):  # files of 8 bits are images made of the product
        raise RasterUnusable(_offset_is_missing(stated.shifted, dtype, scale), param="offset")


def _by_file(card: Card, own: float, lines: list[ScaleOffset]) -> Conversion:
    odd = next(line for line in lines if line != ScaleOffset())
    for line in lines:
        if not (SCALE_LIMITS[0] <= line.scale <= SCALE_LIMITS[1] and abs(line.offset) <= OFFSET_LIMIT):
            raise RasterUnusable(f"the file states {line}, which cannot be; {ADVICE}", param="scale")
    origin = f"the file states {odd}"
    if len(set(lines)) > 1:
        origin += " for some bands, others for others"
    if all(_leads_to_a_unit(card, own, line) for line in lines):
        return _conversion(card, own, lines, origin)
    if any(line.offset for line in lines):
        raise RasterUnusable(f"{origin}, which do not lead to the model's units; {ADVICE}", param="scale")
    plain = _conversion(card, own, [ScaleOffset()] * len(lines))
    note = f"{origin}; that is not the model's unit, so the numbers are used as they are"
    return Conversion(plain.times, plain.plus, (note,))


def _conversion(card: Card, own: float, lines: list[ScaleOffset], origin: str = "") -> Conversion:
    units = [_unit(card, own, line.scale) for line in lines]
    pairs = list(zip(lines, units, strict=True))
    times = np.array([line.scale * unit for line, unit in pairs])
    plus = np.array([line.offset * unit + card.offset for line, unit in pairs])
    return Conversion(times, plus, (f"{origin}; they are used, {_unit_note(card, units)}",) if origin else ())


def _unit_note(card: Card, units: Iterable[float]) -> str:
    """Describe the assumed unit of the values."""
    if card.scale == card.float_scale:
        return "and give values in the model's own units"
    files = {"integer" if unit == card.scale else "float" for unit in units}
    return f"and give values as the model's {' and '.join(sorted(files))} files hold them"


def _unit_of_type(card: Card, dtype: np.dtype[Any]) -> float:
    return card.scale if dtype.kind in "iu" else card.float_scale


def _unit(card: Card, own: float, scale: float) -> float:
    """Return the unit that a scale leads to, as a factor to the units of `mean`.

    A scale of 1 stays in the unit of the file's type. Any other leads to the unit that leaves the file's
    numbers nearer to those of a usual file of its type: 0.0001 of integers x 10000 to the unit of floats,
    10000 of floats from 0 to 1 to the unit of integers. On a tie it is the other type's unit.
    """
    if scale == 1:
        return own
    other = card.float_scale if own == card.scale else card.scale
    return min((other, own), key=lambda unit: round(_apart(scale * unit, own), 6))


def _leads_to_a_unit(card: Card, own: float, line: ScaleOffset) -> bool:
    times = line.scale * _unit(card, own, line.scale)
    limit = math.log(UNIT_FACTOR) + 1e-6
    return any(_apart(times, unit) <= limit for unit in (card.scale, card.float_scale))


def _apart(one: float, other: float) -> float:
    """Return the distance of two factors: the absolute logarithm of their ratio."""
    return abs(math.log(abs(one / other))) if one and other else math.inf


def _check_has_effect(card: Card, requested: ScaleOffset, own: float) -> None:
    """Refuse an offset without a scale that is in the unit after a scale, as -0.1 with integers."""
    largest = abs(requested.offset * own) / min(band.std for band in card.bands)
    if requested.scale == 1 and requested.offset and largest < EFFECT:
        raise RequestInvalid(
            f"offset: {requested.offset:g} is too small to change anything: without a scale it is added to "
            "the file's own numbers; give scale too, as in scale=0.0001 and offset=-0.1",
            param="offset",
        )


def _offset_is_missing(product: str, dtype: np.dtype[Any], scale: float | None) -> str:
    add = "offset=-1000" if scale in (None, 1.0) else f"offset={-1000 * scale:g}"
    if dtype.kind == "f":
        add = "scale=0.0001 and offset=-0.1 (if its floats are those numbers / 10000: offset=-0.1)"
    return (
        f"the file names itself {product}, whose numbers are reflectance x 10000 + 1000, and does not state "
        f"that offset; add {add} to the request, or offset=0 if the offset has been removed already"
    )
