"""Read what a file's tags say of its numbers and bands: scale, offset, product, names, wavelengths."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence

from baton_geo.raster.messages import note
from baton_geo.raster.pixels.bands import UNCLEAR, FileBand, wavelength
from baton_geo.raster.pixels.calibration import ProductUnit, ScaleOffset, Stated

Tags = Mapping[str, str]
VALUE_CHARACTERS = 4096  # characters of a tag's value
# Since baseline 04.00 (January 2022) Sentinel-2's numbers are reflectance x 10000 + 1000; ESA calls the
# offset RADIO_ADD_OFFSET (level 1C) and BOA_ADD_OFFSET (level 2A) in a product's own metadata.
SHIFTED_SINCE = 4.0
SENTINEL = re.compile(r"S2[A-D]_MSIL(1C|2A)_\d{8}T\d{6}_N(\d\d)(\d\d)_", re.ASCII)
DATATAKE = re.compile(r"GS2[A-D]_\d{8}T\d{6}_\d{6}_N(\d\d\.\d\d)", re.ASCII)
BASELINE = re.compile(r"\s*(\d{1,2}\.\d{1,2})\s*", re.ASCII)
LANDSAT = re.compile(r"L([COTEM])0([4-9])_L(\d)([A-Z]{2})_\d{6}_\d{8}_\d{8}_(\d\d)_", re.ASCII)
HLS = re.compile(r"HLS[._-]?([SL])30(?!\d)", re.ASCII)
SENTINEL_2 = re.compile(r"sentinel[-_ ]?0?2", re.IGNORECASE | re.ASCII)
PLATFORM_TAGS = (
    "platform", "spacecraft", "satellite", "mission", "constellation", "sensor", "instrument", "collection"
)  # fmt: skip
# What says Landsat in lower-case platforms and names, and what one generation alone has. `SR_B4`, `sr_band4`
# are Landsat's, but Earth Engine calls Sentinel-2 `S2_SR`.
START = r"(?<![a-z0-9])"
SR, ST = (rf"{START}(?<!s2[\W_]){kind}[\W_]?b(?:and)?[\W_]?0*" for kind in ("sr", "(?:st|bt)"))
LANDSATS = re.compile(
    rf"{START}(?:(?:landsat[-_ ]?|l[cote](?=0?[4-9]))0?([4-9])?|lm0?[1-5]|mss(?![a-z]))", re.ASCII
)
LANDSAT_NUMBER = re.compile(rf"{SR}\d|{ST}\d", re.ASCII)
ONLY = {
    "Landsat 8-9": re.compile(
        rf"{SR}6(?!\d)|{ST}1[01](?!\d)|{START}(?:sr_(?:qa_)?aerosol|oli(?![a-z]))", re.ASCII
    ),
    "Landsat 4-7": re.compile(
        rf"{ST}6(?!\d)|{START}(?:b0?6_vcid|sr_(?:atmos_opacity|cloud_qa)|e?tm(?![a-z]))", re.ASCII
    ),
}
PREFIXED = re.compile(r"(\w+)=(.*)", re.DOTALL)
SENTINEL_OFFSETS = ("boa_add_offset", "radio_add_offset")
APPLIED = ("true", "1", "yes")
NAME_CHARACTERS = 200
# Ends of names of tags, without spaces and underscores.
NAME_TAGS = ("bandname", "commonname")
WAVELENGTH_TAGS = ("wavelength", "wavelengthum", "wavelengthnm")
MICROMETRES_BELOW = 100.0  # no satellite band is at 100 nm, none used here at 100 micrometres


def read_band(name: str | None, tags: Tags, colour: str | None, *, alpha: bool) -> FileBand:
    """Read what a file says of one band.

    Args:
        name: its description.
        tags: of the band, of every domain.
        colour: its colour interpretation.
        alpha: whether the file marks it as the alpha band.
    """
    known = {re.sub(r"[\s_:]+", "", key): value for key, value in _plain(tags).items()}
    name = name and name[:NAME_CHARACTERS]
    names = tuple(
        value[:NAME_CHARACTERS] for key, value in known.items() if key.endswith(NAME_TAGS) and value.strip()
    )
    stated = (
        _nanometres(value[:NAME_CHARACTERS]) for key, value in known.items() if key.endswith(WAVELENGTH_TAGS)
    )
    said = (wavelength(text) for text in (name, *names) if text)
    return FileBand(name, names, next((nm for nm in (*stated, *said) if nm), None), colour, alpha)


def _nanometres(text: str) -> float | None:
    """Read a wavelength with or without its unit: micrometres are small numbers."""
    if (nm := wavelength(text)) is not None:
        return nm
    number = _number({"": text}, "")
    if number is None or number <= 0:
        return None
    return number * 1000 if number < MICROMETRES_BELOW else number


def read_product(tags: Tags, names: Sequence[str]) -> str | None:
    """Return which of `bands.PRODUCTS` numbered the bands, by the file's tags and the bands' names.

    `UNCLEAR` if it is a Landsat that they do not tell, or they say two.
    """
    plain = _plain(tags)
    text = "\n".join((*plain.values(), *names))
    if (hls := HLS.search(text)) is not None:
        return "Sentinel-2" if hls[1] == "S" else "Landsat 8-9"
    platforms = [value for name, value in plain.items() if any(part in name for part in PLATFORM_TAGS)]
    ids = (found[0] for found in LANDSAT.finditer(text))
    said = "\n".join((*platforms, *ids, *names)).casefold()
    products = {_landsat(number) for number in LANDSATS.findall(said)}
    products |= {product for product, pattern in ONLY.items() if pattern.search(said)}
    if SENTINEL.search(text) or DATATAKE.search(text) or any(map(SENTINEL_2.search, platforms)):
        products.add("Sentinel-2")
    elif not products and LANDSAT_NUMBER.search(said):
        return UNCLEAR
    sure = products - {UNCLEAR}
    return sure.pop() if len(sure) == 1 else UNCLEAR if products else None


def _landsat(number: str) -> str:
    return ("Landsat 8-9" if number in "89" else "Landsat 4-7") if number else UNCLEAR


def read_stated(
    lines: Sequence[ScaleOffset], tags: Tags, band_tags: Sequence[Tags], *, integers: bool
) -> Stated:
    """Read the scales and offsets that a file states.

    They are a band's scale and offset as GDAL knows them; the tags `scale_factor` and `add_offset`, of the
    band or of the file; and of integers Sentinel-2's `BOA_ADD_OFFSET` and `RADIO_ADD_OFFSET`, which are in
    the file's numbers, unless the file says that they are taken off. Two that differ are a conflict.

    Args:
        lines: scale and offset of each band, as GDAL knows them.
        tags: of the file.
        band_tags: of each band.
        integers: whether the pixels are integers.
    """
    whole = _plain(tags)
    each = [whole | _plain(own) for own in band_tags]
    read = [_of_band(line, known, integers) for line, known in zip(lines, each, strict=True)]
    removed = next((by for known in (whole, *each) if (by := _removed_by(known))), None)
    shifted = integers and not removed
    offsets = ("add_offset", *(SENTINEL_OFFSETS if shifted else ()))
    without = any(_number(known, name) == 0 for known in each for name in offsets)  # a stated 0 is deliberate
    left = next(
        (name for known in each for name in SENTINEL_OFFSETS if removed and _number(known, name)), None
    )
    text = (
        f"the file has {(left or '').upper()}, and says ({removed}) that the offset is taken off; none is "
        "taken off"
    )
    return Stated(
        tuple(line for line, _ in read),
        None if without or removed else _product(whole, integers=integers),
        tuple(conflict for _, conflict in read),
        (note("offset_removed", text),) if left else (),
    )


def _plain(tags: Tags) -> dict[str, str]:
    """Return tags by lower-case names without prefix: GDAL writes `s2:a=b` as tag `s2` with value `a=b`."""
    plain = {}
    for name, value in tags.items():
        prefixed = PREFIXED.fullmatch(str(value)[:VALUE_CHARACTERS])
        own, text = prefixed.groups() if prefixed else (str(name), str(value)[:VALUE_CHARACTERS])
        plain[own.casefold().rpartition(":")[2]] = text
    return plain


def _of_band(line: ScaleOffset, tags: Tags, integers: bool) -> tuple[ScaleOffset, str]:
    """Return a band's scale and offset, and what contradicts itself in them."""
    removed = _removed_by(tags)
    scales = {"GDAL": line.scale if line.scale != 1 else None, "scale_factor": _number(tags, "scale_factor")}
    scale, conflict = _agreed("scale", scales)
    scale = 1.0 if scale is None else scale
    offsets = {"GDAL": line.offset or None, "add_offset": _number(tags, "add_offset")}
    if integers and not removed:
        offsets |= {name.upper(): _scaled(_number(tags, name), scale) for name in SENTINEL_OFFSETS}
    offset, other = _agreed("offset", offsets)
    if removed and offset:
        other = f"the file states an offset of {offset:g}, and says ({removed}) that it is taken off already"
    return ScaleOffset(scale, offset or 0.0), conflict or other


def _scaled(number: float | None, scale: float) -> float | None:
    return None if number is None else number * scale


def _agreed(what: str, stated: Mapping[str, float | None]) -> tuple[float | None, str]:
    """Return the first number that is stated, and a sentence if another one differs."""
    known = {origin: number for origin, number in stated.items() if number is not None}
    if not known:
        return None, ""
    (origin, first), *others = known.items()
    for other, number in others:
        if not math.isclose(first, number, rel_tol=1e-6):
            return first, f"the file states two {what}s: {first:g} ({origin}) and {number:g} ({other})"
    return first, ""


def _number(tags: Tags, name: str) -> float | None:
    try:
        number = float(tags[name])
    except (KeyError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _removed_by(tags: Tags) -> str | None:
    """Return the tag by which a provider, or HLS, says that Sentinel-2's offset is removed."""
    if "hls_processing_time" in tags:
        return "HLS_PROCESSING_TIME"
    for name, value in tags.items():
        if name.endswith("boa_offset_applied") and value.strip().casefold() in APPLIED:
            return f"boa_offset_applied={value.strip()[:8]}"
    return None


def _product(tags: Tags, *, integers: bool) -> ProductUnit | None:
    """Return the product that the tags name, if its numbers are not reflectance x 10000."""
    text = "\n".join(tags.values())
    if HLS.search(text):
        return None
    landsat = LANDSAT.search(text)
    if landsat is not None and integers:
        return _landsat_product(landsat)
    for product, baseline in _baselines(tags, text):
        if float(baseline) >= SHIFTED_SINCE:
            name = f"{product} of processing baseline {baseline}"
            return ProductUnit(name, "reflectance x 10000 + 1000", None, -0.1)
    return None


def _landsat_product(found: re.Match[str]) -> ProductUnit | None:
    """Return the unit of collection 2's numbers; the name of collection 1's does not say its level."""
    _, number, level, kind, collection = found.groups()
    if collection == "01":
        return None
    name = f"Landsat {number} level {level} ({kind}) of collection {int(collection)}"
    if level == "2":
        return ProductUnit(name, "(reflectance + 0.2) / 0.0000275", 2.75e-5, -0.2)
    return ProductUnit(name, "counts, by default (reflectance + 0.1) / 0.00002 (its MTL says)", 2e-5, -0.1)


def _baselines(tags: Tags, text: str) -> Iterator[tuple[str, str]]:
    """Yield every product and processing baseline that the tags name."""
    for level, major, minor in SENTINEL.findall(text):
        yield f"Sentinel-2 L{level}", f"{major}.{minor}"
    for baseline in DATATAKE.findall(text):
        yield "Sentinel-2", baseline
    for name, value in tags.items():
        if name.endswith("processing_baseline") and (own := BASELINE.fullmatch(value)) is not None:
            yield "Sentinel-2", own[1]
