"""Use by tenant over time as a picture: a stacked area in SVG, which any browser shows."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import pairwise

from coordinator.simulate.measures import HOUR_MS

WIDTH, HEIGHT = 1000, 420
LEFT, TOP, RIGHT, BOTTOM = 60, 40, 190, 45
BINS = 400
SHOWN = 9
# Okabe and Ito's colours, which colour-blind people tell apart, then greys.
COLOURS = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#d55e00",
    "#f0e442",
    "#44aa99",
    "#882255",
    "#999999",
)

Timeline = Sequence[tuple[int, Sequence[float]]]


def picture(title: str, tenants: Sequence[str], timeline: Timeline, gpus: float) -> str:
    """`timeline`: from when on each tenant held how many GPUs. The tenants that used least share one area."""
    if not timeline or timeline[-1][0] <= timeline[0][0]:
        return _page(title, ['<text x="60" y="80">nothing ran</text>'])
    means = binned(timeline, len(tenants))
    order = sorted(range(len(tenants)), key=lambda n: (-sum(row[n] for row in means), tenants[n]))
    groups = [[n] for n in order[:SHOWN]] + ([order[SHOWN:]] if order[SHOWN:] else [])
    names = [tenants[group[0]] if len(group) == 1 else f"{len(group)} others" for group in groups]
    top = max(gpus, *(sum(row) for row in means))
    parts = _axes(timeline[-1][0] - timeline[0][0], top)
    base = [0.0] * len(means)
    for place, group in enumerate(groups):
        upper = [low + sum(row[n] for n in group) for low, row in zip(base, means, strict=True)]
        parts.append(f'<path d="{_area(base, upper, top)}" fill="{_colour(place)}"/>')
        base = upper
    for place, name in enumerate(names):
        y = TOP + 18 * place
        parts.append(
            f'<rect x="{WIDTH - RIGHT + 15}" y="{y}" width="12" height="12" fill="{_colour(place)}"/>'
        )
        parts.append(f'<text x="{WIDTH - RIGHT + 33}" y="{y + 11}">{escape(name)}</text>')
    line = _y(gpus, top)
    parts.append(f'<path d="M{LEFT} {line:.1f}H{WIDTH - RIGHT}" stroke="#000" stroke-dasharray="4 3"/>')
    return _page(title, parts)


def binned(timeline: Timeline, tenants: int) -> list[list[float]]:
    """What each tenant held on average in each of BINS equal spans."""
    first_ms, last_ms = timeline[0][0], timeline[-1][0]
    span_ms = (last_ms - first_ms) / BINS
    sums = [[0.0] * tenants for _ in range(BINS)]
    for (at_ms, held), (until_ms, _) in pairwise(timeline):
        start, end = (at_ms - first_ms) / span_ms, (until_ms - first_ms) / span_ms
        for place in range(int(start), min(BINS, int(end) + 1)):
            overlap = min(end, place + 1) - max(start, place)
            if overlap > 0:
                row = sums[place]
                for n, count in enumerate(held):
                    row[n] += count * overlap
    return sums


def _area(lower: Sequence[float], upper: Sequence[float], top: float) -> str:
    there = [f"{_x(place):.1f} {_y(value, top):.1f}" for place, value in enumerate(upper)]
    back = [f"{_x(place):.1f} {_y(value, top):.1f}" for place, value in enumerate(lower)][::-1]
    return "M" + "L".join([*there, *back]) + "Z"


def _axes(span_ms: int, top: float) -> list[str]:
    parts = []
    hours = span_ms / HOUR_MS
    unit, name = (24.0, "days") if hours > 72 else (1.0, "hours")
    for step in range(5):
        x, y = LEFT + step * (WIDTH - LEFT - RIGHT) / 4, _y(top * step / 4, top)
        parts.append(
            f'<text x="{x:.0f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{hours * step / 4 / unit:.1f}</text>'
        )
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.0f}" text-anchor="end">{top * step / 4:.0f}</text>')
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 8}" text-anchor="middle">{name}</text>'
    )
    parts.append(f'<text x="{LEFT}" y="{TOP - 8}">GPUs held (dashed: what there are)</text>')
    return parts


def _page(title: str, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">'
    body = "\n".join(
        [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>', f"<title>{escape(title)}</title>", *parts]
    )
    heading = f'<text x="{LEFT}" y="18" font-size="14">{escape(title)}</text>'
    return f"{head}\n{body}\n{heading}\n</svg>\n"


def _colour(place: int) -> str:
    return COLOURS[min(place, len(COLOURS) - 1)]


def _x(place: int) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * place / (BINS - 1)


def _y(value: float, top: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / top)
