"""Chapter: what the report says of one scenario: front, tables of every policy, timelines of ours and of the best peer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pd_simulate import charts
from pd_simulate.analysis import OURS, Scenario, Verdicts, mean_summary, operating_knob
from pd_simulate.cell import Row
from pd_simulate.charts import Series
from pd_simulate.markup import JUDGED, Html, bullets, figure, html, judged, paragraph, saving, table
from pd_simulate.study import Study

COLOURED = 4  # peers that get a colour of their own: more cannot be told apart
STYLES = ("s-ours", "s-oracle", *(f"s-{index}" for index in range(1, COLOURED + 1)))
SHOWN_DECISIONS = 40
OUTCOMES = ("completed", "rejected", "cancelled", "timed_out", "expired", "failed", "unfinished", "recomputed")
# Decisions' reasons and their colours; a note that names none of them is drawn in grey.
REASONS = {
    "Demand": "s-ours",
    "Backlog": "s-1",
    "GatedByDecode": "s-3",
    "MaxGPUs": "s-4",
    "MaxReplicas": "s-4",
    "NoCapacity": "s-4",
    "Cooldown": "s-2",
    "SignalsUnknown": "s-oracle",
}


def chapter(study: Study, scenario: Scenario, verdicts: Sequence[Verdicts]) -> Html:
    """The scenario's part of the report; `verdicts` are its own, one a target."""
    styles = _styles(verdicts)
    parts = [
        paragraph(_load(scenario), "soft"),
        _front(scenario, styles),
        Html("<h4>GPUs on average at equal attainment</h4>"),
        _matched(scenario, verdicts),
        Html("<h4>What became of requests</h4>"),
        _outcomes(scenario),
        *_timelines(study, scenario, verdicts),
    ]
    return Html("".join(parts))


def _load(scenario: Scenario) -> str:
    cell = scenario.cell
    half = {"all": "whole trace", "first": "first half of the trace", "second": "second half of the trace"}[cell.half]
    rate = f"rate scaled to {100 * cell.load:g} % of the budget at the peak" if cell.load else "the trace's own rate"
    offered = [row.summary["offered"] for row in scenario.rows if row.summary]
    return (
        f"{half}, {rate}; engine {cell.profile}; SLO {cell.slo}; start-up {cell.lead_time:g} s; {len(scenario.seeds())} seeds; "
        f"{_span(min(offered), max(offered))} requests measured in {scenario.window:,.0f} s."
    )


def _span(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _styles(verdicts: Sequence[Verdicts]) -> dict[str, str]:
    """Policy -> CSS class: ours, the oracle, the best peers at the middle target, grey for the rest."""
    middle = verdicts[len(verdicts) // 2]
    ranked = sorted(
        (name for name in middle.standings if name not in (OURS, "oracle")),
        key=lambda name: (middle.standings[name].mean is None, middle.standings[name].mean or 0.0, name),
    )
    styles = {name: f"s-{index}" if index <= COLOURED else "s-rest" for index, name in enumerate(ranked, start=1)}
    return {**styles, "oracle": "s-oracle", OURS: "s-ours"}


def _front(scenario: Scenario, styles: Mapping[str, str]) -> Html:
    window = scenario.window
    order = sorted(scenario.policies, key=lambda name: (styles[name] != "s-rest", name == OURS))
    series = []
    for name in order:
        sweep = scenario.sweep(name)
        points = [(point.gpu_seconds / window, point.attainment) for _, point in sweep]
        titles = [
            f"{name}, knob {'default' if knob is None else f'{knob:g}'}: {100 * y:.2f} % at {x:.2f} GPUs"
            for (knob, _), (x, y) in zip(sweep, points, strict=True)
        ]
        series.append(Series(name, points, styles[name], titles))
    grey = sum(styles[name] == "s-rest" for name in order)
    legend = [(style, name) for style in STYLES for name in order if styles[name] == style]
    legend += [("s-rest", f"{grey} others (table below)")] if grey else []
    caption = (
        "Attainment against cost. Up and left is better. Each dot is one value of the policy's own headroom knob, mean over seeds; "
        "GPUs on average are GPU-seconds divided by measured seconds."
    )
    return figure(lambda width: charts.fronts(series, width, f"attainment against GPUs, {scenario.title}"), caption, legend)


def _matched(scenario: Scenario, verdicts: Sequence[Verdicts]) -> Html:
    middle = verdicts[len(verdicts) // 2]
    order = sorted(
        middle.standings, key=lambda name: (middle.standings[name].mean is None, middle.standings[name].mean or 0.0, name)
    )
    head = ["policy"]
    for item in verdicts:
        head += [f"at {100 * item.target:g} %", JUDGED]
    rows = []
    for name in order:
        cells: list[object] = [name]
        for item in verdicts:
            pair = item.pairs.get(name)
            shown = "" if pair is None else Html(saving(pair)) if name == "oracle" else judged(pair)
            cells += [_gpus(item, name, scenario.window), shown]
        rows.append(cells)
    note = (
        "A number stands only where every seed reaches the attainment; (3/10) = only so many do; <= means that the cheapest knob "
        "value attains more already. Nothing is extrapolated."
    )
    return Html(table(head, rows, ours=lambda name: name == OURS) + paragraph(note, "soft"))


def _gpus(item: Verdicts, name: str, window: float) -> str:
    standing = item.standings[name]
    total = len(standing.matches)
    if standing.mean is not None:
        return ("<= " if standing.count("always") else "") + f"{standing.mean / window:.2f}"
    return "not reached" if not standing.values else f"not reached ({len(standing.values)}/{total})"


def _outcomes(scenario: Scenario) -> Html:
    order = sorted(scenario.policies, key=lambda name: (name != OURS, name))
    knobs = {name: operating_knob(scenario, name) for name in order}
    means = {name: mean_summary(scenario, name, knobs[name]) for name in order}
    outcomes = [key for key in OUTCOMES if any(numbers[key] for numbers in means.values())]
    head = ["policy", "knob", "attained", "GPUs", "good/1000 GPU-s", *(name.replace("_", " ") for name in outcomes)]
    head += ["TTFT p50", "p95", "p99", "ITL p95", "handoff wait p95", "wasted prefill tok", "held KV tok·s", "reversals/h"]
    rows = []
    for name in order:
        knob, numbers = knobs[name], means[name]
        row: list[object] = [name, "–" if knob is None else f"{knob:g}", f"{100 * numbers['attainment']:.2f} %"]
        row += [f"{numbers['mean_gpus']:.2f}", f"{numbers['good_per_1000_gpu_seconds']:.0f}"]
        row += [f"{numbers[key]:,.0f}" for key in outcomes]
        row += [_seconds(numbers.get(key)) for key in ("ttft_p50", "ttft_p95", "ttft_p99", "itl_p95", "handoff_wait_p95")]
        row += [charts.number(numbers["wasted_prefill_tokens"]), charts.number(numbers["held_token_seconds"])]
        rows.append([*row, f"{numbers['reversals_per_hour']:.1f}"])
    none = [key.replace("_", " ") for key in OUTCOMES if key not in outcomes]
    note = "Each policy at its cheapest knob value that attains 95 %, else at the one that attains most. Means over seeds."
    note += f" No request of any policy was: {', '.join(none)}." if none else ""
    return Html(table(head, rows, ours=lambda name: name == OURS) + paragraph(note, "soft"))


def _seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.1f} s"


def _timelines(study: Study, scenario: Scenario, verdicts: Sequence[Verdicts]) -> list[Html]:
    best = next((item.best_peer for item in reversed(verdicts[:2]) if item.best_peer), None)
    parts = []
    for name in [OURS, *([best] if best else [])]:
        row = _kept(scenario, name)
        values = study.timeline(row) if row else None
        if row is None or values is None:
            continue
        knob = "" if row.cell.knob is None else f", knob {row.cell.knob:g}"
        attained = 100 * float(row.summary["attainment"]) if row.summary else 0.0
        parts.append(Html(f"<h4>Over time: {html(name)}{knob} ({attained:.1f} % at this seed)</h4>"))
        parts.append(timeline(values, name))
    return parts


def _kept(scenario: Scenario, policy: str) -> Row | None:
    if policy not in scenario.policies:
        return None
    knob = operating_knob(scenario, policy)
    rows = [row for row in scenario.rows if row.cell.policy == policy and row.cell.knob == knob and row.cell.seed == 0]
    return rows[0] if rows else None


def timeline(values: Mapping[str, Any], name: str) -> Html:
    """Replicas, queues, held KV and reasons over time of one run."""
    columns, end = values["columns"], float(values["duration"])
    time = [t for t in columns["time"] if t <= end] or columns["time"]
    count = len(time)

    def line(title: str, numbers: Sequence[float], style: str, *, step: bool = True) -> Series:
        return Series(title, list(zip(time, numbers[:count], strict=True)), style, step=step, markers=False)

    replicas = [line("prefill ready", columns["prefill_ready"], "s-1"), line("decode ready", columns["decode_ready"], "s-ours")]
    asked = [
        Series(f"{role} asked for", _steps(values["decisions"], index, end), f"{style} dashed", step=True, markers=False)
        for role, index, style in (("prefill", 1, "s-1"), ("decode", 2, "s-ours"))
    ]
    waiting = [sum(pair) for pair in zip(columns["router_queue"], columns["prefill_queue"], strict=True)]
    handoffs = line("requests that wait for decode", columns["handoffs"], "s-ours", step=False)
    queues = [line("requests that wait for prefill", waiting, "s-1", step=False), handoffs]
    held = [line("KV held on prefill, tokens", columns["held_tokens"], "s-3", step=False)]
    drawn = [
        _panel([*asked, *replicas], "replicas", f"replicas over time, {name}", end),
        _panel(queues, "requests that wait", f"queues over time, {name}", end),
        _panel(held, "held KV", f"held KV over time, {name}", end, label="minutes"),
    ]
    return Html("".join([*drawn, *_reasons(values["decisions"], name, end)]))


def _panel(series: Sequence[Series], what: str, title: str, end: float, label: str = "") -> Html:
    legend = [(line.style, line.name) for line in series]
    return figure(lambda width: charts.lines(series, width, title, end=end, label=label), legend=legend)


def _steps(decisions: Sequence[Sequence[Any]], index: int, end: float) -> list[tuple[float, float]]:
    points = [(float(item[0]), float(item[index])) for item in decisions if item[0] <= end]
    return [*points, (end, points[-1][1])] if points else []


def _reasons(decisions: Sequence[Sequence[Any]], name: str, end: float) -> list[Html]:
    """A strip of reasons where the notes name them, and the decisions in words."""
    states = [(float(item[0]), tuple(reasons(str(item[3])))) for item in decisions if item[0] <= end]
    parts = []
    if any(any(pair) for _, pair in states):
        rows = [(role, _merged([(time, pair[index]) for time, pair in states])) for role, index in (("P", 0), ("D", 1))]
        seen = dict.fromkeys(what for _, pair in states for what in pair if what)
        legend = [(REASONS.get(what, "s-rest"), what) for what in seen]
        drawn = figure(
            lambda width: charts.strip(rows, REASONS, width, f"reasons over time, {name}", end=end), "Reasons of each role", legend
        )
        parts.append(drawn)
    items = [f"{item[0] / 60:.1f} min: prefill {item[1]}, decode {item[2]}: {item[3]}" for item in decisions[:SHOWN_DECISIONS]]
    more = f", the first {SHOWN_DECISIONS} of {len(decisions)}" if len(decisions) > SHOWN_DECISIONS else ""
    parts.append(Html(f"<details><summary>Decisions in words{more}</summary>{bullets(items)}</details>"))
    return parts


def _merged(states: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """States without those that repeat the one before."""
    return [item for index, item in enumerate(states) if index == 0 or states[index - 1][1] != item[1]]


def reasons(note: str) -> tuple[str, str]:
    """The reasons of prefill and decode in a note like `P Demand, D GatedByDecode`, "" where it gives none."""
    found = {"P": "", "D": ""}
    for part in note.split(", "):
        words = part.split()
        if len(words) == 2 and words[0] in found:
            found[words[0]] = words[1]
    return found["P"], found["D"]
