"""Charts as inline SVG text: scales, axes, lines, strips. Colours are CSS classes of templates/report.css: dark and print work.

Every chart is drawn for one pixel width and shown unscaled, so that its text stays readable: the report draws each twice (WIDE,
NARROW) and CSS shows the one that fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

WIDE, NARROW = 760, 360  # pixels
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 12, 34
LINE = 15  # pixels between two texts above each other
BEST_SHOWN = 0.9995  # attainment is drawn on a scale of nines; beyond this all is one line
WORST_SHOWN = 0.3
NINES = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)


@dataclass(frozen=True, slots=True)
class Series:
    """One line: `style` is a CSS class (s-ours, s-1, ... or s-rest), `titles` the tooltips of its points."""

    name: str
    points: Sequence[tuple[float, float]]
    style: str
    titles: Sequence[str] = ()
    step: bool = False
    markers: bool = True


@dataclass(frozen=True, slots=True)
class Axis:
    """Values `low`..`high`, the ticks to write, and how."""

    low: float
    high: float
    ticks: Sequence[float]
    text: Callable[[float], str]
    label: str
    transform: Callable[[float], float] = field(default=lambda value: value)


def number(value: float) -> str:
    """A number for an axis or a table: 3 significant digits, k and M above a thousand."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers that span low..high (steps of 1, 2 or 5 times a power of ten)."""
    if high <= low:
        return [low]
    raw = (high - low) / max(1, count)
    power = 10 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [step * index for index in range(first, math.floor(high / step + 1e-9) + 1)]


def linear(values: Sequence[float], label: str, count: int, *, zero: bool = True) -> Axis:
    """An axis over `values` that ends at round numbers."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    low = 0.0 if zero else low
    if high <= low:
        high = low + 1
    raw = ticks(low, high, count)
    step = raw[1] - raw[0] if len(raw) > 1 else high - low
    low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    return Axis(low, high, ticks(low, high, count), number, label)


def nines(values: Sequence[float]) -> Axis:
    """Attainment on a scale of -log10(1 - a): 90 %, 99 % and 99.9 % are equally far apart."""
    low = max([tick for tick in NINES if tick <= min(values, default=0.9)], default=WORST_SHOWN)
    high = min([tick for tick in NINES if tick >= max(values, default=0.9)], default=BEST_SHOWN)
    shown = [tick for tick in NINES if low <= tick <= high]
    return Axis(low, max(high, low + 0.01), shown, lambda value: f"{100 * value:g} %", "attainment", _nine)


def _nine(value: float) -> float:
    return -math.log10(1 - min(max(value, WORST_SHOWN), BEST_SHOWN))


class Canvas:
    """Collects the elements of one SVG with an x and a y axis."""

    def __init__(self, width: int, height: int, x: Axis, y: Axis, title: str) -> None:
        self.width, self.height, self.x, self.y = width, height, x, y
        self.parts = [
            f'<svg class="chart" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" '
            f'aria-label="{escape(title)}">'
        ]

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Pixels of a value pair."""
        return self._across(x), self._up(y)

    def _across(self, value: float) -> float:
        low, high = self.x.transform(self.x.low), self.x.transform(self.x.high)
        return LEFT + (self.x.transform(value) - low) / (high - low) * (self.width - LEFT - RIGHT)

    def _up(self, value: float) -> float:
        low, high = self.y.transform(self.y.low), self.y.transform(self.y.high)
        return self.height - BOTTOM - (self.y.transform(value) - low) / (high - low) * (self.height - TOP - BOTTOM)

    def axes(self) -> None:
        """Grid lines, tick texts and the labels of both axes."""
        floor = self.height - BOTTOM
        above = -math.inf
        for value in sorted(self.y.ticks, reverse=True):
            y = self._up(value)
            self.parts.append(f'<line class="grid" x1="{LEFT}" x2="{self.width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            if y - above >= LINE:
                self.text(LEFT - 6, y + 4, self.y.text(value), "end")
                above = y
        for value in self.x.ticks:
            x = self._across(value)
            self.parts.append(f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="{floor}" y2="{floor + 4}"/>')
            self.text(x, floor + 16, self.x.text(value), "middle")
        self.parts.append(f'<line class="axis" x1="{LEFT}" x2="{self.width - RIGHT}" y1="{floor}" y2="{floor}"/>')
        if self.x.label:
            self.text((LEFT + self.width - RIGHT) / 2, self.height - 3, self.x.label, "middle", "label")

    def text(self, x: float, y: float, content: str, anchor: str = "start", kind: str = "note") -> None:
        """Text at pixels."""
        self.parts.append(f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>')

    def line(self, series: Series) -> None:
        """The line and the markers of a series."""
        pixels = [self.at(x, y) for x, y in series.points]
        if len(pixels) > 1:
            self.parts.append(f'<path class="line {series.style}" d="{_path(pixels, step=series.step)}"/>')
        if series.markers:
            for index, (x, y) in enumerate(pixels):
                title = series.titles[index] if index < len(series.titles) else series.name
                self.parts.append(
                    f'<circle class="dot {series.style}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"><title>{escape(title)}</title></circle>'
                )

    def svg(self) -> str:
        """The finished element."""
        return "".join([*self.parts, "</svg>"])


def _path(pixels: Sequence[tuple[float, float]], *, step: bool) -> str:
    commands = [f"M{pixels[0][0]:.1f} {pixels[0][1]:.1f}"]
    for x, y in pixels[1:]:
        commands.append(f"H{x:.1f}V{y:.1f}" if step else f"L{x:.1f} {y:.1f}")
    return "".join(commands)


def fronts(series: Sequence[Series], width: int, title: str) -> str:
    """Attainment (nines) against mean GPUs; the series that come last lie on top."""
    xs = [x for line in series for x, _ in line.points]
    ys = [y for line in series for _, y in line.points]
    canvas = Canvas(width, 320 if width > NARROW else 280, linear(xs, "GPUs held, mean", 6, zero=False), nines(ys), title)
    canvas.axes()
    for line in series:
        canvas.line(line)
    return canvas.svg()


def lines(series: Sequence[Series], width: int, title: str, *, end: float, label: str = "", height: int = 130) -> str:
    """Values over simulated time; `title` is written above the plot."""
    ys = [y for line in series for _, y in line.points]
    canvas = Canvas(width, height, _minutes(end, width, label), linear(ys, "", 3), title)
    canvas.axes()
    for line in series:
        canvas.line(line)
    return canvas.svg()


def _minutes(end: float, width: int, label: str) -> Axis:
    shown = [60 * value for value in ticks(0, end / 60, 8 if width > NARROW else 4)]
    return Axis(0, max(end, 1.0), shown, lambda value: f"{value / 60:g}", label)


def strip(
    rows: Sequence[tuple[str, Sequence[tuple[float, str]]]], styles: dict[str, str], width: int, title: str, *, end: float
) -> str:
    """One bar a row, coloured by what held from each time on: (name, [(seconds, what), ...])."""
    height = 22 * len(rows) + BOTTOM
    canvas = Canvas(width, height, _minutes(end, width, "minutes"), Axis(0, 1, (), number, ""), title)
    for index, (name, states) in enumerate(rows):
        y = 2 + 22 * index
        canvas.text(LEFT - 6, y + 13, name, "end")
        for (start, what), (stop, _) in zip(states, [*states[1:], (end, "")], strict=True):
            left, _ = canvas.at(start, 0)
            right, _ = canvas.at(min(stop, end), 0)
            canvas.parts.append(
                f'<rect class="{styles.get(what, "s-rest")}" x="{left:.1f}" y="{y}" '
                f'width="{max(right - left, 0.5):.1f}" height="18">'
                f"<title>{escape(f'{name} {what} from {start:.0f} s to {stop:.0f} s')}</title></rect>"
            )
    canvas.axes()
    return canvas.svg()
