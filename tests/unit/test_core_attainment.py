"""Attainment: shares of histograms, what cannot be known, when status tells it anew, and the numbers of each way to end."""

from __future__ import annotations

import math
from typing import Any

import pytest
from evidence_world import SLICE, TICK
from hypothesis import given
from hypothesis import strategies as st

from pd_operator.api.status import Attainment
from pd_operator.core.evidence import told
from pd_operator.core.evidence.attainment import WINDOW, Attained, Objectives, attained, within
from pd_operator.core.evidence.counters import Counters, Side
from pd_operator.core.evidence.watch import Evidence, Record, Site, look
from pd_operator.core.names import ROLES

INF = math.inf
SLO = Objectives(ttft=1.0, itl=0.05)
BUCKETS = {0.1: 0.0, 0.5: 60.0, 1.0: 90.0, INF: 100.0}


@pytest.mark.parametrize(
    ("limit", "share"),
    [(0.1, 0.0), (0.5, 0.6), (0.75, 0.75), (1.0, 0.9), (30.0, 0.9), (0.0, 0.0), (-1.0, 0.0), (0.3, 0.3)],
)
def test_the_share_within_a_limit(limit: float, share: float) -> None:
    assert within(BUCKETS, limit) == pytest.approx(share)


@pytest.mark.parametrize("buckets", [{}, {0.1: 4.0, INF: 4.0}, {0.1: 9.0, 0.5: 9.0}])
def test_too_few_requests_or_no_total_say_nothing(buckets: dict[float, float]) -> None:
    assert within(buckets, 1.0) is None


@given(st.lists(st.floats(0.001, 20), min_size=5, max_size=60), st.floats(0.0, 25), st.floats(0.0, 25))
def test_a_share_grows_with_the_limit_and_is_right_at_a_bound(times: list[float], one: float, other: float) -> None:
    bounds = (0.1, 0.5, 1.0, 5.0, INF)
    buckets = {bound: float(sum(t <= bound for t in times)) for bound in bounds}
    low, high = (within(buckets, limit) for limit in sorted((one, other)))
    assert low is not None and high is not None and 0.0 <= low <= high <= 1.0
    for bound in bounds[:-1]:
        assert within(buckets, bound) == pytest.approx(sum(t <= bound for t in times) / len(times))


class Pages:
    """One prefill and one decode pod whose requests take as long as told."""

    def __init__(self, slo: Objectives = SLO) -> None:
        self.now, self.record, self.site = 1e9, Record(), Site({SLICE: dict.fromkeys(ROLES, 1)}, slo=slo)
        self.evidence = Evidence(0.0)
        self.values: dict[str, dict[str, float]] = {"prefill": {}, "decode": {}, "router": {}}
        self.buckets: dict[str, dict[str, dict[float, float]]] = {
            side: {name: dict.fromkeys((0.01, 0.05, 0.1, 0.5, 1.0, 2.0, INF), 0.0) for name in ("first_token", "mean_gap")}
            for side in ("prefill", "decode")
        }
        for side in ROLES:
            self.values[side] = dict.fromkeys(("first_tokens", "first_token_seconds", "computed", "prompts"), 0.0)

    def request(self, prefill: float, decode: float, gap: float = 0.01, count: int = 1, tokens: float = 500.0) -> None:
        for side, name, value in (
            ("prefill", "first_token", prefill), ("decode", "first_token", decode), ("decode", "mean_gap", gap)
        ):  # fmt: skip
            mine = self.buckets[side][name]
            for bound in mine:
                mine[bound] += count * (value <= bound)
        for side, taken in (("prefill", prefill), ("decode", decode)):
            self.values[side]["first_tokens"] += count
            self.values[side]["first_token_seconds"] += count * taken
        self.values["prefill"]["prompts"] += count
        self.values["prefill"]["computed"] += count * tokens

    def tick(self, count: int = 1) -> Attained:
        for _ in range(count):
            self.now += TICK
            sides: tuple[Side, ...] = ("prefill", "decode", "router")
            pages = [
                Counters(s, f"uid-{s}", SLICE, s, self.now - 2, dict(v), {n: dict(b) for n, b in self.buckets.get(s, {}).items()})
                for s in sides
                if (v := self.values[s]) is not None
            ]
            self.record, self.evidence = look(self.record, pages, self.site, self.now)
        return self.evidence.attained


def test_both_waits_count_and_goodput_is_an_interval() -> None:
    pages = Pages()
    pages.tick()
    pages.request(0.1, 0.1, count=90)
    pages.request(0.1, 2.0, gap=0.5, count=10)
    found = pages.tick()
    # Where decode took its 0.1 s all of prefill is within the 0.9 s that are left; where it took 2 s nothing is.
    assert found.ttft == pytest.approx(0.9) and found.itl == pytest.approx(0.9)
    assert found.goodput == pytest.approx((0.8, 0.9))
    assert found.window == TICK and found.age == 0.0


def test_what_is_not_asked_or_not_seen_is_not_told() -> None:
    for slo, seen in ((Objectives(), (False, False)), (Objectives(ttft=1.0), (True, False)), (Objectives(itl=0.05), (False, True))):
        pages = Pages(slo)
        assert pages.tick(2).ttft is None
        pages.request(0.1, 0.1, count=4)
        assert (pages.tick().ttft, pages.evidence.attained.itl) == (None, None)  # too few
        pages.request(0.1, 0.1, count=4)
        found = pages.tick()
        assert (found.ttft is not None, found.itl is not None) == seen and found.goodput is None
    assert told.attainment(Evidence(0.0), {"attainment": {"ttft": "97.0%"}}) == {}


def test_long_prompts_have_more_time_where_the_objective_says_so() -> None:
    for per_thousand, share in ((0.0, 0.0), (0.3, 1.0)):
        pages = Pages(Objectives(ttft=1.0, ttft_per_thousand=per_thousand))
        pages.tick()
        pages.request(2.0, 0.1, count=20, tokens=4000.0)  # 1.0 + 4 x 0.3 = 2.2
        assert pages.tick().ttft == share


def test_the_window_forgets_and_a_restart_of_a_process_is_no_negative_count() -> None:
    pages = Pages()
    pages.tick()
    pages.request(2.0, 0.1, count=100)
    assert pages.tick().ttft == 0.0
    for side in ROLES:
        pages.values[side] = dict.fromkeys(pages.values[side], 0.0)
        for mine in pages.buckets[side].values():
            mine.update(dict.fromkeys(mine, 0.0))
    pages.request(0.1, 0.1, count=50)
    assert pages.tick().ttft == pytest.approx(50 / 150)
    pages.tick(20)  # five minutes
    assert pages.evidence.attained.ttft is None
    pages.request(0.1, 0.1, count=50)
    found = pages.tick()
    assert found.ttft == 1.0
    assert found.window == 20 * TICK == WINDOW  # what came since the look before the first of the window


def test_status_tells_it_anew_when_it_moved_and_not_each_tick() -> None:
    def evidence(ttft: float | None, itl: float | None = 0.99) -> Evidence:
        return Evidence(0.0, attained=Attained(ttft, itl, 300.0, 2.0, 95))

    first = told.attainment(evidence(0.975), {})
    assert first == {
        "ttft": "97.5%", "itl": "99.0%", "goodputMin": "96.5%", "goodputMax": "97.5%", "window": "300s", "age": "2s",
    }  # fmt: skip
    assert Attainment.model_validate(first).model_dump(by_alias=True, exclude_unset=True) == first
    before: dict[str, Any] = {"attainment": first}
    for ttft in (0.96, 0.994, 0.975):
        assert told.attainment(evidence(ttft), before) == first
    assert told.attainment(evidence(0.999), before)["ttft"] == "99.9%"
    assert (
        told.attainment(evidence(0.949), {"attainment": {**first, "ttft": "95.5%"}})["ttft"] == "94.9%"
    )  # the objective is missed
    assert "ttft" not in told.attainment(evidence(None), before)
    assert told.attainment(evidence(None, None), before) == {} and told.attainment(None, before) == first


def test_each_way_to_end_is_a_number_of_its_own() -> None:
    pages = Pages()
    pages.values["router"] = dict.fromkeys(("offered", "rejected", "timed_out", "unavailable", "failed", "not_handed"), 0.0)
    pages.values["decode"] |= dict.fromkeys(("ended", "errors", "cancelled", "computed", "received"), 0.0)
    pages.tick()
    for number, name in enumerate(("rejected", "timed_out", "unavailable", "failed", "not_handed"), start=1):
        pages.values["router"][name] += number
    pages.values["decode"] |= {"ended": 50.0, "errors": 6.0, "cancelled": 7.0, "prompts": 20.0}
    pages.values["decode"] |= {"computed": 800.0, "received": 1200.0}
    pages.tick()
    assert pages.evidence.outcomes == {
        ("router", "rejected"): 1, ("router", "timed_out"): 2, ("router", "unavailable"): 3, ("router", "failed"): 4,
        ("router", "not_handed"): 5, ("decode", "answered"): 50, ("decode", "failed"): 6, ("decode", "cancelled"): 7,
        ("decode", "fallback"): 8,
    }  # fmt: skip


def test_what_a_program_does_not_count_is_absent_and_not_zero() -> None:
    pages = Pages()
    pages.values["router"] = {"offered": 0.0, "failed": 0.0}  # vllm-router
    pages.tick(2)
    assert set(pages.evidence.outcomes) == {("router", "failed")}


def test_no_points_say_nothing() -> None:
    assert attained((), SLO, 0.0) == Attained()
