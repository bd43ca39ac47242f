"""The picture a person looks at: classes over the scene, with a legend."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from baton_geo.card import Card
from baton_geo.raster.ask import ClassArea
from baton_geo.raster.products import Classes
from baton_geo.raster.rows import Thumbnail

LONGEST = 1024  # of the whole picture's sides, pixels
SMALLEST = 512  # a smaller scene is enlarged, so that the legend has room
TINT = 0.6  # how much of a pixel is its class's colour
STRETCH = (2.0, 98.0)  # percent of the pixels between black and white
FAINT = 0.25  # how much of the picture is lightened
TEXT_SIZE, LINE, MARGIN, SWATCH, COLUMN = 15, 24, 12, 14, 250  # of the legend, pixels
PAPER, INK, QUIET = (255, 255, 255, 255), (33, 37, 41, 255), (108, 117, 125, 255)
COLOURS = ("red", "green", "blue")

Colours = npt.NDArray[np.uint8]


def picture_bands(card: Card) -> tuple[int, ...]:
    """Places of red, green and blue among the bands of the last time step; none if the model lacks one."""
    known = [{name.casefold() for name in (band.name, *band.aliases)} for band in card.bands]
    places = [
        next((n for n, names in enumerate(known) if colour.casefold() in names), None) for colour in COLOURS
    ]
    last = (card.frames - 1) * len(card.bands)
    found = tuple(last + place for place in places if place is not None)
    return found if len(found) == len(COLOURS) else ()


def draw_preview(card: Card, scene: Thumbnail, classes: Classes, areas: tuple[ClassArea, ...]) -> Image.Image:
    """The preview, RGBA, at most `LONGEST` pixels on its long side; nodata is transparent.

    Args:
        card: of the model.
        scene: small picture of it.
        classes: the mask in the same size.
        areas: for the legend.
    """
    colours = np.zeros((256, 3), np.float32)
    colours[: len(card.classes)] = [label.colour for label in card.classes]
    blended = TINT * colours[classes] + (1 - TINT) * _backdrop(scene)
    alpha = np.where(classes == card.mask_nodata, 0, 255)
    pixels = np.concatenate([blended + 0.5, alpha[:, :, None]], axis=2).astype(np.uint8)
    return _with_legend(Image.fromarray(pixels, "RGBA"), card, areas)


def _backdrop(scene: Thumbnail) -> npt.NDArray[np.float32]:
    """Shape (height, width, 3), 0 to 255: the scene stretched and lightened; grey if it has no colours."""
    height, bands, width = scene.pixels.shape
    grey = np.full((height, width, 3), 235, np.float32)
    if bands != len(COLOURS) or not scene.valid.any():
        return grey
    values: npt.NDArray[Any] = scene.pixels.transpose(0, 2, 1).astype(np.float32)
    low, high = np.percentile(values[scene.valid], STRETCH)  # one stretch for the three keeps the hues
    if not high > low:
        return grey
    shown = np.clip((values - low) / (high - low), 0, 1) ** 0.8
    shown[~scene.valid] = 1
    return np.asarray(255 * (FAINT + (1 - FAINT) * shown), np.float32)


def _with_legend(map_: Image.Image, card: Card, areas: tuple[ClassArea, ...]) -> Image.Image:
    columns = max(1, min(LONGEST, max(map_.width, SMALLEST)) // COLUMN)
    legend = 2 * MARGIN + LINE * -(-len(areas) // columns)
    legend = min(legend, LONGEST // 2)
    map_ = _fitted(map_, LONGEST, LONGEST - legend)
    width = max(map_.width, min(SMALLEST, LONGEST))
    sheet = Image.new("RGBA", (width, map_.height + legend), (0, 0, 0, 0))
    sheet.paste(map_, ((width - map_.width) // 2, 0))
    draw = ImageDraw.Draw(sheet)
    draw.rectangle((0, map_.height, width, sheet.height), fill=PAPER)
    font = ImageFont.load_default(TEXT_SIZE)
    rows = max(1, (legend - 2 * MARGIN) // LINE)
    for number, (label, area) in enumerate(zip(card.classes, areas, strict=True)):
        column, row = divmod(number, rows)
        if column >= columns:
            break
        x, y = MARGIN + column * COLUMN, map_.height + MARGIN + row * LINE
        _entry(draw, font, x, y, label.colour, area)
    return sheet


def _fitted(map_: Image.Image, width: int, height: int) -> Image.Image:
    """Shrunk to the box; or, if it is tiny, enlarged by a whole factor with its pixels kept sharp."""
    ratio = min(width / map_.width, height / map_.height)
    if ratio < 1:
        size = max(1, int(map_.width * ratio)), max(1, int(map_.height * ratio))
        return map_.resize(size, Image.Resampling.LANCZOS)
    factor = min(int(ratio), -(-SMALLEST // max(map_.size)))
    return map_.resize((map_.width * factor, map_.height * factor), Image.Resampling.NEAREST)


def _entry(
    draw: ImageDraw.ImageDraw, font: Any, x: int, y: int, colour: tuple[int, int, int], area: ClassArea
) -> None:
    top = y + (LINE - SWATCH) // 2
    draw.rounded_rectangle((x, top, x + SWATCH, top + SWATCH), 3, fill=(*colour, 255), outline=QUIET)
    middle, start = y + LINE // 2, x + SWATCH + 8
    name = _shortened(area.name, font, COLUMN // 2 - SWATCH)
    draw.text((start, middle), name, fill=INK, font=font, anchor="lm")
    draw.text((start + font.getlength(name) + 8, middle), _amount(area), fill=QUIET, font=font, anchor="lm")


def _shortened(name: str, font: Any, width: int) -> str:
    if font.getlength(name) <= width:
        return name
    while name and font.getlength(name + "…") > width:
        name = name[:-1]
    return name + "…"


def _amount(area: ClassArea) -> str:
    """E.g. "1,254 ha · 20.0 %"."""
    share = f"{area.share:.1%}".replace("%", " %")
    if area.hectares is None:
        return share
    digits = 0 if area.hectares >= 100 else 2
    return f"{area.hectares:,.{digits}f} ha · {share}"
