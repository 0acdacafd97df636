"""The chart's rights are enough, and none of them is there for nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster import gateway_api, lws
from cluster.handle import Cluster
from opsrunner import chart, state, waits
from opsrunner.api import Api
from opsrunner.calls import CallLog
from opsrunner.chart import Right
from opsrunner.process import Operator
from opsrunner.spaces import namespaces

pytest_plugins = ("opsrunner.fixtures",)

RBAC, APPS, OURS = "rbac.authorization.k8s.io", "apps", "pdserve.dev"
LATER = "prune deletes a child that another version of the operator does not render any more; this one renders these always"
CANARIES = "these objects run none; those of test_chart_rights.py do"
# Who has a name that we want? Asked for after a first write that was refused, or where a namespace is full of strangers: seldom.
TAKEN = "get"
# Granted, and not seen in the audit log of this scenario: why it is granted all the same.
UNSEEN: dict[Right, str] = {
    (
        OURS,
        "pddeployments/finalizers",
        "update",
    ): "asked for by the admission plugin OwnerReferencesPermissionEnforcement, off here",
    ("networking.k8s.io", "networkpolicies", "delete"): LATER,
    ("batch", "jobs", "create"): CANARIES,
    ("batch", "jobs", "delete"): CANARIES,
    ("", "serviceaccounts", "delete"): LATER,
    (RBAC, "roles", "delete"): LATER,
    (RBAC, "rolebindings", "delete"): LATER,
}
LEASES = ("coordination.k8s.io", "leases")


@dataclass(frozen=True)
class World:
    """An operator with the rights of the chart and nothing else."""

    profile: str
    install: chart.Install
    operator: Operator
    space: str
    calls: CallLog


@pytest.fixture(scope="module", params=["cluster-wide", "namespaced"])
def world(
    request: pytest.FixtureRequest, kwok_cluster: Cluster, crds: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    """The operator runs as the chart's ServiceAccount, with the chart's settings."""
    gateway_api.install(kwok_cluster)
    lws.install(kwok_cluster)
    folder = Path(tmp_path_factory.mktemp("rbac"))
    with namespaces(kwok_cluster, f"rbac-{request.param}", 2) as (home, space):
        watch = [space] if request.param == "namespaced" else []
        with chart.install(kwok_cluster, home, folder, request.param, watch) as install:
            calls = CallLog(kwok_cluster, install.user)
            with Operator(install.kubeconfig, [], home=home, folder=folder, settings=install.environment()) as operator:
                yield World(request.param, install, operator, space, calls)


def live(api: Api, world: World) -> None:
    """A life in which everything happens that the operator can do."""
    space = world.space
    api.create(state.pdd(space, "chat", lmcache={"p2p": {"enabled": True}}, gateway={"parentRefs": [{"name": "public"}]}))
    waits.ready(api, space, "chat")
    # Slices, coordinators and the HTTPRoute go.
    edit = {"engine": {"args": ["--max-num-seqs=8"]}, "lmcache": None, "gateway": None}
    api.merge("PDDeployment", space, "chat", {"spec": edit})
    slice_ = waits.ready(api, space, "chat")["status"]["slices"][0]["name"]  # slices and coordinators were deleted
    api.merge("PDDeployment", space, "chat", {"spec": {"decode": {"replicas": 2}}})  # /scale of a pool
    waits.ready(api, space, "chat")
    groups(api, space)
    # Something to look up, of each kind that a spec can name.
    names = [
        {"name": "A_TOKEN", "valueFrom": {"secretKeyRef": {"name": "absent", "key": "a"}}},
        {"name": "B", "valueFrom": {"configMapKeyRef": {"name": "absent", "key": "b"}}},
    ]
    api.create(state.pdd(space, "needs", model={"uri": "pvc://absent/model"}, engine={"env": names}))
    waits.condition(api, space, "needs", "Accepted", "False", "MissingReference")
    # The same event again, which makes a series of it: refused, mended, refused.
    for domains in (2, 1, 2):  # without a topology key
        api.merge("PDDeployment", space, "chat", {"spec": {"placement": {"maxDomains": domains}}})
        waits.condition(api, space, "chat", "Accepted", "False" if domains > 1 else "True")
    api.merge("PDDeployment", space, "chat", {"spec": {"placement": {"maxDomains": 1}}})
    waits.ready(api, space, "chat")
    for kind, name in (("Service", "chat"), ("Role", "chat-router"), ("Deployment", f"{slice_}-router"), ("PDPool", "chat-decode")):
        api.delete(kind, space, name)
        waits.until(f"{kind} {name} to be made again", lambda kind=kind, name=name: api.get(kind, space, name))
    api.merge("PDPool", space, "chat-decode", {"metadata": {"labels": {"pdserve.dev/role": None}}})  # an apply mends it
    labels = lambda: api.must_get("PDPool", space, "chat-decode")["metadata"]["labels"]  # noqa: E731
    waits.until("the label of the pool to come back", lambda: labels().get("pdserve.dev/role") == "decode")
    waits.ready(api, space, "chat")


def groups(api: Api, space: str) -> None:
    """A LeaderWorkerSet is made, changed, and replaced by a Deployment. No controller makes pods of it."""
    wide = {"parallelism": {"tensor": 2}}
    spec = {"prefill": wide, "decode": {**wide, "nodes": 2}, "rollout": {"type": "Recreate"}}
    api.create(state.pdd(space, "wide", **spec))
    there = lambda: api.list("LeaderWorkerSet", space)  # noqa: E731
    (made,) = waits.until("the LeaderWorkerSet", there)
    api.merge("PDDeployment", space, "wide", {"spec": {"decode": {"replicas": 2}}})
    waits.until("it to have two groups", lambda: there()[0]["spec"]["replicas"] == 2)
    api.merge("PDDeployment", space, "wide", {"spec": {"decode": {"nodes": 1}}})
    waits.until("it to be gone", lambda: not there())
    assert api.get("Deployment", space, made["metadata"]["name"]) is not None


def old_revisions(api: Api, world: World) -> None:
    """Enough shapes of the pods that the oldest ControllerRevisions are pruned; suspended, so that no pod is made."""
    space = world.space
    api.create(state.pdd(space, "shapes", suspend=True))
    for number in range(9):
        template = {"metadata": {"annotations": {"example.org/number": str(number)}}}
        api.merge("PDDeployment", space, "shapes", {"spec": {"prefill": {"template": template}}})
        generation = api.must_get("PDDeployment", space, "shapes")["metadata"]["generation"]
        waits.until(
            "the status of the edit",
            lambda wanted=generation: (
                (api.must_get("PDDeployment", space, "shapes").get("status") or {}).get("observedGeneration") == wanted
            ),
        )
    waits.until("old revisions to be pruned", lambda: len(state.children(api, space, "shapes", ("ControllerRevision",))) <= 7)


def test_a_whole_life_without_a_denial(world: World, api: Api) -> None:
    """The rights of both profiles come from one template, so the long life runs with one of them."""
    if world.profile == "cluster-wide":
        live(api, world)
        old_revisions(api, world)
    else:
        api.create(state.pdd(world.space, "chat"))
        waits.ready(api, world.space, "chat")
        api.merge("PDDeployment", world.space, "chat", {"spec": {"engine": {"args": ["--max-num-seqs=8"]}}})
        waits.ready(api, world.space, "chat")
    for obj in api.list("PDDeployment", world.space):
        api.delete("PDDeployment", world.space, obj["metadata"]["name"])
    waits.until("everything to be gone", lambda: not state.children(api, world.space, "chat"))
    time.sleep(1)
    assert world.calls.denied() == []


def test_every_right_is_used(world: World) -> None:
    """No right is granted for nothing, and none is used that is not granted."""
    worked = chart.used(world.calls)
    assert worked <= world.install.rights | {(*LEASES, verb) for verb in ("get", "create", "update")}, "a right that is not granted"
    if world.profile == "cluster-wide":
        unseen = {right for right in world.install.rights - worked if right[0] == OURS or right[2] != TAKEN}
        assert unseen == set(UNSEEN), f"granted and not used: {sorted(unseen - set(UNSEEN))}; used: {sorted(set(UNSEEN) - unseen)}"
        print(f"{len(world.install.rights)} rights granted, {len(world.install.rights - unseen)} used")


def may(cluster: Cluster, world: World, verb: str, resource: str, subresource: str = "") -> bool:
    """What the API server answers to this user."""
    argv = ["auth", "can-i", verb, resource, "--as", world.install.user, "--subresource", subresource]
    scope = [] if resource == "nodes" else ["-n", world.space]
    return cluster.kubectl(*argv, *scope, check=False).splitlines()[0].startswith("yes")


def test_the_admission_plugin_would_be_content(world: World, kwok_cluster: Cluster) -> None:
    """What OwnerReferencesPermissionEnforcement asks for is granted (it is off by default, and on in some distributions)."""
    assert may(kwok_cluster, world, "update", "pddeployments.pdserve.dev", "finalizers")


@pytest.mark.parametrize(
    ("verbs", "resource", "subresource"),
    [
        (("update", "patch", "delete"), "pddeployments.pdserve.dev", ""),
        (("list", "create"), "secrets", ""),
        (("create", "delete"), "pods", ""),
        (("create",), "pods", "exec"),
        (("escalate", "bind"), "roles.rbac.authorization.k8s.io", ""),
        (("update", "patch", "delete"), "nodes", ""),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_nothing_more_is_allowed(
    world: World, kwok_cluster: Cluster, verbs: tuple[str, ...], resource: str, subresource: str
) -> None:
    """A sample of what an operator must not be able to do."""
    assert not [verb for verb in verbs if may(kwok_cluster, world, verb, resource, subresource)]
