"""The plan: pools, kept revisions, and no field of the schema that is silently ignored."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import builders
import pytest
from builders import OTHER, deep, make_snapshot, make_spec, other, rendered, serving, templates_of

from pd_operator.api.conditions import Reason
from pd_operator.core.observed import ChildFact
from pd_operator.core.plan import HISTORY, make_plan
from pd_operator.core.references import references
from pd_operator.core.snapshot import Snapshot, StoredRevision

# --- pools ----------------------------------------------------------------------------------------------------------------


def with_pool(changes: dict[str, Any], replicas: int | None) -> Snapshot:
    pool = ChildFact("PDPool", builders.NAMESPACE, "chat-decode", "uid-pool", owner_uid=builders.UID, replicas=replicas)
    return make_snapshot(changes, children=(pool,))


@pytest.mark.parametrize(
    ("changes", "existing", "number", "desired", "scale"),
    [
        ({}, 1, 1, 1, False),
        ({"decode": {"replicas": 3}}, 3, 3, 3, False),
        ({"decode": {"replicas": 3}}, 1, 3, 3, True),
        ({}, 5, 5, 5, False),  # static without a number keeps what the pool has: a mode that is left drops nothing (ADR 0011)
        ({}, None, 1, 1, True),
        ({"suspend": True}, 1, 1, 0, False),  # the number is kept, the workload goes to none
        ({"suspend": True, "decode": {"replicas": 4}}, 4, 4, 0, False),
    ],
)
def test_pool_that_exists(changes: dict[str, Any], existing: int | None, number: int, desired: int, scale: bool) -> None:
    pool = make_plan(with_pool(changes, existing)).pools["decode"]
    assert (pool.number, pool.desired, pool.create, pool.scale) == (number, desired, False, scale)


def test_pool_that_does_not_exist_is_made_with_its_first_number() -> None:
    snapshot = make_snapshot({"prefill": {"replicas": 2}, "suspend": True})
    pool = make_plan(snapshot).pools["prefill"]
    assert (pool.number, pool.desired, pool.create, pool.scale) == (2, 0, True, False)
    _, _, bundle = rendered(snapshot.spec)
    assert builders.by_name(bundle)["PDPool", "chat-prefill"]["spec"] == {
        "deploymentName": "chat",
        "role": "prefill",
        "replicas": 2,
    }


def test_a_later_apply_of_a_pool_never_holds_replicas() -> None:
    _, _, bundle = rendered(children=with_pool({}, 7).children)
    assert builders.by_name(bundle)["PDPool", "chat-decode"]["spec"] == {"deploymentName": "chat", "role": "decode"}


# --- revisions that are kept ----------------------------------------------------------------------------------------------


def revision(pairing: str, number: int) -> StoredRevision:
    return StoredRevision(f"chat-{pairing}-{number:06}", number, pairing, {}, {})


def test_old_revisions_are_kept_up_to_a_bound() -> None:
    old = [revision(f"{n:08}", n) for n in range(20)]
    current = templates_of(number=20)
    kept = make_plan(make_snapshot(revisions=(*old, current))).kept_revisions
    assert kept == {current.name, *(r.name for r in old[-HISTORY:])}


def test_the_revision_of_a_slice_that_still_serves_is_kept_however_old() -> None:
    base = serving()
    newer = [revision(f"{n:08}", n) for n in range(2, 20)]
    snapshot = make_snapshot(
        {"engine": {"args": ["--new"]}}, children=base.children, pods=base.pods, revisions=(*base.revisions, *newer)
    )
    assert base.revisions[0].name in make_plan(snapshot).kept_revisions


def test_many_shapes_of_one_revision_do_not_pile_up() -> None:
    """Each edit of class B stores its templates; only the newest of a pairing revision are in use."""
    current = templates_of(number=30)
    shapes = [revision(current.pairing, n) for n in range(25)]
    assert len(make_plan(make_snapshot(revisions=(*shapes, current))).kept_revisions) <= 2 + HISTORY


def test_the_shape_that_the_spec_names_is_kept_though_it_is_not_the_newest() -> None:
    current = templates_of(number=1)
    shapes = [revision(current.pairing, n) for n in range(2, 25)]
    assert current.name in make_plan(make_snapshot(revisions=(current, *shapes))).kept_revisions


# --- no field is ignored --------------------------------------------------------------------------------------------------


def outcome(changes: dict[str, Any]) -> tuple[list[str], str]:
    """Fields that are refused, and all manifests as text."""
    spec = make_spec(changes)
    plan = make_plan(make_snapshot(spec, missing=references(spec)))  # nothing that it names exists
    if plan.refusal is not None:
        return [plan.refusal.field], ""
    _, _, bundle = rendered(spec)
    shown = [[m["kind"], m["metadata"]["name"], {k: v for k, v in m.items() if k != "data"}] for m in builders.manifests(bundle)]
    return [], json.dumps(shown)


@pytest.mark.parametrize("path", sorted(OTHER))
def test_a_field_that_is_set_shows_or_is_refused_by_name(path: str) -> None:
    base: dict[str, Any] = {}
    if path.startswith("lmcache."):
        base = {"lmcache": {}}
    if path.endswith("requests"):
        base = {path.split(".", maxsplit=1)[0]: {"resources": {"limits": {"cpu": 4}}}}
    changes = deep(base, other(path))
    if path == "handoff.onFailure":
        changes = deep(changes, {"lmcache": None})
    refused, text = outcome(changes)
    if refused:
        assert f"spec.{path}".startswith(refused[0]) or refused[0].startswith(f"spec.{path}")
    else:
        assert text != outcome(base)[1], f"spec.{path} was accepted and changes nothing"


UNBUILT = {
    "engine.type",
    "rollout.maxSurge",
    "rollout.maxUnavailable",
}


@pytest.mark.parametrize("path", sorted(OTHER))
def test_unbuilt_features_and_no_others_are_not_implemented(path: str) -> None:
    changes = other(path)
    refusal = make_plan(make_snapshot(changes)).refusal
    unbuilt = refusal is not None and refusal.reason is Reason.NOT_IMPLEMENTED
    assert unbuilt is (path in UNBUILT)


def test_spelled_out_defaults_are_no_refusal() -> None:
    bare = make_spec({"lmcache": {}})
    spelled = bare.model_dump(by_alias=True, exclude_none=True)
    assert make_plan(make_snapshot(spelled)).refusal is None
    assert make_plan(make_snapshot({"verification": "Disabled"})).refusal is None


@pytest.mark.parametrize("kind", ["smg", "vllm-router"])
def test_both_routers_are_built(kind: str) -> None:
    assert make_plan(make_snapshot({"router": {"type": kind}})).refusal is None


def test_the_first_refusal_is_shown_and_the_others_are_counted() -> None:
    plan = make_plan(make_snapshot({"rollout": {"maxSurge": 1, "maxUnavailable": 1}}))
    assert plan.refusal is not None and plan.refusal.field == "spec.rollout.maxSurge" and plan.more_refusals == 1


def test_objects_with_our_names_are_a_refusal() -> None:
    plan = make_plan(make_snapshot(conflicts=("Service chat", "ServiceAccount chat-engine")))
    assert plan.refusal is not None and plan.refusal.reason is Reason.NAME_CONFLICT
    assert "Service chat exists and is not ours" in plan.refusal.message and plan.more_refusals == 1


def test_target_is_the_slice_that_is_to_exist_now() -> None:
    base = serving()
    target = make_plan(base).target
    assert target is not None and target.revision == make_plan(base).revision
    waiting = replace(base, spec=make_spec({"engine": {"args": ["--new"]}, "rollout": {"type": "Recreate"}}))
    assert make_plan(waiting).target is None
