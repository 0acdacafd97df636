"""`kubectl pdd status NAME`: where the chain from model to door holds, where it does not, and what to do next."""

from __future__ import annotations

import argparse
import json

from pd_operator.plugin.command import Commands, answer, object_arguments

DESCRIPTION = (
    "The chain model -> placement -> pods -> handoff -> offload -> door of one PDDeployment: what is ok, what is not, what is not "
    "known, by what evidence and since when, and what to do next. Exit code 0: Ready; 1: not; 2: wrong arguments, no such object, "
    "no right to read it."
)


def add(commands: Commands) -> None:
    """The parser of `status`."""
    status = commands.add_parser("status", help="what works, what does not, and what to do next", description=DESCRIPTION)
    object_arguments(status)
    status.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The exit code: 0 = Ready, 1 = not."""
    from pd_operator.kube.seen import see  # noqa: PLC0415  slow imports that --help does not need
    from pd_operator.plugin import chain, status_text, terminal  # noqa: PLC0415

    found = chain.chain(answer(see(args.kubeconfig, args.namespace, args.name)))
    if args.output == "json":
        print(json.dumps(found.document(), indent=2))
    else:
        print(status_text.text(found, terminal.paint()), end="")
    return 0 if found.ready else 1
