"""Applying manifests: a write only where the world differs (invariant I2), and never over an object that is not ours (I7)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pd_operator.core.names import APPLIED_HASH
from pd_operator.core.observed import ChildFact
from pd_operator.core.prune import Deletion
from pd_operator.kube import facts
from pd_operator.kube.client import KubeClient
from pd_operator.kube.errors import Conflict
from pd_operator.kube.store import Store

Manifest = dict[str, Any]
EXPECTATION = 30.0  # seconds that a store may lag behind our own write, as KubeRay's scale expectations
CONCURRENCY = 16  # writes of one reconcile at once


@dataclass(frozen=True, slots=True)
class Written:
    """What the server answered to our last write of an object."""

    deployment: str  # name of the PDDeployment
    owner_uid: str  # and its uid
    uid: str
    hash: str
    digest: str
    version: int
    at: float  # time.monotonic()


class Applier:
    """Remembers its own writes, so that an unchanged object costs nothing and a changed one is seen.

    After a restart it remembers nothing: each child is then applied once, which changes nothing on the server.
    """

    def __init__(self, client: KubeClient, store: Store[ChildFact]) -> None:
        self._client = client
        self._store = store
        self._written: dict[tuple[str, str, str], Written] = {}
        self._limit = asyncio.Semaphore(CONCURRENCY)

    async def foreign(self, manifests: Iterable[Manifest]) -> list[tuple[str, str, dict[str, Any]]]:
        """(kind, name, controller owner or {}) of objects that have our names and another owner, or none.

        Only objects that are not known to be ours are looked up. Labels prove nothing: they are copied with a manifest, and
        stay on what a deletion has orphaned.
        """
        unknown = [m for m in manifests if not self._is_ours(m)]
        found = await asyncio.gather(*(self._owner_if_foreign(m) for m in unknown))
        return [item for item in found if item is not None]

    def unseen(self, manifests: Iterable[Manifest]) -> list[str]:
        """Kind and name of what we wrote and the watch has not shown yet: what the store says of it is older."""
        return [f"{m['kind']} {m['metadata']['name']}" for m in manifests if self._is_unseen(m)]

    def version(self, manifest: Manifest) -> int:
        """resourceVersion that our last write of it got; 0 when we wrote nothing."""
        written = self._written.get(_key(manifest))
        return written.version if written else 0

    async def apply(self, manifests: Iterable[Manifest]) -> int:
        """Apply one stage; returns the number of writes.

        Raises:
            kube.errors.ApiError: a write was refused; the other writes of the stage are finished first.
        """
        wanted = [m for m in manifests if self._differs(m)]
        results = await asyncio.gather(*(self._write(m) for m in wanted), return_exceptions=True)
        failed = [r for r in results if isinstance(r, BaseException)]
        if failed:
            raise failed[0]
        return len(wanted)

    async def delete(self, namespace: str, deletions: Iterable[Deletion]) -> int:
        """Delete in order; returns how many went."""
        gone = 0
        for deletion in deletions:
            self._written.pop((deletion.kind, namespace, deletion.name), None)
            gone += await self._client.delete(deletion.kind, namespace, deletion.name, uid=deletion.uid)
        return gone

    def forget(self, namespace: str, deployment: str) -> None:
        """Drop what is remembered of a PDDeployment that is gone."""
        for key in [k for k, w in self._written.items() if k[1] == namespace and w.deployment == deployment]:
            del self._written[key]

    def _fact(self, manifest: Manifest) -> ChildFact | None:
        return self._store.get(*_key(manifest))

    def _is_ours(self, manifest: Manifest) -> bool:
        """Its owner is ours, or it is the very object that we wrote for this owner (whose owner reference somebody removed)."""
        fact, written, owner = self._fact(manifest), self._written.get(_key(manifest)), _owner(manifest)["uid"]
        if fact is not None and fact.owner_uid == owner:
            return True
        if written is None or written.owner_uid != owner:
            return False
        return self._is_unseen(manifest) if fact is None else fact.uid == written.uid

    def _is_unseen(self, manifest: Manifest) -> bool:
        key = _key(manifest)
        fact, written = self._fact(manifest), self._written.get(key)
        if written is None or time.monotonic() - written.at > EXPECTATION:
            return False
        if fact is None:
            gone = self._store.removed(*key)
            return gone is None or gone.uid != written.uid  # else the watch has shown it, and then its deletion
        return int(fact.resource_version or 0) < written.version

    def _differs(self, manifest: Manifest) -> bool:
        fact, written = self._fact(manifest), self._written.get(_key(manifest))
        if written is None or written.hash != manifest["metadata"]["annotations"][APPLIED_HASH]:
            return True
        if self._is_unseen(manifest):
            return False
        return fact is None or fact.uid != written.uid or fact.digest != written.digest

    async def _write(self, manifest: Manifest) -> None:
        async with self._limit:
            # A PDPool's first number must not belong to our apply, or a later apply without it would remove it.
            if manifest["kind"] == "PDPool" and "replicas" in manifest["spec"]:
                # Nor may its bounds belong to the creation, or no later apply could remove them.
                spec = manifest["spec"]
                bounds = {k: v for k, v in spec.items() if k in ("minReplicas", "maxReplicas")}
                try:
                    answer = await self._client.create({**manifest, "spec": {k: v for k, v in spec.items() if k not in bounds}})
                    made = True
                except Conflict:  # made before a crash, or the watch is behind: its number stays
                    made = False
                if bounds or not made:
                    body = {k: v for k, v in spec.items() if k != "replicas"}
                    answer = await self._client.apply({**manifest, "spec": body})
            else:
                answer = await self._client.apply(manifest)
        fact = facts.child(manifest["kind"], answer)
        owner, version, at = _owner(manifest), int(fact.resource_version), time.monotonic()
        self._written[_key(manifest)] = Written(owner["name"], owner["uid"], fact.uid, fact.applied_hash, fact.digest, version, at)

    async def _owner_if_foreign(self, manifest: Manifest) -> tuple[str, str, dict[str, Any]] | None:
        kind, namespace, name = _key(manifest)
        async with self._limit:
            found = await self._client.exists(kind, namespace, name)
        if found is None:
            return None
        owners = [o for o in found["metadata"].get("ownerReferences", []) if o.get("controller")]
        if any(o["uid"] == _owner(manifest)["uid"] for o in owners):
            return None
        return kind, name, owners[0] if owners else {}


def _key(manifest: Manifest) -> tuple[str, str, str]:
    return manifest["kind"], manifest["metadata"]["namespace"], manifest["metadata"]["name"]


def _owner(manifest: Manifest) -> dict[str, str]:
    reference: dict[str, str] = manifest["metadata"]["ownerReferences"][0]
    return reference
