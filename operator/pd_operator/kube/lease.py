"""Leader election on a Lease of coordination.k8s.io/v1, with the rules and times of client-go's leaderelection.

Own code instead of `kubernetes.aio.leaderelection`, which measures with the wall clock, has no request timeout inside the
renew deadline (a hanging renewal outlives the lease: two leaders) and does not release on shutdown.

Times are measured on our own monotonic clock: another holder's lease has expired when *we* have seen it unchanged for its
duration; nothing compares clocks of two machines.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import aiohttp

from pd_operator.kube.client import KubeClient
from pd_operator.kube.errors import ApiError, Conflict

# client-go's recommended defaults (k8s.io/component-base config/v1alpha1 RecommendedDefaultLeaderElectionConfiguration)
LEASE_DURATION = 15.0  # seconds others wait before they take an unrenewed lease
RENEW_DEADLINE = 10.0  # seconds the leader tries to renew before it stops leading
RETRY_PERIOD = 2.0  # seconds between attempts
JITTER = 1.2  # as client-go's JitterFactor: a follower waits up to 2.2 periods
RELEASE_TIMEOUT = 2.0  # seconds
GIVE_UP_AFTER = 300.0  # seconds a follower may fail to read the lease at all

logger = logging.getLogger(__name__)


class LeaseLost(Exception):
    """We led and could not renew in time, or somebody took the lease: another replica may lead now."""


class LeaseUnavailable(Exception):
    """The Lease can be neither read nor written for longer than allowed (RBAC, a missing namespace, no API server)."""


@dataclass(frozen=True, slots=True)
class LeaseTiming:
    """Seconds; tests shorten them."""

    lease_duration: float = LEASE_DURATION
    renew_deadline: float = RENEW_DEADLINE
    retry_period: float = RETRY_PERIOD
    give_up_after: float = GIVE_UP_AFTER

    def __post_init__(self) -> None:
        if not 0 < self.retry_period < self.renew_deadline < self.lease_duration:
            raise ValueError("lease: retry_period < renew_deadline < lease_duration is required")


class LeaseElector:
    """One candidate.

    Args:
        identity: unique per process (pod name and a random part).

    Attributes:
        led: set when we lead, for the first time and for good: losing ends `run`.
    """

    def __init__(self, client: KubeClient, namespace: str, name: str, identity: str, *, timing: LeaseTiming | None = None) -> None:
        self.led = asyncio.Event()
        self.identity = identity
        self._client = client
        self._namespace = namespace
        self._name = name
        self._timing = timing or LeaseTiming()
        self._renewed_at: float | None = None  # when the last successful renewal was *sent*
        self._seen: dict[str, Any] | None = None  # the lease as last read or written
        self._seen_at = 0.0  # when its spec was first seen like that
        self._released = False

    def is_leader(self) -> bool:
        """Whether a write is allowed now.

        False as soon as the renew deadline has passed, even while `run` has not noticed yet (a blocked event loop).
        """
        return self._renewed_at is not None and time.monotonic() - self._renewed_at < self._timing.renew_deadline

    async def run(self) -> None:
        """Wait for the lease, then hold it until cancelled.

        Raises:
            LeaseLost: leadership ended; the caller must stop all writes at once.
            LeaseUnavailable: as a follower, nothing but errors for `give_up_after`.
        """
        await self._acquire()
        logger.info("leading: %s holds lease %s/%s", self.identity, self._namespace, self._name)
        self.led.set()
        while True:
            await asyncio.sleep(self._timing.retry_period)
            await self._renew()

    async def release(self) -> None:
        """Give the lease up so that a follower takes over at once; errors are logged only. Cancel `run` first."""
        held = self._renewed_at is not None
        self._renewed_at = None
        if not held or self._released:
            return
        self._released = True
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT):
                while not await self._let_go():
                    pass
        except (ApiError, aiohttp.ClientError, TimeoutError, OSError) as exc:
            logger.warning("cannot release lease %s/%s, it expires by itself: %s", self._namespace, self._name, exc)

    async def _let_go(self) -> bool:
        """Whether the lease is not ours any more. It is read anew: `run` may have been cancelled during a renewal that arrived."""
        found = await self._client.get("Lease", self._namespace, self._name)
        if found is None or found["spec"].get("holderIdentity") != self.identity:
            return True
        spec = {**found["spec"], "holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": _now()}
        try:
            await self._client.replace({**found, "spec": spec})
        except Conflict:  # that renewal arrived in between
            return False
        logger.info("released lease %s/%s", self._namespace, self._name)
        return True

    async def _acquire(self) -> None:
        failing_since: float | None = None
        while True:
            try:
                async with asyncio.timeout(self._timing.renew_deadline):
                    if await self._try():
                        return
                failing_since = None
            except (ApiError, aiohttp.ClientError, TimeoutError, OSError) as exc:
                now = time.monotonic()
                failing_since = now if failing_since is None else failing_since
                if now - failing_since > self._timing.give_up_after:
                    raise LeaseUnavailable(
                        f"lease {self._namespace}/{self._name}: unavailable for {now - failing_since:.0f} s"
                        f" (limit {self._timing.give_up_after:.0f} s), last: {exc}"
                    ) from exc
                logger.warning("lease %s/%s: %s", self._namespace, self._name, exc)
            await asyncio.sleep(self._timing.retry_period * random.uniform(1.0, 1.0 + JITTER))

    async def _renew(self) -> None:
        """Renew once; several attempts within the deadline."""
        if self._renewed_at is None:
            raise LeaseLost("not leading")
        deadline = self._renewed_at + self._timing.renew_deadline
        last = "the event loop was blocked"
        while (left := deadline - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(left):
                    if await self._try():
                        return
                holder = (self._seen or {}).get("spec", {}).get("holderIdentity")
                self._renewed_at = None
                raise LeaseLost(f"lease {self._namespace}/{self._name} was taken by {holder!r}")
            except (ApiError, aiohttp.ClientError, TimeoutError, OSError) as exc:
                last = f"{type(exc).__name__}: {exc}"
                logger.warning("cannot renew lease %s/%s: %s", self._namespace, self._name, last)
            await asyncio.sleep(min(self._timing.retry_period, max(0.0, deadline - time.monotonic())))
        self._renewed_at = None
        raise LeaseLost(f"lease {self._namespace}/{self._name} was not renewed for {self._timing.renew_deadline:.0f} s: {last}")

    async def _try(self) -> bool:
        """Take or renew the lease if we may; whether we hold it now."""
        sent_at = time.monotonic()
        found = await self._client.get("Lease", self._namespace, self._name)
        try:
            if found is None:
                written = await self._client.create(self._manifest(None))
            else:
                self._observe(found)
                if not self._may_take(found["spec"]):
                    return False
                written = await self._client.replace(self._manifest(found))
        except Conflict:
            return False if self._renewed_at is None else await self._still_ours()
        self._seen, self._seen_at = written, time.monotonic()
        self._renewed_at = sent_at
        return True

    async def _still_ours(self) -> bool:
        """After a conflict while leading: a stranger's write, or an earlier attempt of ours whose answer was lost."""
        found = await self._client.get("Lease", self._namespace, self._name)
        if found is None or found["spec"].get("holderIdentity") == self.identity:
            raise TimeoutError("the lease changed while it was renewed, trying again")
        self._observe(found)
        return False

    def _observe(self, found: dict[str, Any]) -> None:
        if self._seen is None or self._seen["spec"] != found["spec"]:
            self._seen_at = time.monotonic()
        self._seen = found

    def _may_take(self, spec: Mapping[str, Any]) -> bool:
        holder = spec.get("holderIdentity") or ""
        if holder in {"", self.identity}:
            return True
        # A holder's own duration counts, as in client-go; ours when it left none.
        duration = float(spec.get("leaseDurationSeconds") or self._timing.lease_duration)
        return time.monotonic() - self._seen_at > duration

    def _manifest(self, found: Mapping[str, Any] | None) -> dict[str, Any]:
        old: Mapping[str, Any] = found["spec"] if found else {}
        ours = old.get("holderIdentity") == self.identity
        transitions = int(old.get("leaseTransitions") or 0)
        spec = {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": max(1, round(self._timing.lease_duration)),
            "acquireTime": old.get("acquireTime") if ours else _now(),
            "renewTime": _now(),
            "leaseTransitions": transitions if ours or not found else transitions + 1,
        }
        if found is not None:
            return {**found, "spec": spec}
        metadata = {"namespace": self._namespace, "name": self._name}
        return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}


def _now() -> str:
    """MicroTime as the API wants it: exactly six digits and a Z."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
