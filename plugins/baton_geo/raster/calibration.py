"""Find the line, `number * times + plus`, from a file's numbers to the units the model was trained in.

Said by the request, else by the file, else by the model's card alone. A card knows two units: the one that
integer files hold (`Card.scale`, for instance reflectance x 10000) and the one that float files hold
(`Card.float_scale`, for instance reflectance). What `number * scale + offset` gives may be in either.
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

UNIT_FACTOR = 100.0  # a scale that ends further than this from both units of the card leads to neither
SAY = "give scale and offset in the request: a number of the file times scale plus offset is its value"
FELT = 0.01  # deviations of a band: an offset that moves none of them by as much changes no answer


@dataclass(frozen=True)
class Linear:
    """number * scale + offset, as GDAL defines them."""

    scale: float = 1.0
    offset: float = 0.0

    def __str__(self) -> str:
        return f"a scale of {self.scale:g} and an offset of {self.offset:g}"


@dataclass(frozen=True)
class Stated:
    """What a file says of its numbers.

    Attributes:
        bands: of each of the file's bands; `Linear()` where the file says nothing.
        shifted: the product that the file names itself and whose numbers are known to hold an offset, which a
            band without one in `bands` leaves unsaid; None: no such product is named.
    """

    bands: tuple[Linear, ...]
    shifted: str | None = None


@dataclass(frozen=True)
class Conversion:
    """number * times + plus is the value in the units of the card's `mean`.

    Attributes:
        times: float64, one for each band used.
        plus: float64, one for each band used.
        notes: what the client should know of it.
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
    """Decide by the request, else by the file, else by the card alone.

    Args:
        card: of the model.
        dtype: of the file.
        bands: numbers from 0 of the bands used, in the model's order.
        stated: by the file.
        scale: of the request.
        offset: of the request.

    Raises:
        RequestInvalid: an offset too small to change anything.
        RasterUnusable: the file states what cannot be, or has an offset that nobody says.
    """
    own = _unit_of_type(card, dtype)
    lines = [stated.bands[band] for band in bands]
    if offset is None:
        _check_nothing_is_unsaid(lines, stated, dtype, scale)
    if scale is not None or offset is not None:
        asked = Linear(1.0 if scale is None else scale, offset or 0.0)
        _check_is_felt(card, asked, own)
        return _conversion(card, own, [asked] * len(bands), f"the request says {asked}")
    if any(line != Linear() for line in lines):
        return _by_file(card, own, lines)
    return _conversion(card, own, lines)


def _check_nothing_is_unsaid(
    lines: list[Linear], stated: Stated, dtype: np.dtype[Any], scale: float | None
) -> None:
    """Refuse a request without `offset` where the file's numbers hold one that would be lost."""
    odd = next((line for line in lines if line.offset), None)
    if scale is not None and odd is not None:
        raise RasterUnusable(
            f"the file states an offset of {odd.offset:g}, and the request a scale alone; give offset "
            "too, or leave both out",
            param="offset",
        )
    silent = scale is not None or any(line.offset == 0 for line in lines)
    if stated.shifted is not None and silent and dtype.itemsize > 1:  # of 8 bits are pictures made of it
        raise RasterUnusable(_offset_is_missing(stated.shifted, dtype, scale), param="offset")


def _by_file(card: Card, own: float, lines: list[Linear]) -> Conversion:
    odd = next(line for line in lines if line != Linear())
    for line in lines:
        if not (SCALE_LIMITS[0] <= line.scale <= SCALE_LIMITS[1] and abs(line.offset) <= OFFSET_LIMIT):
            raise RasterUnusable(f"the file states {line}, which cannot be; {SAY}", param="scale")
    said = f"the file states {odd}"
    if len(set(lines)) > 1:
        said += " for some bands, others for others"
    if all(_leads_to_a_unit(card, own, line) for line in lines):
        return _conversion(card, own, lines, said)
    if any(line.offset for line in lines):
        raise RasterUnusable(f"{said}, which do not lead to the model's units; {SAY}", param="scale")
    plain = _conversion(card, own, [Linear()] * len(lines))
    note = f"{said}; that is not the model's unit, so the numbers are used as they are"
    return Conversion(plain.times, plain.plus, (note,))


def _conversion(card: Card, own: float, lines: list[Linear], said: str = "") -> Conversion:
    units = [_unit(card, own, line.scale) for line in lines]
    pairs = list(zip(lines, units, strict=True))
    times = np.array([line.scale * unit for line, unit in pairs])
    plus = np.array([line.offset * unit + card.offset for line, unit in pairs])
    return Conversion(times, plus, (f"{said}; they are used, {_told(card, units)}",) if said else ())


def _told(card: Card, units: Iterable[float]) -> str:
    """What the values are taken to be, in words."""
    if card.scale == card.float_scale:
        return "and give values in the model's own units"
    files = {"integer" if unit == card.scale else "float" for unit in units}
    return f"and give values as the model's {' and '.join(sorted(files))} files hold them"


def _unit_of_type(card: Card, dtype: np.dtype[Any]) -> float:
    return card.scale if dtype.kind in "iu" else card.float_scale


def _unit(card: Card, own: float, scale: float) -> float:
    """The unit that a scale leads to, as a factor to the units of `mean`.

    A scale of 1 stays in the unit of the file's type. Any other leads to whichever of the two units leaves
    the file's numbers nearer to what a file of its type holds: 0.0001 of integers x 10000 to what floats
    hold, 10000 of floats from 0 to 1 to what integers hold. Of equals it is the other type's.
    """
    if scale == 1:
        return own
    other = card.float_scale if own == card.scale else card.scale
    return min((other, own), key=lambda unit: round(_apart(scale * unit, own), 6))


def _leads_to_a_unit(card: Card, own: float, line: Linear) -> bool:
    times = line.scale * _unit(card, own, line.scale)
    limit = math.log(UNIT_FACTOR) + 1e-6
    return any(_apart(times, unit) <= limit for unit in (card.scale, card.float_scale))


def _apart(one: float, other: float) -> float:
    """How many times one factor is the other, as the logarithm."""
    return abs(math.log(abs(one / other))) if one and other else math.inf


def _check_is_felt(card: Card, asked: Linear, own: float) -> None:
    """Refuse an offset in the unit that a scale would have led to, where there is no scale."""
    largest = abs(asked.offset * own) / min(band.std for band in card.bands)
    if asked.scale == 1 and asked.offset and largest < FELT:
        raise RequestInvalid(
            f"offset: {asked.offset:g} is too small to change anything: without a scale it is added to the "
            "file's own numbers; give scale too, as in scale=0.0001 and offset=-0.1",
            param="offset",
        )


def _offset_is_missing(product: str, dtype: np.dtype[Any], scale: float | None) -> str:
    add = "offset=-1000" if scale in (None, 1.0) else f"offset={-1000 * scale:g}"
    if dtype.kind == "f":
        add = "scale=0.0001 and offset=-0.1 (if its floats are those numbers / 10000: offset=-0.1)"
    return (
        f"the file names itself {product}, whose numbers are reflectance x 10000 + 1000, and does not state "
        f"that offset; add {add} to the request, or offset=0 if the offset has been taken off already"
    )
