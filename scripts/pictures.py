"""Draws docs/time/*.svg, one small picture for each rule of time, and docs/graph.svg, the lineage graph.

Run `.venv/bin/python scripts/pictures.py`; the files hold nothing that changes from run to run, and a test compares.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

_INK, _GREY, _GOOD, _BAD = "#1f2933", "#8592a0", "#1b7f4d", "#b42318"
_LEFT, _WIDTH, _ROW = 150, 640, 38


@dataclass(frozen=True)
class Row:
    """A row of a source on the time axis (0 to 10): when it happened, when it was known, whether a feature sees it."""

    name: str
    event: float
    known: float
    seen: bool
    why: str = ""


@dataclass(frozen=True)
class Picture:
    """Rows around the question at `asked`; `window` is a span that counts, shaded."""

    title: str
    rows: tuple[Row, ...]
    asked: float = 7.0
    window: tuple[float, float] | None = None


PICTURES = {
    "visible": Picture(
        "visible = happened and known before the question",
        (
            Row("in time", 2, 4, True, "both before"),
            Row("heard of late", 4, 8.5, False, "known after the question"),
            Row("in the future", 8, 8.4, False, "happens after the question"),
        ),
    ),
    "boundary": Picture(
        "boundary: lt or le decides about exactly then",
        (
            Row("lt", 5, 7, False, "known exactly then: not yet"),
            Row("le", 5, 7, True, "known exactly then: visible"),
        ),
    ),
    "latest": Picture(
        "latest: the newest event among the visible, however late it was heard of",
        (
            Row("older, heard late", 2, 6.5, False, "an older event never comes back"),
            Row("newer, heard early", 4, 4.6, True, "the answer"),
            Row("newest", 6, 8, False, "not known yet"),
        ),
    ),
    "lookback": Picture(
        "lookback: an answer older than this is none",
        (
            Row("only this one", 1.2, 1.6, False, "expired: null, with that reason"),
            Row("one inside", 4.5, 5, True, "the answer"),
        ),
        window=(3, 7),
    ),
    "window": Picture(
        "window: counts by when it happened, among what is known",
        (
            Row("before the window", 1.5, 2, False, "happened too early"),
            Row("inside", 4, 5, True, "counts"),
            Row("inside, heard late", 5.5, 8, False, "not known yet: does not count"),
        ),
        window=(3, 7),
    ),
    "correction": Picture(
        "correction: the latest version that was known then",
        (
            Row("first version", 3, 3.6, False, "replaced"),
            Row("corrected", 3, 5.5, True, "in force at the question"),
            Row("corrected again", 3, 8.5, False, "not known yet: history stays"),
        ),
    ),
    "label": Picture(
        "label: known later, and no training row before that",
        (
            Row("the question", 7, 7, True, "features are from here back"),
            Row("its outcome", 8, 9.4, False, "settled after as_of: immature, left out"),
        ),
        asked=8.6,
    ),
}


def pictures() -> dict[str, str]:
    """Text of every picture by its path below docs/."""
    return {f"time/{name}.svg": draw(picture) for name, picture in PICTURES.items()} | {"graph.svg": graph()}


def draw(picture: Picture) -> str:
    """One picture as SVG: a line for each row, a circle where it happened, a square where it was known."""
    height = 70 + _ROW * len(picture.rows)
    parts = [_text(12, 22, picture.title, weight="bold")]
    if picture.window is not None:
        start, end = map(_x, picture.window)
        parts.append(f'<rect x="{start}" y="34" width="{end - start}" height="{height - 62}" fill="#e7eefc"/>')
    asked = _x(picture.asked)
    parts.append(f'<line x1="{asked}" y1="34" x2="{asked}" y2="{height - 28}" stroke="{_INK}" stroke-dasharray="4 3"/>')
    label = "as_of" if picture.asked != 7.0 else "question"
    parts.append(_text(asked, height - 12, label, anchor="middle"))
    for index, row in enumerate(picture.rows):
        parts += _row(row, 54 + index * _ROW)
    return _svg(height, parts)


def _row(row: Row, y: int) -> list[str]:
    colour = _GOOD if row.seen else _BAD
    event, known = _x(row.event), _x(row.known)
    return [
        _text(12, y + 4, row.name),
        f'<line x1="{event}" y1="{y}" x2="{known}" y2="{y}" stroke="{colour}" stroke-width="2"/>',
        f'<circle cx="{event}" cy="{y}" r="5" fill="{colour}"/>',
        f'<rect x="{known - 5}" y="{y - 5}" width="10" height="10" fill="white" stroke="{colour}" stroke-width="2"/>',
        _text(_LEFT + 410, y + 4, row.why, colour=colour),
    ]


def _x(moment: float) -> int:
    return round(_LEFT + moment * 40)


def graph() -> str:
    """The stages of `flight_delay` and what each reads, from the definitions that Dagster loads."""
    from assets.definitions import defs

    every = {n.key.to_user_string(): n for n in defs().resolve_asset_graph().asset_nodes}
    names = [name for name in sorted(every) if name.startswith("flight_delay/")]
    above = {n: sorted({p.to_user_string() for p in every[n].parent_keys} & set(names) - {n}) for n in names}
    level: dict[str, int] = {}
    while len(level) < len(names):
        ready = [n for n in names if n not in level and all(p in level for p in above[n])]
        level |= {n: max((level[p] + 1 for p in above[n]), default=0) for n in ready}
    columns = [[n for n in names if level[n] == column] for column in range(max(level.values()) + 1)]
    place = {n: (20 + 168 * c, 30 + 56 * r) for c, column in enumerate(columns) for r, n in enumerate(column)}
    parts: list[str] = []
    for name, (x, y) in place.items():
        for px, py in (place[parent] for parent in above[name]):
            bend = (px + 140 + x) // 2
            path = f"M{px + 140},{py + 16} C{bend},{py + 16} {bend},{y + 16} {x},{y + 16}"
            parts.append(f'<path d="{path}" fill="none" stroke="{_GREY}"/>')
    for name, (x, y) in place.items():
        parts.append(f'<rect x="{x}" y="{y}" width="140" height="32" rx="6" fill="#e7eefc" stroke="{_INK}"/>')
        parts.append(_text(x + 70, y + 20, name.rpartition("/")[2], anchor="middle"))
    height = 50 + 56 * max(map(len, columns))
    return _svg(height, parts, width=20 + 168 * len(columns))


def _text(x: int, y: int, text: str, *, anchor: str = "start", colour: str = _INK, weight: str = "normal") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{colour}" font-weight="{weight}">{escape(text)}</text>'


def _svg(height: int, parts: list[str], width: int = _LEFT + _WIDTH) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    inside = "\n".join([f'<rect width="{width}" height="{height}" fill="white"/>', *parts])
    return f'{head} font-family="sans-serif" font-size="12">\n{inside}\n</svg>\n'


def main() -> None:
    """Write every picture."""
    (DOCS / "time").mkdir(exist_ok=True)
    for name, text in pictures().items():
        (DOCS / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
