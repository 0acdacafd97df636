"""`kubectl pdd explain NAME`: why the pools have the numbers that they have, and what would change them."""

from __future__ import annotations

import argparse
import sys

from pd_operator.plugin.command import Commands, answer, object_arguments

DESCRIPTION = (
    "Why the pools of one PDDeployment have the numbers that they have: bottleneck, inputs, formula, limits, and what would change "
    "the answer, from the status of its PDPools. -o json prints the record of the tick, one line, which pdd-simulate replay reads. "
    "Exit code 0: explained; 1: -o json and there is no record; 2: wrong arguments, no such object, no right to read it."
)


def add(commands: Commands) -> None:
    """The parser of `explain`."""
    explain = commands.add_parser(
        "explain", help="why the pools have their numbers, and what would change them", description=DESCRIPTION
    )
    object_arguments(explain)
    explain.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The exit code: 0 = explained, 1 = there is no record to print."""
    from pd_operator.kube.seen import see  # noqa: PLC0415  slow imports that --help does not need
    from pd_operator.plugin import explain_text, explanation, terminal  # noqa: PLC0415

    told = explanation.explain(answer(see(args.kubeconfig, args.namespace, args.name, pods=False)))
    if args.output == "text":
        print(explain_text.text(told, terminal.paint()), end="")
        return 0
    if not told.line:
        print(f"kubectl pdd: {told.namespace}/{told.name} has no record: {told.why_not}", file=sys.stderr)
        return 1
    print(told.line)
    return 0
