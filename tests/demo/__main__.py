"""python -m demo up|env|down: see the package."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from cluster import named
from cluster.tools import tool
from demo import stack
from demo.stack import ENGINES, NAME


def main() -> int:
    """Run one command; the exit status is 0 only when it did all it should."""
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="make what is missing, serve, ask, show the evidence; safe to repeat")
    up.add_argument(
        "--engine", choices=sorted(ENGINES), default="standin", help="stand-ins (seconds), or real vLLM on the CPU (minutes)"
    )
    commands.add_parser("env", help="print shell lines that point kubectl at the demo's cluster")
    commands.add_parser("down", help="remove the cluster and all that it made")
    options = parser.parse_args()
    if os.environ.get("PDD_KUBECONFIG") and options.command != "down":
        raise RuntimeError(
            "the demo makes its own cluster; for yours (PDD_KUBECONFIG) see docs/quickstart.md, 'On a cluster of your own'"
        )
    if options.command == "up":
        stack.up(ENGINES[options.engine])
    elif options.command == "env":
        cluster = named.get(NAME)
        print(f"export KUBECONFIG={cluster.kubeconfig}")
        print(f"export PATH={tool('kubectl').parent}:$PATH")
    else:
        named.down(NAME)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (RuntimeError, TimeoutError, ValueError, subprocess.SubprocessError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted; `make demo-down` removes what is there")
