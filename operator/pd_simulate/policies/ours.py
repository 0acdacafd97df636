"""Ours: the operator's own law, called as the operator calls it. This adapter only makes Readings of a View; it decides nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pd_operator.core.scaling import record
from pd_operator.core.scaling.bounds import Bounds, RoleBounds
from pd_operator.core.scaling.decision import Decision
from pd_operator.core.scaling.law import DEFAULT, Law, with_headroom
from pd_operator.core.scaling.learned import Learned
from pd_operator.core.scaling.readings import UNKNOWN, Readings, Replicas, Signal, SliceHandoff
from pd_simulate.view import Counters, ReplicaView, Role, Targets, View

STALE = 45.0  # seconds after which a sample is unknown: three scrapes of 15 s (DESIGN section 7)
RATES = ("offered_uncached", "offered", "prefill_tokens", "prefill_seconds", "decode_starts")


@dataclass(slots=True)
class Window:
    """Counters at the two ends of the last window between two scrapes of the router."""

    taken: float
    counters: Counters
    rates: dict[str, float] = field(default_factory=dict)
    output: float | None = None  # mean output tokens of the requests that finished in it


@dataclass(slots=True)
class Ours:
    """The law with its state. `headroom` divides the loads that the law aims at: above 1 buys attainment with GPUs."""

    law: Law = DEFAULT
    headroom: float = 1.0
    max_num_seqs: int = 256  # a flag of the engine, which the operator sets and so knows
    name: str = "ours"
    tick: float = 15.0
    learned: Learned = field(default_factory=Learned)
    made: list[record.Record] = field(default_factory=list)
    _samples: dict[str, tuple[float, ReplicaView]] = field(default_factory=dict)
    _window: Window | None = None
    _all_waiting: bool = False

    def decide(self, view: View) -> Targets:
        """The counts of `pd_operator.core.scaling`."""
        law = with_headroom(self.law, self.headroom)
        made = record.make(
            "simulated", self.readings(view), self.learned, bounds(view, self.max_num_seqs, self.tick), view.now, law
        )
        self.made.append(made)
        self.learned = made.decision.learned
        return Targets(made.decision.prefill.desired, made.decision.decode.desired, note(made.decision))

    @property
    def records(self) -> list[str]:
        """One line of JSON for each decision, as the operator's own log has them."""
        return [one.line() for one in self.made]

    def readings(self, view: View) -> Readings:
        """What the operator would read: sums over ready replicas, rates over the last window between two scrapes."""
        self._remember(view)
        prefills, decodes = self._ready(view, "prefill"), self._ready(view, "decode")
        holders = self._holders(view)
        was_waiting, self._all_waiting = self._all_waiting, bool(prefills) and all(one.waiting > 0 for one in prefills or ())
        router = Signal.of(float(view.router_queue_tokens), view.counters_age) if self._fresh(view) else UNKNOWN
        queue = _sum(prefills, "waiting_tokens")
        waiting, starts = _sum(holders, "held"), self._rate(view, "decode_starts")
        output = self._window.output if self._window else None
        return Readings(
            prefill=_replicas(view, "prefill"),
            decode=_replicas(view, "decode"),
            prompt_rate=self._rate(view, "offered_uncached"),
            request_rate=self._rate(view, "offered"),
            queued_tokens=Signal.of(queue.value + router.value, queue.age) if queue.known and router.known else UNKNOWN,
            prefill_rate=self._rate(view, "prefill_tokens"),
            prefill_seconds=self._rate(view, "prefill_seconds"),
            every_prefill_waiting=was_waiting and self._all_waiting,
            running=_sum(decodes, "running"),
            handoff_waiting=waiting,
            decode_starts=starts,
            kv_tokens=_sum(decodes, "kv_used"),
            kv_capacity=Signal.of(float(decodes[0].kv_capacity)) if decodes else UNKNOWN,
            output_tokens=Signal.of(output) if output is not None else UNKNOWN,
            itl=_latency(view.itl.p50, self._fresh(view)),
            prefill_latency=_latency(view.prefill_latency.mean, self._fresh(view)),
            ttft=_latency(view.ttft.p95, self._fresh(view)),
            slices=_slices(view, holders, decodes, starts),
        )

    def _remember(self, view: View) -> None:
        """Keep each replica's last sample, and the counters' window when the router was scraped since."""
        alive = {one.name for one in view.replicas}
        self._samples = {name: kept for name, kept in self._samples.items() if name in alive}
        for one in view.replicas:
            if one.known and one.state in ("ready", "draining"):
                self._samples[one.name] = (view.now - one.age, one)
        taken, before = view.now - view.counters_age, self._window
        if not view.counters_known or (before is not None and taken <= before.taken):
            return
        if before is None:
            self._window = Window(taken, view.counters)
            return
        seconds, new, old = taken - before.taken, view.counters, before.counters
        finished = new.finished - old.finished
        self._window = Window(
            taken,
            new,
            {name: (getattr(new, name) - getattr(old, name)) / seconds for name in RATES},
            (new.finished_output - old.finished_output) / finished if finished else None,
        )

    def _fresh(self, view: View) -> bool:
        return self._window is not None and view.now - self._window.taken <= STALE

    def _rate(self, view: View, name: str) -> Signal:
        window = self._window
        if window is None or not window.rates or not self._fresh(view):
            return UNKNOWN
        return Signal.of(max(0.0, window.rates[name]), view.now - window.taken)

    def _seen(self, view: View, one: ReplicaView) -> ReplicaView | None:
        """A replica as last sampled; a young one without a sample yet is empty; None when its sample is stale."""
        if one.known:
            return one
        taken, sample = self._samples.get(one.name, (None, None))
        if taken is not None and view.now - taken <= STALE:
            return sample
        young = taken is None and one.ready_at is not None and view.now - one.ready_at <= STALE
        return one if young else None

    def _all(self, view: View, wanted: list[ReplicaView]) -> list[ReplicaView] | None:
        seen = [self._seen(view, one) for one in wanted]
        known = [one for one in seen if one is not None]
        return known if len(known) == len(seen) else None

    def _ready(self, view: View, role: Role) -> list[ReplicaView] | None:
        """Every ready replica of a role, or None: the sum over a part would look like less load."""
        return self._all(view, [one for one in view.replicas if one.role == role and one.state == "ready"])

    def _holders(self, view: View) -> list[ReplicaView] | None:
        """Every prefill replica that may hold KV for decode; a draining one does until it is pulled."""
        return self._all(view, [one for one in view.replicas if one.role == "prefill" and one.state in ("ready", "draining")])


def bounds(view: View, max_num_seqs: int, tick: float) -> Bounds:
    """Bounds of a View: the user's, and measured lead times."""
    roles: dict[Role, RoleBounds] = {
        role: RoleBounds(view.minimum[role], view.maximum[role], view.gpus[role], view.lead_time[role])
        for role in ("prefill", "decode")
    }
    return Bounds(
        roles["prefill"],
        roles["decode"],
        view.budget,
        view.slo_ttft,
        1000 * view.slo_ttft_per_token,
        view.slo_itl,
        max_num_seqs=max_num_seqs,
        tick=tick,
    )


def note(decision: Decision) -> str:
    """Reasons for the timeline, as the report reads them."""
    words = [f"prefill {decision.prefill.reason.value}", f"decode {decision.decode.reason.value}"]
    return "; ".join([*words, *(alert.value for alert in decision.alerts)])


def _replicas(view: View, role: Role) -> Replicas:
    mine = [one for one in view.replicas if one.role == role]
    counts = {state: sum(one.state == state for one in mine) for state in ("ready", "starting", "blocked", "draining")}
    oldest = max((view.now - one.created for one in mine if one.state == "starting"), default=0.0)
    return Replicas(view.desired[role], **counts, oldest_starting=oldest)


def _sum(replicas: list[ReplicaView] | None, name: str) -> Signal:
    if replicas is None:
        return UNKNOWN
    return Signal.of(float(sum(getattr(one, name) for one in replicas)), max((one.age for one in replicas), default=0.0))


def _latency(value: float, fresh: bool) -> Signal:
    return Signal.of(value) if fresh and math.isfinite(value) else UNKNOWN


def _slices(
    view: View, holders: list[ReplicaView] | None, decodes: list[ReplicaView] | None, starts: Signal
) -> tuple[SliceHandoff, ...]:
    """Handoff of each slice. The router counts decode starts in all; a slice's share is that of what it runs."""
    names = sorted({one.slice for one in view.replicas})
    if len(names) < 2 or holders is None or decodes is None or not starts.known:
        return ()
    running = sum(one.running for one in decodes)
    parts = []
    for name in names:
        share = sum(one.running for one in decodes if one.slice == name) / running if running else 1 / len(names)
        waiting = [one for one in holders if one.slice == name]
        parts.append(SliceHandoff(name, _sum(waiting, "held"), Signal.of(starts.value * share, starts.age)))
    return tuple(parts)
