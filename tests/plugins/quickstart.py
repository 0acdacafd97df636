"""The commands of docs/quickstart.md, and of other pages, for the tests that run them."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "quickstart.md"


def blocks(page: Path = PAGE) -> list[str]:
    """Every ```bash block of the page, in order. What is only shown (a cluster that we do not have) is indented and not fenced."""
    return re.findall(r"^```bash\n(.*?)^```$", page.read_text(), flags=re.M | re.S)
