"""What a tick teaches: averages, V, c and b, against values computed by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from scaling_builders import BOUNDS, learned, readings, replicas

from pd_operator.core.scaling import estimate
from pd_operator.core.scaling.law import DEFAULT, Law
from pd_operator.core.scaling.learned import DecodeLearned, Learned, PrefillLearned, Rate, average
from pd_operator.core.scaling.readings import UNKNOWN, Signal, State

HALF = 30 * math.log(2)  # seconds after which an average over 30 s is half way


@pytest.mark.parametrize(
    ("previous", "sample", "seconds", "expected"),
    [
        (None, 7.0, 15.0, 7.0),
        (10.0, 20.0, HALF, 15.0),
        (10.0, 20.0, 2 * HALF, 17.5),
        (10.0, 10.0, 15.0, 10.0),
        (10.0, 20.0, 1e9, 20.0),
    ],
)
def test_an_average_is_exponential_in_time(previous: float | None, sample: float, seconds: float, expected: float) -> None:
    assert average(previous, sample, seconds, 30.0) == pytest.approx(expected, rel=1e-5)


def test_six_digits_are_kept() -> None:
    assert average(None, 1 / 3, 15.0, 30.0) == 0.333333


@pytest.mark.parametrize(
    ("signal", "expected"),
    [
        (Signal.of(3.0), 3.0), (Signal.of(0.0), 0.0), (UNKNOWN, None), (Signal(State.UNKNOWN, 5.0), None),
        (Signal(State.VALUE, math.nan), None), (Signal(State.VALUE, math.inf), None), (Signal(State.VALUE, -1.0), None),
    ],
)  # fmt: skip
def test_a_number_that_is_none_is_unknown(signal: Signal, expected: float | None) -> None:
    assert estimate.known(signal) == expected


@pytest.mark.parametrize(
    ("last", "now", "expected"), [(None, 100.0, 15.0), (90.0, 100.0, 10.0), (100.0, 100.0, 15.0), (200.0, 100.0, 15.0)]
)
def test_a_clock_that_stands_or_goes_back_counts_as_one_tick(last: float | None, now: float, expected: float) -> None:
    assert estimate.elapsed(Learned(time=last), now, BOUNDS) == expected


def test_rates_keep_their_average_while_unknown() -> None:
    before = learned().prefill
    after = estimate.prefill_rates(readings(prompt_rate=UNKNOWN, request_rate=20.0), before, Law(jump=0.0), HALF)
    assert after.prompt_rate == before.prompt_rate
    assert after.request_rate is not None and after.request_rate.mean == pytest.approx(15.0, rel=1e-5)


@pytest.mark.parametrize(("jump", "sample", "mean"), [(0.0, 40.0, 25.0), (1.3, 40.0, 40.0), (1.3, 11.0, 10.5), (1.3, 4.0, 4.0)])
def test_a_jump_replaces_the_average_only_when_switched_on(jump: float, sample: float, mean: float) -> None:
    before = PrefillLearned(prompt_rate=Rate(10.0))
    after = estimate.prefill_rates(readings(prompt_rate=sample), before, Law(jump=jump), HALF).prompt_rate
    assert after is not None and after.mean == pytest.approx(mean, rel=1e-5)


def test_a_forecast_follows_the_damped_trend() -> None:
    # level 100, trend 10 a tick, 2 ticks ahead: 100 + 10 (0.95 + 0.95^2)
    assert estimate.forecast(Rate(100.0, 0.0, 100.0, 10.0), 30.0, 15.0) == pytest.approx(118.525)
    assert estimate.forecast(Rate(100.0, 0.0, 100.0, -90.0), 300.0, 15.0) == 0.0


def test_v_is_tokens_over_prefill_seconds_decayed() -> None:
    # 120 s of memory: after one tick of 120 ln 2 s the old half stands beside the new tokens.
    seconds = 120 * math.log(2)
    before = PrefillLearned(tokens=1000.0, seconds=0.1)
    after = estimate.throughput(readings(prefill_rate=300.0, prefill_seconds=0.01), before, DEFAULT, seconds, True)
    assert after.throughput == pytest.approx((500 + 300 * seconds) / (0.05 + 0.01 * seconds), rel=1e-5)


def test_v_is_unknown_before_anything_was_prefilled() -> None:
    assert (
        estimate.throughput(readings(prefill_rate=0.0, prefill_seconds=0.0), PrefillLearned(), DEFAULT, 15.0, False).throughput
        is None
    )


def test_prefill_seconds_are_at_most_one_a_replica() -> None:
    """An engine that sums them over requests at once would make V too low: prefill fills the GPUs and decode starves."""
    after = estimate.throughput(readings(prefill_rate=40_000.0, prefill_seconds=9.0), PrefillLearned(), DEFAULT, 15.0, True)
    assert after.throughput == pytest.approx(20_000.0, rel=1e-5)


SATURATED = {"prefill_rate": 30_000.0, "prefill_seconds": 1.0, "every_prefill_waiting": True}


def test_a_saturated_window_corrects_v() -> None:
    """Replicas that have work all the time and are busy half of it: the other half is lost in every flow."""
    before = PrefillLearned(tokens=1.0, seconds=1 / 20_000, ready=2)
    after = estimate.throughput(readings(**SATURATED), before, DEFAULT, 60 * math.log(2), False)
    # 30,000 tokens a busy second; the replicas did 15,000 each: half way from gain 1 to 0.5
    assert after.gain == pytest.approx(0.75, rel=1e-4)
    assert after.throughput == pytest.approx(22_500.0, rel=1e-4)


def test_an_engine_that_got_slower_is_no_loss_of_the_window() -> None:
    """Every replica is busy and does 5,000 where 20,000 was known: V falls by the decay, its gain does not."""
    before = PrefillLearned(tokens=2_400_000.0, seconds=120.0, ready=2)
    slow = readings(prefill_rate=10_000.0, prefill_seconds=2.0, every_prefill_waiting=True)
    after = estimate.throughput(slow, before, DEFAULT, 15.0, False)
    assert after.gain == 1.0
    assert after.throughput == pytest.approx((2_400_000 * math.exp(-0.125) + 150_000) / (120 * math.exp(-0.125) + 30), rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "held_back", "ready"),
    [({}, True, 2), ({"every_prefill_waiting": False}, False, 2), ({}, False, 3), ({"prefill": replicas(2, ready=0)}, False, 0)],
)
def test_a_window_that_says_nothing_corrects_nothing(changes: dict[str, object], held_back: bool, ready: int) -> None:
    before = PrefillLearned(tokens=1.0, seconds=1 / 20_000, ready=ready)
    assert estimate.throughput(readings(**{**SATURATED, **changes}), before, DEFAULT, 60.0, held_back).gain == 1.0


def test_without_counters_of_prefill_the_queue_tells() -> None:
    before = PrefillLearned(queue=100_000.0, ready=2)
    tick = readings(
        prefill_rate=UNKNOWN, prefill_seconds=UNKNOWN, prompt_rate=50_000.0, queued_tokens=400_000.0, every_prefill_waiting=True
    )
    # 50,000 arrive, (400,000 - 100,000) / 15 = 20,000 stay: 30,000 done by 2
    assert estimate.throughput(tick, before, DEFAULT, 15.0, False).throughput == 15_000.0


@pytest.mark.parametrize(
    ("waiting", "running", "congested", "expected"),
    [
        (0.0, 100.0, False, False),
        (49.0, 100.0, False, False),
        (50.0, 100.0, False, True),
        (0.0, 100.0, True, True),
        (UNKNOWN, 9.0, False, True),
    ],
)
def test_decode_may_be_why_prefill_waits(waiting: object, running: float, congested: bool, expected: bool) -> None:
    assert estimate.held_back(readings(handoff_waiting=waiting, running=running), congested) is expected


def test_kv_per_request_needs_four_running() -> None:
    few = estimate.decode_numbers(readings(running=3.0, kv_tokens=9000.0), DecodeLearned(), BOUNDS, DEFAULT, 15.0)
    assert few.kv_per_request is None
    assert estimate.decode_numbers(readings(running=4.0, kv_tokens=9000.0), few, BOUNDS, DEFAULT, 15.0).kv_per_request == 2250.0


@pytest.mark.parametrize(
    ("c", "capacity", "seqs", "expected"),
    [
        (1000.0, 250_000.0, 256, 200.0),
        (500.0, 250_000.0, 256, 256.0),
        (None, 240_000.0, 256, 32.0),
        (None, None, 64, 64.0),
        (1e6, 1000.0, 8, 1.0),
    ],
)
def test_b_is_the_share_of_kv_over_kv_per_request(c: float | None, capacity: float | None, seqs: int, expected: float) -> None:
    decode = DecodeLearned(kv_per_request=c, kv_capacity=capacity)
    assert estimate.batch(decode, replace(BOUNDS, max_num_seqs=seqs), DEFAULT) == expected


@pytest.mark.parametrize(
    ("before", "itl", "running", "expected"),
    [
        (None, 0.03, 100.0, None),  # within the objective of 0.05: never broken, no limit
        (None, 0.1, 200.0, 50.0),  # 100 each, twice too slow
        (None, 1.0, 200.0, 50.0),  # at most by half a tick
        (40.0, 0.1, 200.0, 40.0),  # a limit that is there is not raised by a breach
        (40.0, 0.047, 80.0, 40.0),  # between margin and objective: stays
        (40.0, 0.04, 80.0, 40.0 * math.exp(15 / 600)),  # below the margin: grows by e in 600 s
        (199.0, 0.01, 10.0, None),  # grown past what KV allows: gone
    ],
)
def test_b_falls_while_itl_breaks_and_grows_back(before: float | None, itl: float, running: float, expected: float | None) -> None:
    tick = readings(itl=itl, running=running, kv_tokens=running * 1000)
    after = estimate.decode_numbers(tick, DecodeLearned(itl_batch=before), BOUNDS, DEFAULT, 15.0).itl_batch
    assert after == (None if expected is None else pytest.approx(expected, rel=1e-5))


def test_a_jump_may_have_to_stand_out_of_the_noise() -> None:
    noisy = PrefillLearned(prompt_rate=Rate(10.0, 100.0))  # ticks of 10 with a deviation of 10
    for deviations, mean in ((0.0, 28.0), (1.5, 28.0), (2.0, 19.0)):
        after = estimate.prefill_rates(
            readings(prompt_rate=28.0), noisy, Law(jump=1.3, jump_deviations=deviations), HALF
        ).prompt_rate
        assert after is not None and after.mean == pytest.approx(mean, rel=1e-4)
