"""Answer with a finished scene's mask, probabilities and preview, as files or in JSON."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path

from baton_geo.contract import ClassArea, GeoAnswer, GeoFile
from baton_geo.raster.messages import ClassCount, Products
from baton_geo.scenes import RunningScene

MEDIA_TYPES = {"mask": "image/tiff", "probabilities": "image/tiff", "preview": "image/png"}
PIECE = 3 * 128 * 1024
FILE_NAMES = {"mask": "mask.tif", "probabilities": "probabilities.tif", "preview": "preview.png"}


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
        """Return name, media type and path of each output, in the order of the request."""
        return [
            (FILE_NAMES[output], MEDIA_TYPES[output], path)
            for output in self.running.options.outputs
            if (path := getattr(self.products, output)) is not None
        ]

    def describe(self) -> tuple[str, tuple[str, Path] | None]:
        """Return the areas in one line, and media type and path of the preview, if there is one."""
        words = f"Areas: {', '.join(_area(area) for area in self.products.areas)}."
        preview = self.products.preview
        return words, None if preview is None else (MEDIA_TYPES["preview"], preview)

    def answer(self) -> GeoAnswer:
        """Return the JSON answer."""
        (_, kind, first), *others = self.files()
        info = self.running.scene.info
        areas = tuple(
            ClassArea(
                value=value, name=area.name, pixels=area.pixels, share=area.share, hectares=area.hectares
            )
            for value, area in enumerate(self.products.areas)
        )
        return GeoAnswer(
            format="png" if kind == "image/png" else "tiff",
            data=_text(first),
            request_id=self.running.request_id,
            crs=info.crs,
            transform=info.transform,
            width=info.width,
            height=info.height,
            classes=areas,
            nodata_pixels=self.products.nodata_pixels,
            notes=info.notes + self.products.notes,
            files=tuple(GeoFile(name=name, media_type=kind, data=_text(path)) for name, kind, path in others),
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
