"""Sampling: what a scrape shows and when, the View made of it for a policy, and the rows of a result's timeline."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pd_simulate.decode import DecodeEngine
from pd_simulate.pools import ROLES, Pools
from pd_simulate.prefill import PrefillEngine
from pd_simulate.replica import Replica
from pd_simulate.serving import Serving
from pd_simulate.view import Counters, Latency, ReplicaView, Role, View
from pd_simulate.workload import Floats

WINDOW = 60.0  # seconds of a view's latencies
_NAN = float("nan")
_TALLIED = (
    "offered",
    "offered_tokens",
    "offered_uncached",
    "accepted",
    "rejected",
    "prefilled",
    "prefill_tokens",
    "decode_starts",
    "finished",
    "finished_output",
    "finished_prompt",
    "cancelled",
    "timed_out",
    "expired",
    "recomputed",
)


class Sampler:
    """Scrapes all replicas and the router at each interval; keeps the last sample of each."""

    def __init__(self, serving: Serving, pools: Pools, seed: int) -> None:
        self.serving = serving
        self.pools = pools
        self.fleet = serving.fleet
        self.clock = serving.clock
        self.seed = seed
        self.rng = np.random.default_rng(seed)
        self.rows: list[tuple[float, ...]] = []
        self._samples: dict[str, ReplicaView | None] = {}  # None: the last scrape was lost
        self._taken: dict[str, float] = {}
        self._busy: dict[str, tuple[float, float]] = {}  # name -> (time, busy seconds) of the sample before
        self._counters = Counters()
        self._counters_known = True
        self._counters_taken = 0.0
        nothing = Latency(WINDOW, _NAN, _NAN, _NAN, _NAN, 0)
        self._latencies: tuple[Latency, Latency, Latency, Latency] = (nothing,) * 4
        self._router = (0, 0)

    # -- scrape -------------------------------------------------------------------------------------------------------

    def scrape(self, _: object = None) -> None:
        """Sample all, schedule the next scrape, and show this one after its delay."""
        setting, now = self.fleet.scrape, self.clock.now
        replicas = {one.name: self._sample(one) for one in self.pools.replicas if one.state in ("ready", "draining")}
        self.rows.append(self._row())
        # Drawn per scrape, not from one stream: a policy with more replicas must not change what else is lost.
        draws = np.random.default_rng((self.seed, len(self.rows))).random(len(replicas) + 1).tolist()
        shown: dict[str, ReplicaView | None] = {}
        for draw, (name, sample) in zip(draws[1:], replicas.items(), strict=True):
            shown[name] = None if self._lost(sample.role, draw) else sample
        router = None if self._lost("router", draws[0]) else (self._count(), self._measure(), self._queue())
        if setting.delay > 0:
            self.clock.at(now + setting.delay, self._show, (now, shown, router))
        else:
            self._show((now, shown, router))
        gap = setting.interval + (self.rng.uniform(-setting.jitter, setting.jitter) if setting.jitter else 0.0)
        self.clock.at(now + gap, self.scrape, None)

    def _lost(self, what: str, draw: float) -> bool:
        now = self.clock.now
        return draw < self.fleet.scrape.loss or any(
            one.start <= now < one.end and one.what in ("all", what) for one in self.fleet.outages
        )

    def _show(
        self,
        scrape: tuple[
            float,
            dict[str, ReplicaView | None],
            tuple[Counters, tuple[Latency, Latency, Latency, Latency], tuple[int, int]] | None,
        ],
    ) -> None:
        taken, shown, router = scrape
        self._samples = shown
        for name in shown:
            self._taken[name] = taken
        self._counters_known = router is not None
        if router is not None:
            self._counters, self._latencies, self._router = router
            self._counters_taken = taken

    def _sample(self, replica: Replica) -> ReplicaView:
        now = self.clock.now
        before, busy = self._busy.get(replica.name, (replica.ready_at or now, 0.0))
        self._busy[replica.name] = (now, replica.busy())
        share = min(1.0, (replica.busy() - busy) / (now - before)) if now > before else 0.0
        name = self.fleet.slices[replica.slice].name
        state = "draining" if replica.state == "draining" else "ready"
        if isinstance(replica, PrefillEngine):
            return self._sample_prefill(replica, name, state, share)
        assert isinstance(replica, DecodeEngine)
        return self._sample_decode(replica, name, state, share)

    def _sample_prefill(self, one: PrefillEngine, where: str, state: str, busy: float) -> ReplicaView:
        oldest = min(one.held.values(), default=self.clock.now)
        return ReplicaView(
            one.name,
            "prefill",
            where,
            state,  # type: ignore[arg-type]
            one.created,
            one.ready_at,
            running=len(one.batch),
            running_tokens=one.running_tokens,
            waiting=one.queued,
            waiting_tokens=one.queued_tokens,
            held=len(one.held),
            held_tokens=one.held_tokens,
            oldest_held=self.clock.now - oldest,
            kv_used=one.kv_used,
            kv_capacity=one.kv_capacity,
            busy=busy,
        )

    def _sample_decode(self, one: DecodeEngine, where: str, state: str, busy: float) -> ReplicaView:
        used, _, itl = one.peek(self.clock.now)
        return ReplicaView(
            one.name,
            "decode",
            where,
            state,  # type: ignore[arg-type]
            one.created,
            one.ready_at,
            running=one.seated,
            running_tokens=used,
            waiting=one.waiting_count,
            waiting_tokens=one.waiting_tokens,
            kv_used=used,
            kv_capacity=one.kv_capacity,
            busy=busy,
            itl=itl,
        )

    # -- router's numbers ---------------------------------------------------------------------------------------------

    def _count(self) -> Counters:
        pools, tally = self.pools, self.serving.tally
        busy, tokens = pools.prefill_busy, pools.tokens
        for one in pools.replicas:
            if isinstance(one, PrefillEngine):
                busy += one.busy()
            elif isinstance(one, DecodeEngine):
                tokens += one.peek(self.clock.now)[1]
        return Counters(prefill_seconds=busy, output_tokens=tokens, **{name: getattr(tally, name) for name in _TALLIED})

    def _queue(self) -> tuple[int, int]:
        lanes = self.serving.router.lanes
        return sum(lane.queued for lane in lanes), sum(lane.queued_tokens for lane in lanes)

    def _measure(self) -> tuple[Latency, Latency, Latency, Latency]:
        since, now = self.clock.now - WINDOW, self.clock.now
        serving = self.serving
        found = []
        for pairs in (serving.ttft, serving.prefill_latency, serving.handoff_wait):
            recent = [pair for pair in pairs if pair[0] >= since]
            pairs[:] = recent
            found.append(_latency(np.array([value for time, value in recent if time <= now])))
        gaps = [one.recent(since) for one in self.pools.replicas if isinstance(one, DecodeEngine)]
        values = np.concatenate([one[0] for one in gaps]) if gaps else np.zeros(0)
        weights = np.concatenate([one[1] for one in gaps]) if gaps else np.zeros(0)
        return found[0], _weighted(values, weights), found[1], found[2]

    # -- view and timeline --------------------------------------------------------------------------------------------

    def view(self) -> View:
        """What the policy sees now."""
        now, fleet, pools = self.clock.now, self.fleet, self.pools
        ttft, itl, prefill, handoff = self._latencies
        return View(
            now=now,
            replicas=tuple(self._seen(one) for one in pools.replicas),
            counters=self._counters,
            counters_known=self._counters_known,
            counters_age=now - self._counters_taken,
            ttft=ttft,
            itl=itl,
            prefill_latency=prefill,
            handoff_wait=handoff,
            desired=dict(pools.desired),
            gpus={role: fleet.gpus(role) for role in ROLES},
            minimum=dict(fleet.minimum),
            maximum=dict(fleet.maximum),
            budget=fleet.budget,
            lead_time={role: self._lead(role) for role in ROLES},
            slo_ttft=fleet.slo.ttft,
            slo_ttft_per_token=fleet.slo.ttft_per_token,
            slo_itl=fleet.slo.itl,
            router_queue=self._router[0],
            router_queue_tokens=self._router[1],
        )

    def _lead(self, role: Role) -> float:
        measured = self.pools.leads[role]
        given = self.fleet.lead_prefill if role == "prefill" else self.fleet.lead_decode
        return float(np.percentile(measured, 90)) if measured else given.mean

    def _seen(self, replica: Replica) -> ReplicaView:
        """The last sample, with the state that Kubernetes shows now; one that no scrape has met yet is known to be empty."""
        where = self.fleet.slices[replica.slice].name
        state = replica.state
        sample = self._samples.get(replica.name)
        taken = self._taken.get(replica.name, replica.ready_at if replica.ready_at is not None else self.clock.now)
        age = self.clock.now - taken
        if sample is not None:
            return replace(sample, state=state, ready_at=replica.ready_at, age=age)  # type: ignore[arg-type]
        capacity = getattr(replica, "kv_capacity", 0)
        known = replica.name not in self._samples
        return ReplicaView(
            replica.name,
            replica.role,
            where,
            state,  # type: ignore[arg-type]
            replica.created,
            replica.ready_at,
            age=age,
            known=known,
            kv_capacity=capacity,
        )

    def _row(self) -> tuple[float, ...]:
        """One row of result.TIMELINE: the truth, not what a scrape shows."""
        replicas, tally, now = self.pools.replicas, self.serving.tally, self.clock.now
        lives = ("ready", "starting", "draining")
        states = [sum(one.role == role and one.state == life for one in replicas) for role in ROLES for life in lives]
        prefills = [one for one in replicas if isinstance(one, PrefillEngine)]
        decodes = [one for one in replicas if isinstance(one, DecodeEngine)]
        orphans = sum(len(lane.orphans) for lane in self.serving.router.lanes)
        return (
            now,
            *states,
            sum(one.state == "blocked" for one in replicas),
            self._queue()[0],
            sum(one.queued for one in prefills),
            sum(one.queued_tokens for one in prefills),
            sum(len(one.batch) for one in prefills),
            sum(one.waiting_count for one in decodes) + orphans,
            sum(one.held_tokens for one in prefills),
            sum(len(one.running) for one in decodes),
            sum(one.peek(now)[0] for one in decodes),
            tally.offered,
            tally.finished,
        )


def _latency(values: Floats) -> Latency:
    if len(values) == 0:
        return Latency(WINDOW, _NAN, _NAN, _NAN, _NAN, 0)
    p50, p90, p95 = (float(one) for one in np.percentile(values, (50, 90, 95)))
    return Latency(WINDOW, float(values.mean()), p50, p90, p95, len(values))


def _weighted(values: Floats, weights: Floats) -> Latency:
    """The same with a weight per value (tokens streamed with that gap)."""
    total = float(weights.sum())
    if total <= 0:
        return Latency(WINDOW, _NAN, _NAN, _NAN, _NAN, 0)
    order = np.argsort(values)
    below = np.cumsum(weights[order])
    p50, p90, p95 = (float(values[order[np.searchsorted(below, share * total)]]) for share in (0.5, 0.9, 0.95))
    return Latency(WINDOW, float((values * weights).sum() / total), p50, p90, p95, int(total))
