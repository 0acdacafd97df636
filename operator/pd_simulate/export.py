"""Export: a comparison as small CSV and as a page of Markdown, for committing beside the code."""

from __future__ import annotations

import csv
import io

from pd_simulate.analysis import OURS, TARGETS, Verdicts, losses, mean_summary
from pd_simulate.markup import saving
from pd_simulate.report import lead
from pd_simulate.study import Study

SCENARIO = ("trace", "shock", "budget", "admission", "slo", "profile")
MATCHED = (*SCENARIO, "attainment", "policy", "seeds", "reached", "mean_gpus", "saving", "low", "high", "won", "verdict")
NUMBERS = (
    "attainment",
    "mean_gpus",
    "goodput",
    "good_per_1000_gpu_seconds",
    "offered",
    "completed",
    "rejected",
    "cancelled",
    "timed_out",
    "expired",
    "failed",
    "unfinished",
    "recomputed",
    "ttft_p95",
    "itl_p95",
    "handoff_wait_p95",
    "wasted_prefill_tokens",
    "held_token_seconds",
    "reversals_per_hour",
)


def matched_csv(study: Study) -> str:
    """One line for each scenario, attainment and policy: GPUs there, and what ours saves against it."""
    rows: list[list[object]] = [list(MATCHED)]
    for item in study.verdicts:
        for name, standing in sorted(item.standings.items()):
            pair = item.pairs.get(name)
            mean = "" if standing.mean is None else f"{standing.mean / item.scenario.window:.3f}"
            row = [getattr(item.scenario.cell, field) for field in SCENARIO]
            row += [item.target, name, len(standing.matches), len(standing.values), mean]
            spread = pair.saving if pair else None
            row += [""] * 3 if spread is None else [f"{value:.4f}" for value in (spread.mean, spread.low, spread.high)]
            rows.append([*row, pair.wins[0] if pair else "", pair.verdict if pair else ""])
    return _csv(rows)


def points_csv(study: Study) -> str:
    """One line for each scenario, policy and knob value: means over seeds."""
    rows: list[list[object]] = [[*SCENARIO, "policy", "knob", "seeds", *NUMBERS]]
    for scenario in study.scenarios:
        for name in scenario.policies:
            for knob, _ in scenario.sweep(name):
                count = sum(row.cell.policy == name and row.cell.knob == knob for row in scenario.rows)
                numbers = mean_summary(scenario, name, knob)
                row: list[object] = [getattr(scenario.cell, field) for field in SCENARIO]
                row += [name, "" if knob is None else knob, count]
                rows.append([*row, *(f"{numbers[key]:.6g}" if key in numbers else "" for key in NUMBERS)])
    return _csv(rows)


def _csv(rows: list[list[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def markdown(study: Study) -> str:
    """The result table, the losses and what was left out."""
    lines = [f"# Simulated comparison: {study.name}", "", lead(study.verdicts), ""]
    lines += [
        "| scenario | at | ours, GPUs | best peer | GPUs | ours saves [95 % CI] | seeds won | ours is |",
        "|---|" + "---|" * 7,
    ]
    lines += [_line(item) for item in study.verdicts if item.pairs]
    lost = losses(study.verdicts)
    lines += ["", f"Losses against the best peer: {len(lost)}."]
    lines += ["", "## What was left out", ""]
    lines += [f"* {text}" for text in study.left_out]
    lines.append(f"* Runs asked for: {study.wanted}; not done: {study.missing}; failed: {sum(n for _, n in study.failures)}.")
    lines.append(f"* Attainments: {', '.join(f'{100 * target:g} %' for target in TARGETS)}; code: {', '.join(study.codes)}.")
    return "\n".join(lines) + "\n"


def _line(item: Verdicts) -> str:
    def gpus(name: str) -> str:
        mean = item.standings[name].mean
        return "not reached" if mean is None else f"{mean / item.scenario.window:.2f}"

    cells = [item.scenario.title, f"{100 * item.target:g} %", gpus(OURS)]
    best = item.best
    if best is None:
        cells += ["none reaches it", "", "", "", ""]
    else:
        cells += [best.peer, gpus(best.peer), saving(best), f"{best.wins[0]}/{sum(best.wins)}", best.verdict]
    return "| " + " | ".join(cells) + " |"
