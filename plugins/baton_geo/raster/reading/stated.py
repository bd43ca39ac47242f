"""Read scale and offset from a file's tags, and detect satellite products that need an offset."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from baton_geo.raster.pixels.calibration import ScaleOffset, Stated

Tags = Mapping[str, str]
VALUE_CHARACTERS = 4096  # characters of a tag's value
# Since baseline 04.00 (January 2022) Sentinel-2's numbers are reflectance x 10000 + 1000; ESA calls the
# offset RADIO_ADD_OFFSET (level 1C) and BOA_ADD_OFFSET (level 2A) in a product's own metadata.
SHIFTED_SINCE = 4.0
PRODUCT = re.compile(r"S2[A-D]_MSIL(1C|2A)_\d{8}T\d{6}_N(\d\d)(\d\d)_", re.ASCII)
BASELINE = re.compile(r"\s*(\d{1,2}\.\d{1,2})\s*", re.ASCII)
PREFIXED = re.compile(r"(\w+)=(.*)", re.DOTALL)
SENTINEL_OFFSETS = ("boa_add_offset", "radio_add_offset")
APPLIED = ("true", "1", "yes")


def read_stated(
    lines: Sequence[ScaleOffset], tags: Tags, band_tags: Sequence[Tags], *, integers: bool
) -> Stated:
    """Read the scales and offsets that a file states.

    A band's scale and offset as GDAL knows them come first; then the tags `scale_factor` and `add_offset`, of
    the band or of the file; then, of integers, Sentinel-2's `BOA_ADD_OFFSET` and `RADIO_ADD_OFFSET`.

    Args:
        lines: scale and offset of each band, as GDAL knows them.
        tags: of the file.
        band_tags: of each band.
        integers: whether the pixels are integers.
    """
    whole = _plain(tags)
    each = [whole | _plain(own) for own in band_tags]
    removed = _is_offset_removed(whole)
    shifted = integers and not removed  # a provider that removed the offset may have left its tags
    offsets = ("add_offset", *(SENTINEL_OFFSETS if shifted else ()))
    bands = tuple(_of_band(line, known, shifted) for line, known in zip(lines, each, strict=True))
    without = any(_number(known, name) == 0 for known in each for name in offsets)  # a stated 0 is deliberate
    return Stated(bands, None if without or removed else _shifted(whole))


def _plain(tags: Tags) -> dict[str, str]:
    """Return tags by lower-case names without prefix: GDAL writes `s2:a=b` as tag `s2` with value `a=b`."""
    plain = {}
    for name, value in tags.items():
        prefixed = PREFIXED.fullmatch(str(value)[:VALUE_CHARACTERS])
        own, text = prefixed.groups() if prefixed else (str(name), str(value)[:VALUE_CHARACTERS])
        plain[own.casefold()] = text
    return plain


def _of_band(line: ScaleOffset, tags: Tags, shifted: bool) -> ScaleOffset:
    """Combine GDAL's scale and offset with the tags'; Sentinel-2's offsets are in the file's numbers."""
    if line.offset:
        return line
    scale = line.scale if line.scale != 1 else _number(tags, "scale_factor")
    scale = 1.0 if scale is None else scale
    offset = _number(tags, "add_offset")
    if offset is None and shifted:
        shifts = (_number(tags, name) for name in SENTINEL_OFFSETS)
        offset = next((shift * scale for shift in shifts if shift is not None), None)
    return ScaleOffset(scale, offset or 0.0)


def _number(tags: Tags, name: str) -> float | None:
    try:
        number = float(tags[name])
    except (KeyError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _is_offset_removed(tags: Tags) -> bool:
    """Return whether the tags say that a provider, or HLS, has removed Sentinel-2's offset."""
    return tags.get("boa_offset_applied", "").strip().casefold() in APPLIED or "hls_processing_time" in tags


def _shifted(tags: Tags) -> str | None:
    """Name the product and its baseline, if the tags name one whose numbers contain an offset."""
    for value in tags.values():
        found = PRODUCT.search(value)
        if found is not None:
            level, major, minor = found.groups()
            return _shifted_product(f"Sentinel-2 L{level}", f"{major}.{minor}")
    found = BASELINE.fullmatch(tags.get("processing_baseline", ""))
    return None if found is None else _shifted_product("Sentinel-2", found[1])


def _shifted_product(product: str, baseline: str) -> str | None:
    return f"{product} of processing baseline {baseline}" if float(baseline) >= SHIFTED_SINCE else None
