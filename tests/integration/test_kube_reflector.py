"""Reflector against a real API server, with a proxy in between that breaks streams in every way they break."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from faults.objects import LABELS, pod, service, until
from faults.proxy import FOREVER, Fault, FaultProxy
from pd_operator.core.names import COMPONENT, MANAGED_SELECTOR, REVISION_COMPONENT
from pd_operator.core.observed import ChildFact, PodFact
from pd_operator.kube import client as client_module
from pd_operator.kube.client import KubeClient
from pd_operator.kube.facts import ChildDecoder, PodDecoder
from pd_operator.kube.reflector import Reflector, ReflectorFailed, Timing
from pd_operator.kube.store import Store, Stores, owner_of

QUICK = Timing(server_timeout=30, inactivity=60.0, give_up_after=2.0, backoff_base=0.05, backoff_cap=0.4)
SERVICES = r"/services\?"
WATCH = r"/services\?watch"

Change = tuple[Any, Any]


@pytest.fixture
async def through(proxy: FaultProxy) -> AsyncIterator[KubeClient]:
    made = await KubeClient.connect(str(proxy.kubeconfig), request_timeout=3)
    yield made
    await made.close()


class Watched:
    """A reflector of the Services of one namespace, and what it told."""

    def __init__(self, client: KubeClient, namespace: str, timing: Timing = QUICK) -> None:
        self.store: Store[ChildFact] = Store(owner_of)
        self.changes: list[Change] = []
        self.reflector = Reflector(
            client,
            "Service",
            namespace,
            MANAGED_SELECTOR,
            ChildDecoder("Service"),
            self.store,
            lambda old, new: self.changes.append((old, new)),
            timing=timing,
        )

    def names(self) -> set[str]:
        return {fact.name for fact in self.store}


@asynccontextmanager
async def running(watched: Watched) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(watched.reflector.run())
    try:
        await asyncio.wait_for(watched.reflector.synced.wait(), 10)
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_it_lists_and_then_follows(client: KubeClient, namespace: str) -> None:
    await client.apply(service(namespace, "a"))
    watched = Watched(client, namespace)
    async with running(watched):
        assert watched.names() == {"a"}
        old, new = watched.changes.pop()
        assert old is None
        assert (new.namespace, new.name, new.kind, new.labels) == (namespace, "a", "Service", LABELS)
        first = watched.store.generation
        await client.apply(service(namespace, "b"))
        await until("b is seen", lambda: watched.names() == {"a", "b"})
        await client.apply(service(namespace, "a", port=81))
        await until("the edit is seen", lambda: len(watched.changes) == 2)
        old, new = watched.changes[-1]
        assert old.name == new.name == "a"
        assert old.digest != new.digest
        assert old.resource_version != new.resource_version
        await client.delete("Service", namespace, "b", uid=watched.store.get("Service", namespace, "b").uid)  # type: ignore[union-attr]
        await until("the deletion is seen", lambda: watched.names() == {"a"})
        assert watched.changes[-1][1] is None
        assert watched.store.generation > first
        assert watched.reflector.relists == 1


async def test_other_objects_are_not_seen(client: KubeClient, namespace: str) -> None:
    foreign = service(namespace, "foreign")
    foreign["metadata"]["labels"] = {"app": "x"}
    await client.apply(foreign)
    watched = Watched(client, namespace)
    async with running(watched):
        await client.apply(service(namespace, "ours"))
        await until("ours is seen", lambda: watched.names() == {"ours"})
        # An object that loses the label leaves the view, as if it had been deleted.
        lost = service(namespace, "ours")
        lost["metadata"]["labels"] = {}
        await client.apply(lost)
        await until("it left", lambda: watched.names() == set())


async def test_deletions_during_a_gap_are_seen_after_a_410(
    client: KubeClient, proxy: FaultProxy, through: KubeClient, namespace: str
) -> None:
    """kopf.index keeps such ghosts for ever; a placement made from them uses pods that do not exist."""
    for number in range(30):
        await client.apply(service(namespace, f"s{number}"))
    watched = Watched(through, namespace)
    async with running(watched):
        assert len(watched.store) == 30
        proxy.freeze(WATCH)
        for number in range(10):
            found = watched.store.get("Service", namespace, f"s{number}")
            assert found is not None
            await client.delete("Service", namespace, f"s{number}", uid=found.uid)
        await client.apply(service(namespace, "new"))
        await asyncio.sleep(0.5)
        assert len(watched.store) == 30  # unseen
        watched.changes.clear()
        await proxy.expire(WATCH)
        await until("the ghosts are gone", lambda: watched.names() == {f"s{n}" for n in range(10, 30)} | {"new"})
        assert sorted(old.name for old, new in watched.changes if new is None) == sorted(f"s{n}" for n in range(10))
        assert [new.name for old, new in watched.changes if old is None] == ["new"]
        assert len(watched.changes) == 11  # the unchanged 20 are not told again
        assert len(watched.store.by_owner(namespace, "chat")) == 21
        assert watched.reflector.relists == 2


@pytest.mark.parametrize("fault", [Fault(path=WATCH, cut_after=1), Fault(path=WATCH, end_after=1)], ids=["cut", "ended"])
async def test_a_broken_stream_goes_on_where_it_was(
    client: KubeClient, proxy: FaultProxy, through: KubeClient, namespace: str, fault: Fault
) -> None:
    proxy.add(fault)
    watched = Watched(through, namespace)
    async with running(watched):
        await until("the watch is open", lambda: proxy.open_watches(WATCH))
        for number in range(5):
            await client.apply(service(namespace, f"s{number}"))
        await until("all are seen", lambda: len(watched.store) == 5)
        assert fault.used == 1
        assert watched.reflector.relists == 1
        assert len(watched.changes) == 5  # none lost, none twice


@pytest.mark.parametrize("times", [1, FOREVER], ids=["once", "for-ever"])
async def test_a_silent_stream_is_replaced_by_a_list(
    client: KubeClient, proxy: FaultProxy, through: KubeClient, namespace: str, times: int
) -> None:
    """A proxy that swallows streams, or a server that sends no bookmarks: what happened meanwhile is seen all the same."""
    proxy.add(Fault(path=WATCH, silent_after=0, times=times))
    silence = 2.0
    watched = Watched(through, namespace, Timing(inactivity=silence, give_up_after=0.5, backoff_base=0.05))
    begin = time.monotonic()

    def lists() -> int:
        """As many as the time since allows, the first one and one that is on its way among them."""
        return 2 + int((time.monotonic() - begin) / silence)

    async with running(watched) as task:
        await until("the watch is open", lambda: proxy.open_watches(WATCH))
        opened = time.monotonic()
        await client.apply(service(namespace, "a"))
        await asyncio.sleep(0.5)
        age, first = watched.reflector.stream_age(), watched.reflector.relists == 1
        if first:  # else the machine stood still for all of the silence
            assert watched.names() == set()
            assert age > 0.4
        await until("a is seen", lambda: watched.names() == {"a"})
        assert watched.reflector.stream_age() < time.monotonic() - opened  # what was listed counts
        assert 2 <= watched.reflector.relists <= lists()
        await client.apply(service(namespace, "b"))
        await until("b is seen", lambda: watched.names() == {"a", "b"})
        await asyncio.sleep(2.5)
        assert not task.done()  # silence is no failure
        assert watched.reflector.relists <= lists()


@pytest.mark.parametrize(
    "fault",
    [
        lambda: Fault(path=SERVICES, status=500, times=3),
        lambda: Fault(path=SERVICES, status=503, times=3),
        lambda: Fault(path=SERVICES, drop=True, times=4),
        lambda: Fault(path=SERVICES, status=401, times=2),
        lambda: Fault(path=SERVICES, status=403, times=2),
        lambda: Fault(path=WATCH, status=500, times=3),
        lambda: Fault(path=WATCH, status=410, times=2),
        lambda: Fault(path=WATCH, error_after=0, error_code=410, times=2),
        lambda: Fault(path=WATCH, error_after=0, error_code=500, times=2),
        lambda: Fault(path=WATCH, end_after=0, times=3),
        lambda: Fault(path=WATCH, cut_after=0, times=3),
    ],
    ids=[
        "list-500", "list-503", "list-dropped", "list-401", "list-403",
        "watch-500", "watch-410", "error-event-410", "error-event-500", "watch-ends-at-once", "watch-cut-at-once",
    ],
)  # fmt: skip
async def test_it_recovers(
    client: KubeClient, proxy: FaultProxy, through: KubeClient, namespace: str, fault: Callable[[], Fault]
) -> None:
    injected = proxy.add(fault())
    watched = Watched(through, namespace)
    async with running(watched):
        await client.apply(service(namespace, "a"))
        await until("a is seen", lambda: watched.names() == {"a"})
        await until("the fault was met in full", lambda: injected.used == injected.times)
        await client.apply(service(namespace, "b"))
        await until("b is seen", lambda: watched.names() == {"a", "b"})


async def test_it_waits_as_long_as_the_server_asks(proxy: FaultProxy, through: KubeClient, namespace: str) -> None:
    proxy.add(Fault(path=SERVICES, status=429, headers={"Retry-After": "1"}))
    watched = Watched(through, namespace, Timing(backoff_base=0.01, backoff_cap=5))
    started = time.monotonic()
    async with running(watched):
        assert 0.95 < time.monotonic() - started < 3


@pytest.mark.parametrize("path", [SERVICES, WATCH], ids=["list", "watch-only"])
async def test_it_gives_up_when_it_is_forbidden_for_good(proxy: FaultProxy, through: KubeClient, namespace: str, path: str) -> None:
    """The process ends and is restarted, in sight of everybody, instead of living on with a cache that nobody feeds."""
    proxy.add(Fault(path=path, status=403, times=FOREVER))
    watched = Watched(through, namespace)
    started = time.monotonic()
    with pytest.raises(ReflectorFailed, match="403"):
        await asyncio.wait_for(watched.reflector.run(), 15)
    assert time.monotonic() - started > QUICK.give_up_after
    assert len(proxy.seen) < 40  # it backed off


async def test_a_storm_of_410_does_not_hammer_the_server(proxy: FaultProxy, through: KubeClient, namespace: str) -> None:
    proxy.add(Fault(path=WATCH, error_after=0, times=FOREVER))
    watched = Watched(through, namespace, Timing(give_up_after=60))
    async with running(watched):
        await asyncio.sleep(3)
        assert proxy.count("GET", SERVICES) <= 12


async def test_bytes_that_are_no_list_end_the_task(proxy: FaultProxy, through: KubeClient, namespace: str) -> None:
    """An answer of 200 with something else in it (a captive proxy) must never pass for an empty list."""
    proxy.add(Fault(path=SERVICES, status=200, times=FOREVER))
    watched = Watched(through, namespace)
    with pytest.raises(ReflectorFailed, match="cannot be parsed"):
        await asyncio.wait_for(watched.reflector.run(), 5)


async def test_a_list_in_pages_survives_an_expired_token(
    client: KubeClient, proxy: FaultProxy, through: KubeClient, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kopf ends the whole operator there."""
    monkeypatch.setattr(client_module, "PAGE", 4)
    for number in range(10):
        await client.apply(service(namespace, f"s{number}"))
    fault = proxy.add(Fault(path="services.*continue=", status=410))
    watched = Watched(through, namespace)
    async with running(watched):
        assert len(watched.store) == 10
        assert fault.used == 1


async def test_large_objects_pass(client: KubeClient, namespace: str) -> None:
    """Rendered templates in a ControllerRevision are far larger than a line buffer of aiohttp."""
    store: Store[ChildFact] = Store(owner_of)
    reflector = Reflector(
        client, "ControllerRevision", namespace, MANAGED_SELECTOR, ChildDecoder("ControllerRevision"), store, lambda old, new: None
    )
    task = asyncio.create_task(reflector.run())
    try:
        await asyncio.wait_for(reflector.synced.wait(), 10)
        revision = {
            "apiVersion": "apps/v1",
            "kind": "ControllerRevision",
            "metadata": {"namespace": namespace, "name": "big", "labels": LABELS | {COMPONENT: REVISION_COMPONENT}},
            "data": {"template": "x" * 1_000_000},
            "revision": 7,
        }
        await client.apply(revision)
        await until("it is seen", lambda: len(store) == 1)
        fact = store.get("ControllerRevision", namespace, "big")
        assert fact is not None
        assert len(fact.data) > 1_000_000
        assert fact.data.startswith(b'{"data":{"template":"x')
        assert fact.data.endswith(b'"revision":7}')
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_pods_become_facts(client: KubeClient, namespace: str) -> None:
    stores = Stores()
    reflector = Reflector(client, "Pod", namespace, MANAGED_SELECTOR, PodDecoder(), stores.pods, lambda old, new: None)
    task = asyncio.create_task(reflector.run())
    try:
        await asyncio.wait_for(reflector.synced.wait(), 10)
        await client.create(pod(namespace, "p", **{"pdserve.dev/role": "prefill"}))
        await until("the scheduler spoke", lambda: any(fact.scheduling_reason for fact in stores.pods))
        fact = stores.pods.get(namespace, "p")
        assert isinstance(fact, PodFact)
        assert fact.labels == LABELS | {"pdserve.dev/role": "prefill"}
        assert fact.annotations == {"smg.ai/kv-connector": "x"}
        assert (fact.phase, fact.node, fact.ready, fact.scheduled, fact.deleting) == ("Pending", "", False, False, False)
        assert fact.scheduling_reason == "Unschedulable"
        assert "nodes" in fact.scheduling_message
        assert fact.created is not None
        assert fact.scheduling_since is not None
        assert [f.name for f in stores.pods.by_owner(namespace, "chat")] == ["p"]
        await client.delete("Pod", namespace, "p", uid=fact.uid)
        await until("it is gone", lambda: len(stores.pods) == 0)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_two_kinds_share_a_store(client: KubeClient, namespace: str) -> None:
    """A list of one kind must not remove the other's objects."""
    stores = Stores()
    reflectors = [
        Reflector(client, kind, namespace, MANAGED_SELECTOR, ChildDecoder(kind), stores.children, lambda old, new: None)
        for kind in ("Service", "ServiceAccount")
    ]
    await client.apply(service(namespace, "chat"))
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"namespace": namespace, "name": "chat", "labels": LABELS}}
    await client.apply(account)
    tasks = [asyncio.create_task(reflector.run()) for reflector in reflectors]
    try:
        for reflector in reflectors:
            await asyncio.wait_for(reflector.synced.wait(), 10)
        assert {(fact.kind, fact.name) for fact in stores.children} == {("Service", "chat"), ("ServiceAccount", "chat")}
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
