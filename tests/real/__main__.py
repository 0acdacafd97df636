"""`python -m real build` makes the runtime (or finds it finished) and `python -m real path` tells where it is."""

import argparse
import json
import sys

from real import runtime


def main() -> int:
    """Run one command; returns the exit status (1: `path` of a runtime that is not finished, or a failed build)."""
    parser = argparse.ArgumentParser(prog="python -m real", description=__doc__)
    parser.add_argument("command", choices=["build", "path"])
    args = parser.parse_args()
    try:
        made = runtime.ensure() if args.command == "build" else runtime.find()
    except runtime.BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps({"root": str(made.root), "venv": str(made.venv), "model": str(made.model)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
