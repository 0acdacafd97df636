"""The report of a comparison whose truth is known: verdicts, losses, gaps, one file that needs nothing from elsewhere."""

from __future__ import annotations

import csv
import itertools
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
import simulate_study as made

from pd_simulate import analysis, chapter, charts, export, report, second, store, study
from pd_simulate.analysis import OURS, Standing, judge, losses, scenarios, versus
from pd_simulate.cell import Row
from pd_simulate.statistics import Matched, Point
from pd_simulate.units import InputError

VOID = {"meta", "line", "path", "rect", "circle", "br"}


class Checker(HTMLParser):
    """Every element that is opened is closed, in order; collects ids, links and visible text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids += [values["id"]] if values.get("id") else []  # type: ignore[list-item]
        self.links += [values["href"]] if values.get("href") else []  # type: ignore[list-item]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text.append(data)


def page(folder: Path) -> tuple[str, Checker]:
    text = report.build(study.load(folder))
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    return text, checker


# Verdicts


def test_the_saving_against_each_peer_is_the_one_that_was_built_in() -> None:
    (scenario,) = scenarios(made.rows("a", seeds=10))
    for target in (0.90, 0.95, 0.99):
        found = judge(scenario, target)
        assert found.best_peer == "dynamo-sla", "the oracle is no peer"
        for policy, cost in made.COSTS.items():
            if policy == OURS:
                continue
            pair = found.pairs[policy]
            assert pair.saving is not None and pair.saving.mean == pytest.approx(1 - 1 / cost, abs=0.01)
            assert pair.verdict == ("loss" if policy == "oracle" else "win")
            assert pair.wins == ((0, 0, 10) if policy == "oracle" else (10, 0, 0))


def test_a_difference_within_chance_is_even_and_a_cheaper_peer_is_a_loss() -> None:
    (scenario,) = scenarios(made.rows("a", seeds=10, costs={"ours": 1.0, "wva-v2": 1.0, "llmd-slo": 0.9, "chiron": 1.2}))
    found = judge(scenario, 0.95)
    assert {name: pair.verdict for name, pair in found.pairs.items()} == {"wva-v2": "even", "llmd-slo": "loss", "chiron": "win"}
    assert found.best_peer == "llmd-slo" and losses([found]) == [found]


def standing(name: str, *values: tuple[str, float | None]) -> Standing:
    return Standing(name, {seed: Matched(state, value) for seed, (state, value) in enumerate(values)})  # type: ignore[arg-type]


R, N, A = "reached", "never", "always"


@pytest.mark.parametrize(
    ("ours", "theirs", "verdict"),
    [
        ([(R, 10.0), (R, 10.0)], [(R, 20.0), (R, 20.0)], "win"),
        ([(R, 20.0), (R, 20.0)], [(R, 10.0), (R, 10.0)], "loss"),
        ([(R, 10.0), (R, 20.0)], [(R, 12.0), (R, 18.0)], "even"),
        ([(R, 10.0), (R, 10.0)], [(N, None), (N, None)], "only ours"),
        ([(R, 10.0), (R, 10.0)], [(R, 20.0), (N, None)], "only ours"),
        ([(N, None), (N, None)], [(R, 10.0), (R, 10.0)], "only peer"),
        ([(R, 10.0), (N, None)], [(R, 20.0), (R, 20.0)], "only peer"),
        ([(N, None), (N, None)], [(N, None), (N, None)], "neither"),
        ([(R, 10.0), (N, None)], [(N, None), (R, 10.0)], "open"),
        ([(R, 10.0)], [(R, 20.0)], "open"),
        # our bound counts as our cost, theirs never makes a win
        ([(A, 10.0), (A, 10.0)], [(R, 20.0), (R, 20.0)], "win"),
        ([(R, 10.0), (R, 10.0)], [(A, 20.0), (A, 20.0)], "open"),
        ([(R, 20.0), (R, 20.0)], [(A, 10.0), (A, 10.0)], "loss"),
    ],
)
def test_verdicts(ours: list[tuple[str, float | None]], theirs: list[tuple[str, float | None]], verdict: str) -> None:
    assert versus(standing("ours", *ours), standing("peer", *theirs)).verdict == verdict


def test_a_mean_stands_only_where_every_seed_reaches_the_target() -> None:
    assert standing("x", (R, 10.0), (R, 20.0)).mean == 15.0
    assert standing("x", (R, 10.0), (N, None)).mean is None


def test_a_seed_that_a_policy_did_not_run_is_never_reached() -> None:
    rows = [row for row in made.rows("a", seeds=3) if not (row.cell.policy == "llmd-slo" and row.cell.seed == 2)]
    (scenario,) = scenarios(rows)
    assert analysis.standing(scenario, "llmd-slo", 0.95).matches[2] == Matched("never", None)
    assert judge(scenario, 0.95).pairs["llmd-slo"].verdict == "only ours"


def test_scenarios_differ_in_all_but_policy_knob_seed_and_settings() -> None:
    rows = made.rows("a", seeds=1)
    changed = [replace(row, cell=replace(row.cell, settings=(("x", 1.0),))) for row in rows[:1]]
    other = [replace(row, cell=replace(row.cell, admission="ours")) for row in rows[:1]]
    tuned = [replace(row, cell=replace(row.cell, purpose="tune")) for row in rows[:1]]
    failed = [replace(row, summary=None, error="no") for row in rows[:1]]
    assert [len(item.rows) for item in scenarios([*rows, *changed, *other, *tuned, *failed])] == [len(rows) + 1, 1]


def test_variants_of_ours_and_the_oracle_are_no_peers() -> None:
    names = ("ours", "ours-no-gate", "oracle", "oracle-x", "oursome", "hpa")
    assert [analysis.is_peer(name) for name in names] == [False] * 4 + [True] * 2


def test_a_policy_is_shown_at_its_cheapest_knob_that_attains_95_percent() -> None:
    (scenario,) = scenarios(made.rows("a", seeds=2))
    assert analysis.operating_knob(scenario, "ours") == 1.0
    assert analysis.operating_knob(scenario, "ours", target=0.9999) == 1.25
    assert analysis.mean_summary(scenario, "ours", 1.0)["attainment"] == pytest.approx(0.95)
    assert scenario.sweep("ours")[2][1] == Point(pytest.approx(0.95), pytest.approx(30_000, rel=0.02))  # type: ignore[arg-type]


# The page


def test_the_page_is_whole_and_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    rows = made.rows("azure_conv") + made.rows("mooncake_conversation", costs={**made.COSTS, "dynamo-sla": 0.97})
    failed = replace(rows[0], cell=replace(rows[0].cell, seed=77), summary=None, error="RuntimeError: <b>no GPU</b> & more")
    text, checker = page(made.write(tmp_path, [*rows, failed], missing=7))
    assert not re.search(r"""(src|href)\s*=\s*["'](?!#)|url\(|@import|https?://|<script""", text), "only links inside the page"
    assert set(checker.links) == {f"#{name}" for name in checker.ids} - {"#scenarios"} and len(checker.ids) == len(set(checker.ids))
    shown = " ".join(checker.text)
    assert "At 95 % attainment, of 2 scenarios, ours needs less than the best peer in 1, needs more in 1." in shown
    assert "In 3 of 6 comparisons with the best peer." in shown
    assert "7 of 288 runs were not done." in shown and "Runs that failed: 1." in shown and "Budgets 16 and 64." in shown
    assert "RuntimeError: <b>no GPU</b> & more" in shown and "<b>no GPU" not in text
    for block in re.findall(r"<svg.*?</svg>", text, flags=re.S):
        ElementTree.fromstring(block)
    assert text.count('role="img"') == 2 * 2 * (1 + 2 * 4), "wide and narrow: a front and two timelines of four charts each"


def test_a_study_without_ours_or_without_losses_says_so(tmp_path: Path) -> None:
    rows = made.rows("a")
    _, checker = page(made.write(tmp_path / "all", rows))
    assert "In none of 3 comparisons with the best peer" in " ".join(checker.text)
    _, checker = page(made.write(tmp_path / "peers", [row for row in rows if row.cell.policy != "ours"], timelines=False))
    assert "Ours is not among these runs" in " ".join(checker.text)


def test_results_of_several_codes_are_named(tmp_path: Path) -> None:
    rows = made.rows("a", seeds=2)
    _, checker = page(made.write(tmp_path, [replace(rows[0], code="older"), *rows[1:]]))
    assert "results of several codes: made-up, older" in " ".join(checker.text)


def test_an_unreached_target_is_said_and_not_extrapolated(tmp_path: Path) -> None:
    rows = [row for row in made.rows("a") if not (row.cell.policy == "wva-v2" and (row.cell.knob or 0) > 1.0)]
    (scenario,) = scenarios(rows)
    text = chapter._matched(scenario, [judge(scenario, 0.99)])
    (line,) = [part for part in text.split("<tr") if "wva-v2" in part]
    assert "not reached" in line and "only ours" in line


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no readable plan.json .*accepted is a folder that `compare -o` wrote"):
        study.load(tmp_path)
    made.write(tmp_path, made.rows("a", seeds=1))
    (tmp_path / store.CELLS).write_text("no json\n{}\n")
    with pytest.raises(store.StoreError, match="line 1"):
        study.load(tmp_path)


# Tables for committing


def test_exports_hold_every_policy_and_target(tmp_path: Path) -> None:
    found = study.load(made.write(tmp_path, made.rows("azure_conv")))
    lines = list(csv.DictReader(export.matched_csv(found).splitlines()))
    assert len(lines) == 3 * len(made.COSTS)
    (line,) = [item for item in lines if item["policy"] == "dynamo-sla" and item["attainment"] == "0.95"]
    assert line["verdict"] == "win" and line["won"] == "4" and float(line["saving"]) == pytest.approx(1 - 1 / 1.3, abs=0.01)
    points = list(csv.DictReader(export.points_csv(found).splitlines()))
    assert len(points) == len(made.COSTS) * len(made.HEADROOM)
    assert {item["seeds"] for item in points} == {"4"}
    text = export.markdown(found)
    assert "| azure_conv, 32 GPUs | 95 % |" in text and "Budgets 16 and 64." in text


# The second simulator

REFEREE = """trace,policy,where,attainment,gpus,completed,seconds
t,ours,here,0.9,10,1,1
t,ours,replay,0.8,10,1,1
t,hpa,here,0.8,12,1,1
t,hpa,replay,0.7,12,1,1
t,wva,here,0.7,14,1,1
t,wva,replay,0.75,14,1,1
t,dynamo's own,replay,0.1,9,1,1
"""


def test_the_second_simulator_is_shown_with_its_rank_agreement(tmp_path: Path) -> None:
    file = tmp_path / "referee.csv"
    file.write_text(REFEREE)
    outcomes = second.read(file)
    count, taus = second.agreement(outcomes, "t")
    # attainment: of three pairs one is discordant; GPUs agree; per GPU: 0.09 > 0.067 > 0.05 and 0.08 > 0.058 > 0.054
    assert count == 3 and taus == {"attainment": pytest.approx(1 / 3), "mean GPUs": 1.0, "attainment per GPU": 1.0}
    folder = made.write(tmp_path / "results", made.rows("a", seeds=2), timelines=False)
    checker = Checker()
    checker.feed(report.build(study.load(folder), outcomes))
    shown = " ".join(checker.text)
    assert "Kendall's tau-b over 3 policies: attainment 0.33, mean GPUs 1.00, attainment per GPU 1.00." in shown
    assert "dynamo's own" in shown and "#referee" in checker.links
    file.write_text(REFEREE + "t,ours,here,many,1,1,1\n")
    with pytest.raises(InputError, match=r"referee.csv line 9: .*many.*accepted are the columns trace, policy, where"):
        second.read(file)


# Charts


def test_ticks_are_round_and_inside() -> None:
    assert charts.ticks(0, 10, 5) == [0, 2, 4, 6, 8, 10]
    assert charts.ticks(0.3, 0.7, 4) == pytest.approx([0.3, 0.4, 0.5, 0.6, 0.7])
    assert charts.ticks(5, 5, 3) == [5]
    assert [charts.number(value) for value in (0.25, 12, 1234, 2.5e6, 3e9)] == ["0.25", "12", "1.23k", "2.5M", "3G"]


def test_attainment_is_drawn_on_a_scale_of_nines() -> None:
    axis = charts.nines([0.9, 0.99, 0.999])
    canvas = charts.Canvas(760, 320, charts.linear([0, 1], "", 3), axis, "")
    heights = [canvas.at(0, value)[1] for value in (0.9, 0.99, 0.999)]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2])
    assert canvas.at(0, 1.0)[1] == canvas.at(0, 0.9999)[1], "all beyond 99.95 % is one line"


def test_texts_of_the_axis_do_not_lie_on_each_other() -> None:
    series = charts.Series("x", [(1.0, 0.31), (2.0, 0.9995)], "s-ours")
    for width in (charts.WIDE, charts.NARROW):
        found = re.findall(r'y="([\d.]+)" text-anchor="end">([\d.]+ %)<', charts.fronts([series], width, "t"))
        heights = [float(y) for y, _ in found]
        assert all(low - high >= charts.LINE for high, low in itertools.pairwise(heights))
        assert {"90 %", "99 %", "99.9 %"} <= {text for _, text in found}


def test_lines_stay_inside_the_chart() -> None:
    series = charts.Series("x", [(0.0, 0.0), (30.0, 1e6), (60.0, 5.0)], "s-ours", step=True, markers=False)
    for width in (charts.WIDE, charts.NARROW):
        text = charts.lines([series], width, "t", end=60.0)
        (path,) = re.findall(r'class="line s-ours" d="M([^"]+)"', text)
        numbers = [float(value) for value in re.findall(r"[HVL]([\d.]+)", path)]
        assert min(numbers) >= 0 and max(numbers) <= width


def test_the_reasons_of_a_note() -> None:
    assert chapter.reasons("P Demand, D GatedByDecode, BrokenPath") == ("Demand", "GatedByDecode")
    assert chapter.reasons("need 3.25 D, up cooldown") == ("", "")


def test_rows_without_a_result_make_no_scenario() -> None:
    failed = [Row(row.cell, None, "no", 1.0, "c") for row in made.rows("a", seeds=1)]
    assert scenarios(failed) == []
