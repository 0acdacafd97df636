"""Files that are made from the code and committed: `python -m generated` writes them, `--check` fails when one is stale.

crds/                               from the models
charts/pd-operator/files/crds/      the same, marked so that Helm never deletes them
docs/reference/api.md               from the CRDs
docs/reference/conditions.md        from the reasons
docs/reference/compatibility.md     from the rows of upstream
docs/reference/metrics.md           from the metrics, the recording rules and the tables of signals
charts/pd-operator/files/dashboards from pd_operator.signals.dashboards
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pd_operator.api import condition_docs, crdgen, docs
from pd_operator.controller import metric_docs
from pd_operator.signals import dashboards
from pd_operator.upstream import pairs_docs

ROOT = Path(__file__).resolve().parent.parent
_KEEP = "metadata:\n  annotations:\n    helm.sh/resource-policy: keep\n"


def chart_crd(text: str) -> str:
    """A CRD as the chart has it. Text and not parsed YAML: the two files then differ in these two lines only.

    Raises ValueError when the text does not look like crdgen's.
    """
    head, separator, tail = text.partition("\nmetadata:\n")
    if not separator or tail.startswith("  annotations:"):
        raise ValueError("a CRD with metadata, and no annotations in it, is expected")
    return f"{head}\n{_KEEP}{tail}"


def files() -> dict[Path, str]:
    """Path below the checkout -> content."""
    crds = crdgen.files()
    found = {Path("crds") / name: text for name, text in crds.items()}
    found |= {Path("charts/pd-operator/files/crds") / name: chart_crd(text) for name, text in crds.items()}
    found[Path("docs/reference/api.md")] = docs.markdown()
    found[Path("docs/reference/conditions.md")] = condition_docs.markdown()
    found[Path("docs/reference/compatibility.md")] = pairs_docs.markdown()
    found[Path("docs/reference/metrics.md")] = metric_docs.markdown()
    found |= {Path("charts/pd-operator/files/dashboards") / name: text for name, text in dashboards.files().items()}
    return found


def stale() -> list[Path]:
    """Files that are missing or differ from what would be written, and CRDs that nothing would write any more."""
    wanted = files()
    found = [path for path, text in wanted.items() if not (ROOT / path).is_file() or (ROOT / path).read_text() != text]
    folders = {path.parent for path in wanted if path.suffix == ".yaml"}
    left = [file.relative_to(ROOT) for folder in folders for file in (ROOT / folder).glob("*.yaml")]
    return found + [path for path in left if path not in wanted]


def write() -> None:
    """Bring all of them up to date."""
    wanted = files()
    for path in stale():
        if path not in wanted:
            (ROOT / path).unlink()
            continue
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_text(wanted[path])
        print(f"wrote {path}")


def main(argv: list[str] | None = None) -> int:
    """1 when --check finds a stale file."""
    parser = argparse.ArgumentParser(prog="python -m generated", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a file is not up to date")
    if not parser.parse_args(argv).check:
        write()
        return 0
    old = stale()
    for path in old:
        print(f"{path} is stale: run `make generate` and commit the result", file=sys.stderr)
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
