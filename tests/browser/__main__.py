"""Look at a report at every width and background; exit code 1 when something is wrong. Pictures with --pictures DIR."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from browser.page import BACKGROUNDS, WIDTHS, measure, picture, printed
from cluster.packages import ensure


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m browser", description="Check a report in headless Chromium.")
    parser.add_argument("report", type=Path)
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="keep pictures and the printed PDF")
    options = parser.parse_args()
    ensure({"chromium": "chromium fonts-liberation"})
    wrong = 0
    for width in WIDTHS:
        for background in BACKGROUNDS:
            found = measure(options.report, width, background)
            faults = found.faults()
            wrong += bool(faults)
            print(f"{width:5} {background:5} {found.charts:4} charts: {'; '.join(faults) or 'nothing wrong'}", flush=True)
            if options.pictures:
                options.pictures.mkdir(parents=True, exist_ok=True)
                picture(options.report, options.pictures / f"{width}-{background}.png", width, background)
    if options.pictures:
        printed(options.report, options.pictures / "printed.pdf")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
