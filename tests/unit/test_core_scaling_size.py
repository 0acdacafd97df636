"""From need to count: rounding, the rise, the slow fall, and what forbids either."""

from __future__ import annotations

from typing import Any

import pytest
from scaling_builders import long_ago, replicas

from pd_operator.core.scaling.bounds import RoleBounds
from pd_operator.core.scaling.decision import Reason
from pd_operator.core.scaling.law import Law
from pd_operator.core.scaling.learned import MAX_PEAKS, Memory
from pd_operator.core.scaling.need import Need
from pd_operator.core.scaling.readings import Replicas
from pd_operator.core.scaling.size import Guards, Sized, hold, size, window_of, window_of_decode

NOW = 1000.0
BOUNDS = RoleBounds(1, 100, lead_time=120.0)
LAW = Law()
FREE = Guards()


def sized(
    flow: float,
    there: Replicas,
    backlog: float = 0.0,
    fits: bool = True,
    guards: Guards = FREE,
    memory: Memory | None = None,
    **law: Any,
) -> Sized:
    memory = long_ago(there.desired, NOW) if memory is None else memory
    return size(Need(flow, backlog), fits, there, BOUNDS, guards, Law(**law), memory, NOW)


@pytest.mark.parametrize(
    ("flow", "backlog", "current", "count", "reason"),
    [
        (2.1, 0.0, 2, 2, Reason.HOLD),  # the dead band: ceil(2.1 - 0.1)
        (2.11, 0.0, 2, 3, Reason.DEMAND),
        (1.9, 0.5, 2, 3, Reason.BACKLOG),
        (2.5, 0.5, 2, 3, Reason.DEMAND),
        (9.0, 0.0, 2, 6, Reason.DEMAND),  # +4
        (90.0, 0.0, 8, 16, Reason.DEMAND),  # x2
        (1.9, 90.0, 2, 6, Reason.BACKLOG),
        (0.0, 0.0, 1, 1, Reason.HOLD),  # the minimum
        (0.0, 0.0, 0, 1, Reason.DEMAND),  # below the minimum
        (1.0, 0.0, 2, 1, Reason.DEMAND),  # down
        (1.0, 0.0, 9, 8, Reason.DEMAND),  # by one
    ],
)
def test_counts(flow: float, backlog: float, current: int, count: int, reason: Reason) -> None:
    answer = sized(flow, replicas(current), backlog)
    assert (answer.count, answer.reason) == (count, reason)


def test_a_rise_starts_from_what_is_ordered() -> None:
    """2 ready and 1 starting with a need of 3 is enough: a slow start never orders twice."""
    assert sized(3.0, replicas(3, ready=2, starting=1)).count == 3
    assert sized(99.0, replicas(3, ready=2, starting=1)).count == 7


def test_a_rise_beyond_the_step_says_so() -> None:
    limit = sized(9.0, replicas(2)).limits[0]
    assert (limit.reason, limit.before, limit.after) == (Reason.COOLDOWN, 9, 6)


@pytest.mark.parametrize(
    ("guards", "there", "reason"),
    [
        (Guards(may_rise=False), replicas(2), Reason.GATED_BY_DECODE),
        (Guards(), replicas(2, ready=1, blocked=1), Reason.NO_CAPACITY),
        (Guards(may_rise=False), replicas(2, ready=1, blocked=1), Reason.GATED_BY_DECODE),
    ],
)
def test_what_forbids_a_rise(guards: Guards, there: Replicas, reason: Reason) -> None:
    answer = sized(5.0, there, guards=guards)
    assert (answer.count, answer.reason, answer.wanted) == (2, reason, 5)


def test_a_blocked_replica_that_is_needed_is_named_and_one_that_is_not_goes() -> None:
    there = replicas(3, ready=2, blocked=1)
    assert sized(3.0, there).reason is Reason.NO_CAPACITY
    assert (sized(2.0, there).count, sized(2.0, there).reason) == (2, Reason.DEMAND)


def test_a_congested_decode_has_one_more_than_is_ready() -> None:
    assert sized(1.0, replicas(2), guards=Guards(floor=3)).count == 3
    assert sized(1.0, replicas(3, ready=2, starting=1), guards=Guards(floor=3)).count == 3


@pytest.mark.parametrize("reason", [Reason.ROLLOUT, Reason.GATED_BY_DECODE, Reason.HOLD])
def test_what_forbids_a_fall(reason: Reason) -> None:
    answer = sized(1.0, replicas(3), guards=Guards(keep=reason, keep_detail="why"))
    assert (answer.count, answer.reason, answer.limits[0].detail) == (3, reason, "why")


@pytest.mark.parametrize(
    ("memory", "fits", "detail"),
    [
        (Memory(peaks=((NOW - 299, 3),)), True, "3 were wanted within the down window"),
        (Memory(peaks=((NOW - 290, 2),), stepped_down=NOW - 59), True, "one step in 60 s"),
        (Memory(peaks=((NOW - 290, 2),)), False, "the rest would not fit"),
        (Memory(), True, "3 were wanted within the down window"),  # no past is known
    ],
)
def test_cooldown(memory: Memory, fits: bool, detail: str) -> None:
    answer = sized(1.0, replicas(3), memory=memory, fits=fits)
    assert (answer.count, answer.reason, answer.limits[0].detail) == (3, Reason.COOLDOWN, detail)


@pytest.mark.parametrize(
    "memory",
    [Memory(peaks=((NOW - 301, 3),)), Memory(peaks=((NOW - 290, 2),), stepped_down=NOW - 60), Memory(((NOW - 9, 2),), NOW + 99)],
)
def test_a_step_down_when_the_window_is_over(memory: Memory) -> None:
    answer = sized(1.0, replicas(3), memory=memory)
    assert (answer.count, answer.memory.stepped_down) == (2, NOW)


def test_a_share_steps_down_in_a_large_pool() -> None:
    memory = Memory(peaks=((NOW - 290, 10),))
    assert sized(1.0, replicas(40), memory=memory, down_share=0.1).count == 36
    assert sized(1.0, replicas(12), memory=memory, down_share=0.5).count == 10  # never below what was wanted


@pytest.mark.parametrize(("lead", "window"), [(0.0, 300.0), (200.0, 300.0), (300.0, 450.0)])
def test_the_window_is_at_least_one_and_a_half_lead_times(lead: float, window: float) -> None:
    assert window_of(RoleBounds(1, 2, lead_time=lead), LAW) == window


@pytest.mark.parametrize(
    ("lead", "window"),
    [(0.0, 300.0), (20.0, 300.0), (60.0, 900.0), (120.0, 1800.0), (240.0, 3600.0), (600.0, 3600.0), (3000.0, 4500.0)],
)
def test_decode_remembers_fifteen_lead_times_and_at_most_an_hour(lead: float, window: float) -> None:
    bounds = RoleBounds(1, 2, lead_time=lead)
    on = Law(decode_memory=15.0)
    assert window_of_decode(bounds, on) == window
    assert window_of_decode(bounds, LAW) == window_of(bounds, on) == window_of(bounds, LAW)  # off; and prefill


def test_a_need_that_was_seen_is_remembered_longer_than_the_count_at_the_start() -> None:
    """What is there without a known past stays 300 s, what was needed once 1,800 s."""
    guards = Guards(window=1800.0)

    def falls(before: Sized) -> list[int]:
        ticks = (299.0, 301.0, 1799.0, 1801.0)
        return [size(Need(1.0), True, replicas(3), BOUNDS, guards, LAW, before.memory, NOW + s).count for s in ticks]

    assert falls(sized(1.0, replicas(3), guards=guards, memory=Memory())) == [3, 2, 2, 2]
    assert falls(sized(3.0, replicas(3), guards=guards, memory=Memory())) == [3, 3, 3, 2]
    assert falls(hold(replicas(3), BOUNDS, LAW, Memory(), NOW, "not known", guards.window)) == [3, 3, 3, 2]


def test_unknown_holds_and_starts_the_window_anew() -> None:
    answer = hold(replicas(5), BOUNDS, LAW, Memory(peaks=((NOW - 290, 2),)), NOW, "not known: running")
    assert (answer.count, answer.reason, answer.memory.peaks) == (5, Reason.SIGNALS_UNKNOWN, ((NOW, 5),))


def test_peaks_keep_only_what_can_be_the_highest_of_a_window() -> None:
    memory = Memory()
    for tick, count in enumerate([3, 5, 4, 4, 2, 3, 1]):
        memory = Memory(memory.push(15.0 * tick, count, 300.0))
    assert memory.peaks == ((15.0, 5), (45.0, 4), (75.0, 3), (90.0, 1))
    assert Memory(memory.push(316.0, 2, 300.0)).peaks == ((45.0, 4), (75.0, 3), (316.0, 2))


def test_peaks_are_bounded_and_merging_never_forgets_a_height() -> None:
    memory = Memory()
    for tick in range(100):
        memory = Memory(memory.push(float(tick), 1000 - tick, 300.0))
    assert len(memory.peaks) == MAX_PEAKS
    assert memory.peaks[0][1] == 1000
    assert memory.peaks[-1] == (99.0, 901)


def test_a_backlog_is_frozen_while_replicas_start() -> None:
    ordered = sized(1.9, replicas(2), 0.5, backlog_frozen=True)
    assert (ordered.count, ordered.memory.frozen_backlog) == (3, 0.5)
    starting = replicas(3, ready=2, starting=1)
    assert sized(1.9, starting, 5.0, memory=ordered.memory, backlog_frozen=True).count == 3
    assert sized(4.0, starting, 5.0, memory=ordered.memory, backlog_frozen=True).count == 5  # what flows still orders
    assert sized(1.9, replicas(3), 5.0, memory=ordered.memory, backlog_frozen=True).count == 7  # all are there: it counts again


def test_a_step_down_that_was_taken_back_makes_the_next_one_wait_longer() -> None:
    memory = Memory(peaks=((NOW - 290, 2),), stepped_down=NOW - 100)
    back = sized(2.5, replicas(2), memory=memory, reversal_factor=2.0)
    assert (back.count, back.memory.patience) == (3, 2.0)
    kept = Memory(peaks=((NOW - 500, 3), (NOW - 290, 2)), patience=2.0)
    assert sized(1.0, replicas(3), memory=kept, reversal_factor=2.0).reason is Reason.COOLDOWN  # a window of 600 s still knows 3
    assert sized(1.0, replicas(3), memory=kept).count == 3
    late = Memory(peaks=((NOW - 290, 2),), stepped_down=NOW - 601)
    assert sized(2.5, replicas(2), memory=late, reversal_factor=2.0).memory.patience == 1.0  # no reversal: another load
    calm = Memory(peaks=((NOW - 290, 2),), stepped_down=NOW - 1201, patience=2.0)
    assert sized(2.0, replicas(2), memory=calm, reversal_factor=2.0).memory.patience == 1.0
    worst = Memory(peaks=((NOW - 290, 2),), stepped_down=NOW - 1, patience=8.0)
    assert sized(2.5, replicas(2), memory=worst, reversal_factor=2.0).memory.patience == 8.0
