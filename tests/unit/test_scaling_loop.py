"""The scaling tick with the real law, real stores and a real roster; only the API server and the pods' pages are stand-ins."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import aiohttp
import pytest
from builders import NOW, deep, pod, serving
from prometheus_client import CollectorRegistry, generate_latest

from pd_operator.controller.decision_log import DecisionLog
from pd_operator.controller.loop import Key
from pd_operator.controller.roster import Roster
from pd_operator.controller.scaling import ScalingLoop
from pd_operator.controller.scaling_metrics import ScalingMetrics
from pd_operator.core.names import ROLES
from pd_operator.core.observed import ChildFact
from pd_operator.core.plan import make_plan
from pd_operator.core.scaling.readings import Signal
from pd_operator.core.scaling.record import parse, replay
from pd_operator.core.snapshot import Snapshot
from pd_operator.core.status import build_pool_status
from pd_operator.core.traffic import TICKS
from pd_operator.kube.client import KubeClient
from pd_operator.kube.errors import Forbidden, NotLeading
from pd_operator.kube.events import EventRecorder
from pd_operator.kube.store import Stores
from pd_operator.signals.load import Load, nothing

SCALING = {"scaling": {"mode": "Auto", "prefill": {"maxReplicas": 8}, "decode": {"maxReplicas": 8}}}
QUIET = {
    "prompt_rate": 10_000.0, "request_rate": 5.0, "queued_tokens": 0.0, "prefill_rate": 10_000.0, "prefill_seconds": 0.5,
    "running": 100.0, "handoff_waiting": 0.0, "decode_starts": 5.0, "kv_tokens": 100_000.0, "kv_capacity": 250_000.0,
    "output_tokens": 300.0, "itl": 0.03, "prefill_latency": 0.1, "ttft": 0.3,
}  # fmt: skip


def load(**changes: float) -> Load:
    """A load for which one replica of each role is right."""
    return Load(**{name: Signal.of(value) for name, value in {**QUIET, **changes}.items()})


BUSY = load(running=400.0, kv_tokens=400_000.0)  # decode needs 400 / (0.85 x 200) = 2.35


class Server:
    """The API server as far as the tick uses it: reads of PDPools, and /scale, which a watch shows."""

    def __init__(self, stores: Stores) -> None:
        self.stores = stores
        self.scaled: list[tuple[str, str, int]] = []
        self.statuses: dict[tuple[str, str], dict[str, Any]] = {}
        self.refuse: dict[str, Exception] = {}
        self.events: list[str] = []
        self.before_write: Callable[[], None] = lambda: None

    async def get(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        return {"status": self.statuses.get((namespace, name), {})}

    async def scale(self, kind: str, namespace: str, name: str, replicas: int) -> None:
        self.before_write()
        for part, error in self.refuse.items():
            if part in f"{namespace}/{name}":
                raise error
        self.scaled.append((namespace, name, replicas))
        show(self.stores, namespace, name, replicas)

    async def create(self, obj: Mapping[str, Any]) -> Mapping[str, Any]:
        self.events.append(f"{obj['reason']} {obj['note']}")
        return obj


@dataclass
class Pages:
    """The source of signals: what a test says, for each object of the fleet."""

    now: Load = field(default_factory=load)
    of: dict[Key, Load] = field(default_factory=dict)
    fault: str = ""
    keys: Callable[[], list[Key]] = list

    async def read(self, now: float) -> Mapping[Key, Load]:
        if self.fault == "hang":
            await asyncio.sleep(3600)
        if self.fault == "raise":
            raise RuntimeError("a bug")
        if self.fault == "empty":
            return {}
        if self.fault == "unknown":
            return {key: nothing("pod x does not answer") for key in self.keys()}
        return {key: self.of.get(key, self.now) for key in self.keys()}

    async def run(self) -> None: ...

    async def close(self) -> None: ...


def show(stores: Stores, namespace: str, name: str, replicas: int | None) -> None:
    """What the watch shows of a PDPool."""
    stores.children.put(
        "pools", ("PDPool", namespace, name), ChildFact("PDPool", namespace, name, f"uid-{name}", replicas=replicas)
    )


def snapshot_of(name: str = "chat", **changes: Any) -> Snapshot:
    """A serving object that scales, one replica each."""
    found = serving(deep(SCALING, changes))
    return replace(found, name=name, uid=f"uid-{name}")


class World:
    """One loop over some objects, its clock, its source and its server."""

    def __init__(self, *snapshots: Snapshot, **options: Any) -> None:
        self.stores, self.pages, self.leads = Stores(), Pages(), True
        self.roster, self.server = Roster(self.stores), Server(self.stores)
        self.now, self.enqueued, self.lines = NOW.timestamp(), list[Key](), list[str]()
        for snapshot in snapshots or (snapshot_of(),):
            self.put(snapshot)
            for role in ROLES:
                show(self.stores, snapshot.namespace, f"{snapshot.name}-{role}", 1)
            for one in snapshot.pods:
                labels = {**one.labels, "pdserve.dev/deployment": snapshot.name}
                mine = replace(one, name=f"{snapshot.name}-{one.name}", uid=f"{snapshot.name}-{one.uid}", labels=labels)
                self.stores.pods.put("pods", (mine.namespace, mine.name), mine)
        self.pages.keys = lambda: [e.key for e in self.roster.entries()]
        self.options = {"log": self.lines.append, "read_limit": 0.05, **options}
        self.loop = self.new_loop()

    def put(self, snapshot: Snapshot) -> None:
        plan = make_plan(snapshot)
        assert plan.refusal is None
        self.roster.put(snapshot, plan)

    def new_loop(self) -> ScalingLoop:
        client = cast(KubeClient, self.server)
        return ScalingLoop(
            client,
            self.stores,
            self.roster,
            self.pages,
            EventRecorder(client, "unit"),
            is_leader=lambda: self.leads,
            enqueue=self.enqueued.append,
            clock=lambda: self.now,
            **self.options,
        )

    def tick(self, count: int = 1, load: Load | None = None) -> None:
        self.pages.now = load or self.pages.now

        async def run() -> None:
            for _ in range(count):
                await self.loop.once()
                self.now += 15

        asyncio.run(run())

    def number(self, role: str, name: str = "chat") -> int | None:
        fact = self.stores.children.get("PDPool", "demo", f"{name}-{role}")
        return fact.replicas if fact else None


def test_decode_that_is_short_rises_and_prefill_does_not() -> None:
    world = World()
    world.tick(2, BUSY)
    assert world.server.scaled == [("demo", "chat-decode", 3)]
    (event,) = world.server.events
    assert event.startswith("ScaledDecode decode: 1 -> 3 (Demand): need 2.35 = (R 400 + H 0) / (0.85 x b 200)")


def test_an_unchanged_world_is_neither_written_nor_reconciled() -> None:
    """One reconcile tells the first decision; a hundred ticks after it there is nothing more to say."""
    world = World()
    world.tick(101)
    assert world.server.scaled == [] and world.enqueued == [("demo", "chat")] and len(world.lines) == 101


@pytest.mark.parametrize("fault", ["hang", "raise", "empty", "unknown"])
def test_a_source_that_fails_changes_no_number_and_is_told(fault: str) -> None:
    world = World()
    world.tick(2, BUSY)
    world.pages.fault = fault
    world.tick(40)  # ten minutes: longer than the down window
    assert world.server.scaled == [("demo", "chat-decode", 3)] and world.number("decode") == 3
    scaled = world.roster.scaled(("demo", "chat"), "uid-chat")
    assert scaled is not None and scaled.unknown
    plan_world = replace(snapshot_of(), scaled=scaled)
    status = build_pool_status(plan_world, make_plan(plan_world), "decode", {}, 1)
    active = next(c for c in status["conditions"] if c["type"] == "ScalingActive")
    assert active["status"] == "False" and active["reason"] in ("NoSeries", "SignalsUnknown")
    why = {"hang": "not read within 0.05 s", "raise": "cannot be read: RuntimeError", "empty": "did not answer", "unknown": "pod x"}
    assert why[fault] in active["message"]
    world.pages.fault = ""
    world.tick(1, load(running=700.0, kv_tokens=700_000.0))
    assert world.server.scaled[-1] == ("demo", "chat-decode", 5)  # recovery needs no hand


def test_uneven_traffic_is_told_after_enough_ticks_and_survives_a_restart() -> None:
    world = World()
    entry = world.roster.entries()[0]
    world.roster._entries[entry.key] = replace(entry, should={"a": 50, "b": 50})
    lopsided = replace(load(), requests={"a": Signal.of(9.0), "b": Signal.of(1.0)})
    world.tick(TICKS - 1, lopsided)
    told = world.roster.scaled(entry.key, entry.uid)
    assert told is not None and told.uneven == "" and world.enqueued == [entry.key]
    world.tick(1)
    told = world.roster.scaled(entry.key, entry.uid)
    assert told is not None and told.uneven.startswith("a got 90 % of the requests") and world.enqueued == [entry.key] * 2
    world.roster._entries[entry.key] = replace(world.roster.entries()[0], uneven=told.uneven)  # as the next reconcile puts it
    world.loop = world.new_loop()
    world.tick(1, replace(load(), requests={"a": Signal.of(5.0), "b": Signal.of(5.0)}))
    again = world.roster.scaled(entry.key, entry.uid)
    assert again is not None and again.uneven == told.uneven  # one tick takes nothing back


def test_unknown_says_since_when_and_once_it_is_known_forgets() -> None:
    world = World()
    world.tick(2, BUSY)

    def told() -> str:
        there = replace(snapshot_of(), scaled=world.roster.scaled(("demo", "chat"), "uid-chat"))
        status = build_pool_status(there, make_plan(there), "decode", {}, 1)
        return str(next(c for c in status["conditions"] if c["type"] == "ScalingActive")["message"])

    begin = world.now
    world.pages.fault = "unknown"
    world.tick(5)
    at = datetime.fromtimestamp(begin, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    assert told().startswith(f"the number is kept since {at}: not known: running")
    world.pages.fault = ""
    world.tick(1, BUSY)
    assert told() == "follows what arrives, runs and waits"
    world.pages.fault = "unknown"
    world.tick(1)
    assert at not in told() and "the number is kept since " in told()


@pytest.mark.parametrize("mode", ["External", "Advisory"])
def test_who_does_not_write_still_decides(mode: str) -> None:
    world = World(snapshot_of(scaling={"mode": mode}))
    world.tick(3, BUSY)
    scaled = world.roster.scaled(("demo", "chat"), "uid-chat")
    assert world.server.scaled == [] and world.server.events == []
    assert scaled is not None and scaled.decision is not None and scaled.decision.decode.desired == 3


@pytest.mark.parametrize(
    "error", [Forbidden(403, "Forbidden", "no"), aiohttp.ClientConnectionError("gone"), TimeoutError(), NotLeading("x")]
)
def test_a_write_that_is_refused_leaves_the_others_alone(error: Exception) -> None:
    both = load(running=400.0, kv_tokens=400_000.0, prompt_rate=40_000.0)
    world = World(snapshot_of("a"), snapshot_of("b"), snapshot_of("c"))
    world.server.refuse = {"demo/b-prefill": error}
    world.tick(1, both)
    names = [name for _, name, _ in world.server.scaled]
    assert sorted(names) == ["a-decode", "a-prefill", "b-decode", "c-decode", "c-prefill"]
    world.server.refuse = {}
    world.tick(1)
    assert ("demo", "b-prefill") in [(ns, name) for ns, name, _ in world.server.scaled]


def test_a_fault_in_one_object_leaves_the_others_alone() -> None:
    world = World(snapshot_of("a"), snapshot_of("b"))

    async def get(kind: str, namespace: str, name: str) -> dict[str, Any]:
        if name.startswith("a-"):
            raise KeyError("a bug")
        return {"status": {}}

    world.server.get = get  # type: ignore[method-assign]
    world.tick(1, BUSY)
    assert world.server.scaled == [("demo", "b-decode", 3)]


def test_a_leader_that_is_none_any_more_writes_nothing() -> None:
    """The lease goes between the first write of a tick and the next."""
    world = World(*(snapshot_of(name) for name in "abcdefghijklmnop"))

    def lose() -> None:
        world.leads = False

    world.server.before_write = lose
    world.tick(1, load(running=400.0, kv_tokens=400_000.0, prompt_rate=40_000.0))
    # What was in flight when it happened is at most what may be in flight at once; each object writes one role at a time.
    assert 1 <= len(world.server.scaled) <= 8
    before = list(world.server.scaled)
    world.tick(1)
    assert world.server.scaled == before


def test_a_pool_without_a_number_or_none_at_all_is_left_to_the_reconcile() -> None:
    world = World()
    show(world.stores, "demo", "chat-decode", None)
    world.tick(1, BUSY)
    world.stores.children.remove("pools", ("PDPool", "demo", "chat-decode"))
    world.tick(1, BUSY)
    assert world.server.scaled == [] and world.lines == []


@pytest.mark.parametrize("changes", [{"scaling": None}, {"suspend": True}])
def test_what_does_not_scale_leaves_the_roster(changes: dict[str, Any]) -> None:
    world = World()
    assert len(world.roster.entries()) == 1
    world.put(replace(serving(deep(SCALING, {**changes, "verification": "Advisory"})), uid="uid-chat"))
    assert world.roster.entries() == []
    assert [d.scales for d in world.roster.fleet()] == ([] if "suspend" in changes else [False])  # its evidence is watched
    world.tick(1, BUSY)
    assert world.server.scaled == []
    world.put(replace(serving(deep(SCALING, {**changes, "verification": "Disabled"})), uid="uid-chat"))
    assert world.roster.fleet() == () and world.roster.watched() == []


def test_the_fleet_is_the_pages_of_the_serving_slices() -> None:
    snapshot = snapshot_of()
    pods = [replace(p, ip=f"10.0.0.{n}") for n, p in enumerate(snapshot.pods)]
    dark = pod("feedbeef", "decode", ip="10.0.1.1")
    world = World()
    for one in (*pods, dark, pod(snapshot.revision_of(snapshot.pods[0].labels["pdserve.dev/slice"]), "decode", 9)):  # without an IP
        world.stores.pods.put("more", (one.namespace, f"x-{one.name}"), one)
    (deployment,) = world.roster.fleet()
    found = sorted((t.side, t.url.removeprefix("http://"), t.program, t.ready) for t in deployment.targets)
    assert found == [
        ("decode", "10.0.0.1:8000/metrics", "vllm", True),
        ("prefill", "10.0.0.0:8000/metrics", "vllm", True),
        ("router", "10.0.0.2:29000/metrics", "smg", True),
        ("router", "10.0.0.3:29000/metrics", "smg", True),
    ]


def test_a_deployment_that_is_made_anew_learns_anew() -> None:
    world = World()
    world.tick(2, BUSY)
    again = replace(snapshot_of(), uid="another")
    world.put(again)
    assert world.roster.scaled(("demo", "chat"), "another") is None
    world.server.statuses.clear()
    world.tick(1)
    assert parse(world.lines[-1]).learned.prefill.throughput is None


def test_what_was_learned_survives_a_restart_through_the_status_of_the_pools() -> None:
    world = World()
    world.tick(8)
    scaled = world.roster.scaled(("demo", "chat"), "uid-chat")
    assert scaled is not None and scaled.decision is not None
    there = replace(snapshot_of(), scaled=scaled)
    for role in ROLES:
        world.server.statuses["demo", f"chat-{role}"] = build_pool_status(there, make_plan(there), role, {}, 1)
    world.loop = world.new_loop()
    world.tick(1)
    before, after = scaled.decision.learned, parse(world.lines[-1]).learned
    assert after == before and after.prefill.throughput == 20_000.0
    world.loop, world.now = world.new_loop(), world.now + 3600
    world.tick(1)
    later = parse(world.lines[-1]).learned
    assert later.prefill.throughput == 20_000.0 and later.decode.kv_per_request == 1000.0
    assert later.prefill.prompt_rate is None and later.prefill.memory.peaks == ()


def test_an_engine_says_since_when_it_is_ready_and_is_unread_until_its_load_is_known() -> None:
    world = World()
    (decode,) = [p for p in world.stores.pods if p.labels.get("pdserve.dev/role") == "decode"]
    world.stores.pods.put("pods", (decode.namespace, decode.name), replace(decode, ip="10.0.0.7", ready_since=NOW))
    (found,) = world.roster.fleet()
    since = {target.side: target.since for target in found.targets}
    assert since == {**dict.fromkeys(since, 0.0), "decode": NOW.timestamp()}
    world.pages.of = {("demo", "chat"): replace(load(), unread={"decode": 1})}
    world.tick(1)
    seen = parse(world.lines[-1]).readings.decode
    assert (seen.ready, seen.starting, seen.unread) == (0, 1, 1)


def test_the_pages_of_an_object_are_made_anew_only_when_it_or_a_pod_of_it_changes() -> None:
    world = World(snapshot_of("chat"), snapshot_of("other"))
    for one in list(world.stores.pods):
        world.stores.pods.put("pods", (one.namespace, one.name), replace(one, ip="10.0.0.7"))
    chat, other = world.roster.fleet()
    assert world.roster.fleet()[0] is chat
    changed = next(p for p in world.stores.pods.by_owner("demo", "chat") if p.labels.get("pdserve.dev/role") == "decode")
    world.stores.pods.put("pods", (changed.namespace, changed.name), replace(changed, ip="10.0.0.8"))
    after = world.roster.fleet()
    assert after[1] is other and after[0] is not chat
    assert "http://10.0.0.8:8000/metrics" in [t.url for t in after[0].targets]
    world.put(replace(snapshot_of("chat"), uid="another"))
    assert world.roster.fleet()[0] is not after[0]
    world.roster.forget(("demo", "chat"))
    assert world.roster.fleet() == (other,)


def test_bounds_follow_the_spec_and_the_lead_times() -> None:
    world = World()
    world.tick(1)
    assert parse(world.lines[-1]).bounds.decode.maximum == 8
    world.put(snapshot_of(scaling={"decode": {"maxReplicas": 5}}))
    world.tick(1)
    assert parse(world.lines[-1]).bounds.decode.maximum == 5


@pytest.mark.parametrize(
    ("percent", "need", "counts"), [(100, "0.85 x b 200", (1, 3)), (150, "0.566667 x b 200", (2, 4)), (80, "1 x b 200", (1, 2))]
)
def test_headroom_divides_what_a_replica_may_carry(percent: int, need: str, counts: tuple[int, int]) -> None:
    """A prefill replica is busy by half, and 400 run where a decode replica holds 200: two are full, four carry 0.57 of that."""
    world = World(snapshot_of(scaling={"headroomPercent": percent}))
    world.tick(2, BUSY)
    assert (world.number("prefill"), world.number("decode")) == counts
    assert need in world.server.events[-1]
    assert [d for line in world.lines for d in replay(line)] == [], "what was decided says with which law"


def test_lead_times_are_those_that_a_pod_had_first() -> None:
    """A pod that falters an hour later and is ready again took no hour to start."""
    world = World()
    (decode,) = [p for p in world.stores.pods if p.labels.get("pdserve.dev/role") == "decode"]
    made = replace(decode, created=NOW - timedelta(seconds=50), ready_since=NOW - timedelta(seconds=10))
    world.stores.pods.put("pods", (made.namespace, made.name), made)
    world.tick(1)
    world.stores.pods.put("pods", (made.namespace, made.name), replace(made, ready_since=NOW + timedelta(seconds=3600)))
    world.tick(1)
    scaled = world.roster.scaled(("demo", "chat"), "uid-chat")
    assert scaled is not None and (scaled.lead["decode"].p50, scaled.lead["decode"].count) == (40.0, 1)
    assert parse(world.lines[-1]).bounds.decode.lead_time == 40.0
    world.stores.pods.remove("pods", (made.namespace, made.name))
    world.tick(1)
    assert parse(world.lines[-1]).bounds.decode.lead_time == 40.0  # nobody shows one now: the last one seen stands


def test_every_line_of_the_decision_log_replays(tmp_path: Any) -> None:
    log = DecisionLog(str(tmp_path / "decisions"))
    world = World(snapshot_of("a"), snapshot_of("b"), log=log.write)
    world.tick(4)
    world.tick(4, BUSY)
    world.pages.fault = "unknown"
    world.tick(2)
    lines = (tmp_path / "decisions").read_text().splitlines()
    assert len(lines) == 20 and {parse(line).name for line in lines} == {"demo/a", "demo/b"}
    assert [difference for line in lines for difference in replay(line)] == []
    assert any(parse(line).decision.decode.desired == 3 for line in lines)


def test_metrics_are_those_of_the_last_tick_and_go_with_the_object() -> None:
    world = World()
    registry = CollectorRegistry()
    registry.register(ScalingMetrics(world.roster))
    world.tick(2, BUSY)
    text = generate_latest(registry).decode()
    assert 'pd_operator_scaling_desired_replicas{name="chat",namespace="demo",role="decode"} 3.0' in text
    assert 'pd_operator_scaling_input{input="R",name="chat",namespace="demo",role="decode"} 400.0' in text
    assert 'pd_operator_scaling_signals_unknown{name="chat",namespace="demo"} 0.0' in text
    world.roster.forget(("demo", "chat"))
    assert 'name="chat"' not in generate_latest(registry).decode()


def test_an_object_that_goes_during_a_tick_leaves_nothing_behind() -> None:
    world = World()
    world.server.before_write = lambda: world.roster.forget(("demo", "chat"))
    world.tick(1, BUSY)
    assert world.roster.scaled(("demo", "chat"), "uid-chat") is None
