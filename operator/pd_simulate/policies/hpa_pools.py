"""HPA policies: one HPA per pool on what a Kubernetes user has at hand: GPU utilization, or concurrency (P) and KV usage (D)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pd_simulate.policies.hpa import SYNC, Hpa, PodValues, per_pod
from pd_simulate.policies.signals import Pool, bounded, desired, kv_usage, pool
from pd_simulate.view import ReplicaView, Role, Targets, View


def values_of(group: Pool, read: Callable[[ReplicaView], float]) -> PodValues:
    """`read` of the ready pods; a lost scrape is a missing pod, a starting or blocked one is not ready."""
    known = group.known
    return PodValues(tuple(read(r) for r in known), len(group.ready) - len(known), len(group.starting))


def in_flight(replica: ReplicaView) -> float:
    """Requests on the engine, running or waiting."""
    return float(replica.running + replica.waiting)


@dataclass(slots=True)
class HpaPools:
    """Base: one per-pod metric and target for each pool, one Hpa each."""

    name: str
    prefill_read: Callable[[ReplicaView], float]
    prefill_target: float
    decode_read: Callable[[ReplicaView], float]
    decode_target: float
    tick: float = SYNC
    hpas: dict[Role, Hpa] = field(default_factory=lambda: {"prefill": Hpa(), "decode": Hpa()})

    def decide(self, view: View) -> Targets:
        """Both pools on their own; see `hpa.per_pod` and `Hpa.settle`."""
        prefill, p_note = self._one(view, "prefill", self.prefill_read, self.prefill_target)
        decode, d_note = self._one(view, "decode", self.decode_read, self.decode_target)
        return Targets(prefill, decode, f"{p_note}; {d_note}")

    def _one(self, view: View, role: Role, read: Callable[[ReplicaView], float], target: float) -> tuple[int, str]:
        metric = values_of(pool(view, role), read)
        current = desired(view, role)
        proposal = per_pod(current, metric, target)
        if proposal is None:
            return bounded(view, role, current), f"{role}: no metric, kept"
        count = self.hpas[role].settle(view.now, current, proposal, view.minimum[role], view.maximum[role])
        mean = sum(metric.values) / len(metric.values)
        return count, f"{role}: mean {mean:.3g} of {target:.3g} proposes {proposal}"


def hpa_utilization(target: float = 0.70) -> HpaPools:
    """HPA on GPU utilization (share of time with a kernel running, DCGM_FI_DEV_GPU_UTIL), `target` for both pools."""
    return HpaPools("hpa-utilization", lambda r: r.busy, target, lambda r: r.busy, target)


def hpa_concurrency(prefill_in_flight: float = 4.0, decode_kv: float = 0.70) -> HpaPools:
    """HPA on P requests in flight per pod and D KV usage (facts/autoscaling.md §8 policy 4)."""
    return HpaPools("hpa-concurrency-kv", in_flight, prefill_in_flight, kv_usage, decode_kv)
