"""Referee study: every policy in both simulators on two traces, their outcomes and how far the two orders agree.

`python -m pd_simulate.referee_study --out referee.csv`, in an environment with the wheels (docs/simulate/referee.md). Traces are
read from PDD_TRACES. A run that stands in the file already is not repeated. Half an hour on two cores.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pd_simulate import profiles, referee, traces
from pd_simulate.fleet import Fleet, Slo
from pd_simulate.policies import registry
from pd_simulate.policies.static import Static
from pd_simulate.referee import Outcome, Replay
from pd_simulate.view import Policy
from pd_simulate.workload import Workload, scaled

SEED = 7
LEAD = 60.0  # seconds
# Policies of the registry that need no run of their own on a training half.
POLICIES = (
    "ours",
    "oracle",
    "hpa-utilization",
    "hpa-concurrency-kv",
    "dynamo-throughput",
    "dynamo-latency",
    "dynamo-predictive",
    "llmd-tokens-fast",
    "llmd-slo",
    "wva-v2",
    "heteroscale",
    "tokenscale",
    "chiron",
)
PLANNER = ("throughput", "latency")  # Dynamo's own code, in its replay only
FIELDS = ("trace", "policy", "where", "attainment", "gpus", "completed", "seconds")


@dataclass(frozen=True, slots=True)
class World:
    """One trace with an engine that it loads well: seconds [start, end) of it, its rate times `factor`."""

    trace: str
    start: float
    end: float
    factor: float
    profile: str
    kv_capacity: int  # tokens of one replica
    slo: Slo
    prefill: int  # replicas at the start
    decode: int
    budget: int  # GPUs
    context_length: int  # of the engines; Dynamo's thresholds on P's queue are shares of it
    splits: tuple[tuple[int, int], ...]  # static ones: tight on P, tight on D, about right, plenty


WORLDS = (
    World(
        "azure_conv", 1200.0, 1600.0, 5.4, "Q32B-H100-TP2", 96_000, Slo(1.0, 0.0, 0.050), 4, 3, 32, 16_384,
        ((3, 3), (5, 2), (4, 3), (6, 6)),
    ),
    World(
        "mooncake_conversation", 600.0, 1200.0, 3.0, "L8B-H200-TP1", 384_000, Slo(3.0, 0.0, 0.050), 4, 3, 16, 131_072,
        ((3, 3), (5, 2), (4, 3), (6, 5)),
    ),
)  # fmt: skip


def load_of(world: World, start: float, end: float) -> Workload:
    """The requests of [start, end) seconds, scaled, prefixes left out."""
    window = traces.load(world.trace).window(start, end)
    return replace(scaled(replace(window, prefix=None), world.factor, SEED), name=world.trace)


def fleet_of(world: World) -> Fleet:
    """The world's fleet."""
    profile = referee.flat(profiles.get(world.profile), world.kv_capacity)
    return referee.fleet(profile, world.prefill, world.decode, world.budget, world.slo, LEAD)


def build(name: str, world: World, load: Workload, fleet: Fleet) -> Policy:
    """A policy with its default settings; what it may learn before is the trace's first ten minutes."""
    training = load_of(world, 0.0, world.start)
    inputs = registry.Inputs(fleet.profile, fleet.budget, fleet.slo.itl, training, load)
    entry = registry.entry(name)
    settings = {"context_length": float(world.context_length)} if "context_length" in entry.tunables else {}
    return entry.build(inputs, None, settings)


def runs(world: World, folder: Path, planner: bool) -> Iterable[tuple[str, str, Callable[[], Outcome]]]:
    """(policy, where, how to run it) of all runs of a world."""
    load, fleet = load_of(world, world.start, world.end), fleet_of(world)
    cases: list[tuple[str, Fleet, Callable[[], Policy]]] = [
        (f"static-{p}-{d}", replace(fleet, prefill=p, decode=d), partial(Static, p, d)) for p, d in world.splits
    ]
    cases += [(name, fleet, partial(build, name, world, load, fleet)) for name in POLICIES]
    for name, where, make in cases:
        yield name, "here", partial(_here, load, where, make)
        yield name, "replay", partial(_there, Replay(load, where, folder, world.context_length), make)
    if planner:
        for target in PLANNER:
            yield f"planner-{target}", "replay", partial(Replay(load, fleet, folder, world.context_length).planner, target)


def _here(load: Workload, where: Fleet, make: Callable[[], Policy]) -> Outcome:
    return referee.simulated(load, where, make())


def _there(replay: Replay, make: Callable[[], Policy]) -> Outcome:
    return replay.run(make())


def row_of(trace: str, policy: str, where: str, found: Outcome, seconds: float) -> dict[str, str]:
    """One line of the results."""
    numbers = (f"{found.attainment:.4f}", f"{found.gpus:.2f}", str(found.completed), f"{seconds:.1f}")
    return dict(zip(FIELDS, (trace, policy, where, *numbers), strict=True))


def study(out: Path, worlds: Sequence[World], planner: bool) -> list[dict[str, str]]:
    """All runs not in `out` yet, appended as they end. Returns all rows."""
    rows = list(csv.DictReader(out.open(encoding="utf-8"))) if out.exists() else []
    done = {(row["trace"], row["policy"], row["where"]) for row in rows}
    with out.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        if not rows:
            writer.writeheader()
        for world in worlds:
            with tempfile.TemporaryDirectory() as folder:
                for name, where, run in runs(world, Path(folder), planner):
                    if (world.trace, name, where) in done:
                        continue
                    began = time.monotonic()
                    try:
                        found = run()
                    except TimeoutError as exc:
                        print(world.trace, name, where, exc, flush=True)  # left out of both tables and tau
                        continue
                    row = row_of(world.trace, name, where, found, time.monotonic() - began)
                    writer.writerow(row)
                    file.flush()
                    rows.append(row)
                    print(*row.values(), flush=True)
    return rows


def summary(rows: Sequence[dict[str, str]]) -> list[str]:
    """For each trace a table of both outcomes, and tau of attainment, GPUs and attainment per GPU."""
    lines = []
    for trace in dict.fromkeys(row["trace"] for row in rows):
        found = {(row["policy"], row["where"]): row for row in rows if row["trace"] == trace}
        names = [name for name in dict.fromkeys(row["policy"] for row in rows) if {(name, "here"), (name, "replay")} <= set(found)]
        lines += [f"### {trace}", "", "| policy | here: attainment, GPUs | replay: attainment, GPUs |", "|---|---|---|"]
        for name in dict.fromkeys(row["policy"] for row in rows if row["trace"] == trace):
            cells = [found.get((name, where)) for where in ("here", "replay")]
            lines.append("| " + " | ".join([name, *(f"{c['attainment']}, {c['gpus']}" if c else "-" for c in cells)]) + " |")
        lines.append("")
        for title, read in MEASURES.items():
            here, there = ([read(found[name, where]) for name in names] for where in ("here", "replay"))
            lines.append(f"Kendall's tau-b of {title} over {len(names)} policies: {referee.tau(here, there):.3f}")
        lines.append("")
    return lines


MEASURES: dict[str, Callable[[dict[str, str]], float]] = {
    "attainment": lambda row: float(row["attainment"]),
    "mean GPUs": lambda row: float(row["gpus"]),
    "attainment per GPU": lambda row: float(row["attainment"]) / max(1e-9, float(row["gpus"])),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Exit code 3 without the wheel."""
    parser = argparse.ArgumentParser(
        prog="python -m pd_simulate.referee_study", description=(__doc__ or "").split("\n", maxsplit=1)[0]
    )
    parser.add_argument("--out", type=Path, required=True, help="CSV of results, made or continued")
    parser.add_argument("--trace", choices=[world.trace for world in WORLDS], help="only this one")
    parser.add_argument("--planner", action="store_true", help="also Dynamo's own planner code (needs ai-dynamo)")
    given = parser.parse_args(argv)
    if why := referee.missing():
        print(why, file=sys.stderr)
        return 3
    worlds = [world for world in WORLDS if given.trace in (None, world.trace)]
    print("\n".join(summary(study(given.out, worlds, given.planner))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
