# SPDX-License-Identifier: Apache-2.0
"""Line and bar charts as SVG text. Colours and fonts come from the style sheet, by class."""

import math
from dataclasses import dataclass, field
from html import escape

_WIDTH, _HEIGHT = 480, 300
_LETTER = 6.6  # units of a letter of the labels, at most on average
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, _WIDTH - 12, 34, _HEIGHT - 44


@dataclass
class Line:
    label: str
    colour: str
    points: list  # of (x, y)
    thin: bool = False
    dots: bool = False
    rings: bool = False  # marks alone, which no line joins


@dataclass
class Band:
    """A shaded strip behind the lines."""

    colour: str
    edges: list  # of (x, low, high)


@dataclass
class Chart:
    title: str
    x_label: str
    lines: list = field(default_factory=list)
    log_x: bool = False
    log_y: bool = False
    zero: bool = False  # the y axis holds 0, drawn as a line
    whole_x: bool = False  # no ticks between whole numbers
    bands: list = field(default_factory=list)
    x_ticks: dict = field(default_factory=dict)  # {place: text}; {}: round numbers
    y_range: tuple = ()  # (low, high): what lies outside is cut off; (): all of it is shown


@dataclass
class Bars:
    """Horizontal bars in clusters, from zero, each with its value beside it."""

    title: str
    clusters: list  # names
    bars: list  # of (label, colour, one value per cluster)
    most: float = 0.0  # the value of the longest bar; 0: the largest here
    small: bool = False  # for three beside one another


def ticks(low, high, count=5):
    """Round numbers that cover low to high."""
    if not high > low:
        high = low + (abs(low) or 1.0) * 1e-3
    rough = (high - low) / count
    decade = 10 ** math.floor(math.log10(rough))
    step = next(s * decade for s in (1, 2, 2.5, 5, 10) if s * decade >= rough * 0.999)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def log_ticks(low, high):
    marks = (1, 2, 5) if high / low < 300 else (1,)
    all_ = [s * 10.0**e for e in range(-18, 19) for s in marks]
    first = max(i for i, t in enumerate(all_) if t <= low * 1.001)
    last = min(i for i, t in enumerate(all_) if t >= high * 0.999)
    return all_[first : last + 1]


def number(value, digits=3):
    if value == 0:
        return "0"
    if abs(value) >= 10_000:
        for unit, size in (("G", 1e9), ("M", 1e6), ("K", 1e3)):
            if abs(value) >= size:
                return f"{value / size:.{digits + 1}g}{unit}".replace("-", "−")
    return f"{value:.{max(digits, 4) if abs(value) >= 1000 else digits}g}".replace("-", "−")


def tick_labels(values):
    """{value: text} with as many digits as it takes to tell neighbours apart."""
    for digits in range(3, 17):
        texts = [number(v, digits) for v in values]
        if len(set(texts)) == len(texts):
            break
    places = max((len(t.partition(".")[2]) for t in texts), default=0)
    if digits > 3 and all(abs(v) < 10_000 for v in values):
        texts = [f"{v:.{places}f}".replace("-", "−") for v in values]
    return dict(zip(values, texts))


def share(value):
    """A part of one in percent, two digits."""
    if not math.isfinite(value):
        return str(value)
    digits = 0 if abs(value) >= 0.0995 else 1 if abs(value) >= 0.00995 else 2
    return f"{100 * value:.{digits}f}%"


class _Axis:
    def __init__(self, values, log, begin, end, zero=False, tight=False):
        self.log = log
        values = [v for v in values if math.isfinite(v) and (v > 0 or not log)] or [1.0]
        low, high = min(values), max(values)
        if zero:
            low, high = min(low, 0.0), max(high, 0.0)
        self.ticks = log_ticks(low, high) if log else ticks(low, high)
        if tight:  # the data fills the axis; ticks beyond it are not shown
            self.low, self.high = low, high if high > low else low + 1
            self.ticks = [t for t in self.ticks if low * 0.999 <= t <= high * 1.001]
        else:
            self.low, self.high = self.ticks[0], self.ticks[-1]
        self.begin, self.end = begin, end

    def at(self, value):
        f = math.log if self.log else float
        span = f(self.high) - f(self.low)
        share = (f(value) - f(self.low)) / span if span else 0.5
        return self.begin + share * (self.end - self.begin)

    def shows(self, value):
        return math.isfinite(value) and (value > 0 or not self.log)


def to_svg(chart):
    points = [p for line in chart.lines for p in line.points]
    edges = [e for band in chart.bands for _, low, high in band.edges for e in (low, high)]
    x = _Axis([p[0] for p in points], chart.log_x, _LEFT, _RIGHT, tight=True)
    if chart.whole_x:
        x.ticks = [t for t in x.ticks if t == round(t)]
    x_ticks = chart.x_ticks or tick_labels(x.ticks)
    heights = list(chart.y_range) or [p[1] for p in points] + edges
    y = _Axis(heights, chart.log_y, _BOTTOM, _TOP, chart.zero)
    out = [_open(_WIDTH, _HEIGHT, chart.title), _text(0, 18, "start", chart.title, "title")]
    for t, text in tick_labels(y.ticks).items():
        kind = "axis" if chart.zero and t == 0 else "grid"
        out.append(_rule(_LEFT, y.at(t), _RIGHT, y.at(t), kind))
        out.append(_text(_LEFT - 8, y.at(t) + 4, "end", text))
    out.append(_rule(_LEFT, _BOTTOM, _RIGHT, _BOTTOM, "axis"))
    for t, text in x_ticks.items():
        out.append(_rule(x.at(t), _BOTTOM, x.at(t), _BOTTOM + 4, "axis"))
        anchor = "end" if x.at(t) > _RIGHT - 8 else "middle"
        out.append(_text(x.at(t), _BOTTOM + 18, anchor, text))
    out.append(_text((_LEFT + _RIGHT) / 2, _HEIGHT - 8, "middle", chart.x_label))
    inside = "\n".join(
        [_band(band, x, y) for band in chart.bands] + [_line(line, x, y) for line in chart.lines]
    )
    out.append(_clipped(inside) if chart.y_range else inside)
    return "<figure>" + "\n".join(out) + "\n</svg></figure>\n"


def bars_to_svg(chart):
    width, right, top, bar, gap = (340, 56, 32, 15, 16) if chart.small else (_WIDTH, 62, 34, 20, 22)
    left = 16 + _LETTER * max(map(len, chart.clusters))
    tall = len(chart.bars) * (bar + 3) - 3 + gap
    bottom = top + tall * len(chart.clusters)
    finite = (v for *_, values in chart.bars for v in values if math.isfinite(v))
    most = chart.most or max(finite, default=1.0) or 1.0
    length = lambda v: (width - left - right) * (min(v / most, 1.0) if math.isfinite(v) else 1.0)
    kind = "chart small" if chart.small else "chart"
    out = [_open(width, bottom + 8, chart.title, kind), _text(0, 18, "start", chart.title, "title")]
    for i, name in enumerate(chart.clusters):
        y = top + tall * i + gap / 2
        out.append(_text(left - 10, y + (tall - gap) / 2 + 4, "end", name))
        for label, colour, values in chart.bars:
            hint = escape(f"{name}, {label}: {values[i]:.3g}")
            out.append(
                f'<g class="c-{colour}"><rect class="bar" x="{left}" y="{y:.1f}" '
                f'width="{max(1.0, length(values[i])):.1f}" height="{bar}" rx="2">'
                f"<title>{hint}</title></rect></g>"
            )
            end = left + length(values[i]) + 6
            out.append(_text(end, y + bar - 3, "start", share(values[i]), "value"))
            y += bar + 3
    out.append(_rule(left, top - 2, left, bottom, "axis"))
    return "<figure>" + "\n".join(out) + "\n</svg></figure>\n"


def _open(width, height, title, kind="chart"):
    return (
        f'<svg class="{kind}" role="img" aria-label="{escape(title)}" '
        f'viewBox="0 0 {width} {height:.0f}">'
    )


def _clipped(inside):
    """Cut off above and below the drawing area: an inner picture that hides what overflows. Dots at
    the first and last step are left whole."""
    x, width, height = _LEFT - 5, _RIGHT - _LEFT + 10, _BOTTOM - _TOP
    place = f'x="{x}" y="{_TOP}" width="{width}" height="{height}"'
    return f'<svg {place} viewBox="{x} {_TOP} {width} {height}">\n{inside}\n</svg>'


def _band(band, x, y):
    edge = [(px, high) for px, _, high in band.edges]
    edge += [(px, low) for px, low, _ in band.edges[::-1]]
    path = "L".join(f"{x.at(px):.1f} {y.at(py):.1f}" for px, py in edge)
    return f'<g class="c-{band.colour}"><path class="band" d="M{path}Z"/></g>'


def _line(line, x, y):
    shown = [(px, py) for px, py in line.points if x.shows(px) and y.shows(py)]
    path = "".join(
        f"{'L' if i else 'M'}{x.at(px):.1f} {y.at(py):.1f}" for i, (px, py) in enumerate(shown)
    )
    out = f'<g class="c-{line.colour}">'
    if not line.rings:
        out += f'<path class="line{" thin" if line.thin else ""}" d="{path}"/>'
    if line.dots or line.rings:
        kind, radius = ("ring", 5) if line.rings else ("dot", 3.5)
        for px, py in shown:
            hint = escape(f"{line.label} at {number(px)}: {py:.4g}")
            out += (
                f'<circle class="{kind}" cx="{x.at(px):.1f}" cy="{y.at(py):.1f}" r="{radius}">'
                f"<title>{hint}</title></circle>"
            )
    return out + "</g>"


def _text(x, y, anchor, content, kind="label"):
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">'
        f"{escape(content)}</text>"
    )


def _rule(x1, y1, x2, y2, kind):
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def smoothed(points, share=0.04):
    """A running mean over about ``share`` of the points, exponential, without a start at zero."""
    keep = 1 - 1 / max(1.0, share * len(points))
    out, value, weight = [], 0.0, 0.0
    for x, y in points:
        value, weight = keep * value + (1 - keep) * y, keep * weight + (1 - keep)
        out.append((x, value / weight))
    return out


def thinned(points, most=400):
    """At most that many points, the last among them."""
    step = max(1, -(-len(points) // most))
    return points[::-1][::step][::-1]
