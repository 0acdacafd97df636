"""The adapter of our own law: what it reads of a View, what it does with lost scrapes, and that its records replay."""

from __future__ import annotations

from dataclasses import replace

from simulate_policies_views import latency, pods, traffic, view

from pd_operator.core.scaling.decision import Reason
from pd_operator.core.scaling.readings import Readings
from pd_simulate.policies.ours import STALE, Ours, note
from pd_simulate.replay import replay
from pd_simulate.view import ReplicaView, View


def seen(now: float, replicas: tuple[ReplicaView, ...] = (), **fields: object) -> View:
    """Two prefills, two decodes, ten requests a second of 800 and 400 tokens."""
    pools = replicas or (*pods("prefill", 2, waiting=1, waiting_tokens=800, held=2), *pods("decode", 2, running=30, kv_used=40_000))
    given = {"counters": traffic(now, 10.0, 800, 400), "itl": replace(latency(0.09), p50=0.02), **fields}
    return view(now, pools, **given)


def second(*views: View) -> tuple[Ours, Readings]:
    """Readings of the last view."""
    ours = Ours()
    for one in views[:-1]:
        ours.decide(one)
    return ours, ours.readings(views[-1])


def test_rates_are_differences_and_pools_are_sums() -> None:
    _, tick = second(seen(15.0), seen(30.0, router_queue_tokens=500))
    assert (tick.prompt_rate.value, tick.request_rate.value, tick.decode_starts.value) == (8000.0, 10.0, 10.0)
    assert (tick.queued_tokens.value, tick.handoff_waiting.value, tick.running.value) == (2100.0, 4.0, 60.0)
    assert (tick.kv_tokens.value, tick.kv_capacity.value, tick.output_tokens.value) == (80_000.0, 100_000.0, 400.0)
    assert tick.itl.value == 0.02  # the median: recompute in decode stalls some tokens, a batch slows all
    assert tick.every_prefill_waiting


def test_the_first_view_has_no_rates() -> None:
    _, tick = second(seen(15.0))
    assert not tick.prompt_rate.known
    assert tick.running.value == 60.0


def test_a_lost_scrape_is_the_last_sample_until_it_is_stale() -> None:
    lost = (*pods("prefill", 2), *pods("decode", 1, running=30), *pods("decode", 1, first=1, known=False))
    ours, tick = second(seen(15.0), seen(30.0, lost))
    assert tick.running.value == 60.0
    assert ours.readings(seen(15.0 + STALE, lost)).running.value == 60.0
    late = ours.readings(seen(16.0 + STALE, lost))
    assert not late.running.known
    assert late.handoff_waiting.known  # the other role's replicas answered


def test_a_lost_router_keeps_its_last_rates_until_they_are_stale() -> None:
    gone = {"counters_known": False, "counters": traffic(30.0, 10.0, 800, 400)}
    ours, _ = second(seen(15.0), seen(30.0), seen(45.0, counters_age=15.0, **gone))
    assert ours.readings(seen(75.0, counters_age=45.0, **gone)).prompt_rate.value == 8000.0
    assert not ours.readings(seen(76.0, counters_age=46.0, **gone)).prompt_rate.known


def test_draining_replicas_hold_kv_and_run_nothing_that_counts() -> None:
    pools = (*pods("prefill", 1, held=1), *pods("prefill", 1, "draining", first=1, held=5),
             *pods("decode", 1, running=30), *pods("decode", 1, "draining", first=1, running=9),
             *pods("decode", 1, "starting", first=2), *pods("decode", 2, "blocked", first=3))  # fmt: skip
    _, tick = second(seen(15.0, pools))
    assert (tick.handoff_waiting.value, tick.running.value) == (6.0, 30.0)
    assert (tick.decode.desired, tick.decode.ready, tick.decode.starting, tick.decode.blocked, tick.decode.draining) == (
        4,
        1,
        1,
        2,
        1,
    )


def test_handoffs_are_told_apart_by_slice() -> None:
    part_a = (*pods("prefill", 1, held=1), *pods("decode", 1, running=30))
    part_b = (*pods("prefill", 1, first=1, held=2), *pods("decode", 1, first=1, running=60))
    pools = (*part_a, *(replace(one, slice="b") for one in part_b))
    _, tick = second(seen(15.0, pools), seen(30.0, pools))
    assert [(s.name, s.waiting.value, round(s.starts.value, 2)) for s in tick.slices] == [("a", 1.0, 3.33), ("b", 2.0, 6.67)]


def test_headroom_divides_the_loads() -> None:
    ours = Ours(headroom=1.2)
    ours.decide(seen(15.0))
    assert (round(ours.made[0].law.prefill_load, 3), round(ours.made[0].law.decode_load, 3)) == (0.5, 0.708)


def test_records_replay_and_the_note_names_the_reasons() -> None:
    ours = Ours()
    for i in range(1, 5):
        targets = ours.decide(seen(15.0 * i))
    assert replay(ours.records).agreed == 4
    assert targets.note == note(ours.made[-1].decision)
    assert targets.note.startswith("prefill ") and "; decode " in targets.note
    assert ours.made[0].decision.prefill.reason is Reason.SIGNALS_UNKNOWN  # no rate yet
