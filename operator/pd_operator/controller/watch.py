"""Where keys come from: kopf's event stream for our two kinds, our own reflectors for everything that we create.

kopf is used for exactly one thing, `on.event`, and its handlers only enqueue a key. Every other kind of handler writes to
the user's object (finalizers, annotations) or keeps state that a gap in the watch leaves wrong:

* `kopf.index` start-up is quadratic in the number of objects, and its entries survive deletions during a 410 gap;
* timers, daemons and delete handlers add finalizers, create and update handlers annotations;
* events of one object are not coalesced any more (kopf#844), and a failed event handler is not retried.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import aiohttp
import kopf

from pd_operator.core.names import DEPLOYMENT, GROUP_KIND, MANAGED_SELECTOR, WORKLOADS
from pd_operator.core.observed import AutoscalerFact, ChildFact
from pd_operator.kube.autoscalers import AutoscalerDecoder
from pd_operator.kube.client import KubeClient
from pd_operator.kube.facts import ChildDecoder, PodDecoder
from pd_operator.kube.kinds import KINDS
from pd_operator.kube.reflector import Reflector, Timing
from pd_operator.kube.store import Owner, Stores, owner_of

OUR_KINDS = ("PDDeployment", "PDPool")
CHILD_KINDS = (
    "PDPool",
    "Deployment",
    "ControllerRevision",
    "Service",
    "ServiceAccount",
    "Role",
    "RoleBinding",
    "PodDisruptionBudget",
    "NetworkPolicy",
    "Job",
)
OPTIONAL_KINDS = (GROUP_KIND, "HTTPRoute")  # children whose CRD belongs to somebody else and may be missing
CHILDREN = 100  # objects in a page; they become dicts and are hashed: 500 Deployments take 60 MiB meanwhile
KOPF_STOP = 4.0  # seconds kopf may take to clean up; it gives its workers 2 s
Enqueue = Callable[[Owner], None]
Namespaces = Sequence[str | None]  # (None,) = cluster-wide

logger = logging.getLogger(__name__)


class KopfEnded(Exception):
    """kopf's tasks ended although nobody asked for it."""


def child_reflectors(
    client: KubeClient, stores: Stores, namespaces: Namespaces, enqueue: Enqueue, timing: Timing | None = None
) -> list[Reflector[Any]]:
    """One reflector per kind that we create, and per watched namespace; each change enqueues the owner's key.

    HPAs are nobody's children: one that scales a child of ours enqueues its owner, all others cost their bytes and no more.
    An optional kind that comes or goes enqueues every PDDeployment: any may have waited for it.
    """

    def changed(old: Any, new: Any) -> None:
        for owner in {owner_of(fact) for fact in (old, new) if fact is not None}:
            if owner is not None:
                enqueue(owner)

    def workload(old: ChildFact | None, new: ChildFact | None) -> None:
        for fact in (old, new):
            owner = owner_of(fact) if fact is not None else None
            if owner is not None and stores.ledger is not None:
                stores.ledger.child(owner, old, new)
                break
        changed(old, new)

    def autoscaler(old: AutoscalerFact | None, new: AutoscalerFact | None) -> None:
        for fact in (old, new):
            target = stores.children.get(fact.kind, fact.namespace, fact.target) if fact is not None else None
            owner = owner_of(target) if target is not None else None
            if owner is not None:
                enqueue(owner)

    made: list[Reflector[Any]] = []
    for namespace in namespaces:
        for kind in (*CHILD_KINDS, *OPTIONAL_KINDS):
            notify, told = workload if kind in WORKLOADS else changed, _absence(stores, enqueue, kind, namespace)
            where = (kind, namespace, MANAGED_SELECTOR, ChildDecoder(kind), stores.children)
            made.append(Reflector(client, *where, notify, timing=timing, on_absent=told, limit=CHILDREN))
        scalers, seen = stores.autoscalers, AutoscalerDecoder()
        made.append(Reflector(client, "HorizontalPodAutoscaler", namespace, "", seen, scalers, autoscaler, timing=timing))
        made.append(Reflector(client, "Pod", namespace, MANAGED_SELECTOR, PodDecoder(), stores.pods, changed, timing=timing))
    return made


def _absence(stores: Stores, enqueue: Enqueue, kind: str, namespace: str | None) -> Callable[[str], None]:
    """What a reflector calls with why its kind is not there, or "" when it is."""

    def tell(why: str) -> None:
        stores.absent.pop((kind, namespace), None)
        if why:
            stores.absent[kind, namespace] = why
        for owner in sorted(stores.deployments):
            enqueue(owner)

    return tell


def kopf_settings() -> kopf.OperatorSettings:
    """kopf as a pure event source: no events posted, no peering, no scanning, bounded requests."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.watching.server_timeout = 290
    settings.watching.connect_timeout = 10
    settings.watching.inactivity_timeout = 70  # above the 60 s between two bookmarks
    settings.watching.reconnect_backoff = 1.0  # the default of 0.1 hammers a failing server
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 5
    settings.networking.error_backoffs = (0.5, 1, 2, 4, 8)
    settings.networking.enforce_retry_after = True
    settings.queueing.idle_timeout = 2
    settings.queueing.exit_timeout = 2
    settings.queueing.worker_limit = None  # a limit deadlocks with more objects than workers (kopf#1243)
    settings.execution.max_workers = 4
    settings.persistence.finalizer = "pdserve.dev/never-used"
    settings.process.ultimate_exiting_timeout = 25  # below the 30 s that kubelet gives
    return settings


@dataclass(slots=True)
class _Stream:
    response: aiohttp.ClientResponse
    received: int
    heard_at: float


@dataclass(slots=True)
class EventStreams:
    """kopf's watches, seen from their bytes: kopf itself tells nobody that a stream is silent."""

    namespaces: Namespaces
    opened: asyncio.Event = field(default_factory=asyncio.Event)  # set once each stream was opened
    _streams: dict[str, _Stream] = field(default_factory=dict)

    def expected(self) -> set[str]:
        """Names of the streams that must exist."""
        return {_name(kind, namespace) for kind in OUR_KINDS for namespace in self.namespaces}

    def missing(self) -> set[str]:
        """Streams that were never opened."""
        return self.expected() - set(self._streams)

    def note(self, request: aiohttp.ClientRequest, response: aiohttp.ClientResponse) -> None:
        """Remember a watch that was opened; the session calls this for every response."""
        if response.status != 200 or request.url.query.get("watch") != "true":
            return
        for kind in OUR_KINDS:
            for namespace in self.namespaces:
                if request.url.path.endswith(KINDS[kind].path(namespace)):
                    self._streams[_name(kind, namespace)] = _Stream(response, 0, time.monotonic())
        if not self.missing():
            self.opened.set()

    def sample(self) -> None:
        """Look which streams received bytes since the last look; call it about every second."""
        for stream in self._streams.values():
            received = stream.response.content.total_bytes
            if received != stream.received:
                stream.received = received
                stream.heard_at = time.monotonic()

    def ages(self) -> dict[str, float]:
        """Seconds since each stream last received a byte."""
        now = time.monotonic()
        return {name: now - stream.heard_at for name, stream in self._streams.items()}


def _name(kind: str, namespace: str | None) -> str:
    return f"{kind} (kopf)" if namespace is None else f"{kind}/{namespace} (kopf)"


def event_registry(client: KubeClient, streams: EventStreams, stores: Stores, enqueue: Enqueue) -> kopf.OperatorRegistry:
    """The only handlers that we give to kopf: a login and two event handlers that enqueue."""
    registry = kopf.OperatorRegistry()
    deployment, pool = KINDS["PDDeployment"], KINDS["PDPool"]

    @kopf.on.login(id="login", registry=registry, retries=5, backoff=1.0)
    async def login(**_: Any) -> kopf.AiohttpSession:
        return kopf.AiohttpSession(server=client.host, aiohttp_session=await client.new_session(streams.note))

    @kopf.on.event(deployment.group, deployment.version, deployment.plural, id="deployment", registry=registry)
    async def deployment_changed(type: str | None, namespace: str | None, name: str, meta: Mapping[str, Any], **_: Any) -> None:
        key = (namespace or "", name)
        if type == "DELETED":
            stores.deployments.discard(key)
        else:
            stores.deployments.add(key)
        if type == "DELETED" or stores.read.get(key) != meta.get("resourceVersion"):  # else a look at it has begun since
            enqueue(key)

    @kopf.on.event(pool.group, pool.version, pool.plural, id="pool", registry=registry)
    async def pool_changed(
        type: str | None, namespace: str | None, name: str, labels: Mapping[str, str], meta: Mapping[str, Any], **_: Any
    ) -> None:
        owner, fact = labels.get(DEPLOYMENT), stores.children.get("PDPool", namespace or "", name)
        if type is None and fact is not None and fact.resource_version == meta.get("resourceVersion"):
            return  # of a list; our own watch has told of it already
        if owner:
            enqueue((namespace or "", owner))

    return registry


_in_kopf: ContextVar[bool] = ContextVar("pd_in_kopf", default=False)


class _NotKopf(Collection[asyncio.Task[Any]]):
    """All tasks of the event loop but those that kopf started, directly or not.

    When kopf ends, it waits for and then cancels every task but the ones it is told to ignore, and it takes a fixed set of
    them. Ours come and go (a worker, a connection to /metrics), so tasks are told apart by the context they were born in.
    """

    def __init__(self) -> None:
        self._kopf: WeakSet[asyncio.Task[Any]] = WeakSet()
        loop = asyncio.get_running_loop()

        def factory(loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, Any], **kwargs: Any) -> asyncio.Task[Any]:
            task = asyncio.Task(coro, loop=loop, **kwargs)
            if _in_kopf.get():
                self._kopf.add(task)
            return task

        loop.set_task_factory(factory)  # type: ignore[arg-type]

    def __contains__(self, task: object) -> bool:
        return task not in self._kopf

    def __iter__(self) -> Iterator[asyncio.Task[Any]]:
        return iter([task for task in asyncio.all_tasks() if task in self])

    def __len__(self) -> int:
        return sum(1 for _ in self)


async def run_kopf(
    registry: kopf.OperatorRegistry, namespaces: Namespaces, stop: asyncio.Event, spawned: Callable[[], None]
) -> None:
    """Run kopf in this event loop until `stop` is set or one of its streams ends for good.

    Run it in a task of its own.

    Args:
        spawned: called once kopf has installed its signal handlers, to install ours instead.

    Raises:
        Exception: whatever ended kopf.
        KopfEnded: it ended without `stop` and without saying why.
    """
    ours = _NotKopf()
    _in_kopf.set(True)
    tasks = await kopf.spawn_tasks(
        registry=registry,
        settings=kopf_settings(),
        standalone=True,
        clusterwide=namespaces[0] is None,
        namespaces=[namespace for namespace in namespaces if namespace is not None],
        stop_flag=stop,
    )
    spawned()
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    failed = next((exc for task in tasks if task.done() and not task.cancelled() and (exc := task.exception())), None)
    # From here on kopf only cleans up. That is bounded by us, because it can wait for ever: when one stream fails, the
    # others are not stopped with it, and one of them may wait for credentials that nobody fetches any more (kopf 1.45.2).
    cleanup = asyncio.create_task(kopf.run_tasks(tasks, ignored=ours))
    await asyncio.wait([cleanup], timeout=KOPF_STOP)
    if not cleanup.done():
        logger.warning("kopf did not end within %.0f s and is left behind", KOPF_STOP)
        cleanup.cancel()
    if failed is not None:
        raise failed
    if not stop.is_set():
        raise KopfEnded("kopf ended by itself")
