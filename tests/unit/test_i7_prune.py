"""I7: a child is deleted only for a reason that the plan confirms, and only if its owner's UID is ours."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import builders
import pytest
from builders import UID, deployment, make_snapshot, revision_of, serving, whole_slice

from pd_operator.core.names import COMPONENT, REVISION, ROLES, SLICE, base_labels, slice_labels, slice_name
from pd_operator.core.observed import ChildFact
from pd_operator.core.plan import make_plan
from pd_operator.core.prune import ORDER, Deletion, prune
from pd_operator.core.snapshot import ROUTER, Snapshot
from pd_operator.render.bundle import render

NEW = {"engine": {"args": ["--new"]}}
OLD_REV, NEW_REV = revision_of(), revision_of(NEW)
OLD_SLICE = slice_name("chat", OLD_REV)


def thing(kind: str, name: str, labels: dict[str, str] | None = None, **fields: Any) -> ChildFact:
    base = ChildFact(
        kind, builders.NAMESPACE, name, f"uid-{kind}-{name}", owner_uid=UID, labels=labels or base_labels("chat", "engine")
    )
    return replace(base, **fields)


def pruned(snapshot: Snapshot) -> list[Deletion]:
    plan = make_plan(snapshot)
    return prune(snapshot, plan, render(snapshot, plan).keys)


def names(deletions: list[Deletion]) -> list[tuple[str, str]]:
    return [(d.kind, d.name) for d in deletions]


def of_slice(kind: str, name: str, component: str = ROUTER) -> ChildFact:
    return thing(kind, name, slice_labels("chat", component, OLD_SLICE, OLD_REV))


OLD_SERVICES = (of_slice("Service", OLD_SLICE), of_slice("Service", f"{OLD_SLICE}-coordinator", "coordinator"))


def test_a_settled_world_loses_nothing() -> None:
    base = serving()
    _, _, bundle = builders.rendered()
    shared = [
        thing(m["kind"], m["metadata"]["name"], m["metadata"]["labels"])
        for m in builders.manifests(bundle)
        if m["kind"] != "Deployment"
    ]
    assert pruned(replace(base, children=(*base.children, *shared))) == []


STRAYS = [kind for kind in ORDER if kind != "ControllerRevision"]


@pytest.mark.parametrize("kind", STRAYS)
def test_what_is_no_longer_planned_goes(kind: str) -> None:
    base = serving()
    snapshot = replace(base, children=(*base.children, thing(kind, "chat-of-an-older-version")))
    reason = "not the last canary of its slice" if kind == "Job" else "no longer planned"
    assert pruned(snapshot) == [Deletion(kind, "chat-of-an-older-version", f"uid-{kind}-chat-of-an-older-version", reason)]


@pytest.mark.parametrize("kind", [*STRAYS, "ControllerRevision"])
@pytest.mark.parametrize("owner", ["", "0000-other"])
def test_what_is_not_ours_stays(kind: str, owner: str) -> None:
    base = serving()
    assert pruned(replace(base, children=(*base.children, thing(kind, "chat-x", owner_uid=owner)))) == []


def test_what_is_going_already_is_not_deleted_again() -> None:
    base = serving()
    assert pruned(replace(base, children=(*base.children, thing("Service", "chat-x", deleting=True)))) == []


@pytest.mark.parametrize("kind", ["PDPool", "Secret", "ConfigMap", "PersistentVolumeClaim", "Pod", "ReplicaSet"])
def test_kinds_that_are_never_deleted(kind: str) -> None:
    """A PDPool holds learned numbers; the others are not ours whatever their labels say."""
    base = serving()
    assert pruned(replace(base, children=(*base.children, thing(kind, "chat-x")))) == []


def rolling(old: tuple[ChildFact, ...], **fields: Any) -> Snapshot:
    """The new slice is complete and serves; `old` is what is left of the old one."""
    children, pods = whole_slice(NEW_REV, front=True)
    return make_snapshot(NEW, **{"children": (*children, *old, *OLD_SERVICES), "pods": pods, **fields})


def test_a_slice_that_ends_loses_its_routers_first() -> None:
    old, _ = whole_slice(OLD_REV, front=True)
    coordinator = deployment(OLD_REV, "coordinator")
    assert names(pruned(rolling((*old, coordinator)))) == [("Deployment", f"{OLD_SLICE}-router")]


def test_then_its_engines_with_all_that_belongs_to_them() -> None:
    engines = tuple(deployment(OLD_REV, part) for part in (*ROLES, "coordinator"))
    found = pruned(rolling(engines))
    assert names(found) == [
        ("Deployment", f"{OLD_SLICE}-coordinator"),
        ("Deployment", f"{OLD_SLICE}-decode"),
        ("Deployment", f"{OLD_SLICE}-prefill"),
        ("Service", OLD_SLICE),
        ("Service", f"{OLD_SLICE}-coordinator"),
    ]
    assert {d.reason for d in found} == {f"slice {OLD_SLICE} ends"}


def test_then_what_a_crash_left_of_it() -> None:
    assert names(pruned(rolling(()))) == [("Service", OLD_SLICE), ("Service", f"{OLD_SLICE}-coordinator")]


def test_a_slice_that_goes_on_serving_keeps_everything() -> None:
    base = serving()
    snapshot = make_snapshot(NEW, children=(*base.children, *OLD_SERVICES), pods=base.pods, revisions=base.revisions)
    assert pruned(snapshot) == []


def test_the_uid_is_the_precondition() -> None:
    found = pruned(rolling(tuple(deployment(OLD_REV, role) for role in ROLES)))
    assert all(d.uid == f"uid-{d.name}" for d in found if d.kind == "Deployment")


def test_controller_revisions_go_only_beyond_the_history() -> None:
    base = serving()
    current = base.revisions[0].name
    labels = base_labels("chat", "revision") | {REVISION: "0badcafe"}
    snapshot = replace(base, children=(*base.children, thing("ControllerRevision", "chat-0badcafe-000000", labels)))
    plan = make_plan(snapshot)
    kept = replace(plan, kept_revisions=frozenset({current, "chat-0badcafe-000000"}))
    assert prune(snapshot, kept, render(snapshot, plan).keys) == []
    gone = replace(plan, kept_revisions=frozenset({current}))
    assert names(prune(snapshot, gone, render(snapshot, plan).keys)) == [("ControllerRevision", "chat-0badcafe-000000")]


def test_the_revision_of_this_pass_is_never_deleted() -> None:
    """It is not in the snapshot's children yet, or just became one."""
    base = serving()
    snapshot = replace(base, children=(*base.children, thing("ControllerRevision", base.revisions[0].name)))
    assert pruned(snapshot) == []


def test_labels_of_another_component_do_not_make_a_router() -> None:
    """Only a Deployment is a router workload: the slice's Service carries the same component and stays with the engines."""
    old, pods = whole_slice(OLD_REV, front=True)
    children, new_pods = whole_slice(NEW_REV, front=True)
    assert OLD_SERVICES[0].labels[COMPONENT] == ROUTER and OLD_SERVICES[0].labels[SLICE] == OLD_SLICE
    snapshot = make_snapshot(NEW, children=(*children, *old, *OLD_SERVICES), pods=(*pods, *new_pods))
    assert names(pruned(snapshot)) == [("Deployment", f"{OLD_SLICE}-router")]
