"""The composition root: what exists, in which order it starts and stops, and with which exit code the process ends.

start   client -> probes -> server checked -> reflectors, lease, kopf -> (everything listed) -> workers
stop    workers drain -> lease released -> kopf -> reflectors -> probes -> client
exit    0 after SIGTERM or SIGINT; 1 when anything that must run for ever ended: a watch, kopf, the lease
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import random
import signal
import uuid
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Protocol

import aiohttp

from pd_operator import __version__
from pd_operator.controller.budgets import budgets_of
from pd_operator.controller.capacity import CapacityFeed
from pd_operator.controller.decision_log import DecisionLog, new_source
from pd_operator.controller.evidence import EvidenceLoop
from pd_operator.controller.evidence_metrics import EvidenceMetrics
from pd_operator.controller.health import Check, Health, LoopLag, Problem, over
from pd_operator.controller.loop import Controller, Key
from pd_operator.controller.object_metrics import ObjectMetrics, Shown
from pd_operator.controller.roster import Roster
from pd_operator.controller.scaling import ScalingLoop
from pd_operator.controller.scaling_metrics import ScalingMetrics
from pd_operator.controller.telemetry import Telemetry
from pd_operator.controller.watch import KOPF_STOP, OUR_KINDS, EventStreams, child_reflectors, event_registry, run_kopf
from pd_operator.controller.workqueue import WorkQueue
from pd_operator.core.ledger import Ledger
from pd_operator.core.result import Result
from pd_operator.kube.auth import NoCluster
from pd_operator.kube.client import KubeClient
from pd_operator.kube.errors import ApiError, Forbidden, is_retryable
from pd_operator.kube.events import EventRecorder
from pd_operator.kube.kinds import KINDS
from pd_operator.kube.lease import LeaseElector, LeaseLost, LeaseTiming
from pd_operator.kube.reflector import Reflector, Timing
from pd_operator.kube.store import Stores
from pd_operator.settings import Settings
from pd_operator.signals.source import Both

__all__ = ["Manager", "NoCluster", "ReconcileFactory", "Reconciler", "StartFailed", "run", "run_process"]

# Seconds. The children of one object change in bursts (16 are created, their pods turn Ready together), and the echo of each
# of our own writes is among them; the user's own object is never made to wait.
COALESCE = 0.2
MIN_SERVER = (1, 29)  # native sidecar containers
SERVER_WAIT = 60.0  # seconds for the API server to answer and to serve our kinds
SYNC_WAIT = 120.0  # seconds for all first lists
CANCEL_WAIT = 1.0  # seconds a cancelled task has to end
LEFTOVERS_WAIT = 1.0  # seconds for tasks that are left when everything of ours has ended
RESYNC_SPREAD = 30.0  # seconds over which the keys of a resync are spread
# Containers made, less those freed, between two looks of the youngest generation for cycles; Python's own 700 is for programs that
# make few. A tick of 1,000 objects makes 200,000 without a cycle: the looks were a third of its CPU (tests/bench/tick.py).
GARBAGE = 10_000
PAGES_TICKS = 4  # between two looks at the evidence when a Prometheus answers by pod
RESYNC_RETRY = 30.0  # seconds after a resync that could not list

logger = logging.getLogger(__name__)


class Reconciler(Protocol):
    """What the workers call."""

    async def reconcile(self, key: Key) -> Result:
        """Bring one PDDeployment nearer to its plan."""


ReconcileFactory = Callable[[KubeClient, Stores, Settings, EventRecorder], Reconciler]


class StartFailed(Exception):
    """The cluster cannot be served: too old, our kinds are not installed, no permission."""


class Manager:
    """One run of the operator."""

    def __init__(
        self,
        settings: Settings,
        reconcile_factory: ReconcileFactory,
        *,
        kubeconfig: str | None = None,
        lease_timing: LeaseTiming | None = None,
        watch_timing: Timing | None = None,
    ) -> None:
        """Timings are for tests; None = the documented ones."""
        self.settings = settings
        self.stores = Stores()
        self.stopping = asyncio.Event()
        self.telemetry = Telemetry()
        self.lag = LoopLag()
        self.queue: WorkQueue[Key] = WorkQueue(hooks=self.telemetry)
        self.streams = EventStreams(settings.namespaces)
        self.synced = False
        self._factory = reconcile_factory
        self._kubeconfig = kubeconfig
        self._lease_timing = lease_timing
        self._watch_timing = watch_timing
        self._stop_kopf = asyncio.Event()
        self._tasks: dict[asyncio.Task[None], str] = {}
        self._failed: str = ""
        self.reflectors: list[Reflector[Any]] = []
        self.scaling: ScalingLoop | None = None
        self.evidence: EvidenceLoop | None = None
        self.source: Both | None = None
        self.health = Health(
            settings.http_host, settings.http_port, live=self._live(), ready=self._ready(), expose=self.telemetry.expose
        )

    async def run(self) -> int:
        """Run until a signal, `stopping` or a failure; the exit code."""
        logger.info("pd-operator %s starts as %s", __version__, self.settings.identity)
        self._handle_signals()
        client = await KubeClient.connect(self._kubeconfig, on_call=self.telemetry.api_call)
        try:
            await self._listen()  # first: the kubelet probes while we wait for the server
            await self._check_server(client)
            if not self.stopping.is_set():
                await self._look_at_nodes(client)
                self._build(client)
                self._start(client)
                await self._wait()
                await self._stop()
        except StartFailed as exc:
            self._failed = str(exc)
        finally:
            await self.health.stop()
            if self.source is not None:
                await self.source.close()
            await client.close()
        if self._failed:
            logger.error("ends with exit code 1: %s", self._failed)
            return 1
        logger.info("ends with exit code 0")
        return 0

    async def _listen(self) -> None:
        try:
            await self.health.start()
        except OSError as exc:
            raise StartFailed(f"cannot listen on {self.settings.http_host}:{self.settings.http_port}: {exc}") from exc

    async def _check_server(self, client: KubeClient) -> None:
        """Wait, bounded, for a server that is new enough and serves our kinds."""
        last = ""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SERVER_WAIT):
                while not self.stopping.is_set():
                    try:
                        version = await client.server_version()
                        if version < MIN_SERVER:
                            raise StartFailed(
                                f"the API server is {version[0]}.{version[1]}, {MIN_SERVER[0]}.{MIN_SERVER[1]} is needed"
                            )
                        absent = [kind for kind in OUR_KINDS if not await client.served(kind, self.settings.namespaces[0])]
                        if not absent:
                            return
                        crds = ", ".join(f"{KINDS[kind].plural}.{KINDS[kind].group}" for kind in absent)
                        last = f"custom resource definitions not installed: {crds}"
                    except (ApiError, aiohttp.ClientError, TimeoutError, OSError) as exc:
                        if isinstance(exc, ApiError) and not is_retryable(exc):
                            raise StartFailed(f"the API server refuses: {exc}") from exc
                        last = f"the API server does not answer: {exc or type(exc).__name__}"
                    logger.warning("%s", last)
                    await asyncio.sleep(2)
                return
        raise StartFailed(f"waited {SERVER_WAIT:.0f} s: {last}")

    async def _look_at_nodes(self, client: KubeClient) -> None:
        """A cluster-wide install that may list nodes places by what they have free; any other leaves it to the scheduler."""
        if self.settings.namespaces != (None,):
            return
        try:
            await client.served("Node", None)
        except Forbidden as exc:
            logger.warning("slices are placed without looking at nodes, the chart's ClusterRole would allow it: %s", exc)
            return
        except (ApiError, aiohttp.ClientError, TimeoutError) as exc:
            raise StartFailed(f"nodes cannot be listed: {exc or type(exc).__name__}") from exc
        self.stores.ledger = Ledger()

    def _build(self, client: KubeClient) -> None:
        settings = self.settings
        identity = f"{settings.identity}_{uuid.uuid4().hex[:8]}"  # a restarted pod keeps its name but is another candidate
        namespace = settings.lease_namespace or settings.namespace
        self.elector = LeaseElector(client, namespace, settings.lease_name, identity, timing=self._lease_timing)
        client.may_write = self.elector.is_leader
        self.reflectors = child_reflectors(client, self.stores, settings.namespaces, self._child_changed, self._watch_timing)
        if self.stores.ledger is not None:
            self.reflectors += CapacityFeed(client, self.stores.ledger, self.queue.add_after, self._watch_timing).reflectors
        recorder = EventRecorder(client, settings.identity)
        reconciler = self._factory(client, self.stores, settings, recorder)
        shown: Shown | None = getattr(reconciler, "shown", None)
        if shown is not None:  # a reconciler of tests may have none
            self.telemetry.registry.register(ObjectMetrics(shown))
        self.scaling = self._scaling(client, getattr(reconciler, "roster", None), recorder)
        self.controller = Controller(
            self.queue,
            reconciler.reconcile,
            is_leader=self.elector.is_leader,
            telemetry=self.telemetry,
            workers=settings.workers,
            timeout=settings.reconcile_timeout_seconds,
        )
        self.telemetry.observe(
            depth=lambda: len(self.queue),
            delayed=self.queue.delayed,
            oldest=self.queue.oldest_age,
            leader=self.elector.is_leader,
            lag=self.lag.seconds,
            stream_ages=self.stream_ages,
        )

    def _scaling(self, client: KubeClient, roster: Roster | None, recorder: EventRecorder) -> ScalingLoop | None:
        """The scaling tick; None with a reconciler of tests that has no roster."""
        if roster is None:
            return None
        self.source = new_source(roster.fleet, self.settings)
        log = DecisionLog(self.settings.decision_log) if self.settings.decision_log else None
        self.telemetry.registry.register(ScalingMetrics(roster))
        self.telemetry.registry.register(EvidenceMetrics(roster))
        signals = self.settings.signals
        self.evidence = EvidenceLoop(
            client,
            self.stores,
            roster,
            self.source,
            is_leader=self.elector.is_leader,
            enqueue=self._child_changed,
            tick=signals.tick_seconds * (PAGES_TICKS if signals.source == "prometheus" else 1),
        )
        return ScalingLoop(
            client,
            self.stores,
            roster,
            self.source,
            recorder,
            is_leader=self.elector.is_leader,
            enqueue=self._child_changed,
            log=log.write if log else None,
            tick=self.settings.signals.tick_seconds,
            budgets=budgets_of(self.settings),
        )

    def _child_changed(self, key: Key) -> None:
        self.queue.add_after(key, COALESCE)

    def _start(self, client: KubeClient) -> None:
        """Start everything that must run for ever."""
        for reflector in self.reflectors:
            self._spawn(f"watch of {reflector.name}", reflector.run())
        self._lease_task = self._spawn("lease", self.elector.run())
        self._spawn("loop lag", self.lag.run(self.streams.sample))
        self._workers = self._spawn("workers", self._work())
        if self.scaling is not None and self.source is not None:
            self._spawn("signals", self.source.run())
            self._spawn("scaling tick", self.scaling.run())
        if self.evidence is not None:
            self._spawn("evidence", self.evidence.run())
        self._spawn("resync", self._resync(client))
        registry = event_registry(client, self.streams, self.stores, self.queue.add)
        self._kopf = self._spawn("kopf", run_kopf(registry, self.settings.namespaces, self._stop_kopf, self._handle_signals))

    def _spawn(self, name: str, coro: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coro, name=name)
        self._tasks[task] = name
        return task

    async def _work(self) -> None:
        """No reconcile before everything was listed: a plan from half a world deletes the other half."""
        try:
            async with asyncio.timeout(SYNC_WAIT):
                for reflector in self.reflectors:
                    await reflector.synced.wait()
                await self.streams.opened.wait()
        except TimeoutError:
            raise StartFailed(f"not listed within {SYNC_WAIT:.0f} s: {', '.join(self._unsynced())}") from None
        self.synced = True
        logger.info("all %d watches are listed", len(self.reflectors) + len(self.streams.expected()))
        await self.controller.run()

    async def _resync(self, client: KubeClient) -> None:
        """Enqueue every PDDeployment when we begin to lead, and then every `resync_seconds` (+-20 %).

        Lists them anew, so that a key that a watch has lost is found.
        """
        await self.elector.led.wait()
        spread = 0.0
        while True:
            wait = self.settings.resync_seconds * random.uniform(0.8, 1.2)
            try:
                keys = {key for namespace in self.settings.namespaces for key in await client.list_keys("PDDeployment", namespace)}
                self.stores.deployments.clear()
                self.stores.deployments.update(keys)
                for key in sorted(keys):
                    self.queue.add_after(key, random.uniform(0, spread))
            except (ApiError, aiohttp.ClientError, TimeoutError, OSError) as exc:
                logger.warning("cannot list PDDeployments for the resync: %s", exc)
                wait = min(wait, RESYNC_RETRY)
            spread = min(RESYNC_SPREAD, self.settings.resync_seconds / 10)
            await asyncio.sleep(wait)

    async def _wait(self) -> None:
        """Until we shall stop, or something that must run for ever has ended."""
        stopping = asyncio.create_task(self.stopping.wait(), name="stop")
        await asyncio.wait([stopping, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        for task, name in self._tasks.items():
            if task.done():
                exc = None if task.cancelled() else task.exception()
                self._failed = f"{name}: {type(exc).__name__}: {exc}" if exc else f"{name}: it ended by itself"
                logger.error("%s failed", name, exc_info=exc)

    async def _stop(self) -> None:
        """In an order that loses nothing: see the module's text."""
        logger.info(
            "stops: %d keys wait, the longest running reconcile takes %.1f s", len(self.queue), self.queue.longest_running()
        )
        self.queue.shutdown()
        lost = self._lease_task.done() and not self._lease_task.cancelled() and isinstance(self._lease_task.exception(), LeaseLost)
        # A replica that is not leader any more must not write: its reconciles are cut off.
        drain = self.settings.drain_seconds if self.synced and not lost else 0.0
        await self._end(self._workers, drain)
        await self._end(self._lease_task, 0.0)
        await self.elector.release()
        self._stop_kopf.set()
        await self._end(self._kopf, KOPF_STOP + 1)
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks, timeout=CANCEL_WAIT)

    async def _end(self, task: asyncio.Task[None], seconds: float) -> None:
        """Wait for a task, then cancel it."""
        if seconds:
            await asyncio.wait([task], timeout=seconds)
        if not task.done():
            if seconds:
                logger.warning("%s did not end within %.0f s and is cut off", self._tasks[task], seconds)
            task.cancel()
            await asyncio.wait([task], timeout=CANCEL_WAIT)

    def stream_ages(self) -> dict[str, float]:
        """Seconds since each watch last heard from the server."""
        return {reflector.name: reflector.stream_age() for reflector in self.reflectors} | self.streams.ages()

    def _unsynced(self) -> list[str]:
        return sorted(
            [reflector.name for reflector in self.reflectors if not reflector.synced.is_set()] + list(self.streams.missing())
        )

    def _live(self) -> list[Check]:
        settings = self.settings
        stuck = settings.reconcile_timeout_seconds + 30
        return [
            lambda: over("loopLag", "the event loop is late", self.lag.seconds(), settings.max_loop_lag_seconds),
            lambda: over("worker", "a reconcile does not return", self.queue.longest_running(), stuck),
        ]

    def _ready(self) -> list[Check]:
        settings = self.settings
        return [
            self._check_synced,
            lambda: (
                problem
                for name, age in sorted(self.stream_ages().items())
                for problem in over("streamAge", f"the watch of {name} is silent", age, settings.max_stream_age_seconds)
            ),
            lambda: over("oldestKey", "a key waits for a worker", self.queue.oldest_age(), settings.max_key_age_seconds),
        ]

    def _check_synced(self) -> Iterable[Problem]:
        if not self.synced:
            yield Problem("synced", f"not listed yet: {', '.join(self._unsynced()) or 'the workers do not run'}")

    def _handle_signals(self) -> None:
        """SIGTERM and SIGINT set `stopping`. kopf installs its own handlers, so this runs again after it."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):  # not in the main thread
                loop.add_signal_handler(number, self.stopping.set)


async def run(settings: Settings, reconcile_factory: ReconcileFactory) -> int:
    """Run the operator in this event loop; the exit code of the process."""
    return await Manager(settings, reconcile_factory).run()


def run_process(operator: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Like `asyncio.run(operator())`, but the end is bounded.

    `asyncio.run` waits for every cancelled task, and kopf may leave tasks that swallow their cancellation.
    """
    gc.set_threshold(GARBAGE, *gc.get_threshold()[1:])
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(operator())
    finally:
        leftovers = asyncio.all_tasks(loop)
        for task in leftovers:
            task.cancel()
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        if leftovers:
            loop.run_until_complete(asyncio.wait(leftovers, timeout=LEFTOVERS_WAIT))
        loop.close()
