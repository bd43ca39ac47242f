"""Parse the operator's settings: the `baton_geo` table of vLLM's engine argument `additional_config`.

No environment is read, so that settings work the same way in plain vLLM and behind a gateway.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ByteSize, Field, ValidationError

from baton_geo.card import ReadOnlyModel

MIB = 1024 * 1024


class GeoLimits(ReadOnlyModel):
    """The limits of one request."""

    pixels: int = Field(12_000 * 12_000, ge=1, description="Pixels of one band.")
    bands: int = Field(64, ge=1, le=4096, description="Bands in use.")
    tiles: int = Field(8192, ge=1, description="Tiles of a scene.")
    tiles_at_once: int = Field(
        1024,
        ge=1,
        description="Tiles of a scene where they are not streamed: offline and in vLLM's own server.",
    )
    tile_bytes: int = Field(
        64,
        ge=0,
        description="Least size of the file per tile; a shorter file is a bomb. 0: no such limit.",
    )
    block_bytes: ByteSize = Field(
        ByteSize(128 * MIB), description="Size of one strip or tile of the file, uncompressed."
    )
    file_bytes: ByteSize = Field(ByteSize(2048 * MIB), description="Size of the file.")
    memory: ByteSize = Field(ByteSize(1024 * MIB), description="Address space of a decoder beyond its start.")
    seconds: float = Field(900, gt=0, description="Time of a request from its first byte to its answer.")
    open_seconds: float = Field(
        2.0, gt=0, description="Processor time to look at a file and say whether it is usable."
    )


class GeoSettings(ReadOnlyModel):
    """The plugin's settings."""

    allowed_hosts: tuple[str, ...] = Field(
        (), description="Hosts `data_format: url` may name; none: no URLs."
    )
    allowed_roots: tuple[Path, ...] = Field(
        (), description="Folders `data_format: path` may name files under; none: no paths."
    )
    allow_http: bool = Field(False, description="Fetch http: addresses too, not only https:.")
    fetch_seconds: float = Field(
        30.0,
        gt=0,
        description="Time a fetched file may take, redirects included, and the ranges to open a scene.",
    )
    spool: Path | None = Field(None, description="Folder for temporary files; unset: the system's.")
    decoders: int = Field(8, ge=1, le=256, description="Rasters decoded at the same time; more wait.")
    decoder_wait_s: float = Field(30.0, ge=0, description="How long they wait; then 503.")
    limits: GeoLimits = GeoLimits()


def geo_settings(additional_config: object) -> GeoSettings:
    """Read the settings from vLLM's `additional_config`; absent keys have their defaults.

    Raises:
        ValueError: a key is unknown, or a value is wrong.
    """
    table: Any = additional_config.get("baton_geo", {}) if isinstance(additional_config, Mapping) else {}
    try:
        return GeoSettings.model_validate(table)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in ("baton_geo", *first["loc"]))
        raise ValueError(f"additional_config: {where}: {first['msg']}") from None
