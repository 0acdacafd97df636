"""Pools: replicas are created, become Ready, drain, end or are lost; what they cost in each state."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np

from pd_simulate.cache import PrefixCache
from pd_simulate.decode import DecodeEngine
from pd_simulate.fleet import LinkChange, NodeLoss, QuotaChange
from pd_simulate.link import Nic
from pd_simulate.losses import lose_decode, lose_prefill
from pd_simulate.prefill import PrefillEngine
from pd_simulate.replica import Replica
from pd_simulate.serving import Serving
from pd_simulate.view import Role, Targets

ROLES: tuple[Role, ...] = ("prefill", "decode")


def divide(total: int, weights: list[float]) -> list[int]:
    """`total` over the weights by largest remainder, at least one each while it lasts."""
    base = 1 if total >= len(weights) else 0
    rest = total - base * len(weights)
    whole = sum(weights)
    exact = [max(0.0, total * weight / whole - base) for weight in weights]
    scale = rest / sum(exact) if sum(exact) > 0 else 0.0
    shares = [base + int(value * scale + 1e-9) for value in exact]
    order = sorted(range(len(weights)), key=lambda i: (int(exact[i] * scale + 1e-9) - exact[i] * scale, i))
    for index in order[: total - sum(shares)]:
        shares[index] += 1
    return shares


class Pools:
    """Both roles over all slices. GPUs in use never exceed the quota: a replica beyond it waits, blocked, at no cost."""

    def __init__(self, serving: Serving, seed: int, duration: float) -> None:
        self.serving = serving
        self.fleet = serving.fleet
        self.clock = serving.clock
        # Streams of their own, so that one role's creations do not move the other's lead times or the losses.
        self.rngs = {name: np.random.default_rng((seed, number)) for number, name in enumerate(("losses", *ROLES))}
        self.duration = duration
        self.replicas: list[Replica] = []  # all but the gone ones
        self.desired: dict[Role, int] = {"prefill": self.fleet.prefill, "decode": self.fleet.decode}
        self.convertible = 0
        self.quota = self.fleet.budget
        self.gpu_seconds: dict[str, float] = defaultdict(float)
        self.leads: dict[Role, list[float]] = {"prefill": [], "decode": []}
        self.link_factor = {one.name: 1.0 for one in self.fleet.slices}
        self.clamps = 0
        self.drain_aborted = 0
        self.held_token_seconds = 0.0
        self.prefill_busy = 0.0  # of the gone ones
        self.tokens = 0  # streamed by the gone ones
        self._names = 0
        for role in ROLES:
            self._scale(role, ready=True)

    # -- scaling ------------------------------------------------------------------------------------------------------

    def apply(self, targets: Targets) -> tuple[dict[Role, int], bool]:
        """Clamp the policy's answer, then create and drain. Returns what was applied and whether it was clamped."""
        fleet = self.fleet
        asked: dict[Role, int] = {"prefill": targets.prefill, "decode": targets.decode}
        counts = {role: max(fleet.minimum.get(role, 0), min(fleet.maximum.get(role, asked[role]), asked[role])) for role in ROLES}
        if fleet.mode == "aggregated":
            counts["prefill"] = asked["prefill"] = 0
        self._fit(counts)
        clamped = counts != asked
        self.clamps += clamped
        self.desired = counts
        self.convertible = targets.convertible
        for role in ROLES:
            self._scale(role)
        self._mark_convertible()
        return dict(counts), clamped

    def _fit(self, counts: dict[Role, int]) -> None:
        """Trim the larger rise (in GPUs) until the budget holds; then the larger role, above its minimum."""
        gpus = {role: self.fleet.gpus(role) for role in ROLES}
        while sum(counts[role] * gpus[role] for role in ROLES) > self.fleet.budget:
            able = [role for role in ROLES if counts[role] > self.fleet.minimum.get(role, 0)]
            if not able:
                return
            worst = max(able, key=lambda role: ((counts[role] - self.desired[role]) * gpus[role], counts[role]))
            counts[worst] -= 1

    def _scale(self, role: Role, ready: bool = False) -> None:
        """Bring the slices to the desired counts. `ready`: at the start of a run there is no lead time."""
        shares = divide(self.desired[role], [lane.weight for lane in self.serving.router.lanes])
        for index, wanted in enumerate(shares):
            mine = [one for one in self.replicas if one.role == role and one.slice == index and one.state != "draining"]
            for _ in range(wanted - len(mine)):
                self._create(role, index, ready)
            for victim in self._victims(mine, len(mine) - wanted):
                self._retire(victim)
        self._unblock()

    @staticmethod
    def _victims(mine: list[Replica], count: int) -> list[Replica]:
        """Those that serve nothing yet first, the youngest of them; then those with the least on them."""

        def order(one: Replica) -> tuple[int, float]:
            if one.state == "ready":
                held = one.held_tokens if isinstance(one, PrefillEngine) else 0
                return 2, getattr(one, "load", 0) + held
            return (0 if one.state == "blocked" else 1), -one.created

        return sorted(mine, key=order)[: max(0, count)]

    def _create(self, role: Role, index: int, ready: bool) -> None:
        self._names += 1
        name = f"{role}-{self._names}"
        cache = self.serving.router.lanes[index].cache
        if self.fleet.prefix == "local":
            cache = PrefixCache(self.fleet.prefix_blocks, self.serving.workload.block)
        replica: Replica
        if role == "prefill":
            link, fleet = self.fleet.slices[index].link, self.fleet
            bandwidth = link.bandwidth * self.link_factor[fleet.slices[index].name]
            nic = Nic(self.clock, bandwidth, link.setup, self.serving.transferred)
            replica = PrefillEngine(self.serving, name, index, nic, cache)
        else:
            replica = DecodeEngine(self.serving, name, index, cache if self.fleet.mode == "aggregated" else None)
        self.replicas.append(replica)
        if ready:
            replica.ready_at = self.clock.now
            self._enter(replica, "ready")
            self._serve(replica)

    def _unblock(self) -> None:
        """Bind blocked replicas, oldest first, while the quota lasts; their lead time begins."""
        used = sum(self.fleet.gpus(one.role) for one in self.replicas if one.state != "blocked")
        for replica in [one for one in self.replicas if one.state == "blocked"]:
            used += self.fleet.gpus(replica.role)
            if used > self.quota:
                return
            replica.created = self.clock.now
            self._enter(replica, "starting")
            self.clock.at(self.clock.now + self._lead(replica.role), self._ready, replica)

    def _lead(self, role: Role) -> float:
        setting = self.fleet.lead_prefill if role == "prefill" else self.fleet.lead_decode
        sigma = math.sqrt(math.log1p(setting.cv**2))
        return setting.mean * math.exp(sigma * float(self.rngs[role].standard_normal()) - sigma * sigma / 2)

    def _ready(self, replica: Replica) -> None:
        if replica.state != "starting":
            return
        replica.ready_at = self.clock.now
        self.leads[replica.role].append(self.clock.now - replica.created)
        self._enter(replica, "ready")
        self._serve(replica)

    def _serve(self, replica: Replica) -> None:
        lane = self.serving.router.lanes[replica.slice]
        if isinstance(replica, PrefillEngine):
            lane.prefills.append(replica)
        elif isinstance(replica, DecodeEngine):
            lane.decodes.append(replica)
            self.serving.adopt(lane)
        self.serving.router.pump(lane)

    def _mark_convertible(self) -> None:
        """The first decoders of each slice, `convertible` in all."""
        shares = divide(self.convertible, [lane.weight for lane in self.serving.router.lanes])
        for lane, share in zip(self.serving.router.lanes, shares, strict=True):
            for number, engine in enumerate(lane.decodes):
                engine.convertible = number < share
                engine.chunk_tokens = self.fleet.convertible_tokens if engine.convertible else self.fleet.mixed_tokens

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _retire(self, replica: Replica) -> None:
        """Out of routing; a P keeps what it holds until D has pulled it or the lease ends, a D ends what it runs, both bounded."""
        if replica.state in ("blocked", "starting"):
            self._remove(replica)
            return
        self._withdraw(replica)
        self._enter(replica, "draining")
        bound = self.fleet.drain_timeout + (self.fleet.lease if replica.role == "prefill" else 0.0)
        self.clock.at(self.clock.now + bound, self._overdue, replica)
        self.settle(replica)

    def _withdraw(self, replica: Replica) -> None:
        lane = self.serving.router.lanes[replica.slice]
        if isinstance(replica, PrefillEngine) and replica in lane.prefills:
            lane.prefills.remove(replica)
        elif isinstance(replica, DecodeEngine) and replica in lane.decodes:
            lane.decodes.remove(replica)

    def settle(self, replica: Replica) -> None:
        """End a draining replica that has nothing left."""
        if replica.state == "draining" and getattr(replica, "empty", True):
            self._remove(replica)
            self._unblock()

    def _overdue(self, replica: Replica) -> None:
        if replica.state == "draining":
            self.drain_aborted += self._cut(replica)
            self._remove(replica)
            self._unblock()

    def _cut(self, replica: Replica) -> int:
        """End it with what it has. Returns the requests that failed by it."""
        if isinstance(replica, PrefillEngine):
            before = self.serving.tally.retries
            lose_prefill(self.serving, replica)
            return self.serving.tally.retries - before
        assert isinstance(replica, DecodeEngine)
        return lose_decode(self.serving, replica)

    def _remove(self, replica: Replica) -> None:
        self._enter(replica, "gone")
        self.replicas.remove(replica)
        if isinstance(replica, PrefillEngine):
            self.held_token_seconds += replica.held_token_seconds
            self.prefill_busy += replica.busy()
        elif isinstance(replica, DecodeEngine):
            self.tokens += replica.tokens

    def _enter(self, replica: Replica, state: str) -> None:
        self._charge(replica)
        replica.state = state  # type: ignore[assignment]

    def _charge(self, replica: Replica) -> None:
        """GPU-seconds of the state it leaves, the measured window only."""
        now = self.clock.now
        start, end = max(replica.since, self.fleet.warmup), min(now, self.duration)
        if replica.state not in ("blocked", "gone") and end > start:
            self.gpu_seconds[f"{replica.role}/{replica.state}"] += (end - start) * self.fleet.gpus(replica.role)
        replica.since = now

    def close(self) -> None:
        """The run is over: charge what still stands."""
        for replica in list(self.replicas):
            self._charge(replica)
            if isinstance(replica, PrefillEngine):
                self.held_token_seconds += replica.held_token_seconds

    # -- faults -------------------------------------------------------------------------------------------------------

    def lose(self, loss: NodeLoss) -> None:
        """A share of a role's ready replicas ends at once; others are created in their place."""
        ready = [one for one in self.replicas if one.role == loss.role and one.state == "ready"]
        count = min(len(ready), max(1, round(loss.fraction * len(ready))))
        chosen = sorted(self.rngs["losses"].choice(len(ready), size=count, replace=False)) if ready else []
        for index in chosen:
            self._withdraw(ready[int(index)])
        for index in chosen:
            self._cut(ready[int(index)])
            self._remove(ready[int(index)])
        self._scale(loss.role)

    def change_link(self, change: LinkChange) -> None:
        """Links get faster or slower, transfers under way included."""
        for index, one in enumerate(self.fleet.slices):
            if change.slice in ("", one.name):
                self.link_factor[one.name] = change.factor
                for replica in self.replicas:
                    if replica.slice == index and isinstance(replica, PrefillEngine):
                        replica.nic.change(one.link.bandwidth * change.factor)

    def change_quota(self, change: QuotaChange) -> None:
        """More or fewer GPUs can be bound."""
        self.quota = change.gpus
        self._unblock()
