"""The registry: every peer is there, has one headroom knob that moves it as it says, and a tuning budget drawn by seed."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from simulate_policies_views import PROFILE, latency, load_of, pods, traffic, view

from pd_simulate.policies.registry import ENTRIES, Entry, Inputs, Range, entry, per_bin
from pd_simulate.policies.static import Outcome
from pd_simulate.view import Targets
from pd_simulate.workload import Workload

PEERS = {
    "static-best",
    "oracle",
    "hpa-utilization",
    "hpa-concurrency-kv",
    "dynamo-throughput",
    "dynamo-latency",
    "dynamo-load",
    "dynamo-sla",
    "dynamo-predictive",
    "dynamo-sla-predictive",
    "llmd-tokens-shipped",
    "llmd-tokens-fast",
    "llmd-slo",
    "wva-v2",
    "aibrix-kpa",
    "aibrix-apa",
    "heteroscale",
    "tokenscale",
    "tokenscale-convertible",
    "chiron",
    "sageserve",
    "kthena-ratio",
}


def load() -> Workload:
    return load_of(np.arange(0.0, 600.0, 0.1), 800, 400, 600.0)


def inputs() -> Inputs:
    def run(p: int, d: int) -> Outcome:
        flow = min(10.0, p * 9.0, d * 1.2)
        return Outcome(flow / 10.0, flow, float(p + d))

    return Inputs(PROFILE, 32, 0.050, load(), load(), run, run)


def drive(made: Entry, knob: float) -> list[Targets]:
    """Ten minutes of ticks on one recorded load: what the pools show does not react to the answers."""
    policy = made.build(inputs(), knob)
    answers, desired = [], {"prefill": 3, "decode": 8}
    for step in range(int(600 / policy.tick)):
        at = step * policy.tick
        replicas = pods("prefill", 1, first=2) + pods(
            "prefill", 2, running=1, waiting=2, running_tokens=800, waiting_tokens=4_000, kv_used=80_000, busy=0.6
        )
        decodes = pods("decode", 4, first=4) + pods("decode", 4, running=30, running_tokens=30_000, kv_used=90_000, busy=0.95)
        seen = view(at, replicas + decodes, desired=dict(desired), budget=32, maximum={"prefill": 31, "decode": 31},
                    counters=traffic(at, 10.0, 800, 400), ttft=latency(0.26), itl=latency(0.025))  # fmt: skip
        answers.append(policy.decide(seen))
    return answers


def test_every_peer_is_there() -> None:
    assert set(ENTRIES) >= PEERS
    with pytest.raises(ValueError, match=r"policy 'x': accepted are static-best, oracle"):
        entry("x")


@pytest.mark.parametrize("name", sorted(PEERS))
def test_entry_is_complete(name: str) -> None:
    made = entry(name)
    assert len(made.knobs) == len(set(made.knobs)) == 5
    every = [*made.lower[::-1], *made.knobs]
    assert every in (sorted(every), sorted(every, reverse=True)) and len(every) == 7
    assert min(made.knobs) <= made.default <= max(made.knobs)
    assert made.knob not in made.tunables
    assert made.build(inputs()).name == name


@pytest.mark.parametrize("name", sorted(PEERS))
def test_deterministic_and_inside_bounds(name: str) -> None:
    first, second = drive(entry(name), entry(name).default), drive(entry(name), entry(name).default)
    assert first == second
    assert all(1 <= t.prefill <= 31 and 1 <= t.decode <= 31 for t in first)


@pytest.mark.parametrize("name", sorted(PEERS))
def test_more_headroom_never_asks_for_less(name: str) -> None:
    made = entry(name)
    asked = [sum(t.prefill + t.decode for t in drive(made, knob)) for knob in (*made.lower[::-1], *made.knobs)]
    assert asked == sorted(asked)
    assert asked[-1] > asked[0]


@pytest.mark.parametrize("name", sorted(PEERS))
def test_tuning_budget_is_drawn_by_seed_and_builds(name: str) -> None:
    made = entry(name)
    drawn = [made.draw(Random(7)) for _ in range(2)]
    assert drawn[0] == drawn[1]
    random = Random(11)
    for _ in range(20):
        settings = made.draw(random)
        assert set(settings) == set(made.tunables)
        made.build(inputs(), None, settings)


def test_settings_and_inputs_are_checked() -> None:
    with pytest.raises(ValueError, match="policy chiron: setting 'ibp'; accepted: none"):
        entry("chiron").build(inputs(), None, {"ibp": 0.5})
    with pytest.raises(ValueError, match="policy oracle: input future is missing"):
        entry("oracle").build(Inputs(PROFILE))


def test_ranges() -> None:
    random = Random(1)
    logs = [Range(1.0, 100.0, log=True).draw(random) for _ in range(400)]
    assert 0.4 < sum(1 for v in logs if isinstance(v, float) and v < 10) / 400 < 0.6
    assert Range(1.0, 9.0, whole=True).draw(random) in [float(v) for v in range(1, 10)]
    assert Range(choices=("a",)).draw(random) == "a"


def test_tokens_per_bin() -> None:
    two = Workload("two", np.array([0.5, 61.0]), np.array([600, 1_200]), np.array([1, 1]), 120.0)
    assert per_bin(two, 60.0) == [10.0, 20.0, 0.0]
