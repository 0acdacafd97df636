"""Analysis: from the rows of a comparison to who needs how many GPU-seconds at which attainment: wins, losses, gaps. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from pd_simulate.cell import Cell, Row
from pd_simulate.statistics import Interval, Matched, Point, bootstrap, matched, wins

TARGETS = (0.90, 0.95, 0.99)
OURS = "ours"
NOT_PEERS = ("ours", "oracle")  # prefixes: our own variants, and the bound that knows the future
Verdict = Literal["win", "loss", "even", "only ours", "only peer", "neither", "open"]


@dataclass(frozen=True, slots=True)
class Standing:
    """One policy at one target attainment: GPU-seconds by seed where there is a number, and what the sweep reached."""

    policy: str
    matches: Mapping[int, Matched]

    @property
    def values(self) -> dict[int, float]:
        """GPU-seconds by seed: interpolated, or the cheapest point's where even that attains more."""
        return {seed: match.gpu_seconds for seed, match in self.matches.items() if match.gpu_seconds is not None}

    @property
    def mean(self) -> float | None:
        """Mean GPU-seconds, only when every seed has a number: else it would be the mean of the easy seeds."""
        values = self.values
        return fmean(values.values()) if values and len(values) == len(self.matches) else None

    def count(self, state: str) -> int:
        """Seeds in a state of Matched."""
        return sum(match.state == state for match in self.matches.values())


@dataclass(frozen=True, slots=True)
class Versus:
    """Ours against one other policy: saving = (theirs - ours) / theirs in GPU-seconds, paired by seed."""

    peer: str
    verdict: Verdict
    saving: Interval | None
    wins: tuple[int, int, int]  # seeds in which ours is cheaper, equal, dearer
    note: str = ""


@dataclass(frozen=True, slots=True)
class Scenario:
    """All rows of one scenario."""

    cell: Cell  # any of its cells: what they share is read from it
    rows: Sequence[Row]

    @property
    def policies(self) -> list[str]:
        """Policies with at least one result, by name."""
        return sorted({row.cell.policy for row in self.rows})

    @property
    def title(self) -> str:
        """A name for people."""
        shock = "" if self.cell.shock == "none" else f", {self.cell.shock}"
        admission = ", with our admission" if self.cell.admission == "ours" else ""
        return f"{self.cell.trace}{shock}, {self.cell.budget} GPUs{admission}"

    @property
    def window(self) -> float:
        """Measured seconds, mean over rows: GPU-seconds divided by it are mean GPUs."""
        numbers = [row.summary for row in self.rows if row.summary and row.summary["mean_gpus"]]
        return fmean(item["gpu_seconds"] / item["mean_gpus"] for item in numbers) if numbers else 1.0

    def points(self, policy: str, seed: int) -> list[Point]:
        """The sweep of a policy at one seed."""
        return [point(row) for row in self.rows if row.cell.policy == policy and row.cell.seed == seed]

    def seeds(self) -> list[int]:
        """Seeds that any policy ran."""
        return sorted({row.cell.seed for row in self.rows})

    def sweep(self, policy: str) -> list[tuple[float | None, Point]]:
        """Mean point over seeds for each knob value of a policy, by knob."""
        groups: dict[float | None, list[Point]] = defaultdict(list)
        for row in self.rows:
            if row.cell.policy == policy:
                groups[row.cell.knob].append(point(row))
        order = sorted(groups, key=lambda knob: -1.0 if knob is None else knob)
        return [
            (knob, Point(fmean(p.attainment for p in groups[knob]), fmean(p.gpu_seconds for p in groups[knob]))) for knob in order
        ]


def point(row: Row) -> Point:
    """Attainment and cost of a finished run."""
    assert row.summary is not None
    return Point(float(row.summary["attainment"]), float(row.summary["gpu_seconds"]))


def scenarios(rows: Iterable[Row]) -> list[Scenario]:
    """Finished rows of the comparison (tuning runs and failures left aside) by scenario, real load first, then shocks."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.summary is not None and row.cell.purpose == "compare":
            groups[row.cell.scenario].append(row)
    found = [Scenario(members[0].cell, members) for members in groups.values()]
    return sorted(found, key=lambda s: (s.cell.shock != "none", s.cell.trace, s.cell.shock, s.cell.budget, s.cell.admission))


def standing(scenario: Scenario, policy: str, target: float) -> Standing:
    """One policy's matched GPU-seconds by seed. A seed that it did not run counts as never reached."""
    matches = {}
    for seed in scenario.seeds():
        points = scenario.points(policy, seed)
        matches[seed] = matched(points, target) if points else Matched("never", None)
    return Standing(policy, matches)


def versus(ours: Standing, theirs: Standing) -> Versus:
    """The verdict on one pair, from our side and never in our favour by a bound.

    Where our cheapest point attains more than the target its cost is used (we would be cheaper still); where theirs does, a
    win is not counted (they might be cheaper). `only ours` and `only peer`: the other does not reach the target in every seed.
    """
    mine, other, total = ours.values, theirs.values, len(ours.matches)
    seeds = [seed for seed in mine if seed in other]
    counts = wins([mine[s] for s in seeds], [other[s] for s in seeds])
    saving = bootstrap([(other[s] - mine[s]) / other[s] for s in seeds]) if seeds else None
    verdict, note = _verdict(len(mine), len(other), total, saving, overshoots=theirs.count("always") > 0)
    return Versus(theirs.policy, verdict, saving, counts, note)


def _verdict(mine: int, other: int, total: int, saving: Interval | None, *, overshoots: bool) -> tuple[Verdict, str]:
    """From the seeds in which ours and the other have a number, and the interval of the saving. With the reason."""
    if saving is None or min(mine, other) < total:
        counts = f"ours reaches it in {mine} of {total} seeds, the other in {other}"
        if total in (mine, other):
            return ("only ours" if mine == total else "only peer"), counts
        return ("open" if mine or other else "neither"), counts
    if saving.count < 2:
        return "open", "one seed: no interval"
    if saving.low <= 0:
        return ("loss" if saving.high < 0 else "even"), ""
    return ("open", "the other's cheapest knob value attains more than the target") if overshoots else ("win", "")


@dataclass(frozen=True, slots=True)
class Verdicts:
    """One scenario at one target: every policy's standing, ours against each, and which peer is the best."""

    scenario: Scenario
    target: float
    standings: Mapping[str, Standing]
    pairs: Mapping[str, Versus]  # empty when ours did not run
    best_peer: str | None  # the cheapest that reaches the target in every seed

    @property
    def best(self) -> Versus | None:
        """Ours against the best peer; None when no peer reaches the target or ours did not run."""
        return self.pairs.get(self.best_peer) if self.best_peer else None

    @property
    def oracle(self) -> Versus | None:
        """Ours against the oracle, which knows the future."""
        return self.pairs.get("oracle")


def judge(scenario: Scenario, target: float) -> Verdicts:
    """All verdicts of one scenario at one target attainment."""
    standings = {policy: standing(scenario, policy, target) for policy in scenario.policies}
    ours = standings.get(OURS)
    pairs = {name: versus(ours, other) for name, other in standings.items() if name != OURS} if ours else {}
    reaching = {name: other.mean for name, other in standings.items() if is_peer(name) and other.mean is not None}
    best = min(reaching, key=lambda name: (reaching[name], name)) if reaching else None
    return Verdicts(scenario, target, standings, pairs, best)


def is_peer(policy: str) -> bool:
    """Whether a policy is one that people use today: neither ours, nor a variant of ours, nor the oracle."""
    return not any(policy == name or policy.startswith(name + "-") for name in NOT_PEERS)


def losses(verdicts: Iterable[Verdicts]) -> list[Verdicts]:
    """Where the best peer is cheaper than ours, or reaches what ours does not."""
    return [item for item in verdicts if item.best is not None and item.best.verdict in ("loss", "only peer")]


def operating_knob(scenario: Scenario, policy: str, target: float = 0.95) -> float | None:
    """The knob value at which a policy is shown in the table of outcomes: the cheapest whose mean attainment reaches the target,
    else the one that attains most."""
    sweep = scenario.sweep(policy)
    reaching = [item for item in sweep if item[1].attainment >= target]
    if reaching:
        return min(reaching, key=lambda item: item[1].gpu_seconds)[0]
    return max(sweep, key=lambda item: item[1].attainment)[0]


def mean_summary(scenario: Scenario, policy: str, knob: float | None) -> dict[str, float]:
    """Mean over seeds of every number of the summaries at one knob value; a number that some seed lacks is the mean of the rest."""
    values: dict[str, list[float]] = defaultdict(list)
    for row in scenario.rows:
        if row.cell.policy == policy and row.cell.knob == knob and row.summary:
            for name, value in row.summary.items():
                if isinstance(value, (int, float)) and not isinstance(value, bool):
                    values[name].append(float(value))
    return {name: fmean(numbers) for name, numbers in values.items()}
