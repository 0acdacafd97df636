"""Page: one HTML file in headless Chromium, without a network: what it measures of itself, and pictures of it."""

from __future__ import annotations

import html
import json
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

LIMIT_S = 120.0
# Printing is a width of its own; phones down to 360 pixels.
WIDTHS = (360, 768, 1280)
BACKGROUNDS = ("light", "dark")
FLAGS = (
    "--headless",
    "--no-sandbox",  # the harness runs as root
    "--disable-gpu",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--no-first-run",
)

# Put into a copy of the page: measures the laid-out page and leaves the numbers in it.
PROBE = """<script>
addEventListener("load", () => {
  const shown = [...document.querySelectorAll("svg.chart")].filter(e => e.getBoundingClientRect().width > 0);
  const inside = e => { const r = e.getBoundingClientRect(); return r.left >= -0.5 && r.right <= innerWidth + 0.5; };
  const texts = shown.flatMap(e => [...e.querySelectorAll("text")]);
  const outside = texts.filter(t => { const a = t.getBoundingClientRect(), b = t.closest("svg").getBoundingClientRect();
    return a.left < b.left - 1 || a.right > b.right + 1 || a.bottom > b.bottom + 2; });
  const colour = (e, p) => getComputedStyle(e).getPropertyValue(p);
  const heights = texts.map(t => t.getBoundingClientRect().height);
  const overlap = shown.reduce((n, e) => { const r = [...e.querySelectorAll("text.note")].map(t => t.getBoundingClientRect());
    return n + r.filter((a, i) => r.some((b, j) => j > i && a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 &&
      b.top < a.bottom - 3)).length; }, 0);
  const out = { width: innerWidth, page: document.documentElement.scrollWidth, charts: shown.length,
    outside: shown.filter(e => !inside(e)).length, textsOutside: outside.map(t => t.textContent), overlap,
    smallest: Math.min(...heights), resources: performance.getEntriesByType("resource").map(r => r.name),
    back: colour(document.body, "background-color"), text: colour(document.body, "color"),
    broken: [...document.querySelectorAll("nav a")].filter(a => !document.querySelector(a.getAttribute("href"))).length };
  const pre = document.createElement("pre"); pre.id = "probe"; pre.textContent = JSON.stringify(out); document.body.append(pre);
});
</script>"""


@dataclass(frozen=True, slots=True)
class Measured:
    """What the page measured of itself at one width and background. Pixels; colours as the browser writes them."""

    width: int
    page: int  # widest content: more than `width` means that the whole page scrolls sideways
    charts: int  # shown
    outside: int  # charts beyond the window
    texts_outside: tuple[str, ...]  # of charts
    overlap: int  # chart texts that lie on others
    smallest: float  # height of the smallest chart text
    resources: tuple[str, ...]  # fetched from elsewhere
    back: str
    text: str
    broken: int  # links of the contents that lead nowhere

    def faults(self) -> list[str]:
        """What is wrong, in words."""
        found = []
        if self.page > self.width:
            found.append(f"the page is {self.page} pixels wide in a window of {self.width}")
        if not self.charts:
            found.append("no chart is shown")
        if self.outside or self.texts_outside or self.overlap:
            found.append(f"{self.outside} charts and texts {self.texts_outside} outside, {self.overlap} texts on others")
        if self.charts and self.smallest < 11:
            found.append(f"a chart's text is {self.smallest:.1f} pixels high")
        if self.resources or self.broken:
            found.append(f"fetched {self.resources}; {self.broken} links lead nowhere")
        if contrast(self.back, self.text) < 7:
            found.append(f"text {self.text} on {self.back} has a contrast of {contrast(self.back, self.text):.1f}, less than 7")
        return found


def chromium(*arguments: str, width: int, background: str) -> str:
    """What Chromium prints. Raises RuntimeError when it fails."""
    dark = ("--blink-settings=preferredColorScheme=0",) if background == "dark" else ("--blink-settings=preferredColorScheme=1",)
    with tempfile.TemporaryDirectory() as profile:
        argv = ["chromium", *FLAGS, *dark, f"--user-data-dir={profile}", f"--window-size={width},900", *arguments]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)}: exit code {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def measure(page: Path, width: int, background: str) -> Measured:
    """Lay the page out and read what it says of itself."""
    # Headless Chromium has no window under 500 pixels: a frame of the right width stands in for a phone.
    text = page.read_text().replace("</head>", f"{PROBE}</head>", 1)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "page.html"
        copy.write_text(text)
        if width < 500:
            frame = f'<iframe srcdoc="{html.escape(text)}" style="border:0;width:{width}px;height:800px"></iframe>'
            lift = "onload=()=>setTimeout(()=>document.body.append(frames[0].document.getElementById('probe')),300)"
            copy.write_text(f"<!doctype html><body style='margin:0'>{frame}<script>{lift}</script>")
        dom = chromium("--virtual-time-budget=5000", "--dump-dom", f"file://{copy}", width=max(width, 500), background=background)
    found = re.search(r'<pre id="probe">(.*?)</pre>', dom, flags=re.S)
    if found is None:
        raise RuntimeError(f"{page} at {width} pixels: the page did not measure itself")
    values = json.loads(html.unescape(found[1]))
    values["texts_outside"] = tuple(values.pop("textsOutside"))
    return Measured(**{**values, "resources": tuple(values["resources"])})


def picture(page: Path, target: Path, width: int, background: str, height: int = 2400) -> None:
    """A picture of the top of the page (at least 500 pixels wide: Chromium's least)."""
    size = f"--window-size={max(width, 500)},{height}"
    chromium(f"--screenshot={target}", size, f"file://{page.resolve()}", width=max(width, 500), background=background)


def printed(page: Path, target: Path) -> None:
    """The page as it prints, a PDF."""
    chromium(f"--print-to-pdf={target}", "--no-pdf-header-footer", f"file://{page.resolve()}", width=1280, background="light")


def contrast(first: str, second: str) -> float:
    """Contrast ratio of two colours `rgb(r, g, b)` (WCAG 2.1: 7 is AAA for text)."""
    bright, dim = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


def _luminance(colour: str) -> float:
    shares = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (s / 12.92 if s <= 0.03928 else ((s + 0.055) / 1.055) ** 2.4 for s in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
