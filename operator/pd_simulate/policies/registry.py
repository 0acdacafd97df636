"""Registry: every policy by name: how it is made, its one headroom knob, its tunables with ranges, the evidence for its formula."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Literal

from pd_operator.core.scaling.law import DEFAULT
from pd_simulate.policies import dynamo, hpa_pools, llmd_tokens
from pd_simulate.policies.aibrix import aibrix_apa, aibrix_kpa
from pd_simulate.policies.capacity import decode_rate, prefill_velocity
from pd_simulate.policies.chiron import Chiron
from pd_simulate.policies.heteroscale import HeteroScale, stress_ratio, target_rate
from pd_simulate.policies.kthena import Kthena
from pd_simulate.policies.llmd_slo import SloAware
from pd_simulate.policies.oracle import Oracle
from pd_simulate.policies.ours import Ours
from pd_simulate.policies.sageserve import SageServe
from pd_simulate.policies.static import Run, Static, best_split
from pd_simulate.policies.tokenscale import TokenScale, convertible_decoders
from pd_simulate.policies.wva import Wva, WvaSettings
from pd_simulate.view import Policy, Profile
from pd_simulate.workload import Workload

Evidence = Literal["source read", "code and digest", "digest", "own"]
Value = float | str


@dataclass(frozen=True, slots=True)
class Range:
    """One tunable: numbers from low to high (log-uniform when `log`, whole when `whole`), or one of `choices`."""

    low: float = 0.0
    high: float = 0.0
    log: bool = False
    whole: bool = False
    choices: tuple[str, ...] = ()

    def draw(self, random: Random) -> Value:
        """One value."""
        if self.choices:
            return random.choice(self.choices)
        value = self.low * (self.high / self.low) ** random.random() if self.log else random.uniform(self.low, self.high)
        return float(round(value)) if self.whole else value


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a policy may be given before the run. `training` and `run` concern the training half, `future` is for the oracle only.

    `run(prefill, decode)` simulates a fixed split on the training half; `stress` the same above capacity.
    """

    profile: Profile
    budget: int = 32
    slo_itl: float = 0.050
    training: Workload | None = None
    future: Workload | None = None
    run: Run | None = None
    stress: Run | None = None
    step_requests: int = 512  # prompt tokens a convertible decoder takes a step


Make = Callable[..., Policy]


@dataclass(frozen=True, slots=True)
class Entry:
    """One policy of the comparison. `knobs`: five values of `knob`, lowest headroom first; `default` is the source's own."""

    name: str
    make: Make = field(repr=False)
    knob: str
    knobs: tuple[float, ...]
    default: float
    evidence: Evidence
    tunables: Mapping[str, Range] = field(default_factory=dict)
    needs: tuple[str, ...] = ()  # fields of Inputs that must be given

    @property
    def lower(self) -> tuple[float, float]:
        """Two values below the sweep, lowest headroom last: the ratio of its first two goes on."""
        first, second = self.knobs[:2]
        return round(first * first / second, 4), round(first * (first / second) ** 2, 4)

    def build(self, inputs: Inputs, knob: float | None = None, settings: Mapping[str, Value] | None = None) -> Policy:
        """A fresh policy. Raises ValueError that names the field, the value and what is accepted."""
        for need in self.needs:
            if getattr(inputs, need) is None:
                raise ValueError(f"policy {self.name}: input {need} is missing; accepted: a value, see Inputs.{need}")
        given = dict(settings or {})
        for key in given:
            if key not in self.tunables:
                raise ValueError(f"policy {self.name}: setting {key!r}; accepted: {', '.join(self.tunables) or 'none'}")
        return self.make(inputs, **{self.knob: self.default if knob is None else knob, **given})

    def draw(self, random: Random) -> dict[str, Value]:
        """One random configuration of the tunables."""
        return {key: spread.draw(random) for key, spread in self.tunables.items()}


def _static(inputs: Inputs, attainment: float) -> Policy:
    assert inputs.run is not None
    p, d, _ = best_split(inputs.run, inputs.budget, attainment, inputs.profile.gpus_prefill, inputs.profile.gpus_decode)
    return Static(p, d, "static-best")


def _oracle(inputs: Inputs, utilization: float) -> Policy:
    assert inputs.future is not None
    return Oracle(inputs.future, inputs.profile, utilization)


def _ours(inputs: Inputs, headroom: float, **settings: Value) -> Policy:
    law = replace(DEFAULT, **settings)  # type: ignore[arg-type]
    return Ours(law, headroom, inputs.profile.max_num_seqs)


def means(load: Workload) -> tuple[float, float]:
    """Mean prompt and output tokens."""
    return float(load.prompt.mean()), float(load.output.mean())


def _heteroscale(
    inputs: Inputs, utilization: float, band: float = 0.10, up_cooldown: float = 180.0, down_cooldown: float = 600.0
) -> Policy:
    assert inputs.training is not None
    isl, osl = means(inputs.training)
    if inputs.stress is not None:
        ratio = stress_ratio(inputs.stress, 8)
    else:
        # Without a stress test: the ratio at which both pools have the same capacity for the mean request of the training half.
        ratio = decode_rate(inputs.profile, isl, osl, inputs.slo_itl) * isl / prefill_velocity(inputs.profile)
    rate = target_rate(inputs.profile, isl, osl, inputs.slo_itl, 1.0)
    return HeteroScale(ratio, rate, utilization, band, up_cooldown, down_cooldown)


def _tokenscale(inputs: Inputs, headroom: float, window_seconds: float = 15.0) -> Policy:
    return TokenScale(inputs.profile, headroom, window_seconds=window_seconds)


def _convertible(inputs: Inputs, headroom: float, window_seconds: float = 15.0, quantile: float = 0.99) -> Policy:
    assert inputs.training is not None
    tokens = per_bin(inputs.training, 1.0)
    profile = inputs.profile
    restricted = inputs.step_requests / (inputs.slo_itl + profile.prefill(inputs.step_requests))
    count = convertible_decoders(tokens, prefill_velocity(profile), restricted, quantile)
    return TokenScale(profile, headroom, max(1, min(count, inputs.budget // 4)), window_seconds=window_seconds)


def per_bin(load: Workload, seconds: float) -> list[float]:
    """Prompt tokens per second that arrive in each bin."""
    bins = [0.0] * (int(load.duration / seconds) + 1)
    for at, prompt in zip(load.arrival.tolist(), load.prompt.tolist(), strict=True):
        bins[min(len(bins) - 1, int(at / seconds))] += prompt / seconds
    return bins


def _sageserve(inputs: Inputs, high: float, interval: float = 3600.0, threshold: float = 1.5, utilization: float = 0.8) -> Policy:
    history = [v * 60.0 for v in per_bin(inputs.training, 60.0)] if inputs.training is not None else []
    return SageServe(inputs.profile, history, interval, threshold, high, utilization)


def _wva(
    inputs: Inputs, margin: float, kv_threshold: float = 0.80, up_threshold: float = 0.85, down_boundary: float = 0.70
) -> Policy:
    settings = WvaSettings(kv_threshold=kv_threshold, up_threshold=up_threshold, down_boundary=down_boundary, margin=margin)
    return Wva(inputs.profile, settings)


_IN_FLIGHT = Range(1.0, 16.0, log=True)
_KV = Range(0.4, 0.95)
_CONTEXT = Range(8_192, 131_072, log=True, whole=True)
_THRESHOLD_KNOBS = (1.5, 1.0, 0.75, 0.5, 0.25)
_UP_KNOBS = (0.8, 1.0, 1.2, 1.5, 2.0)
_LOAD = {
    "prefill_up_tokens": Range(2_048, 65_536, log=True, whole=True),
    "prefill_down_tokens": Range(128, 2_048, log=True, whole=True),
    "decode_up_kv": Range(50, 100),
    "decode_down_kv": Range(10, 50),
}
_PREDICTED: Mapping[str, Range] = {"kind": Range(choices=("constant", "kalman", "arima")), "interval": Range(30.0, 300.0)}


def _entries() -> tuple[Entry, ...]:
    return (*_baselines(), *_dynamo(), *_llmd(), *_others(), _own_law())


def _own_law() -> Entry:
    tunables = {
        "prefill_load": Range(0.5, 0.8),
        "decode_load": Range(0.7, 0.95),
        "drain_time": Range(15.0, 120.0, log=True),
        "down_window": Range(120.0, 600.0, log=True),
    }
    return Entry("ours", _ours, "headroom", (0.65, 0.8, 1.0, 1.2, 1.5), 1.0, "own", tunables)


def _baselines() -> tuple[Entry, ...]:
    return (
        Entry("static-best", _static, "attainment", (0.80, 0.90, 0.95, 0.98, 0.995), 0.95, "own", needs=("run",)),
        Entry("oracle", _oracle, "utilization", (1.1, 1.0, 0.9, 0.8, 0.65), 0.85, "own", needs=("future",)),
        Entry(
            "hpa-utilization",
            lambda i, target: hpa_pools.hpa_utilization(target),
            "target",
            (0.9, 0.8, 0.7, 0.55, 0.4),
            0.7,
            "source read",
        ),
        Entry(
            "hpa-concurrency-kv",
            lambda i, prefill_in_flight, decode_kv=0.7: hpa_pools.hpa_concurrency(prefill_in_flight, decode_kv),
            "prefill_in_flight",
            (12.0, 8.0, 4.0, 2.0, 1.0),
            4.0,
            "source read",
            {"decode_kv": _KV},
        ),
    )


def _dynamo() -> tuple[Entry, ...]:
    def mode(target: str) -> Make:
        return lambda i, **settings: dynamo.dynamo_load(i.profile, target, **settings)

    context = {"context_length": _CONTEXT}
    sla = {"down_sensitivity": Range(50.0, 95.0)}
    return (
        Entry("dynamo-throughput", mode("throughput"), "threshold_scale", _THRESHOLD_KNOBS, 1.0, "source read", context),
        Entry("dynamo-latency", mode("latency"), "threshold_scale", (2.0, 1.5, 1.0, 0.75, 0.5), 1.0, "source read", context),
        Entry("dynamo-load", mode("load"), "threshold_scale", _THRESHOLD_KNOBS, 1.0, "source read", _LOAD),
        Entry("dynamo-sla", mode("sla"), "slo_scale", (1.2, 1.0, 0.8, 0.6, 0.4), 1.0, "source read", sla),
        Entry(
            "dynamo-predictive",
            lambda i, **s: dynamo.dynamo_predictive(i.profile, **s),
            "headroom",
            _UP_KNOBS,
            1.0,
            "source read",
            _PREDICTED,
        ),
        Entry(
            "dynamo-sla-predictive",
            lambda i, **s: dynamo.dynamo_combined(i.profile, **s),
            "headroom",
            _UP_KNOBS,
            1.0,
            "source read",
            {**_PREDICTED, **sla},
        ),
    )


def _llmd() -> tuple[Entry, ...]:
    kv = {"decode_threshold": Range(0.4, 0.95)}
    return (
        Entry(
            "llmd-tokens-shipped",
            lambda i, **s: llmd_tokens.token_aware_shipped(i.profile, **s),
            "share",
            (1.5, 1.0, 0.65, 0.4, 0.2),
            1.0,
            "source read",
            {"theta": Range(0.3, 5.0, log=True), **kv},
        ),
        Entry(
            "llmd-tokens-fast",
            lambda i, **s: llmd_tokens.token_aware_fast(i.profile, **s),
            "share",
            (1.5, 1.0, 0.65, 0.4, 0.2),
            0.65,
            "source read",
            kv,
        ),
        Entry(
            "llmd-slo",
            lambda i, band, up=0.55, down=0.40: SloAware(band, up, down),
            "band",
            (1.6, 1.3, 1.0, 0.8, 0.6),
            1.0,
            "source read",
            {"up": Range(0.4, 0.9), "down": Range(0.1, 0.4)},
        ),
        Entry(
            "wva-v2",
            _wva,
            "margin",
            (0.8, 0.9, 1.0, 1.2, 1.5),
            1.0,
            "source read",
            {"kv_threshold": Range(0.6, 0.95), "up_threshold": Range(0.75, 0.95), "down_boundary": Range(0.4, 0.75)},
        ),
    )


def _others() -> tuple[Entry, ...]:
    cooldowns = {"band": Range(0.02, 0.2), "up_cooldown": Range(15.0, 180.0), "down_cooldown": Range(120.0, 900.0)}
    window = {"window_seconds": Range(15.0, 60.0)}
    in_flight = (12.0, 8.0, 4.0, 2.0, 1.0)
    return (
        Entry(
            "aibrix-kpa", lambda i, **s: aibrix_kpa(**s), "prefill_target", in_flight, 4.0, "source read", {"decode_target": _KV}
        ),
        Entry(
            "aibrix-apa", lambda i, **s: aibrix_apa(**s), "prefill_target", in_flight, 4.0, "source read", {"decode_target": _KV}
        ),
        Entry("heteroscale", _heteroscale, "utilization", (0.95, 0.85, 0.75, 0.6, 0.45), 0.75, "digest", cooldowns, ("training",)),
        Entry("tokenscale", _tokenscale, "headroom", _UP_KNOBS, 1.0, "digest", window),
        Entry(
            "tokenscale-convertible",
            _convertible,
            "headroom",
            _UP_KNOBS,
            1.0,
            "digest",
            {**window, "quantile": Range(0.9, 0.999)},
            ("training",),
        ),
        Entry("chiron", lambda i, threshold: Chiron(threshold), "threshold", (0.9, 0.75, 0.6, 0.45, 0.3), 0.6, "code and digest"),
        Entry(
            "sageserve",
            _sageserve,
            "high",
            (0.95, 0.9, 0.75, 0.6, 0.4),
            0.9,
            "code and digest",
            {"interval": Range(300.0, 3600.0, log=True), "threshold": Range(1.1, 5.0, log=True), "utilization": Range(0.5, 1.0)},
        ),
        Entry(
            "kthena-ratio",
            lambda i, prefill_target, low=0.25, high=2.0, decode_target=0.7: Kthena(low, high, prefill_target, decode_target),
            "prefill_target",
            in_flight,
            4.0,
            "source read",
            {"low": Range(0.1, 1.0, log=True), "high": Range(1.0, 8.0, log=True), "decode_target": _KV},
        ),
    )


ENTRIES: dict[str, Entry] = {entry.name: entry for entry in _entries()}


def entry(name: str) -> Entry:
    """A policy's entry; ValueError names those that exist."""
    if name not in ENTRIES:
        raise ValueError(f"policy {name!r}: accepted are {', '.join(ENTRIES)}")
    return ENTRIES[name]
