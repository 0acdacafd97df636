"""Scenario: from a cell's settings to what `simulate` takes: the workload, scaled, cut, resampled and shocked, and the fleet."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from pd_simulate import fleet as fleets
from pd_simulate import profiles, synthetic, traces
from pd_simulate import workload as workloads
from pd_simulate.cell import Cell
from pd_simulate.fleet import Admission, Fleet, LeadTime, LinkChange, NodeLoss, Scrape, Slo
from pd_simulate.policies.capacity import decode_rate
from pd_simulate.units import InputError, seconds
from pd_simulate.view import Profile
from pd_simulate.workload import Workload

MIX = "mix"  # the three recorded traces at equal rates
DAY = "day"  # the rate of ServeGen's m-small over its first day in an hour, lengths of mooncake_conversation
DAY_HOUR, DAY_RATE = 3600.0, 4.0  # seconds, requests/s in the mean
NAMES = (*synthetic.NAMES, *traces.NAMES, MIX, DAY)
MIX_PARTS = ("azure_conv", "azure_code", "mooncake_conversation")
CLASSES = {"chat": fleets.CHAT, "long": fleets.LONG_CONTEXT, "strict": fleets.STRICT}
DEFAULT_PROFILE = "L8B-H200-TP1"
WARMUP = 600.0  # seconds, excluded from every number; a quarter of the window where that is shorter
BIN = 60.0  # seconds over which the peak is taken
PREFILL_BUSY, DECODE_BUSY = 0.70, 0.85  # load of a static split at the peak: rho_P and rho_D of facts/autoscaling.md section 7
SHOCK_LIMIT = 900.0  # seconds


@dataclass(frozen=True, slots=True)
class Window:
    """Seconds of the window: when measuring begins, when a shock begins and ends."""

    duration: float
    warmup: float
    shock_start: float
    shock_end: float


def window(duration: float) -> Window:
    """Warm-up, then a shock from a quarter of the rest on, for at most 15 minutes or 40 % of it."""
    warmup = min(WARMUP, duration / 4)
    rest = duration - warmup
    start = warmup + rest / 4
    return Window(duration, warmup, start, start + min(SHOCK_LIMIT, 0.4 * rest))


# Shocks of facts/autoscaling.md section 8 (T7). Of the workload:
_LOADS: dict[str, Callable[[Workload, Window, int], Workload]] = {
    "outputs-x3": lambda load, w, _: workloads.lengthened(load, w.shock_start, w.shock_end, output=3.0),
    "prompts-x4": lambda load, w, _: workloads.lengthened(load, w.shock_start, w.shock_end, prompt=4.0),
    "rate-x3": lambda load, w, seed: workloads.surged(load, w.shock_start, w.shock_end, 3.0, seed),
    "cancel-10pct": lambda load, _, seed: workloads.cancelling(load, 0.10, seed),
}
# Of the fleet:
_FAULTS: dict[str, Callable[[Fleet, Window], Fleet]] = {
    "decode-loss": lambda fleet, w: replace(fleet, losses=(NodeLoss(w.shock_start, "decode", 0.25),)),
    "link-div-4": lambda fleet, w: replace(fleet, link_changes=(LinkChange(w.shock_start, 0.25), LinkChange(w.shock_end, 1.0))),
    "signals-lost": lambda fleet, w: replace(fleet, outages=(fleets.Outage(w.shock_start, w.shock_start + 300.0),)),
}
SHOCKS = ("none", *_LOADS, *_FAULTS)


def slo(text: str) -> Slo:
    """An SLO: a class (chat, long, strict) or `ttft=2s,itl=50ms[,per-thousand=100ms]`. Raises InputError."""
    if text in CLASSES:
        return CLASSES[text]
    given = dict(re.findall(r"(?:^|,)([a-z-]+)=([^,]+)", text))
    if not {"ttft", "itl"} <= set(given) <= {"ttft", "itl", "per-thousand"}:
        raise InputError(f"slo {text!r}: accepted are {', '.join(CLASSES)}, or ttft=2s,itl=50ms,per-thousand=100ms")
    per_token = seconds(given.get("per-thousand", "0ms"), "slo per-thousand") / 1000
    return Slo(seconds(given["ttft"], "slo ttft"), per_token, seconds(given["itl"], "slo itl"))


def profile(name: str) -> Profile:
    """A profile that ships, by name, or the fit of a CSV of step times. Raises InputError."""
    if name in profiles.names():
        return profiles.get(name)
    if Path(name).is_file():
        try:
            return profiles.fit(Path(name)).profile
        except ValueError as exc:
            raise InputError(f"profile {name}: {exc}") from exc
    raise InputError(f"profile {name!r}: no such file; names that ship are {', '.join(profiles.names())}")


@lru_cache(maxsize=2)
def trace(name: str, digest: str = "") -> Workload:
    """A trace by built-in name or file. `digest` only keeps the cache apart. Raises InputError."""
    if name in synthetic.NAMES:
        return synthetic.make(name)
    if name == MIX:
        parts = [trace(part) for part in MIX_PARTS]
        rate = min(len(part) / part.duration for part in parts)
        scaled = [workloads.scaled(part, rate * part.duration / len(part), synthetic.SEED) for part in parts]
        return workloads.merged(MIX, [replace(part, prefix=None) for part in scaled])
    if name == DAY:
        return _day()
    if name not in traces.NAMES and not Path(name).is_file():
        raise InputError(f"trace {name!r}: no such file; built-in names are {', '.join(NAMES)}")
    try:
        return traces.load(name)
    except (ValueError, OSError) as exc:
        raise InputError(f"trace {name}: {exc}") from exc


def _day() -> Workload:
    """A day's shape, 24 times as fast: changes of the load are steeper than in truth, lead times are not shortened."""
    shape, lengths = trace("servegen_m-small"), trace("mooncake_conversation")
    rng = np.random.default_rng(synthetic.SEED)
    rows = np.sort(rng.choice(len(shape), size=min(len(shape), int(DAY_RATE * DAY_HOUR)), replace=False))
    drawn = rng.integers(0, len(lengths), len(rows))
    arrival = shape.arrival[rows] * DAY_HOUR / shape.duration
    return Workload(DAY, arrival, lengths.prompt[drawn], lengths.output[drawn], DAY_HOUR)


def busiest(load: Workload, span: float, engine: Profile, limit: Slo) -> Workload:
    """The stretch of `span` seconds that needs most GPUs in the mean; all of it when it is not longer."""
    if not 0 < span < load.duration:
        return load
    need = np.array([item.gpus for item in needs(load, engine, limit)])
    width = max(1, round(span / BIN))
    sums = np.convolve(need, np.ones(width), mode="valid")
    start = BIN * int(np.argmax(sums))
    return load.window(start, start + span)


@dataclass(frozen=True, slots=True)
class Need:
    """GPUs that a static split needs in one stretch of time, fractional."""

    prefill: float
    decode: float

    @property
    def gpus(self) -> float:
        """Both roles together."""
        return self.prefill + self.decode


def needs(load: Workload, engine: Profile, limit: Slo, width: float = BIN) -> list[Need]:
    """GPUs needed in each stretch of `width` seconds: prefill at 70 % busy, decode at 85 % of its rate inside the SLO."""
    uncached = np.maximum(load.prompt - load.cached, 1)
    work = engine.a + engine.b * uncached + engine.c * uncached.astype(float) ** 2
    found = []
    edges = np.searchsorted(load.arrival, np.arange(0.0, load.duration + width, width))
    for first, last in itertools.pairwise(edges):
        if last == first:
            found.append(Need(0.0, 0.0))
            continue
        rate = (last - first) / width
        each = decode_rate(engine, float(load.prompt[first:last].mean()), float(load.output[first:last].mean()), limit.itl)
        found.append(
            Need(
                engine.gpus_prefill * float(work[first:last].sum()) / width / PREFILL_BUSY,
                engine.gpus_decode * rate / each / DECODE_BUSY,
            )
        )
    return found


def workload(cell: Cell) -> tuple[Workload, Window]:
    """The cell's requests and the window's times. Equal for all policies: the seed is the only chance in it."""
    load, times = _base(replace(cell, policy="", knob=None, settings=(), admission="none", purpose="compare"))
    if cell.shock in _LOADS:
        load = _LOADS[cell.shock](load, times, cell.seed)
    return load, times


@lru_cache(maxsize=2)
def _base(cell: Cell) -> tuple[Workload, Window]:
    whole = load = trace(cell.trace, cell.digest)
    if cell.half != "all":
        load = load.half(1 if cell.half == "first" else 2)
    load = busiest(load, cell.span, *_engine(cell))
    # A half is scaled like the whole trace, so that training sees the same rates; a stretch of a long one by itself.
    factor = rate_factor(load if cell.span else whole, cell)
    if factor != 1.0:
        load = workloads.scaled(load, factor, synthetic.SEED)
    if len(load) > cell.requests:
        load = load.window(0.0, float(load.arrival[cell.requests]))
    if len(load) == 0:
        raise InputError(f"trace {cell.trace}: no requests in the window; accepted: a trace with requests in its {cell.half} half")
    drawn = workloads.resampled(load, cell.seed)
    return replace(drawn, name=cell.trace), window(load.duration)


def rate_factor(load: Workload, cell: Cell) -> float:
    """What to multiply the rate by, so that a static split needs `load` x `budget` GPUs in the busiest minute."""
    if cell.load <= 0:
        return 1.0
    return cell.load * cell.budget / max(need.gpus for need in needs(load, *_engine(cell)))


def _engine(cell: Cell) -> tuple[Profile, Slo]:
    return profile(cell.profile or DEFAULT_PROFILE), slo(cell.slo)


def fleet(cell: Cell, load: Workload, times: Window) -> Fleet:
    """The cell's fleet; it starts with the counts that a static split needs in the first five minutes."""
    engine, limit = _engine(cell)
    first = needs(load.window(0.0, min(300.0, load.duration)), engine, limit, width=min(300.0, load.duration))[0]
    counts = start_counts(first, engine, cell.budget)
    made = Fleet(
        profile=engine,
        prefill=counts[0],
        decode=counts[1],
        maximum={"prefill": cell.budget // engine.gpus_prefill, "decode": cell.budget // engine.gpus_decode},
        budget=cell.budget,
        slo=limit,
        lead_prefill=LeadTime(cell.lead_time),
        lead_decode=LeadTime(cell.lead_time),
        scrape=Scrape(),
        admission=Admission(enabled=cell.admission == "ours", max_queue_time=max(limit.ttft, 0.5)),
        warmup=times.warmup,
    )
    return _FAULTS[cell.shock](made, times) if cell.shock in _FAULTS else made


def start_counts(need: Need, engine: Profile, budget: int) -> tuple[int, int]:
    """Whole replicas (P, D) for a need, at least one each, in proportion where they do not fit the budget.

    Raises InputError when not even one of each fits.
    """
    if engine.gpus_prefill + engine.gpus_decode > budget:
        raise InputError(f"budget {budget}: one P and one D of {engine.name} need {engine.gpus_prefill + engine.gpus_decode} GPUs")
    each_p, each_d = engine.gpus_prefill, engine.gpus_decode
    prefill, decode = max(1, int(np.ceil(need.prefill / each_p))), max(1, int(np.ceil(need.decode / each_d)))
    while prefill * each_p + decode * each_d > budget:
        if decode == 1 or (prefill > 1 and prefill * each_p * need.decode > decode * each_d * need.prefill):
            prefill -= 1
        else:
            decode -= 1
    return prefill, decode
