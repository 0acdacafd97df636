"""Need: fractional replicas of each role, as flow (what arrives or runs) plus backlog (what waits). Symbols: DESIGN §7."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pd_operator.core.scaling.bounds import Bounds
from pd_operator.core.scaling.estimate import batch, forecast, known
from pd_operator.core.scaling.law import Law
from pd_operator.core.scaling.learned import DecodeLearned, PrefillLearned
from pd_operator.core.scaling.readings import Readings


@dataclass(frozen=True, slots=True)
class Need:
    """Need of one role. `missing` names the signals without which it cannot be told; `flow` is then None."""

    flow: float | None = None
    backlog: float = 0.0
    formula: str = ""
    inputs: dict[str, float | None] = field(default_factory=dict)
    missing: tuple[str, ...] = ()

    @property
    def total(self) -> float | None:
        """Replicas needed."""
        return None if self.flow is None else self.flow + self.backlog


def need_of_decode(
    readings: Readings, learned: DecodeLearned, prefill: PrefillLearned, bounds: Bounds, law: Law, stuck: bool
) -> Need:
    """n_D = (R + H) / (rho_D b). Handoffs that wait while nothing runs (`stuck`) are no load."""
    running, waiting = known(readings.running), known(readings.handoff_waiting)
    b = batch(learned, bounds, law)
    lam = prefill.request_rate.mean if prefill.request_rate else None
    inputs: dict[str, float | None] = {
        "R": running, "H": waiting, "b": b, "rho": law.decode_load, "c": learned.kv_per_request, "C": learned.kv_capacity,
        "x": learned.starts, "lam": lam, "OSL": learned.output, "ITL": known(readings.itl), "N": float(readings.decode.ready),
    }  # fmt: skip
    if running is None or waiting is None:
        names = [n for n, v in (("running", running), ("handoff_waiting", waiting)) if v is None]
        return Need(inputs=inputs, missing=tuple(names))
    slots = law.decode_load * b
    counted = 0.0 if stuck else waiting
    flow, told = running * _coming(lam, learned.starts, law), f"R {running:g}"
    if law.decode_flow > 1 and flow > running:
        told = f"R {running:g} x {flow / running:.2f} (lam / x)"
    little = _little(lam, learned.output, known(readings.itl)) if law.decode_little else None
    if little is not None and little > flow:
        flow, told = little, f"lam OSL ITL {little:.4g}"
    if law.backlog_damped:
        # G = R / x seconds in decode: H needs H G / T slots to be gone in T.
        drain = max(law.drain_time, bounds.decode.lead_time) if law.drain_lead_time else law.drain_time
        stay = running / learned.starts if learned.starts else drain
        counted *= min(1.0, stay / drain)
    formula = f"({told} + H {counted:.4g}) / ({law.decode_load:g} x b {b:.4g})"
    return Need(flow / slots, counted / slots, formula, inputs)


def tail_of_decode(learned: DecodeLearned, law: Law) -> float | None:
    """Requests that R reaches between two ticks: its mean and z standard deviations. None where the law has no such term."""
    if law.decode_tail <= 0 or learned.running is None:
        return None
    return learned.running.mean + law.decode_tail * math.sqrt(learned.running.variance)


def _coming(lam: float | None, starts: float | None, law: Law) -> float:
    """lam / x: decode will hold so many times what it holds, once prefill delivers all that arrives."""
    if law.decode_flow <= 1 or lam is None or not starts:
        return 1.0
    return min(law.decode_flow, max(1.0, lam / starts))


def _little(lam: float | None, output: float | None, itl: float | None) -> float | None:
    return None if lam is None or output is None or itl is None else lam * output * itl


def need_of_prefill(readings: Readings, learned: PrefillLearned, bounds: Bounds, law: Law, queue_counts: bool) -> Need:
    """n_P = A / (rho_P V) + Q / (T V); the second part only while decode takes what prefill makes (`queue_counts`)."""
    offered, queue, v = known(readings.prompt_rate), known(readings.queued_tokens), learned.throughput
    rate = learned.prompt_rate
    inputs: dict[str, float | None] = {
        "A": rate.mean if rate else None, "V": v, "Q": queue, "rho": law.prefill_load, "T": law.drain_time,
        "N": float(readings.prefill.ready), "lam": learned.request_rate.mean if learned.request_rate else None,
        "TTFT": known(readings.ttft),
    }  # fmt: skip
    missing = [n for n, s in (("prompt_rate", offered), ("queued_tokens", queue)) if s is None]
    if v is None and (queue or offered):
        missing.append("throughput")  # nothing was prefilled yet: the need cannot be told
    if missing:
        return Need(inputs=inputs, missing=tuple(missing))
    if v is None or rate is None:
        return Need(0.0, 0.0, "no request yet", inputs)
    a = rate.mean
    if law.forecast:
        a = max(a, forecast(rate, bounds.prefill.lead_time + bounds.tick, bounds.tick))
    a += law.tail * math.sqrt(rate.variance)
    drain = max(law.drain_time, bounds.prefill.lead_time) if law.drain_lead_time else law.drain_time
    backlog = (queue or 0.0) / (drain * v) if queue_counts else 0.0
    formula = f"A {a:.5g} / ({law.prefill_load:g} x V {v:.5g})"
    if queue:
        formula += f" + Q {queue:.5g} / ({drain:g} s x V)" if queue_counts else f" (Q {queue:.5g} does not count)"
    return Need(a / (law.prefill_load * v), backlog, formula, inputs)
