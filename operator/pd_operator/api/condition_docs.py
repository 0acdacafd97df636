"""docs/reference/conditions.md, from the enums and REASONS: `python -m pd_operator.api.condition_docs [--check] FILE`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pd_operator.api.conditions import REASONS, PoolType, Type

_INTRO: Final = """\
<!-- Generated from pd_operator/api/conditions.py by `make generate`; do not edit. -->
# Conditions and reasons

`kubectl get pdd NAME -o yaml` shows them under `status.conditions`. Programs match the reason; the message is for people and names
the field, the pod or the object. `Ready` shows the reason of the first condition, in this order, that stands in the way.
"""


def markdown() -> str:
    """The whole page."""
    return "\n".join([_INTRO, *_conditions(), f"\nOf a PDPool: {' and '.join(PoolType)}.\n", *_reasons(), ""])


def _conditions() -> Iterator[str]:
    yield "| condition | reasons |\n|---|---|"
    for kind in Type:
        reasons = ", ".join(reason for reason, doc in REASONS.items() if kind in doc.conditions)
        yield f"| {kind} | {reasons or 'that of another condition'} |"


def _reasons() -> Iterator[str]:
    yield "| reason | meaning | what to do |\n|---|---|---|"
    for reason, doc in REASONS.items():
        yield f"| {reason} | {doc.meaning} | {doc.remedy} |"


def main(argv: list[str] | None = None) -> int:
    """Entry of `python -m pd_operator.api.condition_docs`; 1 when --check finds a stale page."""
    parser = argparse.ArgumentParser(prog="python -m pd_operator.api.condition_docs", description="Write the page on conditions.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the page is not up to date")
    parser.add_argument("file", type=Path)
    options = parser.parse_args(argv)
    if not options.check:
        options.file.parent.mkdir(parents=True, exist_ok=True)
        options.file.write_text(markdown(), encoding="utf-8")
        return 0
    if options.file.is_file() and options.file.read_text(encoding="utf-8") == markdown():
        return 0
    print(f"{options.file} is not up to date: run python -m pd_operator.api.condition_docs {options.file}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
