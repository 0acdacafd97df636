"""Readings, bounds and hypothesis strategies for the tests of the scaling law."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from hypothesis import strategies as st

from pd_operator.core.scaling.bounds import Bounds, RoleBounds
from pd_operator.core.scaling.learned import DecodeLearned, Learned, Memory, PrefillLearned, Rate
from pd_operator.core.scaling.readings import UNKNOWN, Quality, Readings, Replicas, Signal, SliceHandoff, State

BOUNDS = Bounds(RoleBounds(1, 16), RoleBounds(1, 16), slo_ttft=2.0, slo_itl=0.05)


def replicas(count: int, **changes: Any) -> Replicas:
    """So many, all ready."""
    return replace(Replicas(count, count), **changes)


def readings(p: int = 2, d: int = 2, **changes: Any) -> Readings:
    """A quiet tick: 10 requests/s of 2,000 tokens at V 20,000, 100 running of 1,000 KV tokens. Numbers become known signals."""
    values: dict[str, Any] = {
        "prompt_rate": 20_000.0, "request_rate": 10.0, "queued_tokens": 0.0, "prefill_rate": 20_000.0, "prefill_seconds": 1.0,
        "running": 100.0, "handoff_waiting": 0.0, "decode_starts": 10.0, "kv_tokens": 100_000.0, "kv_capacity": 250_000.0,
        "output_tokens": 300.0, "itl": 0.03, "prefill_latency": 0.1, "ttft": 0.3,
        "prefill": replicas(p), "decode": replicas(d),
    }  # fmt: skip
    values |= changes
    return Readings(**{k: Signal.of(v) if isinstance(v, float) else v for k, v in values.items()})


def long_ago(current: int, now: float) -> Memory:
    """A memory whose whole down window wanted one replica fewer."""
    return Memory(peaks=((now - 299.0, current - 1),))


def learned(now: float = 985.0, p: Memory | None = None, d: Memory | None = None) -> Learned:
    """What the quiet tick has taught, long enough ago to have settled."""
    prefill = PrefillLearned(
        throughput=20_000.0, tokens=2_400_000.0, seconds=120.0, prompt_rate=Rate(20_000.0, 0.0, 20_000.0, 0.0),
        request_rate=Rate(10.0, 0.0, 10.0, 0.0), queue=0.0, ready=2, memory=p or Memory(),
    )  # fmt: skip
    decode = DecodeLearned(kv_per_request=1000.0, kv_capacity=250_000.0, output=300.0, starts=10.0, memory=d or Memory())
    return Learned(now, prefill, decode)


TOPS = {
    "prompt_rate": 1e7, "request_rate": 1e4, "queued_tokens": 1e8, "prefill_rate": 1e7, "prefill_seconds": 50.0, "running": 1e4,
    "handoff_waiting": 1e4, "decode_starts": 1e3, "kv_tokens": 1e8, "kv_capacity": 1e6, "output_tokens": 1e4, "itl": 1.0,
    "prefill_latency": 10.0, "ttft": 100.0,
}  # fmt: skip

SIGNALS = tuple(TOPS)


def _signal(random: Random, top: float) -> Signal:
    """Known in most cases, from idle to the top over all magnitudes; else unknown, NaN, infinite or negative."""
    if random.random() < 0.1:
        return random.choice(
            [UNKNOWN, Signal(State.VALUE, float("nan")), Signal(State.VALUE, float("inf")), Signal(State.VALUE, -1.0)]
        )
    value = 0.0 if random.random() < 0.2 else top * 10 ** -random.uniform(0, 6)
    return Signal.of(value, random.uniform(0, 100), random.choice(list(Quality)))


def _replicas(random: Random) -> Replicas:
    """Any state of a pool, torn ones too: what is there need not be what was asked for."""
    desired = random.randint(0, 40)
    if random.random() < 0.5:
        return Replicas(desired, desired)
    return Replicas(desired, random.randint(0, 40), *(random.choice([0, 0, 1, 4]) for _ in range(3)))


def _readings(random: Random) -> Readings:
    slices = [SliceHandoff(n, _signal(random, 1e4), _signal(random, 1e3)) for n in ("a", "b")[: random.randint(0, 2)]]
    return Readings(
        _replicas(random),
        _replicas(random),
        every_prefill_waiting=random.random() < 0.5,
        slices=tuple(slices),
        rollout=random.random() < 0.2,
        **{name: _signal(random, top) for name, top in TOPS.items()},
    )


def _bounds(random: Random) -> Bounds:
    roles = []
    for _ in range(2):
        least = random.randint(0, 5)
        roles.append(
            RoleBounds(least, random.randint(max(least, 1), 40), random.randint(1, 8), random.choice([0.0, 20.0, 120.0, 600.0]))
        )
    need = roles[0].minimum * roles[0].gpus + roles[1].minimum * roles[1].gpus
    cap = random.choice([None, need + random.randint(0, 100)])
    ttft, itl = random.choice([None, 0.1, 2.0]), random.choice([None, 0.03])
    return Bounds(roles[0], roles[1], cap, ttft, random.choice([0.0, 0.1]), itl)


# From a seed: drawing every number by hypothesis costs most of the time of a test and finds no more.
_SEEDS = st.integers(0, 2**32 - 1)


def any_readings() -> st.SearchStrategy[Readings]:
    """Any readings: known, idle, unknown, NaN, negative."""
    return _SEEDS.map(lambda seed: _readings(Random(seed)))


def any_bounds() -> st.SearchStrategy[Bounds]:
    """Bounds that some count satisfies."""
    return _SEEDS.map(lambda seed: _bounds(Random(seed)))
