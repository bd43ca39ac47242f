"""Embeddings of an encoder alone: a table of tiles, and a raster of a pixel per patch."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
from geo.raster.made import NORTH_UP, make_card, run, write_tiff

from baton_geo.card import Card, Embedding
from baton_geo.errors import RasterTooLarge
from baton_geo.raster.decoders import Decoders
from baton_geo.raster.messages import Products, SceneRequest
from baton_geo.raster.products.geoparquet import Row, write_geoparquet
from baton_geo.settings import GeoLimits

CARD = make_card().model_copy(
    update={"classes": (), "overlap": 0, "embedding": Embedding(patch=8, width=3, model="f1d0"), "nodata": -9}
)


def encoder(tile: np.ndarray[Any, np.dtype[np.float32]]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Each patch's mean, ten times it, and minus it."""
    means = tile[0, 0].reshape(4, 8, 4, 8).mean(axis=(1, 3))
    return np.stack([means, 10 * means, -means]).astype(np.float32)


def vectors_of(path: Path) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The numbers of an embeddings raster; NaN where nothing is known."""
    with rasterio.open(path) as file:
        steps = file.read().astype(float)
        assert (file.nodata, set(file.dtypes)) == (-128, {"int8"})
        found = steps * np.array(file.scales)[:, None, None] + np.array(file.offsets)[:, None, None]
        found[steps == -128] = np.nan
    return found


class Table:
    """The columns of a Parquet file as `write_geoparquet` writes them, read by their places in it."""

    def __init__(self, path: Path, width: int) -> None:
        data = path.read_bytes()
        assert data[:4] == data[-4:] == b"PAR1"
        (length,) = struct.unpack("<I", data[-8:-4])
        self.footer = data[-8 - length : -8]
        start = self.footer.index(b'{"version"')
        self.geo = json.JSONDecoder().raw_decode(self.footer[start:].decode("latin-1"))[0]
        self.data, self.width = data, width


def products(decoders: Decoders, path: Path, check: Any, card: Card = CARD, **asked: Any) -> Products:
    request = SceneRequest(card=card, mask=False, embeddings=True, **asked)
    with decoders.open(path, request) as scene:
        made = run(scene, encoder)
        check(made)
    return made


def test_a_pixel_of_the_raster_is_a_patch(decoders: Decoders, tmp_path: Path) -> None:
    """Vectors lie where their patches lie, also beyond the edge; int8 keeps them within half a step."""
    pixels = np.random.default_rng(1).uniform(0, 100, (1, 50, 70)).astype(np.float32)
    pixels[:, :16, :8] = -9
    path = write_tiff(tmp_path / "a.tif", pixels)
    filled = np.where(pixels[0] == -9, 0, pixels[0])
    padded = np.pad(filled, ((0, 14), (0, 26)), mode="edge")
    wanted = padded.reshape(8, 8, 12, 8).mean(axis=(1, 3))[:7, :9]

    def check(made: Products) -> None:
        assert made.embeddings is not None
        found = vectors_of(made.embeddings)
        assert found.shape == (3, 7, 9)
        assert np.isnan(found[:, :2, 0]).all()
        assert np.isnan(found).sum() == 6
        known = ~np.isnan(found[0])
        for band, factor in enumerate((1, 10, -1)):
            step = abs(factor) * np.ptp(wanted[known]) / 254
            assert np.abs(found[band][known] - factor * wanted[known]).max() <= 0.51 * step
        with rasterio.open(made.embeddings) as file:
            assert file.transform == rasterio.Affine(80, 0, NORTH_UP.c, 0, -80, NORTH_UP.f)
            assert file.crs.to_epsg() == 32633
            assert file.tags()["MODEL"] == "f1d0"

    made = products(decoders, path, check)
    assert made.nodata_pixels == 16 * 8


def test_a_row_of_the_table_is_a_tile(decoders: Decoders, tmp_path: Path) -> None:
    """Its polygon, the mean of its vectors, the model and the date; read back by an independent reader."""
    from pyarrow import parquet

    path = write_tiff(tmp_path / "a.tif", np.random.default_rng(2).uniform(1, 9, (1, 40, 70)).astype("f4"))

    def check(made: Products) -> None:
        assert made.table is not None
        table = parquet.read_table(made.table)
        rows = table.to_pylist()
        assert [row["tile"] for row in rows] == list(range(6))
        assert {row["model"] for row in rows} == {"f1d0"}
        assert {row["date"] for row in rows} == {"2024-05-06"}
        ring = np.frombuffer(rows[5]["geometry"], "<f8", offset=13).reshape(5, 2)
        assert ring.min(axis=0).tolist() == [500_640, 4_999_600]
        assert ring.max(axis=0).tolist() == [500_700, 4_999_680]
        assert len(rows[0]["embedding"]) == 3
        assert rows[0]["embedding"][1] == pytest.approx(10 * rows[0]["embedding"][0], rel=1e-5)
        geo = json.loads(table.schema.metadata[b"geo"])
        assert geo["columns"]["geometry"]["crs"]["id"]["code"] == 32633
        assert geo["columns"]["geometry"]["bbox"] == [500_000, 4_999_600, 500_700, 5_000_000]

    products(decoders, path, check, date="2024-05-06")


def test_the_table_is_framed_as_parquet(tmp_path: Path) -> None:
    """Without a library for it: magic, footer, the list's levels and floats where the footer's sizes put them."""
    rows = [Row(n, [(0, 0), (0, 1), (1, 1), (1, 0)], np.array([n, 0.5], np.float32)) for n in range(20)]
    path = tmp_path / "a.parquet"
    write_geoparquet(path, rows, model="m", date=None, crs=None)
    table = Table(path, 2)
    assert table.geo["columns"]["geometry"]["bbox"] == [0, 0, 1, 1]
    floats = np.stack([row.embedding for row in rows]).tobytes()
    assert table.data.count(floats) == 1
    assert struct.pack("<20i", *range(20)) in table.data
    assert all(name in table.footer for name in (b"tile", b"geometry", b"embedding", b"element", b"date"))


@pytest.mark.fault("F15")
def test_vectors_that_do_not_fit_are_refused_before_any_is_made(decoders: Decoders, tmp_path: Path) -> None:
    """By their size, in words."""
    path = write_tiff(tmp_path / "a.tif", np.ones((1, 400, 400), np.float32))
    wide = CARD.model_copy(update={"embedding": Embedding(patch=8, width=16_384)})
    limits = GeoLimits(memory=128 * 2**20)
    with pytest.raises(RasterTooLarge, match="embeddings of this scene take 156 MiB"):
        decoders.open(path, SceneRequest(card=wide, mask=False, embeddings=True, limits=limits))
