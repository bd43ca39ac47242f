"""Choose the files of a STAC item that a model's bands are in, and what the item says of their numbers.

https://github.com/radiantearth/stac-spec, versions 1.0 and 1.1 (`eo:bands` with `raster:bands`, and `bands`).
Files are chosen before any is fetched; who reads them gets what the item says beside the files' own tags.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urljoin

from baton_geo.card import Card
from baton_geo.contract import URL_CHARACTERS, Asset, quoted
from baton_geo.errors import GeoError, RasterUnusable, RequestInvalid
from baton_geo.raster.messages import FileSpec
from baton_geo.raster.pixels.bands import FileBand, FileBands, choose_bands

FIELD = "data.item"
ITEM_BYTES = 4 * 1024 * 1024
ASSETS_LIMIT = 1024
TAGS_LIMIT, TAG_CHARACTERS = 128, 256
DECISIVE = (
    "boa_offset_applied",
    "processing_baseline",
    "platform",
    "constellation",
    "mission",
)  # in names' ends
NOT_SCENES = {"thumbnail", "overview", "metadata", "visual", "tilejson"}  # roles
SHIFTED_SINCE = 4.0  # processing baseline of Sentinel-2 since which 1,000 is added to its numbers
TIFF, JPEG2000 = "image/tiff", "image/jp2"  # media types
JPEG2000_NAME = re.compile(r"\.(?:jp2|j2k)(?:[?#]|$)", re.IGNORECASE)  # of an asset without a media type
PRODUCTS = {
    "Sentinel-2": re.compile(r"sentinel-?2|hls.?s30|\bs2[a-d]?_"),
    "Landsat 8-9": re.compile(r"landsat-?0?[89]|hls.?l30|\blc0[89]_"),
    "Landsat 4-7": re.compile(r"landsat-?0?[4-7]|\bl[et]0[4-7]_"),
}
Found = tuple[str, FileSpec, Asset]


@dataclass(frozen=True)
class _Candidate:
    """An asset that may be read.

    Attributes:
        bands: what the item says of each band, everything of all its lists together.
    """

    key: str
    href: str
    bands: tuple[Mapping[str, Any], ...]
    jpeg2000: bool

    def file_band(self, band: Mapping[str, Any], *, alone: bool) -> FileBand:
        """Describe a band for `choose_bands`; that of an asset of one is named by the asset's key too."""
        names = (_text(band, "name"), _text(band, "common_name"), _text(band, "eo:common_name"))
        said = tuple(name for name in ((self.key, *names) if alone else names) if name)
        centre = _number(band, "center_wavelength", "eo:center_wavelength")
        return FileBand(said[0] if said else None, said[1:], centre * 1000 if centre else None)


def item_of(text: str | bytes) -> Mapping[str, Any]:
    """Parse an item.

    Raises:
        RequestInvalid: it is no JSON object.
    """
    try:
        item = json.loads(text)
    except (ValueError, RecursionError):
        item = None
    if not isinstance(item, dict):
        raise RequestInvalid(f"{FIELD}: is no STAC item: no JSON object", param=FIELD)
    return item


def files_of(item: Mapping[str, Any], base: str | None, card: Card) -> list[Found]:
    """Choose a file for each of the model's bands: name of its field, what is said of it, and where it is.

    Args:
        base: address of the item, to which addresses in it are relative; None: its own `self` link.

    Raises:
        RequestInvalid: it is no item, or has too many assets.
        RasterUnusable: a band is missing, in several assets, or in none that is a GeoTIFF or JPEG 2000.
    """
    assets = item.get("assets")
    if item.get("type") != "Feature" or not isinstance(assets, Mapping):
        raise RequestInvalid(f"{FIELD}: is no STAC item (a Feature with assets)", param=FIELD)
    if len(assets) > ASSETS_LIMIT:
        raise RequestInvalid(
            f"{FIELD}: has {len(assets)} assets; at most {ASSETS_LIMIT} are allowed", param=FIELD
        )
    if card.frames > 1:
        raise RasterUnusable(
            f"{FIELD}: an item is of one time, and the model takes {card.frames} time steps; give assets",
            param=FIELD,
        )
    properties = item.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    tags = _tags(item, properties)
    base = base or _own_address(item)
    return [
        (
            f"{FIELD}.assets.{quoted(asset.key, 64)[1:-1]}",
            FileSpec(
                name=name,
                tags=tags,
                band_tags=tuple(_band_tags(band, tags, _product(tags)) for band in asset.bands),
                nodata=_nodata(asset.bands),
            ),
            _address(asset, base),
        )
        for name, asset in _chosen(tuple(_candidates(assets)), _product(tags), card)
    ]


def _chosen(
    found: Sequence[_Candidate], product: str | None, card: Card
) -> list[tuple[str | None, _Candidate]]:
    """Choose assets, with the names that their bands have in the card; None: by their own.

    Catalogues have twins of one band: the GeoTIFFs are tried first, then the JPEG 2000 files.
    """
    refused: GeoError | None = None
    for kind in (False, True):
        same = [asset for asset in found if asset.jpeg2000 == kind]
        try:
            if chosen := list(_chosen_of(same, product, card)):
                return chosen
        except GeoError as error:
            refused = refused or error
    listed = ", ".join(asset.key for asset in found[:16]) or "none"
    why = f": {refused.message}" if refused is not None else ""
    raise RasterUnusable(
        f"{FIELD}: its assets are not the model's bands; GeoTIFFs and JPEG 2000 files among them are "
        f"{quoted(listed, 300)}{why}",
        param=FIELD,
    )


def _chosen_of(
    found: Sequence[_Candidate], product: str | None, card: Card
) -> Iterator[tuple[str | None, _Candidate]]:
    """Do the same for assets of one format; yields none if they are not the model's bands.

    Raises:
        GeoError: they are not, and why.
    """
    single = [asset for asset in found if len(asset.bands) <= 1]
    described = [asset.file_band((*asset.bands, {})[0], alone=True) for asset in single]
    refused: GeoError | None = None
    if described:
        try:
            choice = choose_bands(FileBands(tuple(described), product), card, None)
            if not choice.notes or not choice.notes[0].startswith("bands_in_order"):
                for band, number in zip(card.bands, choice.bands, strict=True):
                    yield band.name, single[number]
                return
        except GeoError as error:
            refused = error
    for asset in found:
        if len(asset.bands) >= len(card.bands):
            bands = tuple(asset.file_band(band, alone=False) for band in asset.bands)
            try:
                choose_bands(FileBands(bands, product), card, None)
            except GeoError as error:
                refused = refused or error
                continue
            yield None, asset
            return
    if refused is not None:
        raise refused


def _candidates(assets: Mapping[str, Any]) -> Iterator[_Candidate]:
    for key, asset in assets.items():
        if not isinstance(asset, Mapping) or not isinstance(asset.get("href"), str):
            continue
        kind, roles = asset.get("type"), asset.get("roles")
        kind = kind.strip().casefold() if isinstance(kind, str) else None
        if kind is not None and not kind.startswith((TIFF, JPEG2000)):
            continue
        if isinstance(roles, list) and NOT_SCENES.intersection(
            role for role in roles if isinstance(role, str)
        ):
            continue
        lists = [asset.get(name) for name in ("raster:bands", "eo:bands", "bands")]
        rows = [[row for row in rows if isinstance(row, Mapping)] for rows in lists if isinstance(rows, list)]
        own = {
            name: value
            for name, value in asset.items()
            if name.startswith(("raster:", "eo:")) or name == "nodata"
        }
        merged = tuple(
            {**own, **{name: value for row in same if row for name, value in row.items()}}
            for same in _in_columns(rows)
        )
        href = _https(asset)
        jpeg2000 = kind.startswith(JPEG2000) if kind else bool(JPEG2000_NAME.search(href))
        yield _Candidate(str(key), href, merged or (own,), jpeg2000)


def _in_columns(rows: Sequence[Sequence[Mapping[str, Any]]]) -> Iterator[list[Mapping[str, Any]]]:
    for number in range(max(map(len, rows), default=0)):
        yield [row[number] for row in rows if number < len(row)]


def _https(asset: Mapping[str, Any]) -> str:
    """Return the asset's address, of its alternates the first that can be fetched."""
    href = str(asset["href"])
    alternates = asset.get("alternate")
    if "://" not in href or href.startswith("http") or not isinstance(alternates, Mapping):
        return href
    others = [one.get("href") for one in alternates.values() if isinstance(one, Mapping)]
    return next((one for one in others if isinstance(one, str) and one.startswith("http")), href)


def _address(asset: _Candidate, base: str | None) -> Asset:
    where = f"{FIELD}.assets.{quoted(asset.key, 64)[1:-1]}"
    try:
        href = urljoin(base or "", asset.href)
    except ValueError:
        href = ""
    if "://" not in href or len(href) > URL_CHARACTERS:
        raise RequestInvalid(
            f"{where}: its address is too long, or relative and the item has none of its own (a link `self`)",
            param=FIELD,
        )
    return Asset(data=href, data_format="url")


def _own_address(item: Mapping[str, Any]) -> str | None:
    links = item.get("links")
    for link in links if isinstance(links, list) else ():
        if isinstance(link, Mapping) and link.get("rel") == "self" and isinstance(link.get("href"), str):
            return str(link["href"])
    return None


def _tags(item: Mapping[str, Any], properties: Mapping[str, Any]) -> dict[str, str]:
    """Turn the item's properties into tags of a file."""
    given = {name: value for name, value in properties.items() if isinstance(value, str | int | float)}
    said = dict(
        sorted(given.items(), key=lambda each: not str(each[0]).endswith(DECISIVE))
    )  # before others are cut
    tags = {
        str(name)[:TAG_CHARACTERS]: (str(value).lower() if isinstance(value, bool) else str(value))[
            :TAG_CHARACTERS
        ]
        for name, value in list(said.items())[:TAGS_LIMIT]
    }
    for name, value in (("ITEM_ID", item.get("id")), ("COLLECTION", item.get("collection"))):
        if isinstance(value, str):
            tags[name] = value[:TAG_CHARACTERS]
    if isinstance(when := properties.get("datetime") or properties.get("start_datetime"), str):
        tags["ACQUISITION_DATETIME"] = when[:TAG_CHARACTERS]
    if isinstance(version := properties.get("processing:version"), str):
        tags.setdefault("PROCESSING_BASELINE", version[:TAG_CHARACTERS])
    return tags


def _product(tags: Mapping[str, str]) -> str | None:
    said = " ".join(
        value.casefold()
        for name, value in tags.items()
        if name in ("ITEM_ID", "COLLECTION", "platform", "constellation", "mission")
    )
    found = [product for product, pattern in PRODUCTS.items() if pattern.search(said)]
    return found[0] if len(found) == 1 else None


def _band_tags(band: Mapping[str, Any], tags: Mapping[str, str], product: str | None) -> dict[str, str]:
    """Return a band's scale and offset as tags; flag and baseline decide about Sentinel-2's offset."""
    scale, offset = _number(band, "scale", "raster:scale"), _number(band, "offset", "raster:offset")
    found = {} if scale is None else {"scale_factor": repr(scale)}
    applied = any(
        name.endswith("boa_offset_applied") and value in ("true", "1", "yes") for name, value in tags.items()
    )
    if offset is not None and not applied:
        found["add_offset"] = repr(offset)
    elif offset is None and not applied and product == "Sentinel-2" and _is_shifted(tags):
        found["BOA_ADD_OFFSET"] = "-1000"
    return found


def _is_shifted(tags: Mapping[str, str]) -> bool:
    if any("hls" in tags.get(name, "").casefold() for name in ("ITEM_ID", "COLLECTION")):
        return False
    said = next(
        (value for name, value in tags.items() if name.casefold().endswith("processing_baseline")), ""
    )
    return bool(re.fullmatch(r"\d{1,2}\.\d{1,2}", said)) and float(said) >= SHIFTED_SINCE


def _nodata(bands: Sequence[Mapping[str, Any]]) -> float | None:
    values = [band.get("nodata") for band in bands]
    first = values[0] if values else None
    if isinstance(first, str) and first.casefold() == "nan":
        return math.nan
    return float(first) if isinstance(first, int | float) and not isinstance(first, bool) else None


def _number(band: Mapping[str, Any], *names: str) -> float | None:
    for name in names:
        value = band.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    return None


def _text(band: Mapping[str, Any], name: str) -> str | None:
    value = band.get(name)
    return value[:TAG_CHARACTERS] if isinstance(value, str) and value else None
