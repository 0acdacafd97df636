"""Counters: what one page of one pod showed, and what was learned of that pod from page to page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

Side = Literal["prefill", "decode", "router", "cache"]
WINDOW: Final = 120.0  # seconds that the rules look at: eight ticks
LEAST: Final = 4  # steps that are kept though they are older: with a Prometheus one a minute comes
GAP: Final = 31.0  # seconds between two signs of one thing: one good step of 15 s may lie between them
GAUGES: Final = frozenset({"running", "fetching"})
# Prompt tokens a request that are no fallback: for Mamba and multi-token prediction decode computes the last ones of what it
# received again (vLLM, nixl/base_scheduler.py, _prefill_backoff).
BACKOFF: Final = 10.0
Grown = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Counters:
    """One page. `values` are the counters since the start of the process; a name that is not there is not known.

    Names are those of the tables in upstream/signals_*.py (Table.evidence). `time` is that of the page in seconds since 1970, 0
    before the first one; `failure` is why the last try brought none. `running`: whether the kubelet says that the container is
    ready, None where it does not say.
    """

    pod: str
    uid: str
    slice: str
    side: Side
    time: float
    values: Grown = field(default_factory=dict)
    buckets: Mapping[str, Mapping[float, float]] = field(default_factory=dict)
    ready: bool = True  # and not being deleted
    deleting: bool = False
    failure: str = ""
    running: bool | None = None
    created: float = 0.0  # of the pod, seconds since 1970


def fallbacks(grown: Grown) -> float | None:
    """Requests whose prompt decode computed itself, never counted as transfers: its prompts, in the share that the computed tokens
    have of those computed and received, and at least one when any was. Prompts that lie in its own cache are neither. Of an engine
    that once computed nothing of what it received, `BACKOFF` is allowed in all and not for each prompt: one fallback among many
    prompts shows.

    No histogram a request says it: in that of the computed tokens decode shows what *prefill* computed, since vLLM 0.32 passes
    that on (v1/engine/output_processor.py, remote_prefill_cached_tokens; seen on 0.32.0).
    """
    prompts, computed, received = (grown.get(name) for name in ("prompts", "computed", "received"))
    if prompts is None or computed is None or received is None:
        return None
    allowed = grown.get("allowed", BACKOFF * prompts)
    return max(1.0, prompts * computed / (computed + received)) if computed > allowed else 0.0


@dataclass(frozen=True, slots=True)
class Step:
    """How far the counters moved from one page to the next, and what the gauges said at its end."""

    time: float
    grown: Grown


@dataclass(frozen=True, slots=True)
class Track:
    """One page of one pod, over time."""

    last: Counters
    steps: tuple[Step, ...] = ()
    seen: bool = False  # whether this process ever had a page of it
    restarted: float = 0.0  # time of the page that showed that counters had been reset with their process; 0 if none did
    down_since: float | None = None  # the page cannot be had though it could, or the kubelet says that it does not run
    exact: bool = False  # it received prompts in a step, and computed nothing

    def total(self, name: str, since: float = 0.0) -> float | None:
        """How far a counter moved in the steps after `since`; None when any of them does not know, or there is none."""
        return self._sum(lambda grown: grown.get(name), since)

    def fallbacks(self, since: float = 0.0) -> float | None:
        """Requests whose prompt this decode replica computed itself in the steps after `since`; None as for `total`."""
        return self._sum(fallbacks, since)

    def _sum(self, number: Callable[[Grown], float | None], since: float) -> float | None:
        mine = [number(step.grown) for step in self.steps if step.time > since]
        return None if not mine or None in mine else sum(value for value in mine if value is not None)

    def signs(self, test: Callable[[Grown], bool], unbroken: bool = False) -> tuple[float, ...]:
        """Times of the last steps of which the test is true, as far back as one follows the other within `GAP` seconds, or, with
        `unbroken`, step by step."""
        gap = 1.5 * self._period() if unbroken else max(GAP, 2 * self._period())
        found: list[float] = []
        for step in reversed(self.steps):
            if test(step.grown):
                if found and found[-1] - step.time > gap:
                    break
                found.append(step.time)
        return tuple(reversed(found))

    def _period(self) -> float:
        """Seconds between the last two steps."""
        return self.steps[-1].time - self.steps[-2].time if len(self.steps) > 1 else 0.0


def follow(track: Track | None, page: Counters, now: float) -> Track:
    """The track with a new page. A counter that falls was reset with its process: what it shows then is growth."""
    good = page.time > 0 and not page.failure
    down = page.running is False or (page.failure != "" and track is not None and track.seen)
    since = None if not down else (track.down_since if track and track.down_since is not None else now)
    if track is None or track.last.uid != page.uid:
        return Track(page, (), good, down_since=since)
    young = sum(step.time > now - WINDOW for step in track.steps)
    steps = track.steps[-max(young, LEAST) :]
    if page.time <= track.last.time or not page.values:
        kept = replace(track.last, ready=page.ready, deleting=page.deleting, failure=page.failure, running=page.running)
        return Track(kept, steps, track.seen or good, track.restarted, since, track.exact)
    restarted, exact = track.restarted, track.exact
    if track.seen:
        grown = _grown(track.last.values, page.values)
        exact = exact or (grown.get("received", 0.0) > 0 and grown.get("computed") == 0)
        if page.side == "decode":
            grown["allowed"] = BACKOFF * (1.0 if exact else grown.get("prompts", 0.0))
        steps = (*steps, Step(page.time, grown))
        restarted = page.time if _fell(track.last.values, page.values) else restarted
    return Track(page, steps, True, restarted, since, exact)


def _fell(before: Grown, after: Grown) -> bool:
    return any(after[name] < old for name, old in before.items() if name in after and name not in GAUGES)


def _grown(before: Grown, after: Grown) -> dict[str, float]:
    found = {name: value for name, value in after.items() if name in GAUGES}
    for name, value in after.items():
        old = before.get(name)
        if name not in GAUGES and old is not None:
            found[name] = value - old if value >= old else value
    return found


def grown_buckets(
    before: Mapping[str, Mapping[float, float]], after: Mapping[str, Mapping[float, float]]
) -> dict[str, dict[float, float]]:
    """How many observations came, by name and upper bound; a histogram whose total fell was reset with its process."""
    found = {}
    for name, new in after.items():
        old = before.get(name)
        if old is None or not new:
            continue
        reset = new[max(new)] < old.get(max(new), 0.0)
        found[name] = {bound: count if reset else count - old.get(bound, 0.0) for bound, count in new.items()}
    return found
