"""Pods with counters that tests move, looked at every tick of 15 s as the operator does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from pd_operator.core.evidence.counters import Counters, Side
from pd_operator.core.evidence.watch import Evidence, Record, Site, look
from pd_operator.core.names import ROLES, Role
from pd_operator.core.scaled import LeadTime

SLICE = "chat-1a2b3c4d-0"
TICK = 15.0
BEGIN = 1_800_000_000.0
START: dict[str, dict[str, float]] = {
    "prefill": dict.fromkeys(
        ("computed", "expired", "read_late", "prompts", "ended", "rejected", "good_answers", "bad_answers"), 0.0
    ),
    "decode": dict.fromkeys(
        (
            *("computed", "received", "transfers", "transferred_bytes", "failed_transfers", "prompts", "ended"),
            *("rejected", "good_answers", "bad_answers", "running", "fetching", "first_tokens"),
        ),
        0.0,
    ),
    "cache": dict.fromkeys(("lookups", "requested", "hit", "stored"), 0.0),
    "router": {"offered": 0.0},
}


@dataclass
class Page:
    """One page of one pod."""

    pod: str
    side: Side
    slice: str = SLICE
    values: dict[str, float] = field(default_factory=dict)
    uid: str = ""
    ready: bool = True
    failure: str = ""
    running: bool = True
    deleting: bool = False
    absent: frozenset[str] = frozenset()
    created: float = BEGIN - 3600

    def __post_init__(self) -> None:
        self.uid = self.uid or f"uid-{self.pod}"
        self.values = {**START[self.side], **self.values}

    def add(self, **grown: float) -> None:
        """Counters that move."""
        for name, value in grown.items():
            self.values[name] = self.values.get(name, 0.0) + value

    def reset(self) -> None:
        """The process was restarted."""
        self.values = dict(START[self.side])


class World:
    """Some pods of one PDDeployment, in one slice unless they say otherwise, and its record."""

    def __init__(self, prefill: int = 2, decode: int = 2, cache: bool = False) -> None:
        self.now = BEGIN
        self.record = Record()
        self.pages: list[Page] = [Page(f"p{n}", "prefill") for n in range(prefill)]
        self.pages += [Page(f"d{n}", "decode") for n in range(decode)]
        if cache:
            self.pages += [Page(p.pod, "cache") for p in self.pages]
        self.evidence = Evidence(0.0)
        self.turned: list[tuple[float, tuple[str, ...]]] = []  # seconds since the beginning, reasons

    def of(self, side: str) -> list[Page]:
        return [p for p in self.pages if p.side == side]

    def page(self, pod: str, side: str = "") -> Page:
        return next(p for p in self.pages if p.pod == pod and side in ("", p.side))

    def reasons(self) -> list[str]:
        return [f.reason.value for f in self.evidence.findings]

    def serve(self, requests: float = 10, prefills: Iterable[str] = (), decodes: Iterable[str] = ()) -> None:
        """Requests that are handed over as they should, spread evenly."""
        fed = [p for p in self.of("prefill") if not p.deleting and p.pod in (list(prefills) or [p.pod])]
        took = [p for p in self.of("decode") if not p.deleting and p.pod in (list(decodes) or [p.pod])]
        for router in self.of("router"):
            router.add(offered=requests / len(self.of("router")))
        for p in fed:
            n = requests / len(fed)
            p.add(computed=500 * n, prompts=n, ended=n, good_answers=n)
        for d in took:
            n = requests / len(took)
            d.add(
                received=500 * n, transfers=n, transferred_bytes=65536 * n, prompts=n, ended=n, good_answers=n,
                first_tokens=n,
            )  # fmt: skip

    def fall_back(self, pod: str, requests: float, failed: bool = False) -> None:
        """Requests whose prompt decode computes."""
        self.page(pod, "decode").add(
            computed=500 * requests, prompts=requests, ended=requests, good_answers=requests, first_tokens=requests,
            failed_transfers=requests if failed else 0.0,
        )  # fmt: skip

    def tick(self, count: int = 1, site: Site | None = None) -> None:
        """Looks."""
        for _ in range(count):
            self.now += TICK
            pages = [self._counters(p) for p in self.pages]
            pages = [replace(p, time=0.0, values={}) if p.failure else p for p in pages]
            self.record, self.evidence = look(self.record, pages, site or self.site(), self.now)
            reasons = tuple(self.reasons())
            if reasons != (self.turned[-1][1] if self.turned else ()):
                self.turned.append((self.now - BEGIN, reasons))

    def _counters(self, p: Page) -> Counters:
        values = {n: v for n, v in p.values.items() if n not in p.absent}
        state = {"ready": p.ready, "deleting": p.deleting, "running": p.running}
        return Counters(p.pod, p.uid, p.slice, p.side, self.now - 1, values, failure=p.failure, created=p.created, **state)

    def site(self) -> Site:
        ready: dict[str, dict[Role, int]] = {}
        for name in sorted({p.slice for p in self.pages}):
            ready[name] = {r: sum(p.side == r and p.slice == name and p.ready for p in self.pages) for r in ROLES}
        return Site(ready, 30.0, {"prefill": LeadTime(20.0, 30.0, 2), "decode": LeadTime(20.0, 30.0, 2)})
