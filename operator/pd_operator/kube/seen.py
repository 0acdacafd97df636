"""What a person may see of one PDDeployment: the object, its pools, pods and events, each in one bounded read.

Only the object itself has to be readable. What else is refused or fails is named in `unread`, and the rest is told all the same.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import aiohttp

from pd_operator.core.names import DEPLOYMENT, ROLES, Role, pool
from pd_operator.core.observed import PodFact
from pd_operator.kube.client import KubeClient, Object
from pd_operator.kube.errors import ApiError, Forbidden, NotFound
from pd_operator.kube.facts import PodDecoder
from pd_operator.kube.kinds import KINDS
from pd_operator.kube.read import Unreadable, connected, context_namespace

NAMES = 20  # of other PDDeployments that an error names
FAILURES = (ApiError, aiohttp.ClientError, OSError, TimeoutError)


@dataclass(frozen=True, slots=True)
class Seen:
    """One PDDeployment and what belongs to it, as read at `now`."""

    now: datetime
    namespace: str
    name: str
    deployment: Object
    pools: Mapping[Role, Object] = field(default_factory=dict)
    pods: tuple[PodFact, ...] = ()
    events: tuple[Object, ...] = ()  # about the object and its pods, one page at most
    unread: Mapping[str, str] = field(default_factory=dict)  # pools, pods, events -> why not
    more: frozenset[str] = frozenset()  # pods, events: there were more than one page

    @property
    def status(self) -> Mapping[str, Any]:
        """Status of the PDDeployment."""
        return self.deployment.get("status") or {}


async def see(kubeconfig: str | None, namespace: str | None, name: str, *, pods: bool = True) -> Seen:
    """Read one PDDeployment; without `pods`, only it and its pools. `namespace` None: that of the kubeconfig's context.

    Raises:
        Unreadable: no cluster, no right, or no such object; the message names the right, or the objects that exist.
    """
    space = namespace or context_namespace(kubeconfig)
    async with connected(kubeconfig, f"PDDeployment {space}/{name}") as client:
        deployment = await _deployment(client, space, name)
        unread: dict[str, str] = {}
        pools = (
            await _try("pools", lambda: _pools(client, space, name), unread, f"get pdpools.pdserve.dev in namespace {space}") or {}
        )
        if not pods:
            return Seen(datetime.now(UTC), space, name, deployment, pools, unread=unread)
        found = await _try("pods", lambda: _pods(client, space, name), unread, f"list pods in namespace {space}") or ((), False)
        right = f"list events.events.k8s.io in namespace {space}"
        events = await _try("events", lambda: _events(client, space), unread, right) or ((), False)
        mine = {("PDDeployment", name), *(("PDPool", pool(name, role)) for role in ROLES), *(("Pod", p.name) for p in found[0])}
        about = tuple(e for e in events[0] if _regarding(e) in mine)
        more = frozenset(what for what, cut in (("pods", found[1]), ("events", events[1])) if cut)
        return Seen(datetime.now(UTC), space, name, deployment, pools, found[0], about, unread, more)


async def _deployment(client: KubeClient, space: str, name: str) -> Object:
    try:
        found = await client.get("PDDeployment", space, name)
    except Forbidden as exc:
        raise Unreadable(f"{missing(f'get pddeployments.pdserve.dev in namespace {space}', exc)}") from exc
    if found is None:
        raise Unreadable(f"{space}/{name}: {await _absent(client, space)}")
    return found


def missing(right: str, exc: Exception) -> str:
    """Why something was not read; a refusal names the verb and the resource."""
    if isinstance(exc, Forbidden):
        return f"the right to {right} is missing: docs/examples/rbac/kubectl-pdd.yaml has them all ({exc.message})"
    return f"{exc}" or type(exc).__name__


async def _absent(client: KubeClient, space: str) -> str:
    """Why there is no such object, and which there are."""
    try:
        names = sorted(name for _, name in await client.list_keys("PDDeployment", space))
    except NotFound:
        return "this cluster does not know PDDeployment: the CRDs of pd-operator are not installed"
    except Forbidden as exc:
        return f"there is no such PDDeployment; which there are is not known: {exc.message}"
    if names:
        more = f" and {len(names) - NAMES} more" if len(names) > NAMES else ""
        return f"there is no such PDDeployment; namespace {space} has {', '.join(names[:NAMES])}{more}"
    try:
        if await client.get("Namespace", None, space) is None:
            return f"namespace {space} does not exist"
    except Forbidden:
        pass  # who may read one namespace only cannot tell
    return f"there is no such PDDeployment; namespace {space} has none: -n takes another namespace"


async def _pools(client: KubeClient, space: str, name: str) -> dict[Role, Object]:
    found = {role: await client.get("PDPool", space, pool(name, role)) for role in ROLES}
    return {role: obj for role, obj in found.items() if obj is not None}


async def _pods(client: KubeClient, space: str, name: str) -> tuple[tuple[PodFact, ...], bool]:
    page = PodDecoder().page(await client.list_page(KINDS["Pod"], space, f"{DEPLOYMENT}={name}"))
    return tuple(sorted((pod for _, pod in page.items), key=lambda p: p.name)), bool(page.token)


async def _events(client: KubeClient, space: str) -> tuple[tuple[Object, ...], bool]:
    page = json.loads(await client.list_page(KINDS["Event"], space, ""))
    return tuple(page["items"] or ()), bool(page["metadata"].get("continue"))


async def _try(what: str, read: Callable[[], Awaitable[Any]], unread: dict[str, str], right: str) -> Any:
    try:
        return await read()
    except FAILURES as exc:
        unread[what] = missing(right, exc)
        return None


def _regarding(event: Object) -> tuple[str, str]:
    about = event.get("regarding") or {}
    return str(about.get("kind", "")), str(about.get("name", ""))
