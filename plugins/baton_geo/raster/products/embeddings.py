"""Write the embeddings of an encoder alone: a table of its tiles, and a raster of a pixel per patch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rasterio.crs import CRS
from rasterio.errors import CRSError
from rasterio.transform import Affine

from baton_geo.card import Embedding
from baton_geo.errors import RasterTooLarge
from baton_geo.raster.messages import EMBEDDINGS, TABLE, SceneRequest, Tally
from baton_geo.raster.pixels.grid import Floats, Grid
from baton_geo.raster.pixels.values import Valid
from baton_geo.raster.products.geoparquet import Row, write_geoparquet
from baton_geo.raster.products.output_files import CloudOptimized, write_errors
from baton_geo.raster.reading.rows import Georeference

NOTHING = -128  # of int8
BANDS_AT_ONCE = 16
MEMORY_SHARE = 0.5  # of a decoder's memory that the vectors of a scene may map
STEPS = 254  # between the least and the greatest number of a band: -127 to 127


class EmbeddingWriter:
    """Takes the vectors of each tile; writes both files at the end.

    The vectors lie in a file of float32 until the range of each band is known.

    Attributes:
        nodata_pixels: pixels without data so far.
    """

    def __init__(
        self, folder: Path, request: SceneRequest, place: Georeference, grid: Grid, acquired: str | None
    ) -> None:
        self._folder, self._place, self._grid = folder, place, grid
        self._embedding = request.card.embedding or Embedding(patch=grid.tile, width=1)
        self._date = request.date or acquired
        patch = self._embedding.patch
        self._shape = -(-grid.height // patch), -(-grid.width // patch)
        self._draft = folder / "vectors.draft"
        size = self._shape[0] * self._shape[1] * self._embedding.width * 4
        if size > MEMORY_SHARE * request.limits.memory:
            raise RasterTooLarge(
                f"the embeddings of this scene take {size // 2**20} MiB, more than a decoder has; cut it "
                "into smaller ones"
            )
        with write_errors():
            self._vectors: Any = np.memmap(
                self._draft, np.float32, "w+", shape=(*self._shape, self._embedding.width)
            )
        self._known = np.zeros(self._shape, np.bool_)
        self._least = np.full(self._embedding.width, np.inf, np.float32)
        self._most = np.full(self._embedding.width, -np.inf, np.float32)
        self._awaited: dict[int, Valid] = {}
        self._rows: list[Row] = []
        self.nodata_pixels = 0

    def expect(self, tile: int, valid: Valid) -> None:
        """Note which patches of a tile have data: those of which any pixel has."""
        patch = self._embedding.patch
        rows, columns = (-(-side // patch) for side in valid.shape)
        padded = np.zeros((rows * patch, columns * patch), np.bool_)
        padded[: valid.shape[0], : valid.shape[1]] = valid
        self._awaited[tile] = np.asarray(padded.reshape(rows, patch, columns, patch).any(axis=(1, 3)))

    def write(self, tile: int, vectors: Floats) -> None:
        """Take the vectors of a tile, shape (width, rows, columns)."""
        known = self._awaited.pop(tile)
        row, column = self._grid.place(tile)
        y, x, patch = self._grid.ys[row], self._grid.xs[column], self._embedding.patch
        rows, columns = known.shape
        inner = vectors[:, :rows, :columns].transpose(1, 2, 0)
        seen = inner[known]
        self._least = np.minimum(self._least, seen.min(axis=0))
        self._most = np.maximum(self._most, seen.max(axis=0))
        self._vectors[y // patch : y // patch + rows, x // patch : x // patch + columns] = inner
        self._known[y // patch : y // patch + rows, x // patch : x // patch + columns] = known
        down, right = min(y + self._grid.tile, self._grid.height), min(x + self._grid.tile, self._grid.width)
        a, b, c, d, e, f = self._place.transform or (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)
        corners = [
            (a * i + b * j + c, d * i + e * j + f) for i, j in ((x, y), (x, down), (right, down), (right, y))
        ]
        self._rows.append(Row(tile, corners, seen.mean(axis=0, dtype=np.float64).astype(np.float32)))

    def finish(self, notes: Sequence[str] = ()) -> Tally:
        """Write both files."""
        self._rows.sort(key=lambda row: row.tile)
        with write_errors():
            model, date = self._embedding.model, self._date
            write_geoparquet(self._folder / TABLE, self._rows, model=model, date=date, crs=self._projjson())
        self._write_raster(notes)
        return Tally(nodata_pixels=self.nodata_pixels)

    def _projjson(self) -> dict[str, Any] | None:
        if self._place.crs is None:
            return None
        try:
            described: dict[str, Any] = CRS.from_user_input(self._place.crs).to_dict(projjson=True)
        except CRSError:
            return None
        return described

    def _write_raster(self, notes: Sequence[str]) -> None:
        height, width = self._shape
        native = dict(self._place.native or {})
        if self._place.transform is not None:
            a, b, c, d, e, f = self._place.transform
            patch = self._embedding.patch
            native["transform"] = Affine(a * patch, b * patch, c, d * patch, e * patch, f)
        place = Georeference(native={key: native[key] for key in ("crs", "transform") if key in native})
        profile = {"width": width, "height": height, "count": self._embedding.width}
        file = CloudOptimized(self._folder / EMBEDDINGS, place, dtype="int8", nodata=NOTHING, **profile)
        step = np.maximum((self._most - self._least) / STEPS, np.finfo(np.float32).tiny)
        middle = (self._most + self._least) / 2
        file.dataset.scales, file.dataset.offsets = tuple(map(float, step)), tuple(map(float, middle))
        tags = {f"NOTE_{number}": text for number, text in enumerate(notes)}
        file.dataset.update_tags(MODEL=self._embedding.model, **tags)
        if self._date is not None:
            file.dataset.update_tags(ACQUISITION_DATE=self._date)
        for first in range(0, self._embedding.width, BANDS_AT_ONCE):
            some = slice(first, min(first + BANDS_AT_ONCE, self._embedding.width))
            steps = np.rint((self._vectors[:, :, some] - middle[some]) / step[some]).clip(-127, 127)
            steps[~self._known] = NOTHING
            numbers = list(range(some.start + 1, some.stop + 1))
            with write_errors():
                file.dataset.write(steps.astype(np.int8).transpose(2, 0, 1), numbers)
        del self._vectors
        self._draft.unlink()
        file.finish("NEAREST")
