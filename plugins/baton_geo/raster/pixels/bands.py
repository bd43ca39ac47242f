"""Find the model's bands among the bands of a file, by what the file says of them.

A file says it by names, wavelengths, or colours (TIFF's photometric interpretation, GDAL's COLORINTERP).
What it says is followed or refused; the order alone decides only where it says nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass

from baton_geo.card import Card
from baton_geo.errors import RasterUnusable, RequestInvalid
from baton_geo.raster.messages import note

LISTED = 16  # bands that a message names before "and so on"
NEAR_NM = 40.0  # a wavelength this near to a band's is that band's
SAME_NM = 20.0  # beyond it a note says how far off the band is


@dataclass(frozen=True)
class KnownBand:
    """A band that many files have.

    Attributes:
        name: as Prithvi's papers and TerraTorch call it.
        nm: centre, nanometres, of Sentinel-2's band, else of Landsat's.
        common: STAC's common names, and others, without spaces and underscores; the first is this band's
            alone.
        numbers: its names in the products of `PRODUCTS`, in that order; "": none.
    """

    name: str
    nm: float
    common: tuple[str, ...]
    numbers: tuple[str, str, str]


PRODUCTS = ("Sentinel-2", "Landsat 8-9", "Landsat 4-7")
"""Products that number their bands. HLS S30 numbers them as Sentinel-2 does, HLS L30 as Landsat 8-9."""
UNCLEAR = "unclear"
"""The product of a file that says Landsat but not which, or two products: its numbers mean no band."""

KNOWN_BANDS = (
    KnownBand("COASTAL_AEROSOL", 443, ("coastal", "ultrablue"), ("b1", "b1", "")),
    KnownBand("BLUE", 490, ("blue",), ("b2", "b2", "b1")),
    KnownBand("GREEN", 560, ("green",), ("b3", "b3", "b2")),
    KnownBand("RED", 665, ("red",), ("b4", "b4", "b3")),
    KnownBand("RED_EDGE_1", 705, ("rededge071", "rededge"), ("b5", "", "")),
    KnownBand("RED_EDGE_2", 740, ("rededge075", "rededge"), ("b6", "", "")),
    KnownBand("RED_EDGE_3", 783, ("rededge078", "rededge"), ("b7", "", "")),
    KnownBand("NIR_BROAD", 842, ("nirbroad", "broadnir", "nir", "nearinfrared"), ("b8", "", "")),
    KnownBand(
        "NIR_NARROW",
        865,
        ("nir08", "narrownir", "nir", "nearinfrared", "rededge"),  # ESA calls B8A both
        ("b8a", "b5", "b4"),
    ),
    KnownBand("WATER_VAPOR", 945, ("nir09", "watervapour"), ("b9", "", "")),
    KnownBand("CIRRUS", 1375, ("cirrus",), ("b10", "b9", "")),
    KnownBand("SWIR_1", 1610, ("swir16", "swir"), ("b11", "b6", "b5")),
    KnownBand("SWIR_2", 2190, ("swir22", "swir"), ("b12", "b7", "b7")),
    KnownBand("PANCHROMATIC", 590, ("pan",), ("", "b8", "b8")),
    KnownBand("THERMAL_1", 10_900, ("lwir11", "lwir"), ("", "b10", "b6")),
    KnownBand("THERMAL_2", 12_000, ("lwir12",), ("", "b11", "")),
)
BY_NAME = {band.name: band for band in KNOWN_BANDS}
PANCHROMATIC = "PANCHROMATIC"  # so broad that its wavelength says nothing
BROAD = ("NIR_BROAD", PANCHROMATIC)
THERMAL_NM = 3000.0
NUMBERED = re.compile(r"(?:srband|srb|b)0*(\d{1,2}a?)")  # not `band4`, which may be the file's fourth
NUMBER = re.compile(r"b\d{1,2}a?")
WORDS = 12  # of a name that are looked at


@dataclass(frozen=True)
class FileBand:
    """The description of one band in a file.

    Attributes:
        tags: other names that its tags have for it.
        nm: the centre that its tags state, nanometres.
        colour: its colour interpretation, as `red` or `nir`.
        alpha: whether the file marks it as the alpha band.
    """

    name: str | None = None
    tags: tuple[str, ...] = ()
    nm: float | None = None
    colour: str | None = None
    alpha: bool = False


@dataclass(frozen=True)
class FileBands:
    """The bands of a file, all of them, as gdalinfo lists them.

    Attributes:
        bands: in the file's order.
        product: of `PRODUCTS`, whose numbers the names are, or `UNCLEAR`; None: unknown.
        pages: further images in the file, which are not read.
    """

    bands: tuple[FileBand, ...]
    product: str | None = None
    pages: int = 0


@dataclass(frozen=True)
class BandChoice:
    """The bands to read.

    Attributes:
        bands: indices from 0 of the file's bands in the model's order, one time step after the other.
        notes: assumptions.
    """

    bands: tuple[int, ...]
    notes: tuple[str, ...] = ()


def choose_bands(file: FileBands, card: Card, indices: tuple[int, ...] | None) -> BandChoice:
    """Choose the bands to read.

    The request's `indices` decide. Without them the file's names decide, then its wavelengths, then its
    colours, if they give a band for each of the model's. If the file says nothing of any band that the model
    could know, its order decides, provided that it has as many bands as the model.

    Args:
        indices: of the request, from 0; None: not given.

    Raises:
        RequestInvalid: `indices` has not as many entries as the model has bands.
        RasterUnusable: a band is missing, a band's name and wavelength contradict each other, or the bands
            to use are not clear.
    """
    if indices is not None:
        return _by_index(file, card, indices)
    wanted = [_identity(band.name, band.aliases) for band in card.bands]
    named = [_named_as(file, number, card) for number in range(len(file.bands))]
    by_wavelength = {
        n: band.nm for n, band in enumerate(file.bands) if band.nm is not None and named[n] is None
    }
    known = any(name in BY_NAME for name in wanted)
    speaks = any(name in wanted or (known and name in BY_NAME) for name in named)
    unclear = known and file.product == UNCLEAR and any(map(_has_number, file.bands))
    if not speaks and not unclear and not (known and by_wavelength):
        return _by_order(file, card)
    found = [
        [number for number, name in enumerate(named) if name == band] or _nearest(band, by_wavelength)
        for band in wanted
    ]
    if not all(found):
        first = next(number for number, matches in enumerate(found) if not matches)
        raise RasterUnusable(_missing(file, card, first, unclear=unclear), param="indices")
    bands = _by_name(file, card, found)
    return BandChoice(bands, tuple(_notes(file, bands, wanted * card.frames)))


def require_one_a_band(card: Card, indices: tuple[int, ...]) -> None:
    """Require as many indices as the model has bands.

    Raises:
        RequestInvalid: there are more or fewer.
    """
    wanted = len(card.bands) * card.frames
    if len(indices) != wanted:
        raise RequestInvalid(
            f"indices names {len(indices)} bands; the model takes {wanted}: {_model_bands(card)}",
            param="indices",
        )


def _by_index(file: FileBands, card: Card, indices: tuple[int, ...]) -> BandChoice:
    require_one_a_band(card, indices)
    for place, index in enumerate(indices):
        if not 0 <= index < len(file.bands):
            band = card.bands[place % len(card.bands)].name
            raise RasterUnusable(
                f"band {index + 1}, which indices asks for as '{band}', is missing; {_file_bands(file)}",
                param="indices",
            )
    return BandChoice(indices)


def _by_name(file: FileBands, card: Card, found: list[list[int]]) -> tuple[int, ...]:
    for band, matches in zip(card.bands, found, strict=True):
        if len(matches) != card.frames:
            raise RasterUnusable(
                f"band '{band.name}' is in the file {len(matches)} times, the model takes it "
                f"{card.frames} times; {_file_bands(file)}; say which with indices",
                param="indices",
            )
    return tuple(matches[frame] for frame in range(card.frames) for matches in found)


def _by_order(file: FileBands, card: Card) -> BandChoice:
    wanted = len(card.bands) * card.frames
    shown = tuple(number for number, band in enumerate(file.bands) if not band.alpha)
    if len(shown) < wanted:
        raise RasterUnusable(_missing(file, card, len(shown)), param="indices")
    if len(shown) > wanted:
        raise RasterUnusable(
            f"the bands to use are not clear: the model takes {wanted}: {_model_bands(card)}; "
            f"{_file_bands(file)}; name them as the model does, or say which with indices",
            param="indices",
        )
    strange = any(file.bands[number].name for number in shown)
    text = (
        "no band has a name that the model knows" if strange else "the file does not say what its bands are"
    )
    return BandChoice(
        shown, (note("bands_in_order", f"{text}, so they are used in order as {_model_bands(card)}"),)
    )


def normalised(text: str) -> str:
    """Normalise a band's name: `SWIR 1` is `swir1`, `B02` is `b2`, `SR_B2` of Landsat is `b2`."""
    plain = re.sub(r"[\s_.\-]+", "", text.casefold())
    numbered = NUMBERED.fullmatch(plain)
    return f"b{numbered[1]}" if numbered else plain


COMMON = {
    part: [band for band in KNOWN_BANDS if part in (normalised(band.name), *band.common)]
    for known in KNOWN_BANDS
    for part in (normalised(known.name), *known.common)
}


def _identity(name: str, aliases: Sequence[str]) -> str:
    """Return the known band that a card's band is by its names, else its own name, normalised."""
    for text in (name, *aliases):
        for band in KNOWN_BANDS:
            if normalised(text) in (normalised(band.name), band.common[0]):
                return band.name
    return normalised(name)


def _named_as(file: FileBands, number: int, card: Card) -> str | None:
    """Identify a band by its names, else by its colour, as a known band or the card's; None: neither."""
    band, column = file.bands[number], _column(file)
    texts = [text for text in (band.name, *band.tags) if text]
    names = {text: found for text in texts if (found := _meaning(text, band.nm, file, card))}
    sure = {text: name for text, (name, is_sure) in names.items() if is_sure}
    if not names:
        silent = band.alpha or band.nm is not None or band.colour is None
        return None if silent else _common(band.colour or "", None, column)
    text, name = next(iter(sure.items()), None) or next((text, name) for text, (name, _) in names.items())
    against = next((f"'{_short(other)}' {also}" for other, also in sure.items() if also != name), None)
    if band.nm is not None and name in BY_NAME and not _is_near(BY_NAME[name], band.nm):
        if not sure:
            return None  # a number of another product's bands: the wavelength is sure
        against = f"its wavelength {band.nm:g} nm another"
    if against is not None:
        raise RasterUnusable(
            f"band {number + 1} contradicts itself: '{_short(text)}' says {name}, {against}; "
            f"{_file_bands(file)}; say which bands to use with indices",
            param="indices",
        )
    return name


def _meaning(text: str, nm: float | None, file: FileBands, card: Card) -> tuple[str, bool] | None:
    """Return the band of a name, and whether it is sure: not a number, such as `B4`, of an unknown product.

    Words of the card or the table come first, then the product's numbers, then Sentinel-2's.
    """
    words = _words(text)
    column = _column(file)
    numbers = {part for word in words if NUMBER.fullmatch(part := normalised(word))}
    own = {
        part: _identity(band.name, band.aliases)
        for band in card.bands
        for part in (normalised(alias) for alias in (band.name, *band.aliases))
    }
    plain = {part: name for part, name in own.items() if not NUMBER.fullmatch(part)}
    if name := _found(words, lambda part: plain.get(part) or _common(part, nm, column, numbers)):
        return name, True
    if column is not None and (name := _found(words, lambda part: _numbered(part, column))):
        return name, True
    name = _found(words, lambda part: own.get(part) or _numbered(part, 0))
    if name is None or (file.product == UNCLEAR and name in BY_NAME):
        return None
    return name, column is not None


def _words(text: str) -> list[str]:
    return [word for word in re.split(r"[^a-z0-9]+", text.casefold()) if word][:WORDS]


def _has_number(band: FileBand) -> bool:
    texts = (_words(text or "") for text in (band.name, *band.tags))
    return any(_found(words, lambda part: part if NUMBER.fullmatch(part) else None) for words in texts)


def _column(file: FileBands) -> int | None:
    return PRODUCTS.index(file.product) if file.product in PRODUCTS else None


def _found(words: list[str], known: Callable[[str], str | None]) -> str | None:
    """Identify a band by its longest run of words: `Red Edge 1` is not red; None: two mean two bands."""
    for length in range(len(words), 0, -1):
        runs = ("".join(words[start : start + length]) for start in range(len(words) - length + 1))
        found = {name for run in runs if (name := known(normalised(run)))}
        if found:
            return found.pop() if len(found) == 1 else None
    return None


def _numbered(part: str, column: int) -> str | None:
    if column and part.startswith("band"):  # of Landsat; elsewhere `Band 4` may be the file's fourth
        part = normalised(part.replace("band", "b"))
    return next((band.name for band in KNOWN_BANDS if part and band.numbers[column] == part), None)


def _common(part: str, nm: float | None, column: int | None, numbers: Container[str] = ()) -> str | None:
    """Return the known band of a common name; of several (`nir`) the product's, the one whose number stands
    beside it (`B8A NIR`), or the nearest.
    """
    found = COMMON.get(part, [])
    found = [band for band in found if column is not None and band.numbers[column]] or found
    found = [band for band in found if band.numbers[column or 0] in numbers] or found
    return min(found, key=lambda band: 0.0 if nm is None else abs(band.nm - nm)).name if found else None


def _is_near(band: KnownBand, nm: float) -> bool:
    return band.name == PANCHROMATIC or abs(band.nm - nm) <= max(NEAR_NM, 0.1 * nm * (nm > THERMAL_NM))


def _nearest(name: str, wavelengths: dict[int, float]) -> list[int]:
    """Return the bands nearest to a known band, within `NEAR_NM` and not nearer to another known one.

    Broad bands are no others: Landsat 7's 835 nm is the near infrared, though Sentinel-2 has a broad band at
    842.
    """
    if name not in BY_NAME:
        return []
    target = BY_NAME[name].nm
    others = [band.nm for band in KNOWN_BANDS if band.name not in (name, *BROAD)]
    near = [
        nm
        for nm in wavelengths.values()
        if abs(nm - target) <= NEAR_NM and all(abs(nm - target) <= abs(nm - other) for other in others)
    ]
    best = min(near, key=lambda nm: abs(nm - target), default=None)
    return [number for number, nm in wavelengths.items() if nm == best]


def wavelength(text: str) -> float | None:
    """Read a wavelength with its unit from a text, in nanometres: `B4, central wavelength 665 nm`."""
    found = re.search(r"(\d+(?:\.\d+)?)\s*(nm\b|nanomet|um\b|µm|μm|micromet|micron)", text.casefold())
    if found is None:
        return None
    return float(found[1]) * (1.0 if found[2].startswith("n") else 1000.0)


def _notes(file: FileBands, bands: tuple[int, ...], wanted: list[str]) -> Iterator[str]:
    """Yield notes of bands that are far from the model's in wavelength, or marked as another."""
    marked = []
    for number, name in zip(bands, wanted, strict=True):
        band = file.bands[number]
        if band.nm is not None and name in BY_NAME and abs(band.nm - BY_NAME[name].nm) > SAME_NM:
            yield note("band_wavelength", f"band {number + 1} at {band.nm:g} nm is used as {name}")
        marks = [known.name for known in COMMON.get(band.colour or "", [])]
        if band.alpha or (marks and name not in marks):
            marked.append(f"{number + 1} as {'alpha' if band.alpha else band.colour}")
    if marked:
        yield note(
            "bands_marked",
            f"the file marks band {', band '.join(marked)}; its names say otherwise and are used",
        )


def _missing(file: FileBands, card: Card, place: int, *, unclear: bool = False) -> str:
    band = card.bands[place % len(card.bands)].name
    frame = f" of time step {place // len(card.bands) + 1}" if card.frames > 1 else ""
    taken = f"the model takes {_model_bands(card)}"
    pages = (
        f" (and {file.pages} further images, which are not read: all bands have to be in one)"
        if file.pages
        else ""
    )
    numbers = (
        "; its numbers are Landsat's (SR_B4 is RED of Landsat 8-9, NIR_NARROW of Landsat 4-7), and neither "
        "tags (LANDSAT_PRODUCT_ID) nor names say of which alone"
        if unclear
        else ""
    )
    return (
        f"band {place + 1} '{band}'{frame} is missing; {_file_bands(file)}{pages}{numbers}; {taken}; if the "
        "file has them under other names, say which with indices, from 0 in this order"
    )


def _model_bands(card: Card) -> str:
    listed = ", ".join(band.name for band in card.bands)
    return (
        listed if card.frames == 1 else f"{listed}, each {card.frames} times, one time step after the other"
    )


def _file_bands(file: FileBands) -> str:
    """List the file's bands, e.g. "the file has 3 bands: 1 'BLUE', 2 (no name), 3 (no name, alpha)"."""
    plural = "band" if len(file.bands) == 1 else "bands"
    labels = [_label(band) for band in file.bands]
    if not any(labels):
        return f"the file has {len(labels)} {plural} without names"
    listed = [f"{n} {label or '(no name)'}" for n, label in enumerate(labels[:LISTED], 1)]
    if len(labels) > LISTED:
        listed.append("and so on")
    return f"the file has {len(labels)} {plural}: {', '.join(listed)}"


def _label(band: FileBand) -> str:
    name = f"'{_short(band.name)}'" if band.name else ""
    more = [f"{band.nm:g} nm"] if band.nm is not None else []
    more += ["marked alpha"] if band.alpha else [f"marked {band.colour}"] if band.colour else []
    return f"{name or 'no name'} ({', '.join(more)})" if more else name


def _short(name: str) -> str:
    """Shorten a name from the file to one printable line."""
    text = "".join(letter if letter.isprintable() else " " for letter in name)
    return text if len(text) <= 40 else f"{text[:37]}..."
