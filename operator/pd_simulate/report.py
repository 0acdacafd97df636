"""Report: one HTML file of a comparison that opens offline. Losses and gaps stand beside the wins."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib import resources
from string import Template

from pd_simulate import second
from pd_simulate.analysis import OURS, TARGETS, Verdicts, losses
from pd_simulate.chapter import chapter
from pd_simulate.markup import JUDGED, Html, Prose, bullets, judged, paragraph, table
from pd_simulate.second import Outcome
from pd_simulate.study import Study

LEAD_TARGET = 0.95


def build(study: Study, referee: Sequence[Outcome] = ()) -> str:
    """The whole page; `referee` are outcomes in the second simulator."""
    titles = [(f"scenario-{number}", scenario.title) for number, scenario in enumerate(study.scenarios, start=1)]
    sections = [
        _section("result", "Result", _result(study)),
        _section("losses", "Where ours loses", _losses(study)),
        _section("left-out", "What was left out", _left_out(study)),
        '<h2 id="scenarios">Scenarios</h2>',
    ]
    for (anchor, title), scenario in zip(titles, study.scenarios, strict=True):
        own = [item for item in study.verdicts if item.scenario is scenario]
        body = chapter(study, scenario, own)
        sections.append(f'<section><h3 id="{anchor}">{escape(title)}</h3>{body}</section>')
    last = [("reading", "How to read this")]
    if referee:
        sections.append(_section("referee", "A second simulator", second.section(referee)))
        last.insert(0, ("referee", "A second simulator"))
    sections.append(_section("reading", "How to read this", _reading()))
    fixed = [("result", "Result"), ("losses", "Where ours loses"), ("left-out", "What was left out")]
    contents = [*fixed, *titles, *last]
    return _template("report.html").substitute(
        title=escape(f"P/D scaling compared: {study.name}"),
        style=_read("report.css").strip(),
        facts=escape(_facts(study)),
        lead=escape(lead(study.verdicts)),
        contents="".join(f'<li><a href="#{anchor}">{escape(text)}</a></li>' for anchor, text in contents),
        sections="\n".join(sections),
    )


def _facts(study: Study) -> str:
    finished = sum(row.error is None for row in study.rows)
    seeds = {row.cell.seed for row in study.rows}
    one = set(study.codes) <= {study.code, study.code_peers}
    code = f"code {study.code}" if one else f"results of several codes: {', '.join(study.codes)}"
    note = f" {study.note}" if study.note else ""
    return (
        f"{finished:,} of {study.wanted:,} runs, {len({row.cell.policy for row in study.rows})} policies, {len(seeds)} seeds, "
        f"{len(study.scenarios)} scenarios; {code}.{note}"
    )


def lead(verdicts: Sequence[Verdicts]) -> str:
    """The first sentence: how ours stands against the best peer of each scenario."""
    own = [item for item in verdicts if item.target == LEAD_TARGET and item.pairs]
    if not own:
        return "Ours is not among these runs: there is nothing to judge."
    kinds = [item.best.verdict if item.best else _without_peer(item) for item in own]
    words = {
        "win": "needs less than the best peer in",
        "loss": "needs more in",
        "even": "is no different in",
        "only ours": "alone reaches it in",
        "only peer": "does not reach it where a peer does in",
        "neither": "and every peer miss it in",
        "open": "is undecided in",
    }
    shown = [f"{words[kind]} {kinds.count(kind)}" for kind in words if kind in kinds]
    return f"At {100 * LEAD_TARGET:g} % attainment, of {len(own)} scenarios, ours {', '.join(shown)}."


def _without_peer(item: Verdicts) -> str:
    return "only ours" if item.standings[OURS].mean is not None else "neither"


def _section(anchor: str, title: str, body: str) -> str:
    return f'<section><h2 id="{anchor}">{escape(title)}</h2>{body}</section>'


def _result(study: Study) -> str:
    head = ["scenario", "at", JUDGED, "seeds won", "ours, GPUs", "best peer", "GPUs"]
    head += ["oracle (ours above it)"]
    rows = [_line(item) for item in study.verdicts if item.pairs]
    if not rows:
        return paragraph("No run of ours, so no comparison.")
    note = (
        "GPUs are GPU-seconds divided by measured seconds, interpolated at the attainment from each policy's sweep of its own "
        "headroom knob. The best peer is the cheapest that reaches the attainment in every seed; a variant of ours or the oracle "
        "is no peer."
    )
    return table(head, rows) + paragraph(note, "soft")


def _line(item: Verdicts) -> list[object]:
    window, best, oracle = item.scenario.window, item.best, item.oracle

    def gpus(name: str | None) -> str:
        mean = item.standings[name].mean if name is not None and name in item.standings else None
        return "not reached" if mean is None else f"{mean / window:.2f}"

    row: list[object] = [item.scenario.title, f"{100 * item.target:g} %"]
    if best is None:
        kind = _without_peer(item)
        shown = Html(f'<span class="v v-{"win" if kind == "only ours" else "even"}">{kind}</span>')
        row += [shown, "", gpus(OURS), "none reaches it", ""]
    else:
        counts = f"{best.wins[0]}/{sum(best.wins)}" if sum(best.wins) else "–"
        row += [judged(best), counts, gpus(OURS), best.peer, gpus(best.peer)]
    above = "" if oracle is None or oracle.saving is None else f" ({-100 * oracle.saving.mean:+.1f} %)"
    return [*row, gpus("oracle") + above if oracle else "–"]


def _losses(study: Study) -> str:
    lost = losses(study.verdicts)
    compared = [item for item in study.verdicts if item.best is not None]
    if not lost:
        return paragraph(f"In none of {len(compared)} comparisons with the best peer (a scenario at an attainment each).")
    rows: list[list[object]] = []
    for item in lost:
        best = item.best
        assert best is not None
        rows.append([item.scenario.title, f"{100 * item.target:g} %", judged(best), best.peer, Prose(best.note)])
    return paragraph(f"In {len(lost)} of {len(compared)} comparisons with the best peer.") + table(
        ["scenario", "at", JUDGED, "best peer", ""], rows
    )


def _left_out(study: Study) -> str:
    items: list[str] = [*study.left_out]
    missing = f"{study.missing:,} of {study.wanted:,} runs were not done."
    items.append(missing if study.missing else "Every run that was asked for was done.")
    failed = sum(count for _, count in study.failures)
    items.append(f"Runs that failed: {failed}." if failed else "No run failed.")
    items += [f"{count} x {text}" for text, count in study.failures[:20]]
    if len(study.failures) > 20:
        items.append(f"... and {len(study.failures) - 20} other errors")
    if study.tuning:
        items.append(f"{len(study.tuning)} tuning runs on the first half of the traces are not shown.")
    absent = sorted({row.cell.policy for row in study.rows if row.error} - {row.cell.policy for row in study.rows if row.summary})
    items += [f"No result at all of {name}." for name in absent]
    return bullets(items)


def _reading() -> str:
    return bullets(
        [
            "good: admitted, completed, first token within the TTFT limit, 95th percentile of its own token gaps within the ITL "
            "limit. Rejected, cancelled, timed out, expired and failed requests are never good.",
            "attainment: good / offered, warm-up excluded. GPU-seconds: from creating to deleting a replica, starting and draining "
            "included.",
            f"at equal attainment: {', '.join(f'{100 * target:g} %' for target in TARGETS)}. Each policy's own headroom knob is "
            "swept; between neighbours of the sweep's front the cost is interpolated, beyond its ends it is not reached.",
            "ours saves: (theirs - ours) / theirs, paired by seed, mean and bootstrap 95 % interval. Arrivals, lengths, start-up "
            "times and faults of a seed are the same for every policy.",
            "win and loss: the interval excludes 0. even: it does not. open: not every seed gives a number, or the other's "
            "cheapest knob value attains more than the target, so that it might be cheaper still.",
            "oracle: knows the future; no policy can be expected to beat it by much.",
        ]
    )


def _template(name: str) -> Template:
    return Template(_read(name))


def _read(name: str) -> str:
    return (resources.files("pd_simulate") / "templates" / name).read_text()
