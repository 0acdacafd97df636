"""Pool status: each condition from its cause, decisions that stay told, and no change in a world that does not change (I2)."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from builders import NOW, conditions
from scaling_builders import BOUNDS, learned, readings, replicas

from pd_operator.api.conditions import PoolType, merge
from pd_operator.api.pool import PDPoolStatus
from pd_operator.core.names import Role
from pd_operator.core.pool_status import digest, pool_scaling
from pd_operator.core.pools import Mode, PoolPlan
from pd_operator.core.scaled import LeadTime, Scaled
from pd_operator.core.scaling.bounds import Bounds
from pd_operator.core.scaling.decide import decide
from pd_operator.core.scaling.learned import Learned
from pd_operator.core.scaling.readings import UNKNOWN, Readings

LEAD = {"prefill": LeadTime(31.0, 44.0, 2), "decode": LeadTime(31.0, 44.0, 2)}
ASKED = PoolPlan("decode", 2, 2, create=False, scale=False)


def tick(given: Readings, before: Learned | None = None, now: float = 1000.0, bounds: Bounds = BOUNDS, unknown: str = "") -> Scaled:
    """What one tick finds."""
    return Scaled(now, decide(given, before or learned(), bounds, now), unknown, lead=dict(LEAD))  # type: ignore[arg-type]


def told(
    scaled: Scaled | None,
    previous: dict[str, Any] | None = None,
    *,
    mode: Mode = "Auto",
    mine: PoolPlan = ASKED,
    role: Role = "decode",
    short: int = 0,
) -> dict[str, Any]:
    """The scaling part of a status, as it is written; checked against the schema and the reference of reasons."""
    previous = previous or {}
    status = pool_scaling(mode, mine, scaled, previous, role, short)
    status["conditions"] = merge(previous.get("conditions", []), status["conditions"], 1, NOW)
    read = PDPoolStatus.model_validate(status).model_dump(by_alias=True, exclude_unset=True, mode="json")
    assert read.keys() == status.keys() and len(status.get("lastDecision", {}).get("message", "")) <= 1024
    assert len(status.get("learned", {}).get("leadTime", "")) <= 32
    assert set(conditions(status)) == set(PoolType)
    return status


def active(status: dict[str, Any]) -> tuple[str, str]:
    found = conditions(status)["ScalingActive"]
    return found["status"], found["reason"]


def limited(status: dict[str, Any]) -> tuple[str, str]:
    found = conditions(status)["ScalingLimited"]
    return found["status"], found["reason"]


LOST = readings(running=UNKNOWN, handoff_waiting=UNKNOWN)
NO_SERIES = readings(running=UNKNOWN, handoff_waiting=UNKNOWN, itl=UNKNOWN)
WHY = "running: podScrape: pod chat-d-0 has no sample for 16 s"


@pytest.mark.parametrize(
    ("mode", "scaled", "expected"),
    [
        ("Static", None, ("False", "Static")),
        ("Static", tick(readings()), ("False", "Static")),
        ("External", tick(readings()), ("False", "External")),
        ("External", None, ("False", "External")),
        ("Auto", None, ("False", "NotScraped")),
        ("Auto", tick(LOST, unknown=WHY), ("False", "SignalsUnknown")),
        ("Auto", tick(NO_SERIES, unknown=WHY), ("False", "NoSeries")),
        ("Advisory", tick(LOST, unknown=WHY), ("False", "SignalsUnknown")),
        ("Advisory", tick(readings()), ("False", "Advisory")),
        ("Auto", tick(readings()), ("True", "Deciding")),
        ("Auto", tick(readings(itl=UNKNOWN), unknown="itl: gone"), ("True", "Deciding")),  # a decision does not need it
    ],
)
def test_scaling_active(mode: Mode, scaled: Scaled | None, expected: tuple[str, str]) -> None:
    assert active(told(scaled, mode=mode)) == expected


def test_unknown_names_the_signals_and_where_they_were_looked_for() -> None:
    message = conditions(told(tick(LOST, unknown=WHY)))["ScalingActive"]["message"]
    assert message == f"the number is kept: not known: running, handoff_waiting; {WHY}"


def test_a_throughput_that_was_never_seen_is_unknown_as_well() -> None:
    """All signals are read, and the need of prefill cannot be told before one prompt was computed."""
    scaled = tick(readings(prefill_rate=0.0, prefill_seconds=0.0), Learned())
    found = conditions(told(scaled, role="prefill"))["ScalingActive"]
    assert (found["status"], found["reason"]) == ("False", "SignalsUnknown") and "throughput" in found["message"]


def test_unknown_stays_told_beside_a_limit() -> None:
    tight = replace(BOUNDS, max_gpus=3)
    scaled = tick(replace(LOST, decode=replicas(4)), bounds=tight, unknown=WHY)
    assert scaled.decision.decode.reason.value == "MaxGPUs"
    status = told(scaled)
    assert active(status) == ("False", "SignalsUnknown") and limited(status) == ("True", "MaxGPUs")


MAX = replace(ASKED, number=9, desired=2, limit="MaxReplicas", limit_message="9 replicas are asked for: maxReplicas is 2")
PLENTY = readings(running=900.0, handoff_waiting=0.0, kv_tokens=900_000.0)


@pytest.mark.parametrize(
    ("scaled", "changes", "expected"),
    [
        (tick(readings(running=330.0, kv_tokens=330_000.0)), {}, ("False", "AsExpected")),
        (tick(readings()), {"short": 1}, ("True", "NoCapacity")),
        (tick(readings()), {"mine": MAX}, ("True", "MaxReplicas")),
        (tick(readings()), {"mine": MAX, "mode": "External"}, ("True", "MaxReplicas")),
        (tick(PLENTY, bounds=replace(BOUNDS, decode=replace(BOUNDS.decode, maximum=3))), {}, ("True", "MaxReplicas")),
        (tick(PLENTY, bounds=replace(BOUNDS, max_gpus=4)), {}, ("True", "MaxGPUs")),
        (tick(replace(PLENTY, decode=replicas(2, ready=1, blocked=1))), {}, ("True", "NoCapacity")),
        (tick(readings(running=10.0, kv_tokens=10_000.0)), {}, ("True", "Cooldown")),
        (tick(readings(running=10.0, kv_tokens=10_000.0)), {"mode": "External"}, ("False", "AsExpected")),
    ],
)
def test_scaling_limited(scaled: Scaled, changes: dict[str, Any], expected: tuple[str, str]) -> None:
    assert limited(told(scaled, **changes)) == expected


def test_gated_by_decode() -> None:
    """Handoffs wait longer than half of what the objective leaves, two ticks in a row: prefill may not rise."""
    full = readings(running=400.0, kv_tokens=400_000.0, handoff_waiting=60.0, queued_tokens=4_000_000.0, prompt_rate=60_000.0)
    first = tick(full)
    assert first.decision is not None
    second = tick(full, first.decision.learned, 1015.0)
    status = told(second, role="prefill", mine=replace(ASKED, role="prefill"))
    assert limited(status) == ("True", "GatedByDecode") and "congested" in conditions(status)["ScalingLimited"]["message"]


@pytest.mark.parametrize("mode", ["Auto", "Advisory", "External"])
@pytest.mark.parametrize("given", [readings(), readings(running=10.0, kv_tokens=10_000.0), LOST, NO_SERIES, PLENTY])
def test_a_hundred_ticks_of_the_same_readings_change_nothing(mode: Mode, given: Readings) -> None:
    """After the first write. The count is not followed: in a world that does not change nothing is written either."""
    bounds = replace(BOUNDS, prefill=replace(BOUNDS.prefill, minimum=2), decode=replace(BOUNDS.decode, minimum=2, maximum=2))
    state, before = learned(), {}
    seen: dict[str, list[dict[str, Any]]] = {"prefill": [], "decode": []}
    statuses: dict[str, dict[str, Any]] = {"prefill": {}, "decode": {}}
    for n in range(100):
        scaled = tick(given, state, 1000.0 + 15 * n, bounds, f"running: no sample for {16 + 15 * n} s")
        assert scaled.decision is not None
        state = scaled.decision.learned
        for role in ("prefill", "decode"):
            status = told(scaled, statuses[role], mode=mode, role=role)
            if status != statuses[role]:
                seen[role].append(status)
            statuses[role] = status
    assert before == {} and {role: len(s) for role, s in seen.items()} == {"prefill": 1, "decode": 1}


def test_noise_at_a_rounding_border_is_no_write() -> None:
    """Numbers that wander by less than a tenth about one at which two digits would turn."""
    random, state, status, writes = Random(7), learned(), {}, 0
    for n in range(200):
        v = 19_500.0 * random.uniform(0.97, 1.03)  # two digits turn at 19,500
        given = readings(prefill_rate=v, prefill_seconds=1.0, prompt_rate=v, kv_tokens=104_500.0 * random.uniform(0.97, 1.03))
        scaled = tick(given, state, 1000.0 + 15 * n, replace(BOUNDS, decode=replace(BOUNDS.decode, minimum=2)))
        assert scaled.decision is not None
        state = scaled.decision.learned
        after = told(scaled, status)
        writes += after["learned"] != status.get("learned")
        status = after
    assert writes == 1


def test_a_learned_number_that_moves_by_more_than_a_tenth_is_told() -> None:
    first = told(tick(readings()), role="prefill")
    assert first["learned"]["throughput"] == 20_000 and first["learned"]["leadTime"] == "p50 31s, p90 44s"
    base = learned()
    other = replace(base, prefill=replace(base.prefill, tokens=3_000_000.0, throughput=25_000.0))
    second = told(tick(readings(prefill_rate=25_000.0), other), first, role="prefill")
    assert second["learned"]["throughput"] == 25_000 and second["learned"]["state"] != first["learned"]["state"]


def test_lead_times_stay_told_while_no_replica_shows_one() -> None:
    first = told(tick(readings()))
    assert told(replace(tick(readings()), lead={}), first)["learned"] == first["learned"]


def test_digest_keeps_what_is_near() -> None:
    base = tick(readings()).decision
    assert base is not None
    text = digest(base.learned, "decode", base.decode)
    assert text == "1,0,1e+03,2.5e+05,-,300" or text.split(",")[1:] == ["0", "1e+03", "2.5e+05", "-", "300"]
    near = replace(base.learned, decode=replace(base.learned.decode, kv_per_request=1090.0))
    far = replace(base.learned, decode=replace(base.learned.decode, kv_per_request=1110.0))
    appeared = replace(base.learned, decode=replace(base.learned.decode, itl_batch=40.0))
    assert digest(near, "decode", base.decode, text) == text
    assert digest(far, "decode", base.decode, text) != text
    assert digest(appeared, "decode", base.decode, text) != text
    assert digest(base.learned, "decode", replace(base.decode, desired=9), text) != text
    for broken in ("", "x", "1,0,a,b,c,d", ",,,,,"):
        assert digest(base.learned, "decode", base.decode, broken) == text


def test_that_the_count_is_right_since_does_not_hide_the_decision_that_made_it_so() -> None:
    bounds = replace(BOUNDS, decode=replace(BOUNDS.decode, minimum=2))
    rose = told(tick(replace(PLENTY, decode=replicas(2)), bounds=bounds))
    made = rose["lastDecision"]
    assert made["reason"] == "Demand" and made["toReplicas"] > made["fromReplicas"] == 2
    number = made["toReplicas"]
    calm = tick(readings(running=number * 165.0, kv_tokens=number * 165_000.0, decode=replicas(number)), bounds=bounds)
    assert calm.decision is not None and calm.decision.decode.reason.value == "Hold"
    assert told(calm, rose)["lastDecision"] == made
    lost = told(tick(replace(LOST, decode=replicas(number)), bounds=bounds), rose)
    assert lost["lastDecision"]["reason"] == "SignalsUnknown"
    assert told(calm, lost)["lastDecision"]["reason"] == "Hold"


def test_inputs_that_are_unknown_say_so() -> None:
    decision = told(tick(LOST))["lastDecision"]
    assert decision["inputs"]["R"] == "unknown" and decision["inputs"]["c"] == "1000"
    assert decision["time"] == "1970-01-01T00:16:40Z"


def test_static_keeps_what_was_learned_for_the_day_it_scales_again() -> None:
    auto = told(tick(readings()))
    static = told(None, auto, mode="Static")
    assert static["learned"] == auto["learned"] and static["lastDecision"] == auto["lastDecision"]
    assert static["desiredReplicas"] == 2


@pytest.mark.parametrize("mode", ["Auto", "Advisory", "External"])
@pytest.mark.parametrize("given", [readings(), readings(running=10.0, kv_tokens=10_000.0), LOST, PLENTY])
def test_a_restart_tells_the_same_until_it_has_looked(mode: Mode, given: Readings) -> None:
    before = told(tick(given, unknown=WHY), mode=mode)
    assert told(None, before, mode=mode) == before


def test_a_restart_under_another_mode_says_what_is_so_now() -> None:
    auto = told(tick(readings()))
    assert active(told(None, auto, mode="Advisory")) == ("False", "NotScraped")
    assert active(told(None, auto, mode="External")) == ("False", "External")
    assert active(told(None, auto, mode="Static")) == ("False", "Static")
    assert limited(told(None, auto, mine=MAX)) == ("True", "MaxReplicas")
    assert limited(told(None, told(tick(readings()), mine=MAX))) == ("True", "MaxReplicas")  # until it has looked
