"""Markup: small pieces of HTML, escaped: tables, verdicts, figures that exist once for wide and once for narrow screens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape

from pd_simulate.analysis import Verdict, Versus
from pd_simulate.charts import NARROW, WIDE

WORDS: dict[Verdict, tuple[str, str]] = {
    "win": ("win", "less than the other, the interval excludes 0"),
    "loss": ("loss", "loss"),
    "even": ("even", "no difference beyond chance"),
    "only ours": ("win", "only ours reaches it"),
    "only peer": ("loss", "only the other reaches it"),
    "neither": ("even", "neither reaches it"),
    "open": ("even", "open"),
}


JUDGED = "ours is, saves [95 % CI]"  # head of the columns of `judged`


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def html(value: object) -> str:
    """The value as markup: escaped unless it is Html."""
    return value if isinstance(value, Html) else escape(str(value))


def table(head: Sequence[str], rows: Iterable[Sequence[object]], *, ours: Callable[[str], bool] = lambda _: False) -> Html:
    """A table that scrolls sideways on a small screen. The first cell of a row names it; `ours` marks rows by that name."""
    body = []
    for row in rows:
        mark = ' class="ours"' if ours(str(row[0])) else ""
        body.append(f"<tr{mark}>" + "".join(_cell(value) for value in row) + "</tr>")
    titles = "".join(f"<th{_aligned(title)}>{escape(title)}</th>" for title in head)
    return Html(f'<div class="scroll"><table><thead><tr>{titles}</tr></thead><tbody>{"".join(body)}</tbody></table></div>')


def _aligned(title: str) -> str:
    return ' class="judged"' if title == JUDGED else ""


def _cell(value: object) -> str:
    if isinstance(value, Prose):
        return f'<td class="text">{html(value.text)}</td>'
    kind = ' class="judged"' if isinstance(value, Html) else ""
    return f"<td{kind}>{html(value)}</td>"


class Prose:
    """A cell of running text, which may wrap."""

    __slots__ = ("text",)

    def __init__(self, text: object) -> None:
        self.text = text


def verdict(item: Versus) -> Html:
    """The verdict as a word on a coloured ground; the tooltip says why."""
    kind, _ = WORDS[item.verdict]
    return Html(f'<span class="v v-{kind}" title="{escape(item.note)}">{escape(item.verdict)}</span>')


def judged(item: Versus) -> Html:
    """Verdict and saving in one cell."""
    return Html(f"{verdict(item)} {saving(item)}")


def saving(item: Versus) -> str:
    """Mean saving with its interval, in per cent."""
    if item.saving is None:
        return "–"
    mean, low, high = (100 * value for value in (item.saving.mean, item.saving.low, item.saving.high))
    return f"{mean:+.1f} % [{low:+.1f}, {high:+.1f}]"


def figure(draw: Callable[[int], str], caption: str = "", legend: Sequence[tuple[str, str]] = ()) -> Html:
    """A chart for wide and for narrow screens, its legend ((style, name), ...) and a caption."""
    parts = [f'<div class="wide">{draw(WIDE)}</div><div class="narrow">{draw(NARROW)}</div>']
    if legend:
        parts.append('<ul class="legend">' + "".join(_entry(style, name) for style, name in legend) + "</ul>")
    if caption:
        parts.append(f"<figcaption>{escape(caption)}</figcaption>")
    return Html(f"<figure>{''.join(parts)}</figure>")


def _entry(style: str, name: str) -> str:
    swatch = f'<svg width="26" height="10" aria-hidden="true"><path class="line {style}" d="M1 5H25"/></svg>'
    return f"<li>{swatch}{escape(name)}</li>"


def bullets(items: Iterable[object]) -> Html:
    """A list."""
    return Html("<ul>" + "".join(f"<li>{html(item)}</li>" for item in items) + "</ul>")


def paragraph(text: object, kind: str = "") -> Html:
    """A paragraph."""
    mark = f' class="{kind}"' if kind else ""
    return Html(f"<p{mark}>{html(text)}</p>")
