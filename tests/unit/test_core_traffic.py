"""UnevenTraffic: said after enough ticks in a row, never from what is not known, and taken back the same way."""

from __future__ import annotations

from dataclasses import replace

from builders import conditions, serving
from hypothesis import given
from hypothesis import strategies as st

from pd_operator.core.plan import make_plan
from pd_operator.core.scaling.readings import UNKNOWN, Signal
from pd_operator.core.status import build_status
from pd_operator.core.traffic import BOUND, LEAST, TICKS, Traffic, look

HALVES = {"a": 50, "b": 50}
SCALING = {"scaling": {"prefill": {"maxReplicas": 4}, "decode": {"maxReplicas": 4}}}


def rates(a: float, b: float) -> dict[str, Signal]:
    return {"a": Signal.of(a), "b": Signal.of(b)}


def after(ticks: int, given: dict[str, Signal], before: Traffic | None = None, **options: bool) -> Traffic:
    now = before or Traffic()
    for _ in range(ticks):
        now = look(now, given, HALVES, options.get("weighted", True), moving=options.get("moving", False))
    return now


def test_it_is_said_after_enough_ticks_in_a_row_and_not_before() -> None:
    assert after(TICKS - 1, rates(8, 2)).uneven == ""
    assert after(TICKS, rates(8, 2)).uneven == "a got 80 % of the requests, and its weight is 50: does the gateway honour weights?"
    broken = after(1, rates(5, 5), after(TICKS - 1, rates(8, 2)))
    assert after(TICKS - 1, rates(8, 2), broken).uneven == ""


def test_behind_a_plain_service_it_names_the_way_out() -> None:
    assert "spec.gateway weights slices" in after(TICKS, rates(2, 8), weighted=False).uneven


def test_within_the_bound_nothing_is_said() -> None:
    assert after(99, rates(50 + BOUND, 50 - BOUND)).uneven == ""
    assert after(TICKS, rates(51 + BOUND, 49 - BOUND)).uneven != ""


def test_it_is_taken_back_after_as_many_ticks() -> None:
    said = after(TICKS, rates(8, 2))
    assert after(TICKS - 1, rates(5, 5), said).uneven == said.uneven
    assert after(TICKS, rates(5, 5), said).uneven == ""
    assert after(TICKS, rates(0, 0), said).uneven == ""  # nothing comes any more


def test_what_is_not_known_neither_sets_nor_clears() -> None:
    partly = {"a": Signal.of(9.0), "b": UNKNOWN}
    for missing in (partly, {"a": Signal.of(9.0)}, {}):
        assert after(99, missing).uneven == ""
        said = after(TICKS, rates(8, 2))
        assert after(99, missing, said).uneven == said.uneven
    late = after(99, partly, after(TICKS - 1, rates(8, 2)))
    assert after(1, rates(8, 2), late).uneven != ""  # the ticks that are known are in a row


def test_too_few_requests_say_nothing() -> None:
    assert after(99, rates(LEAST * 0.9, 0)).uneven == ""
    assert after(TICKS, rates(LEAST, 0)).uneven != ""


def test_one_slice_or_none_has_no_share() -> None:
    said = after(TICKS, rates(8, 2))
    assert look(said, rates(8, 2), {"a": 100}, True) == Traffic() == look(said, {}, {}, True)


def test_a_rollout_and_other_weights_begin_anew() -> None:
    almost = after(TICKS - 1, rates(8, 2))
    assert look(almost, rates(8, 2), HALVES, True, moving=True).streak == 0
    assert look(almost, rates(8, 2), {"a": 40, "b": 60}, True).streak == 0
    assert look(almost, rates(8, 2), {"a": 48, "b": 52}, True).uneven != ""  # within the band of the weights
    assert look(after(TICKS, rates(8, 2)), rates(8, 2), {"a": 50, "c": 50}, True).uneven == ""  # another slice


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20), st.booleans()), max_size=60))
def test_no_history_says_it_without_enough_ticks_that_show_it(history: list[tuple[int, int, bool]]) -> None:
    now, shown = Traffic(), 0
    for a, b, known in history:
        before, now = now, look(now, rates(a, b) if known else {}, HALVES, True)
        off = known and a + b >= LEAST and abs(100 * a / (a + b) - 50) > BOUND
        shown = shown + 1 if off else shown if not known else 0
        if now.uneven and not before.uneven:
            assert shown >= TICKS


def test_status_says_it_and_a_new_process_keeps_what_stood_there() -> None:
    base = serving(SCALING)
    found = {"type": "Degraded", "status": "True", "reason": "UnevenTraffic", "message": "a got 80 %"}

    def degraded(**changes: object) -> tuple[str, str, str]:
        snapshot = replace(base, **changes)  # type: ignore[arg-type]
        told = conditions(build_status(snapshot, make_plan(snapshot)))["Degraded"]
        return told["status"], told["reason"], told["message"]

    assert degraded() == ("False", "AsExpected", "")
    assert degraded(status={"conditions": [found]}) == ("True", "UnevenTraffic", "a got 80 %")
    static = serving()
    kept = build_status(replace(static, status={"conditions": [found]}), make_plan(static))
    assert conditions(kept)["Degraded"]["status"] == "False"  # nobody reads signals of it
