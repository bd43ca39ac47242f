"""Draws the dashboard's panels from their own queries: `picture.py PROMETHEUS_URL PICTURE.png`.

Wants matplotlib, which nothing else here needs. Grafana's own rendering needs a Grafana and a browser.
"""

from __future__ import annotations

import datetime
import json
import math
import re
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import matplotlib

matplotlib.use("Agg")
from matplotlib import dates, pyplot, ticker

BOARD = Path(__file__).parent / "baton.json"
SHOWN_S = 150
STEP_S = 2
WINDOW = "30s"
INK, PAPER, PANEL, FAINT = "#d8d9da", "#111217", "#181b1f", "#8e9096"
COLOURS = ["#73bf69", "#f2cc0c", "#5794f2", "#ff9830", "#f2495c", "#b877d9", "#8ab8ff", "#c0d8ff", "#96d98d"]
UNIT_INCHES = (0.62, 0.235)
"""Of one cell of Grafana's grid."""


def filled(expression: str) -> str:
    """An expression with everything chosen."""
    return re.sub(r"\$(?:instance|engine|tenant)\b", ".*", expression.replace("$__rate_interval", WINDOW))


def asked(client: httpx.Client, expression: str, end: float) -> list[dict[str, Any]]:
    """The series of one expression over the time that is shown."""
    params = {"query": filled(expression), "start": end - SHOWN_S, "end": end, "step": STEP_S}
    answer = client.get("/api/v1/query_range", params=params).raise_for_status()
    found: list[dict[str, Any]] = answer.json()["data"]["result"]
    return found


def name(pattern: str, labels: dict[str, str]) -> str:
    """A legend's line."""
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), pattern).strip()


def readable(value: float, unit: str) -> str:
    """A figure as a person reads it."""
    if math.isnan(value):
        return ""
    if unit == "percentunit":
        return f"{value:.0%}"
    if unit == "s":
        return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.3g} s"
    if unit in ("bytes", "Bps"):
        step = int(math.log(value, 1024)) if value >= 1 else 0
        word = ("B", "KiB", "MiB", "GiB", "TiB")[step] + ("/s" if unit == "Bps" else "")
        return f"{value / 1024**step:.3g} {word}"
    return f"{value:.3g}"


def draw_figure(axes: Any, panel: dict[str, Any], client: httpx.Client, end: float) -> None:
    """A panel of one number."""
    (target,) = panel["targets"]
    rows = asked(client, target["expr"], end)
    text = "no data"
    if rows:
        value = readable(float(rows[0]["values"][-1][1]), panel["fieldConfig"]["defaults"]["unit"])
        named = panel["options"]["textMode"] == "name"
        text = name(target["legendFormat"], rows[0]["metric"]) if named else value
    axes.text(
        0.5, 0.42, text, ha="center", va="center", fontsize=15, color=COLOURS[0], transform=axes.transAxes
    )
    axes.set_xticks([])
    axes.set_yticks([])


def draw_states(axes: Any, panel: dict[str, Any], client: httpx.Client, end: float) -> None:
    """A panel that shows which of two states something was in."""
    (target,) = panel["targets"]
    rows = asked(client, target["expr"], end)
    for number, row in enumerate(rows):
        for when, value in row["values"]:
            start = dates.date2num(datetime.datetime.fromtimestamp(when, datetime.UTC))
            colour = COLOURS[0] if float(value) else COLOURS[4]
            axes.barh(number, STEP_S / 86400, left=start, height=0.6, color=colour, linewidth=0)
    axes.set_yticks(range(len(rows)), [name(target["legendFormat"], row["metric"]) for row in rows])
    axes.set_ylim(-0.7, max(1, len(rows)) - 0.3)


def draw_lines(axes: Any, panel: dict[str, Any], client: httpx.Client, end: float) -> None:
    """A panel of figures over time."""
    custom = panel["fieldConfig"]["defaults"]["custom"]
    lines: list[tuple[str, list[Any], list[float]]] = []
    for target in panel["targets"]:
        for row in asked(client, target["expr"], end):
            at = [datetime.datetime.fromtimestamp(when, datetime.UTC) for when, _ in row["values"]]
            lines.append(
                (name(target["legendFormat"], row["metric"]), at, [float(v) for _, v in row["values"]])
            )
    below: dict[Any, float] = {}
    for (label, at, values), colour in zip(lines, COLOURS * 4, strict=False):
        base = (
            [below.get(when, 0.0) for when in at]
            if custom["stacking"]["mode"] == "normal"
            else [0.0] * len(at)
        )
        top = [value + under for value, under in zip(values, base, strict=True)]
        below |= dict(zip(at, top, strict=True))
        axes.plot(at, top, color=colour, linewidth=0.9, label=label)
        axes.fill_between(at, base, top, color=colour, alpha=custom["fillOpacity"] / 100, linewidth=0)
    if lines:
        axes.legend(
            loc="upper center", bbox_to_anchor=(0.5, -0.13), ncol=3, fontsize=4.6, frameon=False,
            labelcolor=INK, handlelength=1.2, columnspacing=0.9, borderpad=0,
        )  # fmt: skip
    else:
        axes.text(0.5, 0.5, "nothing", ha="center", color=FAINT, fontsize=6, transform=axes.transAxes)
    axes.set_ylim(bottom=0)
    unit = panel["fieldConfig"]["defaults"]["unit"]
    axes.yaxis.set_major_locator(ticker.MaxNLocator(4))
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: readable(value, unit)))


KINDS = {"stat": draw_figure, "state-timeline": draw_states, "timeseries": draw_lines}


def styled(axes: Any, title: str, end: float) -> None:
    """The frame of a panel."""
    axes.set_facecolor(PANEL)
    axes.set_title(title, loc="left", fontsize=6.5, color=INK, pad=3)
    axes.tick_params(colors=FAINT, labelsize=4.8, length=0, pad=2)
    axes.grid(color="#2c3036", linewidth=0.4)
    for side in axes.spines.values():
        side.set_color("#2c3036")
    if axes.get_xticks().size:
        start = datetime.datetime.fromtimestamp(end - SHOWN_S, datetime.UTC)
        axes.set_xlim(start, datetime.datetime.fromtimestamp(end, datetime.UTC))
        axes.xaxis.set_major_locator(dates.MinuteLocator())
        axes.xaxis.set_major_formatter(dates.DateFormatter("%H:%M"))


def main(url: str, picture: Path) -> None:
    """Draw every panel where Grafana would."""
    shown = json.loads(BOARD.read_text())["panels"]
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in shown)
    width, height = 24 * UNIT_INCHES[0], rows * UNIT_INCHES[1]
    figure = pyplot.figure(figsize=(width, height), facecolor=PAPER)
    end = time.time()
    with httpx.Client(base_url=url, timeout=30) as client:
        for panel in shown:
            at = panel["gridPos"]
            top = 1 - at["y"] / rows
            if panel["type"] == "row":
                figure.text(
                    at["x"] / 24 + 0.005, top - 0.6 / rows, panel["title"], color=INK, fontsize=9, va="center"
                )
                continue
            left, space = (at["x"] + 0.75) / 24, 2.6 if panel["type"] == "timeseries" else 1.2
            if panel["type"] == "state-timeline":
                left += 0.6 / 24
            place = (
                left,
                top - (at["h"] - space + 1.3) / rows,
                (at["x"] + at["w"] - 0.25) / 24 - left,
                (at["h"] - space) / rows,
            )
            axes = figure.add_axes(place)
            KINDS[panel["type"]](axes, panel, client, end)
            styled(axes, panel["title"], end)
    figure.savefig(picture, dpi=100, facecolor=PAPER)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
