"""Follow a scene through the engine: prompts of its tiles, outputs matched to it, the answer of its products.

vLLM gives a plugin a request before the engine and its outputs after it, without a reliable link between the
two: offline there is no request id at all. So the prompt of a strip of tiles is one token, a serial number
that is unique among the prompts in use, and every output comes back with its prompt. Concurrent requests
cannot be mixed up.
"""

from __future__ import annotations

import base64
import math
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from baton_geo.card import MapValue
from baton_geo.contract import ClassArea, Fetched, GeoAnswer, GeoFile, GeoOptions, ValueRange
from baton_geo.errors import RequestInvalid
from baton_geo.prithvi import PrithviConfig
from baton_geo.raster.messages import CARRIED, FILES, PARQUET, ClassCount, Products, SceneInfo, note

SERIALS = 2**31 - 2
"""Number of serial numbers: token ids are int32, and 0 is not used."""
FORMATS: dict[str, Any] = {
    ".tif": "tiff",
    ".png": "png",
    ".geojson": "geojson",
    ".gpkg": "gpkg",
    ".qml": "qml",
    ".json": "json",
    ".parquet": "parquet",
}
PIECE = 3 * 128 * 1024


class Files(Protocol):
    """The files of a scene."""

    def fetched(self) -> Fetched | None: ...

    def close(self) -> None: ...


@dataclass(eq=False)
class RunningScene:
    """One request's scene while the engine works on it.

    Attributes:
        scene: the raster, opened in its process.
        request_id: of the server that runs the plugin; None offline.
        began: start, seconds on the monotonic clock.
        notes: assumptions that are the gateway's and not the raster process's.
        serials: serial numbers of prompts whose output has not come back.
    """

    scene: Any
    options: GeoOptions
    request_id: str | None
    raster: Files
    value: MapValue | None = None
    notes: tuple[str, ...] = ()
    began: float = field(default_factory=time.monotonic)
    serials: set[int] = field(default_factory=set)

    def close(self) -> None:
        """End the raster process and remove the files; a second call does nothing."""
        self.scene.close()
        self.raster.close()


class RunningScenes:
    """The running scenes of one plugin. Safe to use from several threads.

    Args:
        seconds: age at which an abandoned scene is dropped.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._running: set[RunningScene] = set()
        self._strips: dict[int, tuple[RunningScene, tuple[int, ...]]] = {}
        self._next = 0

    def add(self, running: RunningScene) -> None:
        """Keep a scene until `drop`, and drop scenes that are too old."""
        with self._lock:
            late = [old for old in self._running if time.monotonic() - old.began > self._seconds]
            self._running.add(running)
        for old in late:
            self.drop(old)

    def serial(self, running: RunningScene, tiles: tuple[int, ...]) -> int:
        """Number one strip of a scene's tiles, anew."""
        with self._lock:
            while (serial := self._next % SERIALS + 1) in self._strips:
                self._next += 1
            self._next += 1
            self._strips[serial] = (running, tiles)
            running.serials.add(serial)
            return serial

    def take(self, serial: int) -> tuple[RunningScene, tuple[int, ...]]:
        """Find the scene and the tiles of a serial number, and free the number.

        Raises:
            LookupError: no running scene has this number.
        """
        with self._lock:
            running, tiles = self._strips.pop(serial)
            running.serials.discard(serial)
            return running, tiles

    def drop(self, running: RunningScene) -> None:
        """Remove a scene and close it; a second call does nothing."""
        with self._lock:
            self._running.discard(running)
            for serial in running.serials:
                self._strips.pop(serial, None)
            running.serials.clear()
        running.close()

    def close(self) -> None:
        """Drop every scene."""
        for running in list(self._running):
            self.drop(running)

    def of_request(self, request_id: str) -> Iterator[RunningScene]:
        """Yield the scenes of a server's request."""
        with self._lock:
            found = [running for running in self._running if running.request_id == request_id]
        yield from found

    def __len__(self) -> int:
        return len(self._running)


UNKNOWN_DAY, UNKNOWN_PLACE = (0, 0), (999.0, 999.0)
"""Coordinates of tiles whose scene has none: the encoder adds nothing for them."""


class Coordinates:
    """Dates and places for models with temporal or location embeddings."""

    def __init__(self, config: PrithviConfig) -> None:
        self._frames = config.num_frames
        self._time = "time" in config.coords_encoding
        self._place = "location" in config.coords_encoding

    def require_dates(self, options: GeoOptions) -> None:
        """Require as many dates as the model has time steps, if it takes any and the request gives some.

        Raises:
            RequestInvalid: there are more or fewer.
        """
        if self._time and options.dates is not None and len(options.dates) != self._frames:
            raise RequestInvalid(
                f"data.dates: {len(options.dates)} given; this model has {self._frames} time steps.",
                param="data.dates",
            )

    def of(self, options: GeoOptions, info: SceneInfo) -> tuple[dict[str, torch.Tensor], tuple[str, ...]]:
        """Make the fields for every tile of a scene: from the request, else from the file.

        The published models are trained with a part of the dates and places left out, and clients of the
        published plugins send none: where they are unknown the model answers without them, with a note.

        Raises:
            RequestInvalid: the number of dates is not the number of the model's time steps.
        """
        fields, notes = {}, []
        if self._time:
            days = self._days(options, info)
            fields["temporal_coords"] = torch.tensor(
                days or [UNKNOWN_DAY] * self._frames, dtype=torch.float32
            )
            if days is None:
                text = f"the model takes the dates of its {self._frames} time steps, and neither the request "
                notes.append(note("no_dates", text + "(dates) nor the file has them; it works without"))
        if self._place:
            place = _place(options, info)
            fields["location_coords"] = torch.tensor(place or UNKNOWN_PLACE, dtype=torch.float32)
            if place is None:
                text = "the model takes the place, and neither the request (location) nor the file has it"
                notes.append(note("no_location", f"{text}; it works without"))
        return fields, tuple(notes)

    def _days(self, options: GeoOptions, info: SceneInfo) -> list[tuple[int, int]] | None:
        days = options.dates
        if days is None and self._frames == 1 and info.acquired is not None:
            days = (date.fromisoformat(info.acquired[:10]),)
        if days is None:
            return None
        return [(day.year, day.timetuple().tm_yday) for day in days]


def _place(options: GeoOptions, info: SceneInfo) -> tuple[float, float] | None:
    if options.location is not None:
        return options.location.latitude, options.location.longitude
    if info.latitude is None or info.longitude is None:
        return None
    return info.latitude, info.longitude


def prompt(
    serial: int, strip: NDArray[np.uint8], info: SceneInfo, fields: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """Make vLLM's prompt for a strip of tiles, shape (tiles, bytes of each).

    vLLM makes one tensor of those of a step that have one shape, in the type of the first. So all tiles are
    bytes, whatever their numbers are: scenes of any types can share a step.
    """
    image = {
        "tiles": torch.from_numpy(strip),
        "carried": torch.tensor([CARRIED.index(info.carried)]),
        "scaling": torch.tensor(info.scaling, dtype=torch.float32),
        **fields,
    }
    return {
        "prompt_token_ids": [serial],
        "multi_modal_data": {"image": image},
        # With a name given, vLLM does not hash the pixels of tiles that it has never seen before.
        "multi_modal_uuids": {"image": [f"strip-{serial}"]},
    }


def normalised(
    strip: torch.Tensor, carried: int, scaling: torch.Tensor, shape: tuple[int, ...]
) -> torch.Tensor:
    """Make the model's input of a prompt's tiles, with its fields as `prompt` made them.

    Args:
        shape: of a tile, (bands, frames, side, side).

    Returns:
        (tiles, *shape) float32; at nodata 0.0, or what the card replaces it by.
    """
    kind: torch.dtype = getattr(torch, CARRIED[carried])
    count = math.prod(shape)
    numbers, hidden = strip.split((count * kind.itemsize, strip.shape[1] - count * kind.itemsize), dim=1)
    pixels = numbers.view(kind).unflatten(1, shape)
    if kind == torch.float32:
        return pixels
    times, plus, empty = scaling.view(3, *shape[:2], 1, 1)
    pixels = pixels.float().mul_(times).add_(plus)
    if hidden.any():
        bits = hidden[..., None].bitwise_right_shift(
            torch.arange(7, -1, -1, dtype=torch.uint8, device=hidden.device)
        )
        marked = bits.bitwise_and(1).flatten(1)[:, : shape[-1] ** 2].bool()
        pixels = torch.where(marked.view(-1, 1, 1, *shape[2:]), empty, pixels)
    return pixels


@dataclass(frozen=True)
class FinishedScene:
    """A scene whose mask is written.

    Attributes:
        running: the request; its files exist until it is dropped.
        products: files and counts of its raster process.
    """

    running: RunningScene
    products: Products

    def files(self) -> list[tuple[str, str, Path]]:
        """List name, media type and path of each output, in the order of the request."""
        kinds = {output: kind for output, (_, kind) in FILES.items()} | {"table": PARQUET}
        wanted = [
            product
            for output in self.running.options.outputs
            for product in (("table", output) if output == "embeddings" else (output,))
        ]
        return [
            (path.name, kinds[product], path)
            for product in wanted
            if (path := getattr(self.products, product)) is not None
        ]

    def left_out(self) -> dict[str, str]:
        """Name the files that were not made though they were wanted, each with the note why."""
        return {FILES[output][0]: reason for output, reason in self.products.left_out.items()}

    def describe(self) -> tuple[str, tuple[str, Path] | None]:
        """Describe the areas in one line; with media type and path of the preview, if there is one."""
        values = self._values()
        if self.products.table is not None:
            return "A vector for each patch of the scene.", None
        words = (
            f"Areas: {', '.join(_area(area) for area in self.products.areas)}."
            if values is None
            else f"{values.name}: {values.minimum:.4g} to {values.maximum:.4g}, mean {values.mean:.4g}"
            f"{' ' + values.unit if values.unit else ''}."
        )
        preview = self.products.preview
        return words, None if preview is None else (FILES["preview"][1], preview)

    def _values(self) -> ValueRange | None:
        found, value = self.products.values, self.running.value
        if found is None or value is None:
            return None
        return ValueRange(name=value.name, unit=value.unit, **found.model_dump())

    def answer(self) -> GeoAnswer:
        """Make the JSON answer."""
        (_, _, first), *others = self.files()
        info = self.running.scene.info
        areas = tuple(
            ClassArea(
                value=value, name=area.name, pixels=area.pixels, share=area.share, hectares=area.hectares
            )
            for value, area in enumerate(self.products.areas)
        )
        return GeoAnswer(
            format=FORMATS[first.suffix],
            data=_text(first),
            request_id=self.running.request_id,
            crs=info.crs,
            transform=info.transform,
            width=info.width,
            height=info.height,
            classes=areas,
            value=self._values(),
            nodata_pixels=self.products.nodata_pixels,
            notes=info.notes + self.running.notes + self.products.notes,
            files=tuple(GeoFile(name=name, media_type=kind, data=_text(path)) for name, kind, path in others),
            window=info.window,
            fetched=self.running.raster.fetched(),
        )


def _area(area: ClassCount) -> str:
    """Format an area, e.g. "water 20.0 % (1,254 ha)"."""
    share = f"{area.name} {100 * area.share:.1f} %"
    return share if area.hectares is None else f"{share} ({area.hectares:,.0f} ha)"


def _text(path: Path) -> str:
    """Encode a file in base64 piece by piece: one large piece would hold the interpreter's lock."""
    with open(path, "rb") as file:
        return "".join(
            base64.b64encode(piece).decode("ascii") for piece in iter(lambda: file.read(PIECE), b"")
        )
