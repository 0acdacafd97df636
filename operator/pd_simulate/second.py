"""Second: outcomes of the same policies in Dynamo's own replay (the referee), read from its study's CSV, beside ours."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pd_simulate.markup import Html, html, paragraph, table
from pd_simulate.statistics import kendall
from pd_simulate.units import InputError

FIELDS = ("trace", "policy", "where", "attainment", "gpus")
HERE, THERE = "here", "replay"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One policy on one trace in one simulator (`where`: here or replay)."""

    trace: str
    policy: str
    where: str
    attainment: float
    gpus: float


MEASURES: dict[str, Callable[[Outcome], float]] = {
    "attainment": lambda one: one.attainment,
    "mean GPUs": lambda one: one.gpus,
    "attainment per GPU": lambda one: one.attainment / max(one.gpus, 1e-9),
}


def read(path: Path) -> list[Outcome]:
    """The rows of a referee study. Raises InputError that names the line."""
    found = []
    try:
        with path.open(newline="") as file:
            for number, row in enumerate(csv.DictReader(file), start=2):
                try:
                    found.append(Outcome(row["trace"], row["policy"], row["where"], float(row["attainment"]), float(row["gpus"])))
                except (KeyError, TypeError, ValueError) as exc:
                    raise InputError(
                        f"--referee {path} line {number}: {exc}; accepted are the columns {', '.join(FIELDS)}"
                    ) from exc
    except OSError as exc:
        raise InputError(f"--referee {path}: {exc.strerror}; accepted is a CSV of referee_study") from exc
    return found


def agreement(outcomes: Sequence[Outcome], trace: str) -> tuple[int, dict[str, float]]:
    """Policies that ran in both simulators, and Kendall's tau-b of the two orders by each measure."""
    here, there = ({one.policy: one for one in outcomes if (one.trace, one.where) == (trace, where)} for where in (HERE, THERE))
    both = sorted(set(here) & set(there))
    orders = {name: ([of(here[one]) for one in both], [of(there[one]) for one in both]) for name, of in MEASURES.items()}
    return len(both), {name: kendall(*pair) for name, pair in orders.items()}


def section(outcomes: Sequence[Outcome]) -> Html:
    """A table for each trace, and how far the orders agree."""
    parts = [paragraph("The same policies and requests in Dynamo's own replay. A policy that ran in one of both is not ranked.")]
    for trace in dict.fromkeys(one.trace for one in outcomes):
        count, taus = agreement(outcomes, trace)
        shown = ", ".join(f"{name} {tau:.2f}" for name, tau in taus.items())
        parts += [Html(f"<h4>{html(trace)}</h4>"), paragraph(f"Kendall's tau-b over {count} policies: {shown}.")]
        parts.append(_table(outcomes, trace))
    return Html("".join(parts))


def _table(outcomes: Sequence[Outcome], trace: str) -> Html:
    own = [one for one in outcomes if one.trace == trace]
    rows = []
    for policy in dict.fromkeys(one.policy for one in own):
        cells: list[object] = [policy]
        for where in (HERE, THERE):
            found = [one for one in own if (one.policy, one.where) == (policy, where)]
            cells += [f"{100 * found[-1].attainment:.1f} %", f"{found[-1].gpus:.2f}"] if found else ["not run", ""]
        rows.append(cells)
    return table(["policy", "here: attained", "GPUs", "replay: attained", "GPUs"], rows, ours=lambda name: name == "ours")
