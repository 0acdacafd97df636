"""python -m pd_operator.signals.rules: the recording rules as YAML, for charts/pd-operator/files/rules/signals.yaml."""

from __future__ import annotations

import sys

import yaml

from pd_operator.upstream.signals_promql import rules

HEAD = """\
# Recording rules of the queries of a scaling tick, made by `python -m pd_operator.signals.rules`: do not edit.
# Labels that the series must carry: operator/pd_operator/upstream/signals_labels.py.
"""


def main() -> int:
    """Write the file to standard output."""
    sys.stdout.write(HEAD + yaml.safe_dump(rules(), sort_keys=False, width=1_000_000))
    return 0


if __name__ == "__main__":
    sys.exit(main())
