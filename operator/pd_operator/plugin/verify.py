"""`kubectl pdd verify NAME`: run the canaries of an object again, and say what they saw."""

from __future__ import annotations

import argparse
import json
from typing import Final

from pd_operator.plugin.command import Commands, PluginError, answer, object_arguments

DESCRIPTION: Final = (
    "Deletes the canary Jobs of one PDDeployment, upon which the operator starts new ones, and waits for their verdicts. "
    "What serves goes on serving; six or seven requests go through each slice. Exit code 0: everything was proven; "
    "1: something was not; 2: wrong arguments, no such object, no right, or no verdict in time."
)
LIMIT: Final = 300.0  # seconds: the deadline of a canary's Job


def add(commands: Commands) -> None:
    """The parser of `verify`."""
    verify = commands.add_parser("verify", help="run the canaries again and say what they saw", description=DESCRIPTION)
    object_arguments(verify)
    verify.add_argument("--timeout", type=float, default=LIMIT, metavar="SECONDS", help=f"default: {LIMIT:.0f}")
    verify.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The exit code: 0 = proven, 1 = not."""
    from pd_operator.kube.asking import ask_again  # noqa: PLC0415  slow imports that --help does not need

    asked = answer(ask_again(args.kubeconfig, args.namespace, args.name, args.timeout))
    if asked.off:
        raise PluginError(
            f"{asked.namespace}/{asked.name}: spec.verification is Disabled, so no canary runs; set Required or Advisory"
        )
    if args.output == "json":
        print(json.dumps({"slices": asked.found, "waiting": asked.waiting}, indent=2))
    else:
        for name, canary in sorted(asked.found.items()):
            for what in ("handoff", "offload"):
                if canary.get(f"{what}Reason"):
                    print(f"{name} {what}: {canary[f'{what}Reason']}: {canary.get(f'{what}Message', '')}")
    if asked.waiting or not asked.found:
        slices = ", ".join(asked.waiting) or "any slice"
        raise PluginError(f"waited {asked.waited:.0f} s for the canary of {slices}; why: kubectl pdd status {asked.name}")
    return 1 if any(canary.get("failures", 0) for canary in asked.found.values()) else 0
