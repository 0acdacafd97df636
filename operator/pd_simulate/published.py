"""Published: the runs of a comparison as one small CSV for the repository, and the page that is made of that CSV alone.

`python -m pd_simulate.published RESULTS DOCS` writes DOCS/result.csv and the generated part of DOCS/result.md; a test makes the
page again from the CSV.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean

from pd_simulate import matrix, peers
from pd_simulate.analysis import OURS, TARGETS, Scenario, Verdicts, Versus, is_peer, judge
from pd_simulate.cell import Row
from pd_simulate.compare import TIMELINES
from pd_simulate.markup import saving
from pd_simulate.runs import OUTAGE, order, read, runs_csv
from pd_simulate.store import load

SHIPPED = matrix.shipped("full")
FALLING = {sweep.name for sweep in peers.sweeps() if sweep.knobs and sweep.knobs[0] > sweep.knobs[-1]}
# The budget at which a trace was run first: other budgets stand in a table of their own.
BUDGETS = {trace: block.budgets[0] for block in SHIPPED.blocks[::-1] for trace in block.traces}
FIXED = ("static-best", "aggregated-static")  # peers that never scale
PAGE, RUNS = "result.md", "result.csv"
BEGIN, END = "<!-- made of result.csv: begin -->", "<!-- made of result.csv: end -->"
AIM_SAVING, AIM_LOSS, AIM_ORACLE = 0.20, -0.02, 0.10  # what was aimed at, against the best peer and the oracle


@dataclass(frozen=True, slots=True)
class Part:
    """One scenario of the page: the rows of the seeds that were done whole, and what was not."""

    scenario: Scenario
    seeds: Sequence[int]
    short: Sequence[str]  # policies of the matrix without all those seeds: not judged
    verdicts: Sequence[Verdicts]  # ours against every policy that ran all seeds, by TARGETS


def parts(rows: Sequence[Row], everyone: bool = False) -> list[Part]:
    """Scenarios with the seeds that ours and the policies of the first block ran whole: every value of the knob.

    What ran fewer seeds than those is not judged, and named: it neither wins nor loses by what was not run. With `everyone` only
    the seeds count that every policy which ran the first one whole did, so that policies are judged which ran fewer.
    """
    ran: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        ran[row.cell.scenario].append(row)
    done = {row.cell.key() for row in rows}
    found = []
    for name, group in _wanted().items():
        whole = {pair for pair, keys in group.items() if keys <= done}
        policies = sorted({policy for policy, _ in group})
        first = {policy for policy in policies if (everyone or policy in SHIPPED.blocks[0].policies) and (policy, 0) in whole}
        seeds = sorted({seed for _, seed in group if all((policy, seed) in whole for policy in first | {OURS})})
        judged = [policy for policy in policies if seeds and all((policy, seed) in whole for seed in seeds)]
        if len(judged) > 1:
            kept = [row for row in ran[name] if row.cell.policy in judged and row.cell.seed in seeds]
            scenario, short = Scenario(kept[0].cell, kept), [policy for policy in policies if policy not in judged]
            found.append(Part(scenario, seeds, short, [judge(scenario, target) for target in TARGETS]))
    return sorted(found, key=lambda part: order(part.scenario.cell))


@cache
def _wanted() -> Mapping[str, Mapping[tuple[str, int], set[str]]]:
    """Keys of the matrix's cells, by scenario and by policy and seed."""
    found: dict[str, dict[tuple[str, int], set[str]]] = defaultdict(lambda: defaultdict(set))
    for cell in matrix.cells(SHIPPED, peers.sweeps()):
        found[cell.scenario][cell.policy, cell.seed].add(cell.key())
    return found


def page(runs: Sequence[tuple[Row, str]]) -> str:
    """The generated part of the page, in Markdown."""
    found = parts([row for row, _ in runs])
    real = [part for part in found if _kind(part) == "real"]
    shocks = [part for part in found if _kind(part) == "shock"]
    judged = [*real, *shocks]
    sections = [
        ("What ran", _ran(found, len(runs))),
        ("Ours against the best peer", _judged(real)),
        ("Against what was aimed at", _aims(real, shocks)),
        ("Losses", _losses(judged)),
        ("Every policy", [line for part in real for line in _points(part)]),
        ("The rest of the policies, fewer seeds", _rest(found, parts([row for row, _ in runs], everyone=True))),
        ("Shocks", _judged(shocks)),
        ("With our admission limits", _judged([part for part in found if _kind(part) == "admission"])),
        ("Other budgets", _judged([part for part in found if _kind(part) == "budget"])),
        ("All signals unknown for five minutes", _outage(shocks, runs)),
        ("What was left out", [f"* {text}" for text in SHIPPED.left_out]),
    ]
    return "\n\n".join(f"## {title}\n\n" + "\n".join(lines or ["Not run."]) for title, lines in sections) + "\n"


def _kind(part: Part) -> str:
    """Which section a scenario belongs to: the traces as they are, with shocks, with our admission limits, at other budgets."""
    cell = part.scenario.cell
    if cell.shock != "none":
        return "shock"
    if cell.admission != "none":
        return "admission"
    return "real" if cell.budget == BUDGETS[cell.trace] else "budget"


def _table(*heads: str) -> list[str]:
    return ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]


def _row(*cells: object) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _ran(found: Sequence[Part], count: int) -> list[str]:
    lines = [f"{count} runs. Seeds and policies that are not whole are in the CSV and not below.", ""]
    lines += _table("scenario", "engine", "seconds", "requests", "seeds", "policies judged", "not run, or not in all those seeds")
    for part in found:
        offered = fmean(row.summary["offered"] for row in part.scenario.rows if row.summary)
        numbers = (f"{part.scenario.window:.0f}", f"{offered:.0f}", len(part.seeds), len(part.scenario.policies))
        lines.append(_row(part.scenario.title, part.scenario.cell.profile, *numbers, ", ".join(part.short) or "-"))
    return lines


def _gpus(item: Verdicts, name: str) -> str:
    """Mean GPUs at the attainment; "≤" where in some seed even the cheapest knob value attains more: no match then."""
    standing = item.standings.get(name)
    if standing is None or standing.mean is None:
        return "not reached"
    return ("≤ " if standing.count("always") else "") + f"{standing.mean / item.scenario.window:.2f}"


def _judged(found: Sequence[Part]) -> list[str]:
    head = ("scenario", "at", "ours, GPUs", "best peer", "GPUs", "ours saves [95 % CI]", "seeds cheaper", "ours is")
    lines = _table(*head, "oracle, GPUs", "ours over it", "best that scales", "GPUs", "ours saves")
    for part in found:
        for item in part.verdicts:
            over = item.oracle
            above = "" if over is None or over.saving is None else f"{-100 * over.saving.mean:+.1f} %"
            shown = (*_against(item, len(part.seeds)), _gpus(item, "oracle"), above, *_moving(item))
            lines.append(_row(part.scenario.title, f"{100 * item.target:g} %", _gpus(item, OURS), *shown))
    return lines if found else []


def _against(item: Verdicts, seeds: int) -> tuple[str, ...]:
    best = item.best
    if best is None:
        return ("none reaches it", "", "", "", "neither" if item.standings[OURS].mean is None else "only ours")
    note = f" ({best.note})" if best.note else ""
    return (
        best.peer,
        _gpus(item, best.peer),
        _saving(best),
        f"{best.wins[0]} of {seeds}",
        best.verdict + ("" if best.verdict == "open" and best.saving and best.saving.count < 2 else note),
    )


def _moving(item: Verdicts) -> tuple[str, str, str]:
    """The cheapest peer that is no fixed split, and what ours saves against it."""
    reaching = {
        name: one.mean for name, one in item.standings.items() if is_peer(name) and name not in FIXED and one.mean is not None
    }
    if not reaching:
        return "none reaches it", "", ""
    best = min(reaching, key=lambda name: (reaching[name], name))
    return best, _gpus(item, best), _saving(item.pairs[best])


def _saving(pair: Versus) -> str:
    """With its interval, where there is one."""
    single = pair.saving is not None and pair.saving.count < 2
    return f"{100 * pair.saving.mean:+.1f} % (one seed)" if single and pair.saving else saving(pair)


def _aims(real: Sequence[Part], shocks: Sequence[Part]) -> list[str]:
    lines = []
    for number, target in enumerate(TARGETS):
        items = [part.verdicts[number] for part in real]
        paired = [item.best.saving.mean for item in items if item.best is not None and item.best.saving is not None]
        near = [-item.oracle.saving.mean for item in items if item.oracle is not None and item.oracle.saving is not None]
        alone = sum(item.best_peer is None and item.standings[OURS].mean is not None for item in items)
        lines.append(
            f"* At {100 * target:g} %, of {len(items)} traces: at least {100 * AIM_SAVING:g} % fewer GPU-seconds than the best "
            f"peer in {sum(value >= AIM_SAVING for value in paired)} (aim: 4; the oracle, which knows the future, does in "
            f"{sum(_possible(item) >= AIM_SAVING for item in items)}), reached by ours alone in {alone}; more than "
            f"{-100 * AIM_LOSS:g} % worse in {sum(value < AIM_LOSS for value in paired)} (aim: 0), not reached by ours in every "
            f"seed in {sum(item.standings[OURS].mean is None for item in items)}; within {100 * AIM_ORACLE:g} % of the oracle in "
            f"{sum(value <= AIM_ORACLE for value in near)} of the {len(near)} where both reach it."
        )
    for number, target in enumerate(TARGETS):
        marks = [part.verdicts[number] for part in shocks]
        told = f"ours is the cheapest but the oracle in {sum(map(_first, marks))} (aim: all)"
        lines.append(f"* At {100 * target:g} %, of {len(marks)} shocks: {told}.")
    return lines


def _possible(item: Verdicts) -> float:
    """What the oracle saves against the best peer: mean of the seeds in which both reach the attainment; 0 without any."""
    if item.best_peer is None or "oracle" not in item.standings:
        return 0.0
    bound, theirs = item.standings["oracle"].values, item.standings[item.best_peer].values
    shares = [1 - bound[seed] / theirs[seed] for seed in bound.keys() & theirs.keys()]
    return fmean(shares) if shares else 0.0


def _first(item: Verdicts) -> bool:
    if item.standings[OURS].mean is None:
        return False
    return item.best is None or (item.best.saving is not None and item.best.saving.mean > 0)


def _losses(found: Sequence[Part]) -> list[str]:
    lines = []
    for part in found:
        for item in part.verdicts:
            best = item.best
            if best is None or not (best.verdict == "only peer" or (best.saving is not None and best.saving.mean < 0)):
                continue
            told = best.note if best.saving is None else f"{_saving(best)} against {_gpus(item, best.peer)} GPUs"
            lines.append(f"* {part.scenario.title}, {100 * item.target:g} %: {best.peer} is better ({best.verdict}; {told}).")
    return lines or ["None."]


def _rest(found: Sequence[Part], alone: Sequence[Part]) -> list[str]:
    """Where fewer seeds were run by more policies: the cheapest of them all there, and what the rest did."""
    judged = {part.scenario.cell.scenario: part.scenario.policies for part in found}
    more = [(part, sorted(set(part.scenario.policies) - set(judged.get(part.scenario.cell.scenario, ())))) for part in alone]
    more = [(part, names) for part, names in more if names]
    lines = _table("scenario", "seeds", "peers judged", "at", "ours, GPUs", "ours is", "reached by", "cheapest peers, GPUs")
    for part, _ in more:
        lines += [_row(part.scenario.title, len(part.seeds), *_among(item)) for item in part.verdicts]
    return [*lines, *(line for part, names in more for line in _points(part, names))] if more else []


def _among(item: Verdicts) -> tuple[object, ...]:
    """Peers, the attainment, ours, its rank among those that reach it, how many do, and the cheapest three."""
    peers_ = [name for name in item.standings if is_peer(name)]
    reaching = {name: mean for name in peers_ if (mean := item.standings[name].mean) is not None}
    cheapest = sorted(reaching, key=lambda name: (reaching[name], name))[:3]
    mine = item.standings[OURS].mean
    place = "" if mine is None else f"number {1 + sum(cost < mine for cost in reaching.values())}"
    told = ", ".join(f"{name} {_gpus(item, name)}" for name in cheapest) or "none"
    return len(peers_), f"{100 * item.target:g} %", _gpus(item, OURS), place, len(reaching), told


def _points(part: Part, names: Sequence[str] | None = None) -> list[str]:
    """The sweeps of these policies, of all that were judged without them; the highest headroom is always the last column."""
    swept = {}
    for name in part.scenario.policies if names is None else names:
        points = [point for _, point in part.scenario.sweep(name)]
        swept[name] = points[::-1] if name in FALLING else points  # of those the knob's values fall as headroom rises
    columns = max(map(len, swept.values()))
    words = f"attainment / mean GPUs, from the lowest headroom to the highest, means over {_seeds(part)}:"
    lines = ["", f"**{part.scenario.title}**, {words}", "", *_table("policy", "lowest", *[""] * (columns - 2), "highest")]
    for name, points in swept.items():
        shown = [f"{100 * point.attainment:.1f} % / {point.gpu_seconds / part.scenario.window:.2f}" for point in points]
        lines.append(_row(name, *[""] * (columns - len(shown)), *shown))
    return lines


def _seeds(part: Part) -> str:
    return "one seed" if len(part.seeds) == 1 else f"{len(part.seeds)} seeds"


def _outage(shocks: Sequence[Part], runs: Sequence[tuple[Row, str]]) -> list[str]:
    """Of the runs whose timeline was kept (seed 0): replicas taken away while nothing was known, at each knob value."""
    lines = _table("policy", "replicas taken away, by knob value", "attainment of those runs")
    heads = len(lines)
    for scenario in (part.scenario for part in shocks if part.scenario.cell.shock == OUTAGE):
        for name in scenario.policies:
            mine = [(row, down) for row, down in runs if (row.cell.scenario, row.cell.policy) == (scenario.cell.scenario, name)]
            kept = [(row, down) for row, down in mine if down]
            if kept:
                shares = ", ".join(f"{100 * row.summary['attainment']:.1f} %" for row, _ in kept if row.summary)
                lines.append(_row(name, ", ".join(down for _, down in kept), shares))
    return lines if len(lines) > heads else []


def insert(document: str, made: str) -> str:
    """The page with its generated part replaced. Raises ValueError when a marker is missing."""
    if document.count(BEGIN) != 1 or document.count(END) != 1:
        raise ValueError(f"{PAGE}: accepted is a page with one line {BEGIN} and one line {END}")
    return document[: document.index(BEGIN)] + f"{BEGIN}\n\n{made}\n" + document[document.index(END) :]


def main(arguments: Sequence[str]) -> int:
    """RESULTS DOCS: write both files. Several results folders may be given: the later one counts where both ran a cell."""
    *folders, docs = (Path(one) for one in arguments)
    rows: dict[str, tuple[Row, Path]] = {}
    for folder in folders:
        rows |= {key: (row, folder / TIMELINES) for key, row in load(folder).items() if row.cell.purpose == "compare"}
    wanted = {key for group in _wanted().values() for keys in group.values() for key in keys}
    text = runs_csv([(row, timelines) for key, (row, timelines) in rows.items() if key in wanted])
    (docs / RUNS).write_text(text)
    document = docs / PAGE
    document.write_text(insert(document.read_text(), page(read(text))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
