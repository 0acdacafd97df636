"""Applying manifests: a write only where the world differs (invariant I2), and never over an object that is not ours (I7)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pd_operator.controller.strangers import Strangers
from pd_operator.core.names import APPLIED_HASH, SLICE
from pd_operator.core.observed import ChildFact
from pd_operator.core.prune import Deletion
from pd_operator.kube import facts
from pd_operator.kube.client import KubeClient
from pd_operator.kube.errors import Conflict, Invalid
from pd_operator.kube.store import Store

Manifest = dict[str, Any]
EXPECTATION = 30.0  # seconds that a store may lag behind our own write, as KubeRay's scale expectations
CONCURRENCY = 16  # writes of one reconcile at once
FEW = 3  # names of which each is looked up by itself


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

    After a restart it remembers nothing: a child of which the first list shows that it is as it was applied counts as written, any
    other one is applied once.
    """

    def __init__(self, client: KubeClient, store: Store[ChildFact]) -> None:
        self._client = client
        self._store = store
        self._strangers = Strangers(client)
        self._written: dict[tuple[str, str, str], Written] = {}
        self._made: dict[str, dict[tuple[str, str, str], tuple[str, str]]] = {}  # uid of owner -> Deployment -> slice, site
        self._doubted: set[str] = set()  # uids of owners: the server refused to make what no list had shown
        self._limit = asyncio.Semaphore(CONCURRENCY)

    async def foreign(self, manifests: Iterable[Manifest]) -> list[tuple[str, str, dict[str, Any]]]:
        """(kind, name, controller owner or {}) of objects that have our names and another owner, or none.

        Only objects that are not known to be ours are looked up. Labels prove nothing: they are copied with a manifest, and
        stay on what a deletion has orphaned.
        """
        unknown = [m for m in manifests if not self._is_ours(m)]
        suspects = [m for m, free in zip(unknown, await self._free(unknown), strict=True) if not free]
        found = await asyncio.gather(*(self._owner_if_foreign(m) for m in suspects))
        self._doubted -= {_owner(m)["uid"] for m in unknown}
        return [item for item in found if item is not None]

    async def _free(self, unknown: Sequence[Manifest]) -> list[bool]:
        """Whether a list shows that nobody has the name; the others must be looked at one by one.

        A list shows those without our label, the watch those with it. An object that both miss, because it is newer, stops
        the write that makes ours (`_make`), and the next pass looks at every name.
        """
        if len(unknown) <= FEW or any(_owner(m)["uid"] in self._doubted for m in unknown):
            return [False] * len(unknown)
        kinds = sorted({(m["kind"], m["metadata"]["namespace"]) for m in unknown})
        lists = dict(zip(kinds, await asyncio.gather(*(self._strangers.of(*kind) for kind in kinds)), strict=True))
        there = [lists[m["kind"], m["metadata"]["namespace"]] for m in unknown]
        return [
            names is not None and m["metadata"]["name"] not in names and self._fact(m) is None
            for m, names in zip(unknown, there, strict=True)
        ]

    def unseen(self, manifests: Iterable[Manifest]) -> list[str]:
        """Kind and name of what we wrote and the watch has not shown yet: what the store says of it is older."""
        return [f"{m['kind']} {m['metadata']['name']}" for m in manifests if self._is_unseen(m)]

    def unshown(self, owner_uid: str) -> dict[str, str]:
        """Slices of which we made engines that no watch has shown yet, and the annotation of their sites."""
        found, mine = {}, self._made.get(owner_uid, {})
        for key, (slice_, site) in list(mine.items()):
            fact, written = self._store.get(*key), self._written.get(key)
            if self._unseen(key) and (fact is None or written is None or fact.uid != written.uid):
                found[slice_] = site
            else:
                del mine[key]
        if not mine:
            self._made.pop(owner_uid, None)
        return found

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
            self._made.pop(self._written[key].owner_uid, None)
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
        return self._unseen(_key(manifest))

    def _unseen(self, key: tuple[str, str, str]) -> bool:
        fact, written = self._store.get(*key), self._written.get(key)
        if written is None or time.monotonic() - written.at > EXPECTATION:
            return False
        if fact is None:
            gone = self._store.removed(*key)
            return gone is None or gone.uid != written.uid  # else the watch has shown it, and then its deletion
        return int(fact.resource_version or 0) < written.version

    def _differs(self, manifest: Manifest) -> bool:
        fact, written = self._fact(manifest), self._written.get(_key(manifest)) or self._adopted(manifest)
        if written is None or written.hash != manifest["metadata"]["annotations"][APPLIED_HASH]:
            return True
        if self._is_unseen(manifest):
            return False
        return fact is None or fact.uid != written.uid or fact.digest != written.digest

    def _adopted(self, manifest: Manifest) -> Written | None:
        """What another process of ours wrote, if nobody has changed it."""
        fact, owner = self._fact(manifest), _owner(manifest)
        wanted = manifest["metadata"]["annotations"][APPLIED_HASH]
        if fact is None or not fact.intact or fact.deleting or fact.owner_uid != owner["uid"] or fact.applied_hash != wanted:
            return None
        version, at = int(fact.resource_version), time.monotonic()
        found = Written(owner["name"], owner["uid"], fact.uid, fact.applied_hash, fact.digest, version, at)
        self._written[_key(manifest)] = found
        return found

    async def _write(self, manifest: Manifest) -> None:
        answer = await (self._send(manifest) if self._is_ours(manifest) else self._make(manifest))
        fact = facts.child(manifest["kind"], answer)
        owner, version, at = _owner(manifest), int(fact.resource_version), time.monotonic()
        self._written[_key(manifest)] = Written(owner["name"], owner["uid"], fact.uid, fact.applied_hash, fact.digest, version, at)
        if fact.site:
            self._made.setdefault(owner["uid"], {})[_key(manifest)] = fact.labels.get(SLICE, ""), fact.site

    async def _make(self, manifest: Manifest) -> Manifest:
        """The first write of an object: it takes no field from anybody (invariant I7).

        Raises:
            kube.errors.Conflict: somebody else has the name, since our look at it or unseen by it; the next pass finds who.
        """
        try:
            return await self._send(manifest, force=False)
        except (Conflict, Invalid) as exc:
            if await self._owner_if_foreign(manifest) is None:
                if isinstance(exc, Invalid):
                    raise
                return await self._send(manifest)  # ours, made before a crash or not shown yet, and changed by somebody
            self._doubted.add(_owner(manifest)["uid"])
            raise Conflict(409, "Conflict", f"{manifest['kind']} {manifest['metadata']['name']} exists and is not ours") from exc

    async def _send(self, manifest: Manifest, *, force: bool = True) -> Manifest:
        async with self._limit:
            if manifest["kind"] != "PDPool" or "replicas" not in manifest["spec"]:
                return await self._client.apply(manifest, force=force)
            # A PDPool's first number must not belong to our apply, or a later apply without it would remove it.
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
                answer = await self._client.apply({**manifest, "spec": body}, force=force)
            return answer

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
