"""Referee view: the View of a policy made from a tick of the Dynamo replay, and the policy object that its engine calls.

No wheel is needed here: a tick is a plain mapping (keys as ai-dynamo-runtime 1.4.2 gives them). What the replay does not say is
made from what any router knows (prompt lengths of the requests that came) or left unknown; each such number is named below.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pd_simulate.fleet import Fleet
from pd_simulate.view import Counters, Latency, Policy, ReplicaView, Role, Targets, View
from pd_simulate.workload import Floats, Workload

WINDOW = 60.0  # seconds of the latencies
ROLES: tuple[Role, Role] = ("prefill", "decode")
_NAN = float("nan")
Tick = Mapping[str, Any]


def latency(pairs: Sequence[tuple[float, float]]) -> Latency:
    """From (count, mean seconds) of the ticks of the window: the replay tells means only, so they stand for every percentile."""
    count = sum(n for n, _ in pairs)
    if count <= 0:
        return Latency(WINDOW, _NAN, _NAN, _NAN, _NAN, 0)
    mean = sum(n * value for n, value in pairs) / count
    return Latency(WINDOW, mean, mean, mean, mean, int(count))


def fit(asked: Targets, desired: Mapping[Role, int], fleet: Fleet) -> dict[Role, int]:
    """Bounds, then the larger rise (in GPUs) trimmed until the budget holds: the same rule as in the simulator."""
    wanted: dict[Role, int] = {"prefill": asked.prefill, "decode": asked.decode}
    counts = {role: max(fleet.minimum.get(role, 0), min(fleet.maximum.get(role, wanted[role]), wanted[role])) for role in ROLES}
    while sum(counts[role] * fleet.gpus(role) for role in ROLES) > fleet.budget:
        able = [role for role in ROLES if counts[role] > fleet.minimum.get(role, 0)]
        if not able:
            break
        worst = max(able, key=lambda role: ((counts[role] - desired[role]) * fleet.gpus(role), counts[role]))
        counts[worst] -= 1
    return counts


@dataclass(slots=True)
class Totals:
    """Counters kept over the ticks."""

    finished: float = 0.0
    finished_output: float = 0.0
    finished_prompt: float = 0.0
    output: float = 0.0

    def add(self, traffic: Mapping[str, Any]) -> None:
        """One tick's traffic. `shape_count`: requests that finished in it (TTFTs are theirs); a forward of one is a token."""
        finished = float(traffic.get("shape_count") or 0.0)
        self.finished += finished
        self.finished_output += finished * float(traffic.get("avg_osl") or 0.0)
        self.finished_prompt += finished * float(traffic.get("avg_isl") or 0.0)
        self.output += float(traffic.get("accept_length_forward_count") or 0.0)


def shared(whole: int, parts: int, index: int) -> int:
    """The share of part `index` when `whole` is spread evenly."""
    return whole // parts + (index < whole % parts)


def blurred(view: View) -> View:
    """The same view with no more in it than the replay tells, so that both simulators ask a policy the same question."""

    def flat(one: Latency) -> Latency:
        return replace(one, p50=one.mean, p90=one.mean, p95=one.mean)

    prefills = [r for r in view.replicas if r.role == "prefill"]
    ready = [r for r in prefills if r.state == "ready"]
    busy = sum(r.busy for r in ready) / max(1, len(ready))
    held, tokens = sum(r.held for r in prefills), sum(r.held_tokens for r in prefills)

    def seen(index: int, one: ReplicaView) -> ReplicaView:
        mine = (shared(held, len(ready), index), shared(tokens, len(ready), index)) if one.state == "ready" else (0, 0)
        running = int(one.waiting > 0 or busy > 0.5) if one.state == "ready" else 0
        used = min(one.kv_capacity, mine[1])
        return replace(one, running=running, running_tokens=0, held=mine[0], held_tokens=mine[1], kv_used=used, busy=busy)

    others = [r for r in prefills if r.state != "ready"]
    decodes = [r for r in view.replicas if r.role == "decode"]
    replicas = (*(seen(i, r) for i, r in enumerate(ready)), *(seen(0, r) for r in others), *decodes)
    return replace(
        view,
        replicas=replicas,
        ttft=flat(view.ttft),
        itl=flat(view.itl),
        prefill_latency=flat(view.prefill_latency),
        handoff_wait=latency([]),
    )


@dataclass(slots=True)
class Blurred:
    """A policy that is shown `blurred` views."""

    policy: Policy
    name: str = ""
    tick: float = 15.0

    def __post_init__(self) -> None:
        """Name and tick are the policy's."""
        self.name, self.tick = self.policy.name, self.policy.tick

    def decide(self, view: View) -> Targets:
        """The policy's answer."""
        return self.policy.decide(blurred(view))


@dataclass(slots=True)
class Scaling:
    """The `scaling_policy` of the replay around one of our policies: `initial_tick_ms`, `on_tick`.

    Requests are those of `load` in order of arrival: offered counts and their prompt tokens are the router's own. Prefill
    seconds are the profile's for the requests prefilled so far (the replay tells no busy time); percentiles are not known.
    """

    policy: Policy
    load: Workload
    fleet: Fleet
    desired: dict[Role, int] = field(init=False)
    totals: Totals = field(default_factory=Totals)
    samples: dict[tuple[Role, str], Mapping[str, Any]] = field(default_factory=dict)
    created: dict[tuple[Role, str], float] = field(default_factory=dict)
    ready: dict[tuple[Role, str], float] = field(default_factory=dict)
    held_since: dict[str, float] = field(default_factory=dict)
    recent: deque[tuple[float, Mapping[str, Any]]] = field(default_factory=deque)
    decisions: list[tuple[float, int, int]] = field(default_factory=list)
    last: tuple[float, float] = (0.0, 0.0)  # time and prefill seconds of the tick before
    gpu_seconds: float = 0.0  # of all states, up to the last tick of the window
    prompts: Floats = field(init=False)
    seconds: Floats = field(init=False)

    def __post_init__(self) -> None:
        """Cumulative prompt tokens and prefill seconds by order of arrival."""
        self.desired = {"prefill": self.fleet.prefill, "decode": self.fleet.decode}
        tokens = self.load.prompt.astype(np.float64)
        profile = self.fleet.profile
        each = np.maximum(profile.floor, profile.a + profile.b * tokens + profile.c * tokens**2)
        self.prompts = np.concatenate(([0.0], np.cumsum(tokens)))
        self.seconds = np.concatenate(([0.0], np.cumsum(each)))

    def initial_tick_ms(self) -> float:
        """The first tick."""
        return self.policy.tick * 1000.0

    def on_tick(self, tick: Tick) -> dict[str, float | int | None]:
        """One call of the engine: the counts to have and the time of the next tick (None: beyond the window)."""
        now = float(tick["now_ms"]) / 1000.0
        seen = self.view(tick)
        self.desired = fit(self.policy.decide(seen), self.desired, self.fleet)
        self.decisions.append((now, self.desired["prefill"], self.desired["decode"]))
        after = now + self.policy.tick
        return {
            "target_prefill": self.desired["prefill"],
            "target_decode": self.desired["decode"],
            "next_tick_ms": after * 1000.0 if after <= self.load.duration else None,
        }

    def view(self, tick: Tick) -> View:
        """The View at a tick; keeps samples, counters and the traffic of the last minute."""
        now = float(tick["now_ms"]) / 1000.0
        self._keep(now, tick)
        decodes = self._replicas(now, "decode", tick, (0, 0))
        handoffs = sum(r.waiting for r in decodes), sum(r.waiting_tokens for r in decodes)
        prefills = self._replicas(now, "prefill", tick, handoffs)
        counters = self._counters(now, prefills, decodes)
        replicas = (*self._with_busy(now, prefills, counters), *decodes)
        traffic = [one for _, one in self.recent]
        ttft = latency([(float(t.get("ttft_count") or 0), float(t.get("avg_ttft_ms") or 0) / 1000) for t in traffic])
        itl = latency([(float(t.get("itl_count") or 0), float(t.get("avg_itl_ms") or 0) / 1000) for t in traffic])
        slo, leads = self.fleet.slo, (self.fleet.lead_prefill.mean, self.fleet.lead_decode.mean)
        return View(
            now=now,
            replicas=replicas,
            counters=counters,
            counters_known=True,
            counters_age=0.0,
            ttft=ttft,
            itl=itl,
            prefill_latency=self._prefill_latency(now),
            handoff_wait=latency([]),
            desired=dict(self.desired),
            gpus={role: self.fleet.gpus(role) for role in ROLES},
            minimum=dict(self.fleet.minimum),
            maximum=dict(self.fleet.maximum),
            budget=self.fleet.budget,
            lead_time={"prefill": leads[0], "decode": leads[1]},
            slo_ttft=slo.ttft,
            slo_ttft_per_token=slo.ttft_per_token,
            slo_itl=slo.itl,
        )

    def _keep(self, now: float, tick: Tick) -> None:
        alive = {role: sum(len(tick[f"{state}_{role}_ids"]) for state in ("active", "starting", "draining")) for role in ROLES}
        self.gpu_seconds += (now - self.last[0]) * sum(alive[role] * self.fleet.gpus(role) for role in ROLES)
        for role in ROLES:
            for sample in tick[f"{role}_fpm_snapshots"]:
                self.samples[role, str(sample["worker_id"])] = sample
        self.totals.add(tick["traffic"])
        self.recent.append((now, tick["traffic"]))
        while self.recent and self.recent[0][0] <= now - WINDOW:
            self.recent.popleft()

    def _prefill_latency(self, now: float) -> Latency:
        """Mean prefill seconds of the requests of the last minute, as engines export them."""
        first, last = (int(np.searchsorted(self.load.arrival, at, side="right")) for at in (now - WINDOW, now))
        return (
            latency([(last - first, float(self.seconds[last] - self.seconds[first]) / (last - first))])
            if last > first
            else latency([])
        )

    def _replicas(self, now: float, role: Role, tick: Tick, handoffs: tuple[int, int]) -> list[ReplicaView]:
        found = []
        for state, key in (("ready", "active"), ("starting", "starting"), ("draining", "draining")):
            for index, number in enumerate(tick[f"{key}_{role}_ids"]):
                name = str(number)
                self.created.setdefault((role, name), 0.0 if now <= self.policy.tick else now)
                if state == "ready":
                    self.ready.setdefault((role, name), now)
                sample = self.samples.get((role, name), {})
                ready = len(tick[f"active_{role}_ids"])
                held = [shared(one, ready, index) if state == "ready" else 0 for one in handoffs]
                numbers = self._prefill(now, name, sample, held) if role == "prefill" else self._decode(sample)
                ready_at = self.ready.get((role, name))
                place = self.fleet.slices[0].name
                found.append(
                    ReplicaView(f"{role}-{name}", role, place, state, self.created[role, name], ready_at, **numbers)  # type: ignore[arg-type]
                )
        return found

    def _prefill(self, now: float, name: str, sample: Mapping[str, Any], held: Sequence[int]) -> dict[str, Any]:
        """The replay does not tell what a P holds: the handoffs that wait on D are spread evenly over the ready P."""
        self.held_since[name] = self.held_since.get(name, now) if held[0] else now
        running, waiting = int(sample.get("num_prefill_requests", 0)), int(sample.get("num_queued_prefill", 0))
        capacity = self.fleet.profile.prefill_kv_capacity
        used = int(sample.get("sum_prefill_tokens", 0)) + int(sample.get("sum_prefill_kv_tokens", 0)) + held[1]
        return {
            "running": running,
            "running_tokens": int(sample.get("sum_prefill_tokens", 0)),
            "waiting": waiting,
            "waiting_tokens": int(sample.get("sum_queued_prefill_tokens", 0)),
            "held": held[0],
            "held_tokens": held[1],
            "oldest_held": now - self.held_since[name],
            "kv_used": min(used, capacity),
            "kv_capacity": capacity,
        }

    def _decode(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        running, used = int(sample.get("num_decode_requests", 0)), int(sample.get("sum_decode_kv_tokens", 0))
        return {
            "running": running,
            "running_tokens": used,
            "waiting": int(sample.get("num_queued_decode", 0)),
            "waiting_tokens": int(sample.get("sum_queued_decode_kv_tokens", 0)),
            "kv_used": used,
            "kv_capacity": self.fleet.profile.kv_capacity,
            "busy": 1.0 if running else 0.0,
            "itl": float(sample.get("wall_time") or 0.0) if running else 0.0,
        }

    def _with_busy(self, now: float, prefills: list[ReplicaView], counters: Counters) -> list[ReplicaView]:
        """Utilization of P since the last tick: prefill seconds over replica seconds, the same for each (the replay tells none).

        Nor does it tell which P runs a prompt at the tick: one with work waiting does, and every one above a half busy.
        """
        before, worked = self.last
        self.last = now, counters.prefill_seconds
        ready = sum(1 for r in prefills if r.state == "ready")
        share = (counters.prefill_seconds - worked) / (max(1, ready) * max(1e-9, now - before))
        busy = max(0.0, min(1.0, share))
        return [
            replace(r, busy=busy, running=max(r.running, int(r.waiting > 0 or busy > 0.5))) if r.state == "ready" else r
            for r in prefills
        ]

    def _counters(self, now: float, on_prefill: list[ReplicaView], decodes: list[ReplicaView]) -> Counters:
        offered = int(np.searchsorted(self.load.arrival, now, side="right"))
        ahead = sum(r.waiting + r.running for r in on_prefill)
        prefilled = max(0, offered - ahead)
        computed = max(0.0, float(self.prompts[offered]) - sum(r.waiting_tokens + r.running_tokens for r in on_prefill))
        totals = self.totals
        return Counters(
            offered=offered,
            offered_tokens=int(self.prompts[offered]),
            offered_uncached=int(self.prompts[offered]),
            accepted=offered,
            prefilled=prefilled,
            prefill_tokens=int(computed),
            prefill_seconds=float(self.seconds[prefilled]),
            decode_starts=int(totals.finished) + sum(r.running for r in decodes),
            output_tokens=int(totals.output),
            finished=int(totals.finished),
            finished_output=math.floor(totals.finished_output + 0.5),
            finished_prompt=math.floor(totals.finished_prompt + 0.5),
        )
