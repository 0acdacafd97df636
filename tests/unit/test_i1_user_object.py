"""I1: the user's object is never written, and nothing of it is copied: no labels, no annotations, no finalizer."""

from __future__ import annotations

from builders import manifests, rendered

from pd_operator.core.names import APPLIED_HASH, DEPLOYMENT, MANAGED_BY
from pd_operator.core.snapshot import Snapshot

EVERYTHING = {"lmcache": {"p2p": {"enabled": True}}, "prefill": {"template": {"metadata": {"labels": {"team": "a"}}}}}
KNOWN = {
    "app.kubernetes.io/managed-by",
    "app.kubernetes.io/component",
    "pdserve.dev/deployment",
    "pdserve.dev/slice",
    "pdserve.dev/revision",
    "pdserve.dev/role",
}


def test_children_carry_our_labels_and_one_annotation() -> None:
    _, _, bundle = rendered(EVERYTHING)
    for manifest in manifests(bundle):
        labels = manifest["metadata"]["labels"]
        assert {MANAGED_BY, DEPLOYMENT} <= set(labels) <= KNOWN, manifest["metadata"]["name"]
        assert list(manifest["metadata"]["annotations"]) == [APPLIED_HASH]


def test_components_are_those_that_the_reference_lists() -> None:
    _, _, bundle = rendered(EVERYTHING)
    found = {m["metadata"]["labels"]["app.kubernetes.io/component"] for m in manifests(bundle)}
    assert found == {"engine", "router", "coordinator", "pool", "front", "revision"}


def test_the_plan_cannot_copy_what_it_never_sees() -> None:
    """A snapshot has no place for labels, annotations or finalizers of the user's object."""
    assert not {"labels", "annotations", "metadata", "finalizers"} & set(Snapshot.__dataclass_fields__)


def test_no_child_has_a_finalizer_and_each_goes_with_its_owner() -> None:
    _, _, bundle = rendered(EVERYTHING)
    for manifest in manifests(bundle):
        metadata = manifest["metadata"]
        assert "finalizers" not in metadata and metadata["namespace"] == "demo"
        assert metadata["ownerReferences"] == [
            {
                "apiVersion": "pdserve.dev/v1alpha1",
                "kind": "PDDeployment",
                "name": "chat",
                "uid": "0000-chat",
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ]


def test_no_manifest_is_of_the_users_own_kind() -> None:
    _, _, bundle = rendered(EVERYTHING)
    assert "PDDeployment" not in {m["kind"] for m in manifests(bundle)}
