"""I2: same snapshot, same plan, byte for byte; the order in which things were observed means nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from random import Random
from typing import Any

import builders
import pytest
import yaml
from builders import NOW, make_snapshot, pod, rendered, revision_of, serving, unschedulable, whole_slice
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_operator.core.names import APPLIED_HASH, ROLES
from pd_operator.core.plan import make_plan
from pd_operator.core.prune import prune
from pd_operator.core.revision import applied_hash
from pd_operator.core.snapshot import Reference, Snapshot
from pd_operator.core.status import build_pool_status, build_status
from pd_operator.render.bundle import render

CHANGES: dict[str, Any] = {
    "engine": {"args": ["--new"], "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]},
    "lmcache": {"l1Size": "1Gi", "p2p": {"enabled": True}},
    "prefill": {"template": {"metadata": {"labels": {"b": "1", "a": "2"}}, "spec": {"nodeSelector": {"z": "1", "y": "2"}}}},
}


def busy() -> Snapshot:
    """A rollout in the middle: two slices, pods in trouble, several revisions, a reference that is missing."""
    old_children, old_pods = whole_slice(revision_of(), front=True, replicas=3)
    new = revision_of(CHANGES)
    children, pods = whole_slice(new, front=False, replicas=2)
    waiting = tuple(unschedulable(new, role, 7) for role in ROLES)
    crashed = tuple(replace(pod(new, role, n, ready=False), containers=()) for role in ROLES for n in (8, 9))
    revisions = (
        builders.templates_of(number=1),
        builders.templates_of(CHANGES, number=2),
        builders.templates_of({"lmcache": {}}, number=3),
    )
    return make_snapshot(
        CHANGES,
        children=(*old_children, *children),
        pods=(*old_pods, *pods, *waiting, *crashed),
        revisions=revisions,
        missing=(),
        conflicts=(),
    )


def everything(snapshot: Snapshot) -> str:
    """All that a reconcile would write, as text."""
    plan = make_plan(snapshot)
    text: list[Any] = [build_status(snapshot, plan)]
    text += [build_pool_status(snapshot, plan, role, {}, 1) for role in ROLES]
    if plan.refusal is None:
        bundle = render(snapshot, plan)
        text += [m for stage in bundle.stages for m in stage]
        text += [[d.kind, d.name, d.uid, d.reason] for d in prune(snapshot, plan, bundle.keys)]
    return json.dumps(text, sort_keys=True)


def shuffled(value: Any, random: Random) -> Any:
    """The same object with its keys in another order."""
    if isinstance(value, dict):
        keys = list(value)
        random.shuffle(keys)
        return {key: shuffled(value[key], random) for key in keys}
    return [shuffled(item, random) for item in value] if isinstance(value, list) else value


@settings(max_examples=12, deadline=None)
@given(st.randoms(use_true_random=False))
def test_shuffled_inputs_give_the_same_bytes(random: Random) -> None:
    base = busy()
    parts = {name: list(getattr(base, name)) for name in ("children", "pods", "revisions")}
    for part in parts.values():
        random.shuffle(part)
    spec = builders.PDDeploymentSpec.model_validate(shuffled(builders.deep(builders.MINIMAL, CHANGES), random))
    other = replace(base, spec=spec, images=shuffled(dict(base.images), random), **{k: tuple(v) for k, v in parts.items()})
    assert everything(other) == everything(base)


def test_the_same_snapshot_twice() -> None:
    assert everything(busy()) == everything(busy())


def test_another_process_with_another_hash_seed_gives_the_same_bytes() -> None:
    code = "import test_i2_determinism as t; print(t.everything(t.busy()))"
    here = os.path.dirname(__file__)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([here, str(builders.ROOT / "operator"), str(builders.ROOT / "tests")])}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**env, "PYTHONHASHSEED": "7"}, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == everything(busy())


def test_time_alone_changes_nothing() -> None:
    base = serving()
    status = build_status(base, make_plan(base))
    later = replace(base, now=NOW.replace(year=2027), status=status)
    assert build_status(later, make_plan(later)) == status
    assert list(builders.manifests(render(later, make_plan(later)))) == list(builders.manifests(render(base, make_plan(base))))


@pytest.mark.parametrize("changes", [{}, CHANGES, {"router": {"type": "vllm-router"}}])
def test_rendering_does_not_touch_its_inputs(changes: dict[str, Any]) -> None:
    snapshot = make_snapshot(changes)
    before = snapshot.spec.model_dump(), dict(snapshot.images)
    first = everything(snapshot)
    assert (snapshot.spec.model_dump(), dict(snapshot.images)) == before and everything(snapshot) == first


def test_no_two_manifests_share_a_mutable_part() -> None:
    """One that is changed by a caller must not change another."""
    _, _, bundle = rendered(CHANGES)
    texts = [yaml.safe_dump(m) for m in builders.manifests(bundle)]
    for manifest in builders.manifests(bundle, "Deployment"):
        manifest["spec"]["template"]["spec"]["securityContext"]["runAsUser"] = 0
        manifest["metadata"]["labels"]["x"] = "y"
    again = [yaml.safe_dump(m) for m in builders.manifests(rendered(CHANGES)[2])]
    assert again == texts


def test_the_hash_covers_the_manifest_and_nothing_else() -> None:
    """But for the first number of a PDPool, which its later manifests leave out."""
    _, _, bundle = rendered(CHANGES)
    for manifest in builders.manifests(bundle):
        if manifest["kind"] == "PDPool":
            manifest = {**manifest, "spec": {k: v for k, v in manifest["spec"].items() if k != "replicas"}}  # noqa: PLW2901
        metadata = {k: v for k, v in manifest["metadata"].items() if k != "annotations"}
        assert manifest["metadata"]["annotations"] == {APPLIED_HASH: applied_hash({**manifest, "metadata": metadata})}


def test_names_are_unique() -> None:
    _, _, bundle = rendered(CHANGES)
    found = [(m["kind"], m["metadata"]["name"]) for m in builders.manifests(bundle)]
    assert len(found) == len(set(found)) == len(bundle.keys)


def test_every_name_fits_a_dns_label_for_the_longest_deployment() -> None:
    name = "a" * 30
    snapshot = replace(make_snapshot(CHANGES), name=name)
    bundle = render(snapshot, make_plan(snapshot))
    assert max(len(m["metadata"]["name"]) for m in builders.manifests(bundle)) <= 63
    for manifest in builders.manifests(bundle):
        assert all(len(str(v)) <= 63 for v in manifest["metadata"]["labels"].values())


def test_references_have_a_stable_order() -> None:
    missing = (Reference("Secret", "b", "spec.x"), Reference("Secret", "a", "spec.y"))
    plan = make_plan(make_snapshot(missing=missing))
    assert plan.refusal is not None and plan.refusal.value == "b"  # in the order of the spec
