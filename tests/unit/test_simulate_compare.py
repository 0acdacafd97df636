"""A comparison: cells and keys, the results file, the pool of processes, resuming, tuning, matrices."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import simulate_fakes as fakes

from pd_simulate import matrix, peers, pool, scenario, store
from pd_simulate.cell import Cell, Row, Sweep, from_json, row
from pd_simulate.compare import PLAN, TIMELINES, Options, candidates, choose, compare
from pd_simulate.matrix import Tuning
from pd_simulate.units import InputError

CELL = Cell("burst", "hpa-utilization", 0.7, seed=3, settings=(("decode_kv", 0.5),))
REGISTRY = [
    Sweep("oracle", (1.1, 1.0, 0.9, 0.8, 0.65)),
    Sweep("hpa-utilization", (0.9, 0.8, 0.7, 0.55, 0.4)),
    Sweep("broken", (1.0,)),
]
MATRIX = """
name: test
blocks:
- {traces: [burst, steady], policies: [oracle, hpa-utilization], knobs: 2, seeds: 2, budgets: [16], half: second}
"""


def options(folder: Path, **changes: Any) -> Options:
    return replace(Options(folder, jobs=2, cell_limit=60.0, limit=60.0, quiet=True), **changes)


def cells_of(text: str) -> list[Cell]:
    return matrix.cells(matrix.parse(text, "test"), REGISTRY)


# Cells and rows


def test_the_key_depends_on_every_setting() -> None:
    changes: dict[str, Any] = {
        "trace": "steady", "policy": "oracle", "knob": 0.8, "seed": 4, "budget": 16, "admission": "ours", "shock": "rate-x3",
        "half": "first", "span": 60.0, "requests": 5, "load": 0.5, "profile": "P", "slo": "long", "lead_time": 9.0, "settings": (),
        "purpose": "tune", "digest": "d",
    }  # fmt: skip
    assert set(changes) == set(Cell.__slots__), "a new field of Cell must be in its key"
    keys = {CELL.key(), *(replace(CELL, **{name: value}).key() for name, value in changes.items())}
    assert len(keys) == 1 + len(changes)
    assert CELL.key() == replace(CELL).key()


def test_a_row_survives_its_line() -> None:
    for item in (Row(CELL, {"attainment": 0.5}, None, 1.5, "c"), Row(CELL, None, "ValueError: no", 0.1, "c")):
        assert row(json.loads(item.line())) == item


def test_a_cell_of_unknown_fields_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown fields colour of a cell; known are admission, .*trace"):
        from_json({"trace": "a", "policy": "b", "colour": 1})
    with pytest.raises(ValueError, match="needs policy"):
        from_json({"trace": "a"})


# The results file


def test_half_a_last_line_is_dropped_and_cut_off(tmp_path: Path) -> None:
    whole = Row(CELL, {"attainment": 0.5}, None, 1.0, "c")
    other = Row(replace(CELL, seed=9), {"attainment": 0.7}, None, 1.0, "c")
    (tmp_path / store.CELLS).write_text(whole.line() + other.line()[:40])
    assert store.load(tmp_path) == {CELL.key(): whole}
    with store.appending(tmp_path) as file:
        file.write(other.line())
    assert set(store.load(tmp_path)) == {CELL.key(), other.cell.key()}
    assert (tmp_path / store.CELLS).read_text() == whole.line() + other.line()


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    (tmp_path / store.CELLS).write_text(Row(CELL, {}, None, 1.0, "c").line() + "{broken}\n" + Row(CELL, {}, None, 1.0, "c").line())
    with pytest.raises(store.StoreError, match="line 2"):
        store.load(tmp_path)


def test_two_comparisons_do_not_write_one_file(tmp_path: Path) -> None:
    with store.appending(tmp_path), pytest.raises(store.StoreError, match="another comparison"), store.appending(tmp_path):
        pass


def test_the_fingerprint_changes_with_the_law_and_not_with_the_report() -> None:
    assert store.fingerprint() == store.fingerprint()
    assert "scenario.py" in {path.name for path in store.sources()} >= {"simulation.py", "decide.py", "registry.py"}
    assert not {"report.py", "cli.py", "charts.py"} & {path.name for path in store.sources()}


def test_a_change_of_the_law_leaves_the_peers_results_valid() -> None:
    assert store.fingerprint("ours") == store.fingerprint() != store.fingerprint("hpa-utilization") == store.fingerprint("oracle")
    law = {path for path in store.sources() if path not in store.sources(law=False)}
    assert {path.parent.name for path in law} == {"scaling"} and "law.py" in {path.name for path in law}


# The pool


def test_the_pool_answers_every_item_and_survives_what_goes_wrong() -> None:
    done = {item.item: item for item in pool.run(fakes.square, [1, 2, 13, 99, 77, 3], jobs=2, limit=2.0)}
    assert {value: item.answer for value, item in done.items() if item.error is None} == {1: 1, 2: 4, 3: 9}
    assert done[13].error == "ValueError: unlucky"
    assert done[99].error == "the process ended with exit code 7 (memory?)"
    assert done[77].error == "took more than the limit of 2 s"


def test_after_the_deadline_nothing_begins() -> None:
    assert list(pool.run(fakes.square, [1, 2, 3], jobs=1, limit=60.0, deadline=time.monotonic() - 1)) == []


# Comparing


def test_compare_runs_every_cell_once_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    parsed = matrix.parse(MATRIX, "test")
    first = compare(parsed, REGISTRY, options(tmp_path), fakes.compute)
    assert (first.wanted, first.finished, first.failed, first.left) == (16, 16, 0, 0) and first.complete
    before = (tmp_path / store.CELLS).read_text()
    pids = {item.summary["pid"] for item in store.load(tmp_path).values() if item.summary}
    assert os.getpid() not in pids and 1 <= len(pids) <= 2
    assert len(list((tmp_path / TIMELINES).iterdir())) == 8, "one for each cell of seed 0"
    again = compare(parsed, REGISTRY, options(tmp_path), fakes.compute)
    assert again == first and (tmp_path / store.CELLS).read_text() == before
    # A row lost: only that cell runs again.
    lines = before.splitlines(keepends=True)
    (tmp_path / store.CELLS).write_text("".join(lines[:-1]) + lines[-1][:30])
    assert compare(parsed, REGISTRY, options(tmp_path), fakes.compute) == first
    after = (tmp_path / store.CELLS).read_text().splitlines(keepends=True)
    assert after[:-1] == lines[:-1] and json.loads(after[-1])["key"] == json.loads(lines[-1])["key"]


def test_a_failed_cell_is_recorded_and_not_fatal(tmp_path: Path) -> None:
    text = "name: t\nblocks: [{traces: [burst], policies: [broken, oracle], knobs: 1, seeds: 2}]"
    ended = compare(matrix.parse(text, "t"), REGISTRY, options(tmp_path), fakes.compute)
    assert (ended.finished, ended.failed, ended.left) == (2, 2, 0)
    errors = [item.error for item in store.load(tmp_path).values() if item.error]
    assert errors == ["RuntimeError: no such engine"] * 2
    count = len((tmp_path / store.CELLS).read_text().splitlines())
    compare(matrix.parse(text, "t"), REGISTRY, options(tmp_path), fakes.compute)
    assert len((tmp_path / store.CELLS).read_text().splitlines()) == count
    compare(matrix.parse(text, "t"), REGISTRY, options(tmp_path, retry_failed=True), fakes.compute)
    assert len((tmp_path / store.CELLS).read_text().splitlines()) == count + 2


def test_what_was_not_run_is_counted(tmp_path: Path) -> None:
    ended = compare(matrix.parse(MATRIX, "test"), REGISTRY, options(tmp_path, limit=0.0), fakes.compute)
    assert (ended.wanted, ended.finished, ended.left) == (16, 0, 16) and not ended.complete
    assert len(json.loads((tmp_path / PLAN).read_text())["cells"]) == 16


def test_rows_of_other_code_are_counted(tmp_path: Path) -> None:
    cells = cells_of(MATRIX)
    (tmp_path / store.CELLS).write_text("".join(Row(cell, {"attainment": 1.0}, None, 1.0, "older").line() for cell in cells))
    assert compare(matrix.parse(MATRIX, "test"), REGISTRY, options(tmp_path), fakes.compute).other_code == 16
    refreshed = compare(matrix.parse(MATRIX, "test"), REGISTRY, options(tmp_path, refresh=True), fakes.compute)
    assert (refreshed.other_code, refreshed.finished) == (0, 16)
    assert len((tmp_path / store.CELLS).read_text().splitlines()) == 32, "the older rows stay, the last one of a cell counts"
    compare(matrix.parse(MATRIX, "test"), REGISTRY, options(tmp_path, refresh=True), fakes.compute)
    assert len((tmp_path / store.CELLS).read_text().splitlines()) == 32


# Tuning


def test_tuning_gives_every_policy_the_same_budget_and_the_defaults_first() -> None:
    base = Cell("burst", "hpa-concurrency-kv", 4.0, purpose="tune")
    tried = candidates(base, Tuning(configurations=6))
    assert len(tried) == 6 == len({cell.key() for cell in tried}) and tried[0] == base
    assert tried == candidates(base, Tuning(configurations=6)) and tried[:3] == candidates(base, Tuning(configurations=3))
    assert all(0.4 <= float(dict(cell.settings)["decode_kv"]) <= 0.95 for cell in tried[1:])
    assert candidates(replace(base, policy="oracle"), Tuning(configurations=6)) == [replace(base, policy="oracle")]


def test_the_chosen_configuration_is_the_cheapest_that_attains_enough() -> None:
    def made(seed: int, attainment: float, cost: float) -> Row:
        return Row(replace(CELL, seed=seed), {"attainment": attainment, "gpu_seconds": cost}, None, 1.0, "c")

    rows = [made(0, 0.99, 500), made(1, 0.96, 400), made(2, 0.90, 100)]
    assert choose(rows, 0.95).cell.seed == 1
    assert choose(rows, 0.995).cell.seed == 0, "none attains it: the best attainment"


def test_the_comparison_uses_what_tuning_found_on_the_first_half(tmp_path: Path) -> None:
    text = """
name: t
blocks:
- {traces: [burst], policies: [hpa-concurrency-kv], knobs: 2, seeds: 1, tuning: {configurations: 8, requests: 500}}
"""
    registry = [sweep for sweep in peers.sweeps() if sweep.name == "hpa-concurrency-kv"]
    ended = compare(matrix.parse(text, "t"), registry, options(tmp_path), fakes.compute)
    rows = list(store.load(tmp_path).values())
    tuning = [item.cell for item in rows if item.cell.purpose == "tune"]
    compared = [item.cell for item in rows if item.cell.purpose == "compare"]
    assert len(tuning) == 8 and ended.wanted == len(compared) == 2
    assert {(cell.half, cell.requests, cell.shock) for cell in tuning} == {("first", 500, "none")}
    assert {cell.half for cell in compared} == {"second"}
    (settings,) = {cell.settings for cell in compared}
    assert float(dict(settings)["decode_kv"]) > 0.6, "the fake attains 95 % only there"


# Matrices


def test_a_block_is_the_product_of_its_lists() -> None:
    cells = cells_of(MATRIX)
    assert len(cells) == 2 * 2 * 2 * 2 == len({cell.key() for cell in cells})
    assert Counter(cell.policy for cell in cells) == {"oracle": 8, "hpa-utilization": 8}
    assert {cell.knob for cell in cells if cell.policy == "oracle"} == {1.1, 0.65}
    # a cell that two blocks ask for runs once
    twice = MATRIX + "- {traces: [burst], policies: [oracle], knobs: 2, seeds: 2, budgets: [16], half: second}\n"
    assert len(cells_of(twice)) == 16


@pytest.mark.parametrize(("count", "chosen"), [(1, [3.0]), (2, [1.0, 5.0]), (3, [1.0, 3.0, 5.0]), (5, [1.0, 2.0, 3.0, 4.0, 5.0])])
def test_knob_values_are_spread(count: int, chosen: list[float]) -> None:
    assert matrix.knob_values(Sweep("x", (1.0, 2.0, 3.0, 4.0, 5.0)), count) == chosen
    assert matrix.knob_values(Sweep("x", ()), count) == [None]


@pytest.mark.parametrize(
    ("count", "lower", "chosen"), [(0, 2, [0.25, 0.5]), (0, 1, [0.5]), (1, 1, [0.5, 2.0]), (2, 2, [0.25, 0.5, 1.0, 3.0])]
)
def test_values_below_a_sweep_come_before_it(count: int, lower: int, chosen: list[float]) -> None:
    assert matrix.knob_values(Sweep("x", (1.0, 2.0, 3.0), (0.5, 0.25)), count, lower) == chosen


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: x", "blocks.*Field required"),
        ("name: x\nblocks: [{traces: []}]", r"blocks.0.traces \[\]"),
        ("name: x\nblocks: [{traces: [a], budgets: [1]}]", r"blocks.0.budgets.0 1: .*greater than or equal to 2"),
        ("name: x\nblocks: [{traces: [a], colour: red}]", r"blocks.0.colour 'red': Extra"),
        ("name: x\nblocks: [{traces: [a], knobs: 0}]", r"knobs 0 without `lower`: accepted are 1 to 5, or 0 with"),
        ("name: x\nblocks: [{traces: [a], lower: 3}]", r"blocks.0.lower 3: Input should be less than or equal to 2"),
        ("name: x\nblocks: [{traces: [a], shocks: [boom]}]", r"shocks 'boom': accepted are none, outputs-x3"),
        ("name: x\nblocks: [{traces: [a], leadTime: soon}]", r"leadTime 'soon': accepted is a duration"),
        ("- [", "not YAML"),
    ],
)
def test_a_wrong_matrix_is_explained(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        matrix.parse(text, "mine.yaml")


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(InputError, match=r"policy 'magic': accepted are oracle, hpa-utilization, broken"):
        cells_of("name: x\nblocks: [{traces: [a], policies: [magic]}]")


@pytest.mark.parametrize("name", matrix.SHIPPED)
def test_shipped_matrices_are_valid_and_say_what_they_leave_out(name: str) -> None:
    shipped = matrix.shipped(name)
    assert shipped.left_out
    cells = matrix.cells(shipped, peers.sweeps())
    assert all(cell.requests <= 60_000 for cell in cells)
    if name == "smoke":
        from pd_simulate import synthetic

        assert {cell.trace for cell in cells} <= set(synthetic.NAMES), "smoke must run without trace files"
        assert {cell.policy for cell in cells} == {sweep.name for sweep in peers.sweeps()}


# Common random numbers


def test_policies_meet_the_same_requests_and_seeds_do_not() -> None:
    base = Cell("burst", "oracle", budget=16, half="second", requests=800)
    load, times = scenario.workload(base)
    same, _ = scenario.workload(replace(base, policy="hpa-utilization", knob=0.4, admission="ours"))
    other, _ = scenario.workload(replace(base, seed=1))
    assert len(load) == 800
    assert list(load.arrival) == list(same.arrival) and list(load.output) == list(same.output)
    assert list(load.arrival) != list(other.arrival) and list(load.output) != list(other.output)
    assert 0 < times.warmup < times.shock_start < times.shock_end < load.duration


def test_leaving_early_ends_the_processes() -> None:
    answers = pool.run(fakes.square, [1, 77, 2, 3], jobs=2, limit=60.0)
    assert next(answers).answer in (1, 4, 9)
    assert len(multiprocessing.active_children()) == 2
    answers.close()  # type: ignore[attr-defined]
    assert multiprocessing.active_children() == []
