"""The command `pdd-simulate`. Exit codes: 0 done, 1 done with a difference or failures, 2 wrong input."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from pd_operator import __version__
from pd_simulate.units import InputError

RUN_EXAMPLES = """examples:
  pdd-simulate run --trace burst --policy ours
  pdd-simulate run --trace my.csv --policy hpa-utilization --set target=0.6 --gpus 16 --slo ttft=2s,itl=50ms
  pdd-simulate run --trace burst --policy ours --decisions decisions.jsonl -o json
"""
COMPARE_EXAMPLES = """examples:
  pdd-simulate compare --profile smoke -o results
  pdd-simulate compare --matrix mine.yaml -o results --jobs 2 --limit 8h     (the same command again goes on where it stopped)
"""
RECOMMEND_EXAMPLES = """examples:
  pdd-simulate recommend --trace my.csv --profile steptimes.csv --slo-ttft 2s --slo-itl 50ms
  pdd-simulate recommend --trace burst --attainment 99 --gpus 24
"""
REPORT_EXAMPLE = "example:\n  pdd-simulate report results -o report.html\n"
REPLAY_EXAMPLE = "example:\n  pdd-simulate replay decisions.jsonl\n"
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    args = _parser().parse_args(argv)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # or `kill` leaves the workers behind
    from pd_simulate import commands  # noqa: PLC0415  slow imports (numpy) that --help does not need

    try:
        code: int = getattr(commands, args.command)(args)
        return code
    except InputError as exc:
        print(f"pdd-simulate: {exc}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("pdd-simulate: interrupted; `compare` goes on from its results folder when it is called again", file=sys.stderr)
        return 1
    except BrokenPipeError:
        sys.stderr.close()
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pdd-simulate", description="Simulates disaggregated prefill/decode serving under a scaling policy."
    )
    parser.add_argument("--version", action="version", version=f"pdd-simulate {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _run_parser(_command(commands, "run", "simulate one run", RUN_EXAMPLES))
    _compare_parser(_command(commands, "compare", "run a matrix of cells over all cores; resumable", COMPARE_EXAMPLES))
    _report_parser(_command(commands, "report", "one HTML file of a comparison", REPORT_EXAMPLE))
    replay = _command(commands, "replay", "decide recorded decisions again", REPLAY_EXAMPLE)
    replay.add_argument("file", type=Path, metavar="FILE.jsonl", help="one recorded decision a line")
    replay.set_defaults(command="replay")
    _recommend_parser(_command(commands, "recommend", "how many GPUs and which split for a trace of your own", RECOMMEND_EXAMPLES))
    listing = _command(commands, "list", "traces, policies with knobs and settings, profiles, shocks", "")
    listing.set_defaults(command="listing")
    return parser


def _command(commands: Commands, name: str, text: str, examples: str) -> argparse.ArgumentParser:
    shape = argparse.RawDescriptionHelpFormatter
    return commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=examples, formatter_class=shape)


def _scenario_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--trace", required=True, metavar="FILE|NAME", help="CSV, JSONL (also .gz), or a built-in name: see `pdd-simulate list`")
    add("--profile", default="", metavar="NAME|CSV", help="engine: a name (see `list`) or a CSV of step times")
    add("--slo", metavar="CLASS|ttft=..,itl=..", help="chat (default), long, strict, or ttft=2s,itl=50ms,per-thousand=100ms")
    add("--slo-ttft", metavar="DURATION", help="time to first token, whatever the prompt's length; with --slo: replaces its ttft")
    add("--slo-itl", metavar="DURATION", help="gap between tokens; replaces the itl of --slo")
    add("--lead-time", default="60s", metavar="DURATION", help="mean time from ordering a replica to Ready (default 60s)")
    add("--seed", type=int, default=0, help="of all chance (default 0)")
    add("--requests", type=int, default=60_000, metavar="N", help="cut the trace after so many (default and most 60000)")
    add("-o", "--output", choices=("text", "json"), default="text", help="text for people (default) or json")
    add("--json", dest="output", action="store_const", const="json", help="the same as -o json")


def _run_parser(parser: argparse.ArgumentParser) -> None:
    _scenario_arguments(parser)
    add = parser.add_argument
    add("--policy", default="ours", metavar="NAME", help="see `pdd-simulate list` (default ours)")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="the policy's knob or a setting; repeatable")
    add("--gpus", type=int, default=32, metavar="N", help="budget of both roles (default 32)")
    add("--load", type=float, default=0.0, metavar="SHARE", help="scale the rate to this share of the budget at its peak; 0 = no")
    add("--half", choices=("all", "first", "second"), default="all", help="half of the trace (default all)")
    add("--shock", default="none", metavar="NAME", help="see `pdd-simulate list`")
    add("--admission", choices=("none", "ours"), default="none", help="ours = with the operator's limits at the router")
    add("--decisions", type=Path, metavar="FILE.jsonl", help="record the decisions of `ours`, for `replay`")
    parser.set_defaults(command="run")


def _compare_parser(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--profile", choices=("smoke", "full"), help="a matrix that ships")
    which.add_argument("--matrix", type=Path, metavar="FILE.yaml", help="a matrix of your own")
    add = parser.add_argument
    add("-o", "--output", type=Path, metavar="DIR", help="results folder (default simulate-results/NAME)")
    add("-j", "--jobs", type=int, metavar="N", help="processes (default: the cores this process may use)")
    add("--limit", default="8h", metavar="DURATION", help="begin no cell after this time (default 8h)")
    add("--cell-limit", default="15m", metavar="DURATION", help="give a cell up after this time (default 15m)")
    add("--retry-failed", action="store_true", help="run cells again that failed")
    add("--refresh", action="store_true", help="run cells again whose result is of other code than today's")
    add("-q", "--quiet", action="store_true", help="no progress")
    parser.set_defaults(command="compare")


def _report_parser(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", type=Path, metavar="DIR", help="results folder of `compare`")
    add("-o", "--output", type=Path, default=Path("report.html"), metavar="FILE", help="default report.html")
    add("--csv", type=Path, metavar="DIR", help="also write matched.csv and points.csv there")
    add("--referee", type=Path, metavar="FILE.csv", help="outcomes of the same policies in the second simulator, of referee_study")
    add("--summary", type=Path, metavar="FILE.md", help="also write the result as Markdown")
    parser.set_defaults(command="report")


def _recommend_parser(parser: argparse.ArgumentParser) -> None:
    _scenario_arguments(parser)
    add = parser.add_argument
    add("--policy", default="ours", metavar="NAME", help="the policy that scales (default ours)")
    add("--attainment", type=float, default=95.0, metavar="PERCENT", help="good requests of those offered (default 95)")
    add("--gpus", type=int, metavar="N", help="most GPUs to consider (default: 1.5 times what the busiest minute needs)")
    parser.set_defaults(command="recommend")


if __name__ == "__main__":
    sys.exit(main())
