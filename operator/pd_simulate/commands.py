"""Commands: what each sub-command of `pdd-simulate` does with its parsed arguments; each returns the exit code."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

from pd_simulate import compare as comparing
from pd_simulate import execute, export, matrix, peers, profiles, scenario, second, study, text
from pd_simulate import recommend as advising
from pd_simulate import replay as replaying
from pd_simulate import report as reporting
from pd_simulate.cell import Cell
from pd_simulate.fleet import Slo
from pd_simulate.matrix import digest
from pd_simulate.policies import registry
from pd_simulate.progress import Progress
from pd_simulate.store import StoreError
from pd_simulate.units import InputError, seconds, setting


def run(args: argparse.Namespace) -> int:
    """One simulated run."""
    if args.shock not in scenario.SHOCKS:
        raise InputError(f"--shock {args.shock!r}: accepted are {', '.join(scenario.SHOCKS)}")
    if not 0 <= args.load <= 3:
        raise InputError(f"--load {args.load:g}: accepted is 0 (the trace's own rate) to 3")
    entry = peers.entry(args.policy)
    cell = replace(_cell(args), policy=entry.name, half=args.half, shock=args.shock, admission=args.admission, load=args.load)
    cell = _settings(cell, entry, args.set)
    ready = execute.prepare(cell)
    if args.decisions and execute.records(ready.policy) is None:
        raise InputError(f"--decisions {args.decisions}: {entry.name} records none; accepted with --policy ours")
    progress = Progress(ready.load.duration, "simulated seconds", quiet=not sys.stderr.isatty())
    result = execute.simulate_prepared(ready, cell.seed, progress.show)
    progress.end()
    if args.decisions:
        _write(args.decisions, "".join(line + "\n" for line in execute.records(ready.policy) or ()), "--decisions")
    if args.output == "json":
        share = text.bottleneck(result, ready.fleet.slo)
        print(json.dumps({**execute.summary(result), "bottleneck": share, "timeline": execute.timeline(result)}))
    else:
        print(text.describe(result, ready.fleet.slo))
    return 0


def compare(args: argparse.Namespace) -> int:
    """A matrix of runs."""
    chosen = matrix.shipped(args.profile) if args.profile else matrix.read(args.matrix)
    folder = args.output or Path("simulate-results") / chosen.name
    jobs = comparing.cores() if args.jobs is None else args.jobs
    if jobs < 1:
        raise InputError(f"--jobs {jobs}: accepted is a number from 1")
    limits = seconds(args.cell_limit, "--cell-limit"), seconds(args.limit, "--limit")
    options = comparing.Options(folder, jobs, *limits, args.retry_failed, args.refresh, args.quiet)
    begin = time.monotonic()
    try:
        ended = comparing.compare(chosen, peers.sweeps(), options)
    except StoreError as exc:
        raise InputError(str(exc)) from exc
    print(comparing.describe(ended, options, time.monotonic() - begin))
    print(f"next: pdd-simulate report {folder} -o report.html")
    return 0 if ended.complete and not ended.failed else 1


def report(args: argparse.Namespace) -> int:
    """The HTML file of a comparison."""
    try:
        found = study.load(args.folder)
        page = reporting.build(found, second.read(args.referee) if args.referee else ())
    except StoreError as exc:
        raise InputError(str(exc)) from exc
    _write(args.output, page, "--output")
    if args.csv:
        for name, content in (("matched.csv", export.matched_csv(found)), ("points.csv", export.points_csv(found))):
            _write(args.csv / name, content, "--csv")
    if args.summary:
        _write(args.summary, export.markdown(found), "--summary")
    print(f"{args.output}: {reporting.lead(found.verdicts)}")
    return 0


def replay(args: argparse.Namespace) -> int:
    """Recorded decisions, decided again."""
    try:
        with args.file.open() as file:
            answer = replaying.replay(file)
    except (OSError, ValueError) as exc:
        raise InputError(f"{args.file}: {exc}; accepted are lines that `run --decisions` wrote") from exc
    if answer.difference:
        print("\n".join(answer.difference))
        print(f"{answer.agreed} decisions before it agree")
        return 1
    print(f"{answer.agreed} decisions agree")
    return 0


def recommend(args: argparse.Namespace) -> int:
    """GPUs and split for a trace."""
    if not 0 < args.attainment < 100:
        raise InputError(f"--attainment {args.attainment:g}: accepted is a percentage between 0 and 100")
    cell = _cell(args)
    peers.entry(args.policy)
    if args.gpus is None:
        cell = replace(cell, budget=advising.budget_for(scenario.workload(replace(cell, load=0.0))[0], cell))
    progress = Progress(0, "recommend", quiet=not sys.stderr.isatty())
    sweep = advising.sweep_of(peers.sweeps(), args.policy)
    advice = advising.recommend(cell, sweep, args.attainment / 100, progress.say)
    progress.end()
    print(json.dumps(advising.as_json(advice)) if args.output == "json" else advising.describe(advice))
    return 0


def listing(args: argparse.Namespace) -> int:
    """Everything that has a name."""
    print("traces:   " + ", ".join(scenario.NAMES))
    print("profiles: " + ", ".join(profiles.names()))
    print("slo:      " + ", ".join(scenario.CLASSES))
    print("shocks:   " + ", ".join(scenario.SHOCKS))
    print("policies: name, its headroom knob with the five values of a sweep, further settings")
    for entry in peers.ENTRIES.values():
        knobs = ", ".join(f"{value:g}" for value in entry.knobs)
        more = f"; {', '.join(entry.tunables)}" if entry.tunables else ""
        print(f"  {entry.name:<24} {entry.knob} = {knobs}{more}  ({entry.evidence})")
    return 0


def _cell(args: argparse.Namespace) -> Cell:
    """The settings that `run` and `recommend` share."""
    for flag, value, least, most in (("--requests", args.requests, 1, 60_000), ("--seed", args.seed, 0, 2**31)):
        if not least <= value <= most:
            raise InputError(f"{flag} {value}: accepted is {least} to {most}")
    if args.gpus is not None and not 2 <= args.gpus <= 1024:
        raise InputError(f"--gpus {args.gpus}: accepted is 2 to 1024")
    return Cell(
        trace=args.trace,
        policy="ours",
        seed=args.seed,
        budget=args.gpus or 2,
        requests=args.requests,
        load=0.0,
        profile=args.profile or scenario.DEFAULT_PROFILE,
        slo=_slo(args),
        lead_time=seconds(args.lead_time, "--lead-time"),
        digest=digest(args.trace),
    )


def _slo(args: argparse.Namespace) -> str:
    """The SLO as text that `scenario.slo` reads back. A --slo-ttft alone is flat: nobody asked for seconds per prompt token."""
    limit: Slo = scenario.slo(args.slo or "chat")
    if args.slo_ttft is None and args.slo_itl is None:
        return str(args.slo or "chat")
    if args.slo is None and args.slo_ttft is not None:
        limit = replace(limit, ttft_per_token=0.0)
    ttft = limit.ttft if args.slo_ttft is None else seconds(args.slo_ttft, "--slo-ttft")
    itl = limit.itl if args.slo_itl is None else seconds(args.slo_itl, "--slo-itl")
    return f"ttft={_ms(ttft)},itl={_ms(itl)},per-thousand={_ms(1000 * limit.ttft_per_token)}"


def _ms(value: float) -> str:
    return f"{round(1000 * value)}ms"


def _settings(cell: Cell, entry: registry.Entry, given: list[str]) -> Cell:
    """The cell with the values of --set: the policy's knob, or one of its further settings."""
    values = dict(setting(item) for item in given)
    accepted = ", ".join((entry.knob, *entry.tunables))
    for key in values:
        if key != entry.knob and key not in entry.tunables:
            raise InputError(f"--set {key}: accepted with {entry.name} are {accepted}")
    knob = values.pop(entry.knob, None)
    if isinstance(knob, str):
        raise InputError(f"--set {entry.knob}={knob}: accepted is a number")
    return replace(cell, knob=knob, settings=tuple(sorted(values.items())))


def _write(path: Path, content: str, flag: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    except OSError as exc:
        raise InputError(f"{flag} {path}: {exc.strerror}; accepted is a path that can be written") from exc
