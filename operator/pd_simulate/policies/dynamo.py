"""Dynamo planner policies: throughput, latency, load and sla (load loop), predictive (throughput loop), and both together.

Source read: ai-dynamo 1.6.1 (state_machine.py, load_scaling.py, throughput_scaling.py, budget.py). While a replica of either pool
starts, both only observe (up to 1.5, the default here: in NVIDIA's replay it behaves as its own planner does there, see
docs/simulate/referee.md); from 1.6 on a fall may cancel what starts (`cancel_pending`), which did worse wherever it was tried.
Draining alone stops nothing: connectors/kubernetes.py counts terminating pods only when power aware (`wait_for_drain`).
"""

from __future__ import annotations

from dataclasses import dataclass

from pd_simulate.policies.dynamo_budget import Budget, asked
from pd_simulate.policies.dynamo_load import LoadLoop, LoadSettings
from pd_simulate.policies.dynamo_throughput import ThroughputLoop
from pd_simulate.policies.signals import Pool, RateWindow, pool
from pd_simulate.view import Profile, Targets, View

LOAD_TICK = 5.0


@dataclass(slots=True)
class Dynamo:
    """The planner with either loop or both; with both the throughput loop is a floor only."""

    name: str
    load: LoadLoop | None
    throughput: ThroughputLoop | None
    tick: float = LOAD_TICK
    cancel_pending: bool = False
    wait_for_drain: bool = False
    next_plan: float | None = None
    floor: tuple[int, int] = (0, 0)
    traffic: RateWindow | None = None

    def decide(self, view: View) -> Targets:
        """One tick: the throughput loop when its interval is over, then the load loop."""
        pools = pool(view, "prefill"), pool(view, "decode")
        ready = len(pools[0].ready), len(pools[1].ready)
        planned = self._plan(view, ready)
        if self.load is None:
            return self._throughput_only(view, pools, planned)
        return self._load(view, pools, ready, self.load)

    def _plan(self, view: View, ready: tuple[int, int]) -> tuple[int, int] | None:
        if self.throughput is None:
            return None
        self.throughput.observe(view)
        if self.next_plan is None:
            self.next_plan = view.now + self.throughput.interval
        if view.now < self.next_plan - 1e-9:
            return None
        self.next_plan += self.throughput.interval
        planned = self.throughput.plan(view, ready)
        if planned is not None:
            self.floor = Budget.of(view).clamp(*planned)
        return planned

    def _throughput_only(self, view: View, pools: tuple[Pool, Pool], planned: tuple[int, int] | None) -> Targets:
        if planned is None:
            return Targets(*asked(view), "between intervals, or no traffic data")
        ready = len(pools[0].ready), len(pools[1].ready)
        starting = bool(pools[0].starting or pools[1].starting)
        if self._blocked(pools, starting):
            return Targets(*asked(view), "scaling_in_progress")
        if starting:
            return self._reduce(view, ready, planned)
        p, d, why = Budget.of(view).guard(ready, planned)
        return Targets(p, d, why or f"planned {planned}")

    def _load(self, view: View, pools: tuple[Pool, Pool], ready: tuple[int, int], load: LoadLoop) -> Targets:
        if self.traffic is None:
            self.traffic = RateWindow(60.0)
        self.traffic.update(view)
        rates = self.traffic.rates(view.now)
        load.observe(pools, rates.isl if rates else None)
        starting = bool(pools[0].starting or pools[1].starting)
        if self._blocked(pools, starting):
            return Targets(*asked(view), "scaling_in_progress")
        workers = load.samples(pools[0]), load.samples(pools[1])
        if workers[0] is None or workers[1] is None:
            return Targets(*asked(view), "worker_count_mismatch")
        steps = load.step_prefill(workers[0], view, rates.hit_rate if rates else 0.0), load.step_decode(workers[1], view)
        proposal = (
            max(ready[0] + steps[0], self.floor[0], view.minimum["prefill"]),
            max(ready[1] + steps[1], self.floor[1], view.minimum["decode"]),
        )
        if starting:
            return self._reduce(view, ready, proposal if steps != (0, 0) else asked(view))
        p, d, why = Budget.of(view).guard(ready, proposal)
        return Targets(p, d, why or f"steps {steps[0]:+d} {steps[1]:+d}")

    def _blocked(self, pools: tuple[Pool, Pool], starting: bool) -> bool:
        draining = bool(pools[0].draining or pools[1].draining)
        return (draining and (self.wait_for_drain or starting)) or (starting and not self.cancel_pending)

    def _reduce(self, view: View, ready: tuple[int, int], proposal: tuple[int, int]) -> Targets:
        """While replicas start: a target below ready + starting counts only when it is no rise over what is ready."""
        result = []
        for wanted, serving, now in zip(proposal, ready, asked(view), strict=True):
            result.append(wanted if self.cancel_pending and wanted < serving else now)
        return Targets(result[0], result[1], "pending start: reductions only")


def dynamo_load(profile: Profile, target: str = "throughput", **settings: float) -> Dynamo:
    """Load loop in mode `target`: throughput, latency, load or sla."""
    return Dynamo(f"dynamo-{target}", LoadLoop(profile, load_settings(target, **settings)), None)


def dynamo_predictive(profile: Profile, kind: str = "arima", headroom: float = 1.0, interval: float = 180.0) -> Dynamo:
    """Throughput loop alone (the default of optimization_target sla)."""
    return Dynamo("dynamo-predictive", None, ThroughputLoop(profile, kind, interval, headroom))


def dynamo_combined(
    profile: Profile, kind: str = "arima", headroom: float = 1.0, interval: float = 180.0, **settings: float
) -> Dynamo:
    """sla load loop over the throughput loop's floor."""
    load = LoadLoop(profile, load_settings("sla", **settings))
    return Dynamo("dynamo-sla-predictive", load, ThroughputLoop(profile, kind, interval, headroom))


def load_settings(target: str, **settings: float) -> LoadSettings:
    """Settings of a mode; ValueError names the modes there are."""
    if target not in ("throughput", "latency", "load", "sla"):
        raise ValueError(f"target: {target!r} is not one of throughput, latency, load, sla")
    return LoadSettings(target=target, **settings)  # type: ignore[arg-type]
