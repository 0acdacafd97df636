"""Formulas: the numbers of groups -> the signals of a PDDeployment. Pure, and the same for both sources.

The formulas stand in the rows of the tables in upstream/signals_*.py; symbols are those of DESIGN §7. A signal is unknown as soon
as one number in it is, and then its source says which and why. Totals are over the slices given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from pd_operator.core.names import ROLES
from pd_operator.core.scaling.readings import Quality, Signal, SliceHandoff, State
from pd_operator.signals.fleet import Deployment, Side
from pd_operator.signals.group import Group, GroupKey
from pd_operator.signals.load import Load, nothing
from pd_operator.upstream import signals_catalog as catalog
from pd_operator.upstream import signals_table as tables


def load(deployment: Deployment, groups: Mapping[GroupKey, Group]) -> Load:
    """The load of one PDDeployment from the groups of its slices. A group that is not there has no pods."""
    names = tuple(dict.fromkeys(part.slice for part in deployment.parts))
    if not names:
        return nothing("no pods yet")
    parts = [_Slice(deployment, name, groups) for name in names]
    if strange := next((part.strange for part in parts if part.strange), ""):
        return nothing(strange, names)
    tokens = _mean_tokens(parts)
    offered = {part.name: _offered(part) for part in parts}
    requests = total(list(offered.values()))
    return Load(
        prompt_rate=_as(_scaled(requests, tokens), parts, "prompt_rate"),
        request_rate=requests,
        queued_tokens=_as(_scaled(_queue(parts), tokens), parts, "queued_tokens"),
        prefill_rate=_as(_sum(parts, "prefill", "computed"), parts, "prefill_rate"),
        prefill_seconds=_as(_sum(parts, "prefill", "prefill_seconds"), parts, "prefill_seconds"),
        running=_as(_sum(parts, "decode", "running"), parts, "running"),
        handoff_waiting=total([part.handoff() for part in parts]),
        decode_starts=_as(_sum(parts, "decode", "first_tokens"), parts, "decode_starts"),
        kv_tokens=_as(_sum(parts, "decode", "kv_used"), parts, "kv_tokens"),
        kv_capacity=_as(_capacity(parts), parts, "kv_capacity"),
        output_tokens=_as(_mean(parts, "decode", "output_tokens", "outputs"), parts, "output_tokens"),
        itl=_as(_itl(parts), parts, "itl"),
        prefill_latency=_as(_mean(parts, "prefill", "prefill_seconds", "prefills"), parts, "prefill_latency"),
        ttft=_as(_ttft(parts), parts, "ttft"),
        every_prefill_waiting=_every_prefill_waiting(parts),
        slices=tuple(
            SliceHandoff(part.name, part.handoff(), part.as_row("decode_starts", part.signal("decode", "first_tokens")))
            for part in parts
        ),
        requests=offered,
        unread={role: found for role in ROLES if (found := sum(part.unread(role) for part in parts))},
    )


@dataclass(frozen=True, slots=True)
class _Programs:
    """What the tables of the programs of a slice say together."""

    rows: Mapping[str, tables.Row]
    quantities: frozenset[str]
    strange: str  # an engine that has no table


@lru_cache(maxsize=1024)
def _programs(programs: frozenset[tuple[Side, str, str]]) -> _Programs:
    rows: dict[str, tables.Row] = {}
    quantities: set[str] = set()
    strange = ""
    for side, program, version in sorted(programs):
        table = catalog.table(program, version)
        if table is None and side in ("prefill", "decode"):
            known = ", ".join(catalog.PROGRAMS)
            strange = f"engine {program} {version} has no table of signals; those that have one are {known}"
        elif table is not None:
            # Where both roles run other versions, the one that is worse off counts.
            rows |= {row.signal: row for row in table.rows if row.quality is not tables.Quality.EXACT or row.signal not in rows}
            quantities |= {q.name for q in table.quantities}
    return _Programs(rows, frozenset(quantities), strange)


class _Slice:
    """The groups of one slice, and the tables of what runs in it."""

    def __init__(self, deployment: Deployment, name: str, groups: Mapping[GroupKey, Group]) -> None:
        self.name = name
        self._there = deployment.sides
        mine = [part for part in deployment.parts if part.slice == name]
        self.sides = {part.side for part in mine}
        found = ((side, groups.get((*deployment.key, name, side))) for side in self.sides)
        self._groups = {side: group for side, group in found if group is not None}
        self._programs = _programs(frozenset((part.side, *program) for part in mine for program in part.programs))
        self.strange = self._programs.strange
        self._signals: dict[tuple[Side, str], Signal] = {}  # several formulas read the same number

    def row(self, signal: str) -> tables.Row | None:
        """The row of a signal."""
        return self._programs.rows.get(signal)

    def signal(self, side: Side, quantity: str) -> Signal:
        """A number of one side. A slice without pods on a side does nothing there; a deployment without any is not idle, it is
        down, and nobody knows its load (I4).
        """
        found = self._signals.get((side, quantity))
        if found is None:
            found = self._signals[side, quantity] = self._signal(side, quantity)
        return found

    def _signal(self, side: Side, quantity: str) -> Signal:
        group = self._groups.get(side)
        if group is not None:
            return group.signal(quantity)
        if side in ("prefill", "decode") and side not in self._there:
            return Signal(State.UNKNOWN, source=f"no {side} pods")
        return Signal.of(0.0, source=f"no {side} pods")

    def pods(self, side: Side) -> int:
        """Pods of one side that count."""
        group = self._groups.get(side)
        return group.pods if group is not None else 0

    def unread(self, side: Side) -> int:
        """Ready pods of one side that are too new to have been read."""
        group = self._groups.get(side)
        return group.unread if group is not None else 0

    def has(self, quantity: str) -> bool:
        """Whether a program of this slice gives a quantity at its version."""
        return quantity in self._programs.quantities

    def as_row(self, signal: str, reading: Signal) -> Signal:
        """A reading with the quality and the formula of its row. A slice without that side has no row, and says nothing."""
        row = self.row(signal)
        if row is None:
            return reading
        if row.quality is tables.Quality.MISSING:
            return Signal(State.UNKNOWN, source=row.formula)
        quality = Quality.EXACT if row.quality is tables.Quality.EXACT else Quality.DERIVED
        source = _told(reading.source, row.formula) if reading.known else reading.source
        return Signal(reading.state, reading.value, reading.age, quality, source)

    def handoff(self) -> Signal:
        """H. Before vLLM told fetches apart, all that waits on decode."""
        return self.as_row("handoff_waiting", self.signal("decode", "fetching" if self.has("fetching") else "waiting"))


@lru_cache(maxsize=4096)
def _told(source: str, formula: str) -> str:
    """Where a number is from, and by which formula; there are few of both and many signals."""
    return f"{source.partition(' (')[0]} ({formula})"


def total(signals: Sequence[Signal]) -> Signal:
    """A sum: as old as its oldest part, as good as its worst, unknown with its first unknown part."""
    if len(signals) == 1:
        return signals[0]
    value, age, quality, sources = 0.0, 0.0, Quality.EXACT, dict[str, None]()
    for signal in signals:
        if signal.state is State.UNKNOWN:
            return signal
        value += signal.value
        age = max(age, signal.age)
        quality = Quality.DERIVED if signal.quality is Quality.DERIVED else quality
        sources[signal.source] = None
    return Signal.of(value, age, quality, ", ".join(sources))


def ratio(above: Signal, below: Signal, empty: str) -> Signal:
    """A quotient; unknown, with `empty` as the reason, when there is nothing to divide by."""
    if not above.known or not below.known:
        return above if not above.known else below
    age, quality, source = _both(above, below)
    if below.value <= 0:
        return Signal(State.UNKNOWN, age=age, source=f"{source}: {empty}")
    return Signal.of(above.value / below.value, age, quality, source)


def _both(one: Signal, other: Signal) -> tuple[float, Quality, str]:
    """Age, quality and source of what is made of two known signals."""
    quality = Quality.DERIVED if Quality.DERIVED in (one.quality, other.quality) else Quality.EXACT
    source = one.source if one.source == other.source else f"{one.source}, {other.source}"
    return max(one.age, other.age), quality, source


def _scaled(count: Signal, each: Signal) -> Signal:
    """A product; nothing times anything is nothing, also while nobody knows how much one is."""
    if not count.known or count.value == 0:
        return count
    return Signal.of(count.value * each.value, *_both(count, each)) if each.known else each


def _sum(parts: Iterable[_Slice], side: Side, quantity: str) -> Signal:
    return total([part.signal(side, quantity) for part in parts])


def _mean(parts: Sequence[_Slice], side: Side, above: str, below: str) -> Signal:
    return ratio(_sum(parts, side, above), _sum(parts, side, below), f"no {below} in the window")


def _as(reading: Signal, parts: Sequence[_Slice], signal: str) -> Signal:
    """The reading with the row of the slice that gives it worst."""
    if len(parts) == 1:
        return parts[0].as_row(signal, reading)
    found = [part.as_row(signal, reading) for part in parts if part.row(signal) is not None] or [reading]
    return next((s for s in found if not s.known), None) or next((s for s in found if s.quality is Quality.DERIVED), found[0])


def _mean_tokens(parts: Sequence[_Slice]) -> Signal:
    """Uncached prompt tokens of a request: of the window, else since the pods' start (long prompts may take longer than it)."""
    recent = _mean(parts, "prefill", "computed", "prefills")
    if recent.known:
        return recent
    ever = ratio(_sum(parts, "prefill", "computed_total"), _sum(parts, "prefill", "prefills_total"), "no prefill has ended yet")
    return replace(ever, quality=Quality.DERIVED)


def _offered(part: _Slice) -> Signal:
    """lam of a slice: what came to its routers; for routers that are not ours, what prefill ended and refused (late while a queue
    grows)."""
    if "router" in part.sides and part.row("request_rate") is not None:
        return part.as_row("request_rate", part.signal("router", "offered"))
    derived = total([part.signal("prefill", "prefills"), part.signal("prefill", "rejected")])
    return replace(derived, quality=Quality.DERIVED)


def _queue(parts: Sequence[_Slice]) -> Signal:
    """Requests accepted and not yet running prefill."""
    waiting = [part.signal("prefill", "waiting") for part in parts]
    doors = [part.signal("router", "queue") for part in parts if part.has("queue")]
    return total([*waiting, *doors])


def _capacity(parts: Sequence[_Slice]) -> Signal:
    size, pods = _sum(parts, "decode", "kv_size"), sum(part.pods("decode") for part in parts)
    return ratio(size, replace(size, value=float(pods)), "no decode pod shows its cache")


def _itl(parts: Sequence[_Slice]) -> Signal:
    """The median gap between tokens, and at most the mean. Of several slices the slowest counts; those without tokens do not."""
    found: list[Signal] = []
    for part in parts:
        mean = ratio(part.signal("decode", "gap_seconds"), part.signal("decode", "gaps"), "no gaps in the window")
        median = part.signal("decode", "gap_median") if part.has("gap_median") and mean.known else mean
        if part.signal("decode", "gaps").state is not State.IDLE:
            found.append(median if not median.known or median.value < mean.value else mean)
    if not found:
        return Signal(State.UNKNOWN, source="no gaps in the window")
    return next((s for s in found if not s.known), None) or max(found, key=lambda s: s.value)


def _ttft(parts: Sequence[_Slice]) -> Signal:
    """The tail of a sum of two waits that know nothing of each other: the tail of one and the mean of the other, whichever is
    more. Of several slices the slowest counts; slices in which nothing started do not.
    """
    slowest: list[Signal] = []
    for part in parts:
        counts = [part.signal(side, "first_tokens") for side in ROLES]
        sums = [part.signal(side, "first_token_seconds") for side in ROLES]
        means = [ratio(s, count, "no first token in the window") for s, count in zip(sums, counts, strict=True)]
        tails = [part.signal(side, "first_token_quantile") for side in ROLES]
        if all(c.known for c in counts) and any(c.value == 0 for c in counts):
            continue
        either = [total([tails[0], means[1]]), total([means[0], tails[1]])]
        slowest.append(next((s for s in either if not s.known), None) or max(either, key=lambda s: s.value))
    if not slowest:
        return Signal(State.UNKNOWN, source="no first token in the window")
    return next((s for s in slowest if not s.known), None) or max(slowest, key=lambda s: s.value)


def _every_prefill_waiting(parts: Sequence[_Slice]) -> bool:
    """Whether every P pod had work waiting in every sample of the window."""
    least = [part.signal("prefill", "least_waiting") for part in parts]
    return all(s.known and s.value > 0 for s in least) and all(part.pods("prefill") > 0 for part in parts)
