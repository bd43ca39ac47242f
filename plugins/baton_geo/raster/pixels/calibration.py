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
from baton_geo.raster.messages import NoteCode, note

Asked = float | tuple[float, ...] | None  # of a request: one number for all bands, or one a band

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
class ProductUnit:
    """The unit of a product's numbers, for files that say which product they are.

    Attributes:
        name: as "Sentinel-2 L2A of processing baseline 05.10".
        numbers: what they are, in words.
        scale: number * scale + offset is reflectance; None: numbers / 10000 + offset is.
        offset: see `scale`.
    """

    name: str
    numbers: str
    scale: float | None
    offset: float


@dataclass(frozen=True)
class Stated:
    """The scales and offsets that a file states.

    Attributes:
        bands: of each of the file's bands; `ScaleOffset()` where the file states nothing.
        product: the product that the file names itself, if its numbers are not the model's as they are; what
            `bands` does not have of its scale and offset is missing. None: no such product is named.
        conflicts: of each of the file's bands, two statements that cannot both be true; "": there are none.
            Empty: no band has any.
        notes: assumptions.
    """

    bands: tuple[ScaleOffset, ...]
    product: ProductUnit | None = None
    conflicts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Conversion:
    """The conversion to the units of the card's `mean`: number * times + plus.

    Attributes:
        times: factors, float64, one per band used.
        plus: summands, float64, one per band used.
        notes: assumptions.
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
    scale: Asked = None,
    offset: Asked = None,
) -> Conversion:
    """Find the conversion by the request, else by the file, else by the card alone.

    Args:
        bands: indices from 0 of the bands used, in the model's order.
        scale: of the request, one for all bands or one a band.
        offset: of the request, as `scale`.

    Raises:
        RequestInvalid: the offset is too small to change anything, or there are not as many numbers as bands.
        RasterUnusable: the file states an impossible scale or offset, or two that contradict each other, or
            is known to need one that neither the file nor the request has.
    """
    own = _unit_of_type(card, dtype)
    lines = [stated.bands[band] for band in bands]
    scales, offsets = each_band(card, "scale", scale, 1.0), each_band(card, "offset", offset, 0.0)
    if scales is None and offsets is None:
        conflict = next(
            (stated.conflicts[band] for band in bands if stated.conflicts and stated.conflicts[band]), ""
        )
        if conflict:
            raise RasterUnusable(f"{conflict}; {ADVICE}", param="offset")
    shared = _of_the_cards_unit(card, lines)
    if dtype.itemsize == 1:  # also of a product's file: then it is an image made of the product
        _check_bytes_have_a_scale(card, shared, scales)
    _check_offset_is_given(shared, scales, offsets)
    if dtype.itemsize > 1:
        _check_product_is_converted(shared, stated.product, dtype, scales, offsets)
    if scales is not None or offsets is not None:
        pairs = zip(scales or [1.0] * len(bands), offsets or [0.0] * len(bands), strict=True)
        requested = [ScaleOffset(*pair) for pair in pairs]
        for line in _of_the_cards_unit(card, requested):
            _check_has_effect(card, line, own)
        return _conversion(
            card, own, requested, ("scale_of_request", f"the request says {_listed(requested)}")
        )
    if any(line != ScaleOffset() for line in lines):
        return _by_file(card, own, lines)
    return _conversion(card, own, lines)


def _of_the_cards_unit(card: Card, lines: list[ScaleOffset]) -> list[ScaleOffset]:
    """Return the lines of the bands that have no unit of their own."""
    return [line for line, own in zip(lines, card.own_units * card.frames, strict=True) if not own]


def each_band(card: Card, name: str, asked: Asked, neutral: float) -> list[float] | None:
    """Give each band used the request's number; one number is not for bands with a unit of their own.

    Raises:
        RequestInvalid: there are not as many numbers as bands.
    """
    if asked is None:
        return None
    own_units, bands = card.own_units * card.frames, len(card.bands) * card.frames
    if isinstance(asked, float | int):
        every = all(own_units)
        numbers = [neutral if own and not every else asked for own in own_units]
    else:
        numbers = list(asked)
    if len(numbers) != bands:
        listed = ", ".join(band.name for band in card.bands)
        raise RequestInvalid(
            f"{name} has {len(numbers)} numbers; give one, or {bands}, one a band: {listed}", param=name
        )
    return numbers


def _check_bytes_have_a_scale(card: Card, lines: list[ScaleOffset], scales: list[float] | None) -> None:
    """Refuse 8 bits without a scale for a model of reflectance: their unit is anybody's guess."""
    if card.reflectance is not None and scales is None and any(line.scale == 1 for line in lines):
        raise RasterUnusable(
            "the file has 8 bits and states no scale, and the model takes reflectance; give scale, a number "
            "of the file times scale being reflectance or reflectance x 10000 (scale=1: the file holds the "
            "latter)",
            param="scale",
        )


def _check_offset_is_given(
    lines: list[ScaleOffset], scales: list[float] | None, offsets: list[float] | None
) -> None:
    """Refuse a request of a scale alone where the file states an offset that would be ignored."""
    odd = next((line for line in lines if line.offset), None)
    if scales is not None and offsets is None and odd is not None:
        raise RasterUnusable(
            f"the file states an offset of {odd.offset:g}, and the request a scale alone; give offset "
            "too, or leave both out",
            param="offset",
        )


def _check_product_is_converted(
    lines: list[ScaleOffset],
    product: ProductUnit | None,
    dtype: np.dtype[Any],
    scales: list[float] | None,
    offsets: list[float] | None,
) -> None:
    """Refuse a product's numbers without the scale and offset that its numbers need."""
    if product is None:
        return
    asked = scales is not None or offsets is not None
    unscaled = scales is None and (asked or any(line.scale == 1 for line in lines))
    no_offset = offsets is None and (
        scales is not None or any(_lacks_offset(line, product) for line in lines)
    )
    if no_offset or (unscaled and product.scale is not None):
        param = "scale" if unscaled and product.scale is not None else "offset"
        raise RasterUnusable(_conversion_is_missing(product, dtype, scales), param=param)


def _lacks_offset(line: ScaleOffset, product: ProductUnit) -> bool:
    """Return whether a stated scale, if it is the product's own, lacks the offset that belongs to it."""
    return line.offset == 0 and (
        product.scale is None or math.isclose(line.scale, product.scale, rel_tol=1e-3)
    )


def _by_file(card: Card, own: float, lines: list[ScaleOffset]) -> Conversion:
    for line in lines:
        if not (SCALE_LIMITS[0] <= line.scale <= SCALE_LIMITS[1] and abs(line.offset) <= OFFSET_LIMIT):
            raise RasterUnusable(f"the file states {line}, which cannot be; {ADVICE}", param="scale")
    origin = f"the file states {_listed(lines)}"
    shared = _of_the_cards_unit(card, lines)
    if all(_leads_to_a_unit(card, own, line) for line in shared):
        return _conversion(card, own, lines, ("scale_of_file", origin))
    if any(line.offset for line in shared):
        raise RasterUnusable(f"{origin}, which do not lead to the model's units; {ADVICE}", param="scale")
    plain = _conversion(card, own, [ScaleOffset()] * len(lines))
    text = f"{origin}; that is not the model's unit, so the numbers are used as they are"
    return Conversion(plain.times, plain.plus, (note("scale_unused", text),))


def _listed(lines: list[ScaleOffset]) -> str:
    odd = next((line for line in lines if line != ScaleOffset()), lines[0])
    return f"{odd}{' for some bands, others for others' if len(set(lines)) > 1 else ''}"


def _conversion(
    card: Card, own: float, lines: list[ScaleOffset], origin: tuple[NoteCode, str] | None = None
) -> Conversion:
    units, times, plus = [], np.empty(len(lines)), np.empty(len(lines))
    for place, (line, band) in enumerate(zip(lines, card.bands * card.frames, strict=True)):
        unit, more = (_unit(card, own, line.scale), card.offset) if band.scale is None else (band.scale, 0.0)
        times[place], plus[place] = line.scale * unit, line.offset * unit + more
        if band.scale is None:
            units.append(unit)
    if origin is None:
        return Conversion(times, plus)
    code, text = origin
    return Conversion(times, plus, (note(code, f"{text}; they are used, {_unit_note(card, units)}"),))


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
    largest = abs(requested.offset * own) / min(band.std for band in card.bands if band.scale is None)
    if requested.scale == 1 and requested.offset and largest < EFFECT:
        raise RequestInvalid(
            f"offset: {requested.offset:g} is too small to change anything: without a scale it is added to "
            "the file's own numbers; give scale too, as in scale=0.0001 and offset=-0.1",
            param="offset",
        )


def _conversion_is_missing(product: ProductUnit, dtype: np.dtype[Any], scales: list[float] | None) -> str:
    if product.scale is not None:
        add = f"scale={product.scale:.8f}".rstrip("0") + f" and offset={product.offset:g}"
        plain = "scale=1 and offset=0 if they are reflectance x 10000 already"
        missing = "a scale and an offset"
    else:
        first = scales[0] if scales else 1.0
        add = f"offset={product.offset * 10_000 * first:g}"
        if dtype.kind == "f":
            add = "scale=0.0001 and offset=-0.1 (if its floats are those numbers / 10000: offset=-0.1)"
        plain, missing = "offset=0 if the offset has been removed already", "that offset"
    return (
        f"the file names itself {product.name}, whose numbers are {product.numbers}, and does not state "
        f"{missing}; add {add} to the request, or {plain}"
    )
