"""The program `kubectl-pdd`: its arguments, and the exit code of what they ask for."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pd_operator import __version__
from pd_operator.plugin import explain, plan, status, verify
from pd_operator.plugin.command import PluginError


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; the exit code: 0 = yes (it fits, it is ready), 1 = no, 2 = wrong arguments or no cluster."""
    args = parser().parse_args(argv)
    try:
        code: int = args.run(args)
    except PluginError as exc:
        print(f"kubectl pdd: {exc}", file=sys.stderr)
        return 2
    return code


def parser() -> argparse.ArgumentParser:
    """All commands; each module of a command adds its own, with the function that runs it as `run`."""
    found = argparse.ArgumentParser(prog="kubectl pdd", description="Looks at PDDeployments. Only `verify` changes something.")
    found.add_argument("--version", action="version", version=f"kubectl-pdd {__version__}")
    commands = found.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for command in (plan, status, explain, verify):
        command.add(commands)
    return found
