"""One tick as a whole: reasons, alerts, bottleneck, and the words for people."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from scaling_builders import BOUNDS, learned, long_ago, readings, replicas

from pd_operator.core.scaling.bounds import Bounds
from pd_operator.core.scaling.decide import decide
from pd_operator.core.scaling.decision import Alert, Bottleneck, Decision, Reason
from pd_operator.core.scaling.explain import explain
from pd_operator.core.scaling.law import DEFAULT, Law, with_headroom
from pd_operator.core.scaling.learned import Gate, Learned, Rate
from pd_operator.core.scaling.readings import UNKNOWN

NOW = 1000.0


def tick(state: Learned | None = None, bounds: Bounds = BOUNDS, p: int = 2, d: int = 2, **changes: Any) -> Decision:
    return decide(readings(p, d, **changes), learned() if state is None else state, bounds, NOW)


def congested(state: Learned | None = None) -> Learned:
    state = learned() if state is None else state
    return replace(state, decode=replace(state.decode, gates=(Gate("", congested=True, starts=10.0),)))


def reasons(decision: Decision) -> tuple[Reason, Reason]:
    return decision.prefill.reason, decision.decode.reason


def counts(decision: Decision) -> tuple[int, int]:
    return decision.prefill.desired, decision.decode.desired


def test_a_quiet_tick_holds() -> None:
    decision = tick(d=1)
    assert (counts(decision), reasons(decision)) == ((2, 1), (Reason.HOLD, Reason.HOLD))
    assert (decision.bottleneck, decision.congested, decision.alerts) == (Bottleneck.NONE, (), ())


def test_more_prompts_raise_prefill_in_one_tick() -> None:
    decision = tick(d=1, prompt_rate=80_000.0, queued_tokens=500_000.0)
    # four times as much is a jump and no noise: A is 80,000 at once, n = 80,000 / 12,000; up by four at most
    assert (counts(decision), reasons(decision)) == ((6, 1), (Reason.DEMAND, Reason.HOLD))
    assert decision.prefill.flow == pytest.approx(6.667, abs=0.001)
    assert decision.bottleneck is Bottleneck.PREFILL


def test_queued_prompts_alone_are_backlog() -> None:
    assert reasons(tick(d=1, queued_tokens=2_000_000.0)) == (Reason.BACKLOG, Reason.HOLD)


def test_a_congested_decode_grows_and_prefill_does_not() -> None:
    decision = tick(congested(), running=340.0, handoff_waiting=60.0, queued_tokens=5_000_000.0)
    assert (counts(decision), reasons(decision)) == ((2, 3), (Reason.GATED_BY_DECODE, Reason.BACKLOG))
    assert (decision.bottleneck, decision.congested) == (Bottleneck.DECODE, ("",))


def test_a_congested_decode_orders_once_while_the_order_starts() -> None:
    decision = tick(congested(), d=3, decode=replicas(3, ready=2, starting=1), running=340.0, handoff_waiting=60.0)
    assert counts(decision)[1] == 3


def test_a_late_first_token_while_decode_is_congested_adds_no_prefill() -> None:
    for ttft in (0.1, 60.0):
        decision = tick(congested(), ttft=ttft, running=340.0, handoff_waiting=60.0, queued_tokens=5_000_000.0)
        assert counts(decision)[0] == 2


@pytest.mark.parametrize("name", ["running", "handoff_waiting"])
def test_unknown_decode_holds_decode_and_silences_the_prompts_queue(name: str) -> None:
    decision = tick(p=2, d=4, **{name: UNKNOWN}, queued_tokens=5_000_000.0)
    assert (counts(decision), reasons(decision)) == ((2, 4), (Reason.HOLD, Reason.SIGNALS_UNKNOWN))
    assert decision.bottleneck is Bottleneck.UNKNOWN


@pytest.mark.parametrize("name", ["prompt_rate", "queued_tokens"])
def test_unknown_prefill_holds_prefill_and_not_decode(name: str) -> None:
    decision = tick(p=5, d=1, **{name: UNKNOWN}, running=340.0)
    assert (counts(decision), reasons(decision)) == ((5, 2), (Reason.SIGNALS_UNKNOWN, Reason.DEMAND))


def test_capacity_that_cannot_be_reached_stops_only_its_role() -> None:
    blocked = replicas(4, ready=2, blocked=2)
    decision = tick(p=2, decode=blocked, running=900.0, prompt_rate=20_000.0)
    assert (counts(decision), reasons(decision)) == ((2, 4), (Reason.HOLD, Reason.NO_CAPACITY))


def test_a_rollout_keeps_what_is_there() -> None:
    state = learned(p=long_ago(5, NOW), d=long_ago(5, NOW))
    assert reasons(tick(state, p=5, d=5, rollout=True)) == (Reason.ROLLOUT, Reason.ROLLOUT)
    assert counts(tick(state, p=5, d=5)) == (4, 4)


def test_a_replica_that_was_not_read_yet_keeps_what_is_there_and_stops_no_rise() -> None:
    state = learned(p=long_ago(5, NOW), d=long_ago(5, NOW))
    new = replicas(5).without(1)
    idle = tick(state, p=5, decode=new)
    assert (counts(idle), reasons(idle)) == ((5, 5), (Reason.HOLD, Reason.HOLD))
    assert idle.decode.limits[0].detail == "replicas that are ready and were not read yet: 1"
    assert counts(tick(state, p=5, decode=new, running=1200.0)) == (5, 6)
    capped = replace(BOUNDS, max_gpus=4)
    assert counts(tick(bounds=capped, running=900.0)) == (1, 2)  # prefill has to give one of its two to decode
    assert counts(tick(bounds=capped, running=900.0, prefill=replicas(2).without(1))) == (2, 2)


def test_a_congested_decode_keeps_both() -> None:
    state = congested(learned(p=long_ago(5, NOW), d=long_ago(5, NOW)))
    assert counts(tick(state, p=5, d=5)) == (5, 6)
    assert counts(tick(state, p=5, decode=replicas(6, ready=5, starting=1))) == (5, 6)


def test_caps() -> None:
    short = replace(BOUNDS, decode=replace(BOUNDS.decode, maximum=2))
    assert reasons(tick(bounds=short, running=900.0))[1] is Reason.MAX_REPLICAS
    capped = tick(bounds=replace(BOUNDS, max_gpus=4), running=900.0, prompt_rate=20_000.0)
    # flows 1.7 and 5.3 of 4 GPUs: one for prefill, three for decode; the third when prefill's is free
    assert (counts(capped), capped.decode.reason, capped.prefill.reason) == ((1, 2), Reason.MAX_GPUS, Reason.MAX_GPUS)


def test_a_step_down_by_a_cap_starts_the_minute() -> None:
    lowered = tick(bounds=replace(BOUNDS, max_gpus=6), p=4, d=4)
    assert sum(counts(lowered)) == 6
    stepped = [m.stepped_down for m in (lowered.learned.prefill.memory, lowered.learned.decode.memory)]
    assert stepped == [NOW if c < 4 else None for c in counts(lowered)]


STUCK = {"running": 0.0, "handoff_waiting": 50.0, "decode_starts": 0.0}


def test_a_backlog_with_nothing_running_is_a_broken_path_after_the_lease() -> None:
    state, alerts = learned(d=long_ago(3, NOW)), []
    for i in range(4):
        decision = decide(readings(2, 3, **STUCK), state, BOUNDS, NOW + 15 * i)
        state = decision.learned
        alerts.append(decision.alerts)
        assert (counts(decision), decision.decode.reason) == ((2, 3), Reason.HOLD)  # neither load nor idleness
    assert alerts == [(), (), (), (Alert.BROKEN_PATH,)]  # 45 s > 30 s
    mended = decide(readings(2, 3), state, BOUNDS, NOW + 60)
    assert (mended.alerts, mended.learned.decode.stuck_since) == ((), None)


def test_handoffs_that_wait_for_the_first_decode_are_no_broken_path() -> None:
    decision = tick(**STUCK, decode=replicas(1, ready=0, starting=1))
    assert decision.learned.decode.stuck_since is None


STALLED = {"prefill_rate": 0.0, "prefill_seconds": 0.0, "queued_tokens": 9_000_000.0}


def test_prompts_that_nothing_prefills_are_no_demand() -> None:
    decision = tick(**STALLED)
    assert (counts(decision)[0], decision.alerts, decision.prefill.backlog) == (2, (Alert.STALLED_ENGINE,), 0.0)


@pytest.mark.parametrize(
    "changes", [{"handoff_waiting": 40.0}, {"prefill": replicas(2, ready=0, starting=2)}, {"prefill_seconds": UNKNOWN}]
)
def test_prefill_that_is_full_of_held_kv_or_not_there_yet_is_not_stalled(changes: dict[str, Any]) -> None:
    assert tick(**{**STALLED, **changes}).alerts == ()


def test_nothing_is_decided_on_a_first_tick_without_a_past() -> None:
    decision = tick(Learned(), p=6, d=6)
    assert (counts(decision), reasons(decision)) == ((6, 6), (Reason.COOLDOWN, Reason.COOLDOWN))


def test_the_explanation_names_every_number() -> None:
    decision = tick(congested(), running=340.0, kv_tokens=340_000.0, handoff_waiting=60.0, queued_tokens=5_000_000.0)
    assert explain(decision, BOUNDS) == [
        "bottleneck: decode: what runs and waits does not fit into what is ready",
        "decode is congested in slice the only one: a handoff waits 6 s, of 1.9 s that it may",
        "prefill: stays at 2 (GatedByDecode)",
        "  need 1.667 = A 20000 / (0.6 x V 20000) (Q 5e+06 does not count): 6 wanted",
        "  inputs A 20000, V 20000, Q 5e+06, rho 0.6, T 60, N 2, lam 10, TTFT 0.3",
        "  limit GatedByDecode: 6 -> 2, decode is congested: the queue of prompts would only become held KV",
        "  would change it: handoffs that wait less than half of what they may, for some ticks",
        "decode: 2 -> 3 (Backlog)",
        "  need 2.353 = (R 340 + H 60) / (0.85 x b 200): 3 wanted",
        "  inputs R 340, H 60, b 200, rho 0.85, c 1000, C 2.5e+05, x 10, lam 10, OSL 300, ITL 0.03, N 2, wait 6, wait_budget 1.9",
        "  would change it: a need above 3.1, or a need of at most 2.1 for the whole down window",
    ]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"running": UNKNOWN}, "  would change it: the missing signals"),
        (STUCK, "alert: handoffs wait longer than the lease while decode runs nothing: the path is broken; this is no load"),
        (STALLED, "alert: prompts wait while prefill runs nothing: an engine stands still; this is no load"),
        (
            {"decode": replicas(3, ready=2, blocked=1), "running": 900.0},
            "  would change it: room for the replicas that cannot run",
        ),
    ],
)
def test_the_explanation_says_what_would_change_the_answer(changes: dict[str, Any], line: str) -> None:
    state = learned()
    state = replace(state, decode=replace(state.decode, stuck_since=NOW - 100 if changes is STUCK else None))
    assert line in explain(tick(state, **changes), BOUNDS)


def with_law(law: Law, state: Learned | None = None, **changes: Any) -> Decision:
    return decide(readings(**changes), learned() if state is None else state, BOUNDS, NOW, law)


def test_the_switches_of_the_gate() -> None:
    load = {
        "running": 400.0,
        "kv_tokens": 400_000.0,
        "handoff_waiting": 60.0,
        "prompt_rate": 80_000.0,
        "queued_tokens": 5_000_000.0,
    }
    assert counts(with_law(Law(), congested(), **load))[0] == 2
    held = with_law(Law(gate_holds=False), congested(), **load)  # what arrives may raise prefill, what waits may not
    assert (counts(held)[0], held.prefill.backlog) == (6, 0.0)
    off = with_law(Law(prefill_gate=False), congested(), **load)
    assert off.prefill.backlog == pytest.approx(5_000_000 / (60 * 20_000), rel=1e-3)


def test_a_late_first_token_adds_one_prefill_only_where_that_is_switched_on_and_decode_is_not_why() -> None:
    late = {"prompt_rate": 20_000.0, "ttft": 9.0}
    state = learned()
    state = replace(state, prefill=replace(state.prefill, late=2))
    assert counts(with_law(Law(latency_ticks=3), state, **late))[0] == 3
    assert counts(with_law(Law(), state, **late))[0] == 2
    blocked = congested(state)
    assert counts(with_law(Law(latency_ticks=3), blocked, **late, running=400.0, handoff_waiting=60.0))[0] == 2


def test_decode_stays_while_prefill_is_short_only_where_that_is_switched_on() -> None:
    state = learned(d=long_ago(2, NOW))
    assert with_law(Law(), state, queued_tokens=400_000.0).decode.desired == 1
    assert with_law(Law(hold_decode=5.0), state, queued_tokens=400_000.0).decode.reason is Reason.HOLD


def test_decode_keeps_what_its_bursts_need_where_the_law_looks_at_them() -> None:
    """150 run in the mean and one replica holds 230: with a deviation of 60 not its bursts, with one of 10 these too."""
    calm, bursts = (replace(learned(d=long_ago(2, NOW)).decode, running=Rate(150.0, v)) for v in (100.0, 3600.0))
    for law, decode, expected in ((Law(decode_tail=2.0), calm, 1), (Law(decode_tail=2.0), bursts, 2), (Law(), bursts, 1)):
        state = replace(learned(d=long_ago(2, NOW)), decode=decode)
        assert decide(readings(2, 2, running=150.0), state, BOUNDS, NOW, law).decode.desired == expected
    state = replace(learned(d=long_ago(2, NOW)), decode=bursts)
    idle = decide(readings(2, 2, running=0.0), state, BOUNDS, NOW, Law(decode_tail=2.0))
    assert idle.decode.desired == 1, "nothing runs: no burst is to come"


def test_the_spread_of_what_runs_is_learned_only_where_the_law_looks_at_it() -> None:
    state = learned()
    assert decide(readings(running=140.0), state, BOUNDS, NOW, Law()).learned.decode.running is None
    for running in (140.0, 140.0, 300.0):
        state = decide(readings(running=running), state, BOUNDS, (state.time or 0) + 15, Law(decode_tail=2.0)).learned
    # 15 s of 300: 1 - exp(-1/20) = 0.048771 of 160 and of 160 squared
    assert state.decode.running == Rate(147.803, 1248.53)
    held = decide(readings(running=UNKNOWN), state, BOUNDS, (state.time or 0) + 15, Law(decode_tail=2.0)).learned
    assert held.decode.running == state.decode.running


@pytest.mark.parametrize(
    ("headroom", "loads"), [(1.0, (0.6, 0.85)), (1.5, (0.4, 0.85 / 1.5)), (0.75, (0.8, 1.0)), (0.5, (1.2, 1.0))]
)
def test_headroom_changes_the_two_loads_and_nothing_else(headroom: float, loads: tuple[float, float]) -> None:
    made = with_headroom(DEFAULT, headroom)
    assert (made.prefill_load, made.decode_load) == pytest.approx(loads)
    assert replace(made, prefill_load=DEFAULT.prefill_load, decode_load=DEFAULT.decode_load) == DEFAULT
