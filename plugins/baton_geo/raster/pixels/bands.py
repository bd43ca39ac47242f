"""Find the model's bands among the bands of a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton_geo.card import Card
from baton_geo.errors import RasterUnusable, RequestInvalid

Names = Sequence[str | None]
LISTED = 16  # bands that a message names before "and so on"


@dataclass(frozen=True)
class BandChoice:
    """The bands to read.

    Attributes:
        bands: indices from 0 of the file's bands in the model's order, one time step after the other.
        notes: assumptions, one sentence each.
    """

    bands: tuple[int, ...]
    notes: tuple[str, ...] = ()


def choose_bands(names: Names, card: Card, indices: tuple[int, ...] | None) -> BandChoice:
    """Choose the bands to read.

    The request's `indices` decide. Without them names decide, if the file has a band for each of the model's.
    If no name of the file is one of the model's, the order decides, provided that the file has as many bands
    as the model.

    Args:
        names: of the file's bands; None for a band without a name.
        card: of the model.
        indices: of the request, from 0; None: not given.

    Raises:
        RequestInvalid: `indices` has not as many entries as the model has bands.
        RasterUnusable: a band is missing, or the bands to use are not clear.
    """
    if indices is not None:
        return _by_index(names, card, indices)
    found = [_matches(names, name, aliases) for name, aliases in ((b.name, b.aliases) for b in card.bands)]
    if all(found):
        return _by_name(names, card, found)
    if any(found):
        first = next(number for number, matches in enumerate(found) if not matches)
        raise RasterUnusable(_missing(card, first, names))
    return _by_order(names, card)


def _by_index(names: Names, card: Card, indices: tuple[int, ...]) -> BandChoice:
    wanted = len(card.bands) * card.frames
    if len(indices) != wanted:
        raise RequestInvalid(
            f"indices names {len(indices)} bands; the model takes {wanted}: {_model_bands(card)}",
            param="indices",
        )
    for place, index in enumerate(indices):
        if not 0 <= index < len(names):
            band = card.bands[place % len(card.bands)].name
            raise RasterUnusable(
                f"band {index + 1}, which indices asks for as '{band}', is missing; {_file_bands(names)}",
                param="indices",
            )
    return BandChoice(indices)


def _by_name(names: Names, card: Card, found: list[list[int]]) -> BandChoice:
    for band, matches in zip(card.bands, found, strict=True):
        if len(matches) != card.frames:
            raise RasterUnusable(
                f"band '{band.name}' is in the file {len(matches)} times, the model takes it "
                f"{card.frames} times; {_file_bands(names)}; say which with indices"
            )
    return BandChoice(tuple(matches[frame] for frame in range(card.frames) for matches in found))


def _by_order(names: Names, card: Card) -> BandChoice:
    wanted = len(card.bands) * card.frames
    if len(names) < wanted:
        raise RasterUnusable(_missing(card, len(names), names))
    if len(names) > wanted:
        raise RasterUnusable(
            f"the bands to use are not clear: the model takes {wanted}: {_model_bands(card)}; "
            f"{_file_bands(names)}; name them as the model does, or say which with indices"
        )
    if not any(names):
        return BandChoice(tuple(range(wanted)))
    note = f"no band has a name that the model knows, so they are used in order as {_model_bands(card)}"
    return BandChoice(tuple(range(wanted)), (note,))


def _matches(names: Names, name: str, aliases: tuple[str, ...]) -> list[int]:
    known = {text.strip().casefold() for text in (name, *aliases)}
    return [index for index, text in enumerate(names) if text and text.strip().casefold() in known]


def _missing(card: Card, place: int, names: Names) -> str:
    band = card.bands[place % len(card.bands)].name
    frame = f" of time step {place // len(card.bands) + 1}" if card.frames > 1 else ""
    taken = f"the model takes {_model_bands(card)}"
    return f"band {place + 1} '{band}'{frame} is missing; {_file_bands(names)}; {taken}"


def _model_bands(card: Card) -> str:
    listed = ", ".join(band.name for band in card.bands)
    return (
        listed if card.frames == 1 else f"{listed}, each {card.frames} times, one time step after the other"
    )


def _file_bands(names: Names) -> str:
    """List the file's bands, e.g. "the file has 2 bands: 1 'BLUE', 2 (no name)"."""
    plural = "band" if len(names) == 1 else "bands"
    if not any(names):
        return f"the file has {len(names)} {plural} without names"
    listed = [
        f"{n} '{_short(name)}'" if name else f"{n} (no name)" for n, name in enumerate(names[:LISTED], 1)
    ]
    if len(names) > LISTED:
        listed.append("and so on")
    return f"the file has {len(names)} {plural}: {', '.join(listed)}"


def _short(name: str) -> str:
    """Shorten a name from the file to one printable line."""
    text = "".join(letter if letter.isprintable() else " " for letter in name)
    return text if len(text) <= 40 else f"{text[:37]}..."
