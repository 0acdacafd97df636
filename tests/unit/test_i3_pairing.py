"""I3: no prefill and decode of different revisions serve one request: selectors, and a rollout watched step by step."""

from __future__ import annotations

from typing import Any

import pytest
from builders import by_name, containers, manifests, pod_specs, rendered, revision_of
from rollout_world import World

from pd_operator.core.names import COMPONENT, DEPLOYMENT, FRONT, REVISION, ROLE, ROLES, SLICE

TWO = ({}, {"engine": {"args": ["--new"]}})
ROUTERS = ("smg", "vllm-router")


def selected(args: list[str], role: str) -> dict[str, str]:
    """What a router's arguments select."""
    words = []
    for word in args[args.index(f"--{role}-selector") + 1 :]:
        if word.startswith("--"):
            break
        words.append(word.split("=", 1))
    return dict(words)


def slices(kind: str) -> list[dict[str, dict[str, Any]]]:
    """Pod templates of both revisions, by part."""
    found = []
    for changes in TWO:
        _, _, bundle = rendered({**changes, "router": {"type": kind}, "lmcache": {"p2p": {"enabled": True}}})
        found.append({name.rsplit("-", 1)[1]: pod for name, pod in pod_specs(bundle).items()})
    return found


@pytest.mark.parametrize("kind", ROUTERS)
def test_a_router_selects_the_engines_of_its_own_slice_and_no_others(kind: str) -> None:
    both = slices(kind)
    for here, mine in enumerate(both):
        args = containers(mine["router"])["router"]["args"]
        for role in ROLES:
            selector = selected(args, role)
            for there, other in enumerate(both):
                for part, pod in other.items():
                    matches = selector.items() <= pod["metadata"]["labels"].items()
                    assert matches is (here == there and part == role), f"{role} of slice {here} and {part} of slice {there}"


@pytest.mark.parametrize("kind", ROUTERS)
def test_a_routers_discovery_stays_in_its_namespace(kind: str) -> None:
    args = containers(slices(kind)[0]["router"])["router"]["args"]
    assert args[args.index("--service-discovery-namespace") + 1] == "demo"


def test_workloads_services_and_coordinators_select_one_slice() -> None:
    both = slices("smg")
    _, _, bundle = rendered({"lmcache": {"p2p": {"enabled": True}}})
    for (kind, name), manifest in by_name(bundle).items():
        if kind not in ("Deployment", "Service") or name == "chat":
            continue
        spec = manifest["spec"]
        selector = spec["selector"]["matchLabels"] if kind == "Deployment" else spec["selector"]
        matched = [
            (n, part)
            for n, pods in enumerate(both)
            for part, pod in pods.items()
            if selector.items() <= pod["metadata"]["labels"].items()
        ]
        assert len(matched) == 1 and matched[0][0] == 0, (kind, name, matched)


def test_labels_of_a_pod_name_its_revision_and_its_role() -> None:
    for changes, pods in zip(TWO, slices("smg"), strict=True):
        revision = revision_of({**changes, "lmcache": {"p2p": {"enabled": True}}})
        for part, pod in pods.items():
            labels = pod["metadata"]["labels"]
            assert (labels[DEPLOYMENT], labels[SLICE], labels[REVISION]) == ("chat", f"chat-{revision}-0", revision)
            assert labels.get(ROLE) == (part if part in ROLES else None)
            assert labels[COMPONENT] == ("engine" if part in ROLES else part)


def test_a_cache_server_registers_with_the_coordinator_of_its_slice() -> None:
    for pods in slices("smg"):
        for role in ROLES:
            args = containers(pods[role])["lmcache"]["args"]
            slice_ = pods[role]["metadata"]["labels"][SLICE]
            assert args[args.index("--coordinator-url") + 1] == f"http://{slice_}-coordinator:9300"


def test_only_serving_slices_stand_behind_the_front_door() -> None:
    world = World()
    world.pairing_edit(1)
    world.settle()
    world.pairing_edit(2)
    world.run(lambda w: len(w.slices()) == 2)
    for name, d in world.deployments.items():
        labels = d.manifest["spec"]["template"]["metadata"]["labels"]
        assert (FRONT in labels) is (name == f"chat-{world.revision(1)}-0-router")


@pytest.mark.parametrize("gpus", [2, 3, 4, 1000])
@pytest.mark.parametrize("kind", ["RollingUpdate", "Recreate"])
def test_no_step_of_a_rollout_mixes_two_revisions(gpus: int, kind: str) -> None:
    world = World(gpus=gpus)
    world.edit({"rollout": {"type": kind}})
    for edit in (1, 2, 3, 1):
        world.pairing_edit(edit)
        world.settle()  # looks at every selector after every tick
    assert world.broken_rules == []


def test_both_roles_load_the_same_model_by_the_same_string() -> None:
    """It is part of the handshake between the two engines."""
    for uri in ("hf://org/model", "pvc://claim/a/b", "oci://example.org/m:1", "/models/x"):
        _, _, bundle = rendered({"model": {"uri": uri}})
        models = {containers(pod)["engine"]["args"][1] for pod in pod_specs(bundle).values() if "engine" in containers(pod)}
        images = {containers(pod)["engine"]["image"] for pod in pod_specs(bundle).values() if "engine" in containers(pod)}
        assert len(models) == len(images) == 1


def test_the_handoff_annotation_names_the_connector_that_hands_over() -> None:
    """Without it, or with MultiConnector in it, smg answers and decode computes every prompt again."""
    for changes in ({}, {"lmcache": {}}, {"router": {"type": "vllm-router"}}):
        _, _, bundle = rendered(changes)
        for manifest in manifests(bundle, "Deployment"):
            if ROLE in manifest["metadata"]["labels"]:
                assert manifest["spec"]["template"]["metadata"]["annotations"] == {"smg.ai/kv-connector": "NixlConnector"}
