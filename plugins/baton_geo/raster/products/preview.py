"""Draw the preview of a map, classes over the scene with a legend of their areas; or either of them alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from baton_geo.card import Card, ClassLabel
from baton_geo.raster.messages import ClassCount
from baton_geo.raster.products.output_files import Classes
from baton_geo.raster.reading.rows import Thumbnail

LONGEST = 1024  # side of the preview, pixels
SMALLEST = 512  # a smaller scene is enlarged, so that the legend has room
TINT = 0.6  # weight of the class's colour in a pixel
STRETCH = (2.0, 98.0)  # percentiles shown as black and white
FAINT = 0.25  # how much the scene is lightened
TEXT_SIZE, LINE, MARGIN, SWATCH, COLUMN = 15, 24, 12, 14, 250  # of the legend, pixels
PAPER, INK, QUIET = (255, 255, 255, 255), (33, 37, 41, 255), (108, 117, 125, 255)
COLOURS = ("red", "green", "blue")
RAMP = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))  # of values, low to high


def rgb_bands(card: Card) -> tuple[int, ...]:
    """Return the indices of red, green and blue in the last time step; empty if the model lacks one."""
    known = [{name.casefold() for name in (band.name, *band.aliases)} for band in card.bands]
    places = [
        next((n for n, names in enumerate(known) if colour.casefold() in names), None) for colour in COLOURS
    ]
    last = (card.frames - 1) * len(card.bands)
    found = tuple(last + place for place in places if place is not None)
    return found if len(found) == len(COLOURS) else ()


def draw_preview(
    card: Card, scene: Thumbnail, classes: Classes, areas: tuple[ClassCount, ...]
) -> Image.Image:
    """Draw the preview: RGBA, at most `LONGEST` pixels on its long side, nodata transparent."""
    colours = np.zeros((256, 3), np.float32)
    colours[: len(card.classes)] = [label.colour for label in card.classes]
    blended = TINT * colours[classes] + (1 - TINT) * _backdrop(scene, FAINT)
    alpha = np.where(classes == card.mask_nodata, 0, 255)
    pixels = np.concatenate([blended + 0.5, alpha[:, :, None]], axis=2).astype(np.uint8)
    return _with_legend(Image.fromarray(pixels, "RGBA"), card, areas)


def binned(card: Card, values: Any) -> tuple[Card, Classes, tuple[ClassCount, ...]]:
    """Make classes of a regression's values, for its pictures: equal steps between low and high percentiles.

    Args:
        values: of the thumbnail, NaN where unknown.

    Returns:
        A card of these classes, the class of each pixel, and the classes' shares of the thumbnail.
    """
    known = values[~np.isnan(values)]
    low, high = np.percentile(known, STRETCH) if known.size else (0.0, 1.0)
    edges = np.linspace(low, max(high, np.nextafter(low, np.inf)), len(RAMP) + 1)
    with np.errstate(invalid="ignore"):
        classes = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, len(RAMP) - 1).astype(np.uint8)
    unit = f" {card.value.unit}" if card.value and card.value.unit else ""
    labels = tuple(
        ClassLabel(name=f"{edges[n]:.3g} to {edges[n + 1]:.3g}{unit}", colour=colour)
        for n, colour in enumerate(RAMP)
    )
    counts = [int((classes[~np.isnan(values)] == n).sum()) for n in range(len(RAMP))]
    classes[np.isnan(values)] = card.mask_nodata
    areas = tuple(
        ClassCount(name=label.name, pixels=count, share=count / max(1, known.size))
        for label, count in zip(labels, counts, strict=True)
    )
    return card.model_copy(update={"classes": labels, "value": None}), classes, areas


def draw_scene(scene: Thumbnail) -> Image.Image:
    """Draw the scene without classes: RGBA, nodata transparent."""
    alpha = np.where(scene.valid, 255, 0)
    pixels = np.concatenate([_backdrop(scene, 0.0) + 0.5, alpha[:, :, None]], axis=2).astype(np.uint8)
    return _fitted(Image.fromarray(pixels, "RGBA"), LONGEST, LONGEST)


def draw_classes(card: Card, classes: Classes) -> Image.Image:
    """Draw the classes without the scene, in the size of `draw_scene`: RGBA, nodata transparent."""
    colours = np.zeros((256, 4), np.uint8)
    colours[: len(card.classes)] = [(*label.colour, 255) for label in card.classes]
    colours[card.mask_nodata] = 0
    return _fitted(Image.fromarray(colours[classes], "RGBA"), LONGEST, LONGEST)


def _backdrop(scene: Thumbnail, faint: float) -> npt.NDArray[np.float32]:
    """Return the stretched and lightened scene, (height, width, 3), 0 to 255; grey if it has no colours.

    Args:
        faint: how much it is lightened, from 0 to 1.
    """
    height, bands, width = scene.pixels.shape
    grey = np.full((height, width, 3), 235, np.float32)
    if bands != len(COLOURS) or not scene.valid.any():
        return grey
    values: npt.NDArray[Any] = scene.pixels.transpose(0, 2, 1).astype(np.float32)
    low, high = np.percentile(values[scene.valid], STRETCH)  # the same stretch for all three keeps the hues
    if not high > low:
        return grey
    shown = np.clip((values - low) / (high - low), 0, 1) ** 0.8
    shown[~scene.valid] = 1
    return np.asarray(255 * (faint + (1 - faint) * shown), np.float32)


def _with_legend(map_: Image.Image, card: Card, areas: tuple[ClassCount, ...]) -> Image.Image:
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
    """Shrink the map to the box; or enlarge a tiny one by a whole factor, without smoothing."""
    ratio = min(width / map_.width, height / map_.height)
    if ratio < 1:
        size = max(1, int(map_.width * ratio)), max(1, int(map_.height * ratio))
        return map_.resize(size, Image.Resampling.LANCZOS)
    factor = min(int(ratio), -(-SMALLEST // max(map_.size)))
    return map_.resize((map_.width * factor, map_.height * factor), Image.Resampling.NEAREST)


def _entry(
    draw: ImageDraw.ImageDraw, font: Any, x: int, y: int, colour: tuple[int, int, int], area: ClassCount
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


def _amount(area: ClassCount) -> str:
    """Format an area, e.g. "1,254 ha · 20.0 %"."""
    share = f"{area.share:.1%}".replace("%", " %")
    if area.hectares is None:
        return share
    digits = 0 if area.hectares >= 100 else 2
    return f"{area.hectares:,.{digits}f} ha · {share}"
