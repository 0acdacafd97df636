"""The command `pd-operator`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from pd_operator import __version__, logs
from pd_operator.settings import Settings, SettingsError, load


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; the exit code: 0 = stopped by a signal, 1 = failed, 2 = wrong settings or arguments."""
    args = _parser().parse_args(argv)
    command: int = args.command(args)
    return command


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pd-operator", description="Runs disaggregated prefill/decode serving on Kubernetes.")
    parser.add_argument("--version", action="version", version=f"pd-operator {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="run the operator until SIGTERM", description="Settings: --config and PD_* variables.")
    run.add_argument("--config", metavar="FILE", help="YAML file of settings (default: $PD_CONFIG)")
    run.add_argument("--log-level", choices=logs.LEVELS, help="overrides the setting logLevel")
    run.set_defaults(command=_run)
    crds = commands.add_parser("crds", help="print the custom resource definitions as YAML")
    crds.set_defaults(command=_crds)
    canary = commands.add_parser(
        "canary", help="send a few requests through a slice and report what its counters show; runs in a Job"
    )
    canary.set_defaults(command=_canary)
    return parser


def _run(args: argparse.Namespace) -> int:
    from pd_operator.controller.reconcile import Reconciler  # noqa: PLC0415  slow imports that `crds` does not need
    from pd_operator.manager import NoCluster, run, run_process  # noqa: PLC0415

    try:
        settings = load(os.environ, args.config)
    except SettingsError as exc:
        print(f"pd-operator: {exc}", file=sys.stderr)
        return 2
    if args.log_level:
        settings = Settings.model_validate(settings.model_dump() | {"log_level": args.log_level})
    logs.setup(settings.log_level)
    try:
        return run_process(lambda: run(settings, Reconciler))
    except NoCluster as exc:
        print(f"pd-operator: {exc}", file=sys.stderr)
        return 2


def _canary(args: argparse.Namespace) -> int:
    from pd_operator import canary  # noqa: PLC0415

    return canary.main()


def _crds(args: argparse.Namespace) -> int:
    from pd_operator.api import crdgen  # noqa: PLC0415

    sys.stdout.write("---\n".join(text for _, text in sorted(crdgen.files().items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
