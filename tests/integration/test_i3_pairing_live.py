"""Invariant I3: through every kind of rollout no router sees engines of two revisions, and the order keeps the door open.

new slice dark -> all of it ready -> its routers take the front label -> old routers go -> old engines go
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from cluster.handle import Cluster
from cluster.kwok import FakeNodes
from opsrunner import pairing, state, waits
from opsrunner.api import Api, Object
from opsrunner.process import Operator
from opsrunner.recording import Recording

pytest_plugins = ("opsrunner.fixtures",)

KINDS = ("Pod", "Deployment", "PDDeployment")
PAIRING_EDIT = {"engine": {"args": ["--max-num-seqs=8"]}}
NOWHERE = {"spec": {"nodeSelector": {"pdserve.dev/nowhere": "true"}}}  # holds a slice in the dark


def edit(api: Api, space: str, name: str, spec: dict[str, Any]) -> Object:
    """Merge a patch into the spec, as a user does."""
    return api.merge("PDDeployment", space, name, {"spec": spec})


def revisions(api: Api, space: str, name: str) -> set[str]:
    """Revisions that have a Deployment."""
    return {d["metadata"]["labels"]["pdserve.dev/revision"] for d in state.children(api, space, name, ("Deployment",)).values()}


def until_single(api: Api, space: str, name: str) -> None:
    """Wait until pods of one revision are left."""
    waits.until(
        "the pods of the old revision to go",
        lambda: (
            len({p["metadata"]["labels"]["pdserve.dev/revision"] for p in api.list("Pod", space, f"pdserve.dev/deployment={name}")})
            == 1
        ),
        show=lambda: waits.describe(api.get("PDDeployment", space, name)),
    )


def held_dark(obj: Object) -> bool:
    """Whether the status shows a dark slice beside one that serves."""
    return sorted(s["state"] for s in (obj.get("status") or {}).get("slices", [])) == ["Dark", "Serving"]


def wait_dark(api: Api, space: str, name: str) -> Object:
    """Wait until a new slice stands dark beside the serving one, its pods made."""
    waits.until(
        "a dark slice beside the serving one",
        lambda: held_dark(api.must_get("PDDeployment", space, name)) and len(revisions(api, space, name)) == 2,
        show=lambda: waits.describe(api.get("PDDeployment", space, name)),
    )
    return api.must_get("PDDeployment", space, name)


def test_an_edit_of_a_pairing_field(api: Api, operator: Operator, space: str) -> None:
    api.create(state.pdd(space, "chat", prefill={"replicas": 2}, decode={"replicas": 2}, lmcache={"p2p": {"enabled": True}}))
    old = waits.ready(api, space, "chat")["status"]["currentRevision"]
    with Recording(api, space, *KINDS) as recording:
        begin = time.monotonic()
        edit(api, space, "chat", PAIRING_EDIT)
        done = waits.ready(api, space, "chat")
        until_single(api, space, "chat")
        print(f"rolled out in {time.monotonic() - begin:.2f} s")
    new = done["status"]["currentRevision"]
    assert new != old and done["status"]["updatedRevision"] == new
    assert pairing.assert_never_paired(recording, "chat") >= 16
    pairing.assert_door_leads_to_whole_pairs(recording, "chat")
    pairing.assert_door_never_closed(recording, "chat")
    order = [
        pairing.first(recording, "chat", "dark", new),
        pairing.first(recording, "chat", "complete", new),
        pairing.first(recording, "chat", "front", new),
        pairing.first(recording, "chat", "routers-gone", old),
        pairing.first(recording, "chat", "engines-going", old),
        pairing.first(recording, "chat", "engines-gone", old),
    ]
    assert order[:4] == sorted(set(order[:4])) and order[3] < order[4] <= order[5], order
    said = [event.object for event in recording.events("PDDeployment", "chat") if event.type == "MODIFIED"]
    assert all(waits.conditions(obj)["Ready"]["status"] == "True" for obj in said), "what serves went on serving"
    words = [waits.kstatus(obj) for obj in said]
    assert words[0] == "InProgress" and words[-1] == "Current" and "Failed" not in words, words
    states = [{s["name"][5:13]: s["state"] for s in obj["status"]["slices"]} for obj in said]
    assert (
        {old: "Serving", new: "Dark"} in states and {old: "Removing", new: "Serving"} in states and states[-1] == {new: "Serving"}
    )
    left = state.children(api, space, "chat")
    kept = {name for kind, name in left if kind == "ControllerRevision"}
    assert {name.split("-")[1] for name in kept} == {old, new}  # the way back stays known
    assert not [name for kind, name in left if kind != "ControllerRevision" and old in name]


def test_a_restart_id_makes_a_new_revision(api: Api, operator: Operator, space: str) -> None:
    api.create(state.pdd(space, "restart"))
    waits.ready(api, space, "restart")
    before = state.uids(state.pods(api, space, "restart"))
    with Recording(api, space, *KINDS) as recording:
        edit(api, space, "restart", {"rollout": {"restartID": "monday"}})
        waits.ready(api, space, "restart")
        until_single(api, space, "restart")
    pairing.assert_never_paired(recording, "restart")
    pairing.assert_door_never_closed(recording, "restart")
    assert not before & state.uids(state.pods(api, space, "restart"))


@contextmanager
def two_gpus(cluster: Cluster, prefix: str) -> Iterator[dict[str, Any]]:
    """Two nodes of one GPU that nobody else uses; a role with one GPU that can only run there."""
    key = f"pdserve.dev/{prefix}"
    taint = {"key": key, "value": "true", "effect": "NoSchedule"}
    group = FakeNodes(2, prefix=prefix, gpus=1, labels={key: "true"}, taints=[taint])
    cluster.apply(*group.manifests())
    pod = {"nodeSelector": {key: "true"}, "tolerations": [{"key": key, "operator": "Exists"}]}
    try:
        yield {"template": {"spec": pod}, "resources": {"limits": {"nvidia.com/gpu": 1, "cpu": None}}}
    finally:
        cluster.kubectl("delete", "node", *group.names, "--ignore-not-found")


@dataclass
class Tight:
    """A rollout without room that is on its way."""

    old: str
    recording: Recording
    stack: ExitStack


@pytest.fixture(scope="module", autouse=True)
def tight(kwok_cluster: Cluster, api: Api, operator: Operator, space: str) -> Iterator[Tight]:
    """Begin the longest rollout first."""
    with ExitStack() as outer:
        role = outer.enter_context(two_gpus(kwok_cluster, f"tight-{secrets.token_hex(2)}"))
        api.create(state.pdd(space, "tight", prefill=role, decode=role))
        old = waits.ready(api, space, "tight")["status"]["currentRevision"]
        stack = outer.enter_context(ExitStack())
        recording = stack.enter_context(Recording(api, space, *KINDS, seconds=1800))  # through all tests of this module
        edit(api, space, "tight", PAIRING_EDIT)
        yield Tight(old, recording, stack)


def test_a_role_that_cannot_surge_says_so(api: Api, operator: Operator, space: str, kwok_cluster: Cluster) -> None:
    """An edit of one role's pods where the surge pod finds no GPU: nothing ends, and the message names the ways out."""
    with two_gpus(kwok_cluster, f"surge-{secrets.token_hex(2)}") as role:
        api.create(state.pdd(space, "surge", prefill=role, decode=role))
        waits.ready(api, space, "surge")
        before = state.uids(state.pods(api, space, "surge"))
        edit(api, space, "surge", {"prefill": {"template": {"metadata": {"annotations": {"example.org/a": "b"}}}}})
        obj = waits.condition(api, space, "surge", "Progressing", "False", "NoCapacityForPair")
        message = waits.conditions(obj)["Progressing"]["message"]
        assert "Insufficient nvidia.com/gpu" in message and "Recreate" in message
        assert waits.has(obj, "Ready", "True") and waits.kstatus(obj) == "InProgress"
        assert before <= state.uids(state.pods(api, space, "surge"))
        edit(api, space, "surge", {"rollout": {"type": "Recreate"}})
        waits.ready(api, space, "surge", timeout=90)
        (prefill,) = state.pods(api, space, "surge", role="prefill")
        assert prefill["metadata"]["annotations"]["example.org/a"] == "b"
        assert state.uids(state.pods(api, space, "surge", role="decode")) <= before
        api.delete("PDDeployment", space, "surge")
        waits.until("its pods to be gone", lambda: not api.list("Pod", space, "pdserve.dev/deployment=surge"))


def test_the_old_slice_serves_until_the_new_routers_are_ready(
    api: Api, operator: Operator, space: str, kwok_cluster: Cluster
) -> None:
    """The flip replaces router pods; while the new ones find no room, the door stays where it was."""
    slot = f"example.org/slot-{secrets.token_hex(2)}"
    groups = [FakeNodes(1, prefix=f"door-{n}-{secrets.token_hex(2)}", gpus=0, extended={slot: "4"}) for n in range(2)]
    template = {"spec": {"containers": [{"name": "router", "resources": {"limits": {slot: 1}}}]}}
    kwok_cluster.apply(*groups[0].manifests())
    try:
        api.create(state.pdd(space, "door", router={"template": template}))
        old = waits.ready(api, space, "door")["status"]["currentRevision"]
        with Recording(api, space, *KINDS) as recording:
            edit(api, space, "door", PAIRING_EDIT)
            held = "app.kubernetes.io/component=router,pdserve.dev/front=door"
            waits.until(
                "a router pod with the front label that finds no room",
                lambda: [p for p in api.list("Pod", space, held) if not p["spec"].get("nodeName")],
                show=lambda: waits.describe(api.get("PDDeployment", space, "door")),
            )
            time.sleep(2)
            serving = [p for p in api.list("Pod", space, held) if pairing.is_ready(p)]
            assert {p["metadata"]["labels"]["pdserve.dev/revision"] for p in serving} == {old} and len(serving) == 2
            obj = api.must_get("PDDeployment", space, "door")
            assert waits.has(obj, "Ready", "True") and waits.kstatus(obj) == "InProgress"
            assert obj["status"]["currentRevision"] == old and len(revisions(api, space, "door")) == 2
            kwok_cluster.apply(*groups[1].manifests())
            assert waits.ready(api, space, "door")["status"]["currentRevision"] != old
            until_single(api, space, "door")
        pairing.assert_never_paired(recording, "door")
        pairing.assert_door_never_closed(recording, "door")
        pairing.assert_door_leads_to_whole_pairs(recording, "door")
        api.delete("PDDeployment", space, "door")
        waits.until("its pods to be gone", lambda: not api.list("Pod", space, "pdserve.dev/deployment=door"))
    finally:
        kwok_cluster.kubectl("delete", "node", *groups[0].names, *groups[1].names, "--ignore-not-found")


def test_recreate_ends_the_old_before_the_new_begins(api: Api, operator: Operator, space: str) -> None:
    api.create(state.pdd(space, "recreate", rollout={"type": "Recreate"}))
    old = waits.ready(api, space, "recreate")["status"]["currentRevision"]
    with Recording(api, space, *KINDS) as recording:
        edit(api, space, "recreate", PAIRING_EDIT)
        new = waits.ready(api, space, "recreate")["status"]["currentRevision"]
        until_single(api, space, "recreate")
    pairing.assert_never_paired(recording, "recreate")
    gone = max(e.version for e in recording.events("Deployment", "recreate") if e.type == "DELETED")
    began = min(e.version for e in recording.events("Deployment", "recreate") if e.labels["pdserve.dev/revision"] == new)
    assert gone < began
    assert pairing.first(recording, "recreate", "routers-gone", old) < pairing.first(recording, "recreate", "engines-going", old)


def test_going_back_half_way_restarts_nothing(api: Api, operator: Operator, space: str) -> None:
    api.create(state.pdd(space, "back"))
    old = waits.ready(api, space, "back")
    before = state.uids(state.pods(api, space, "back"))
    with Recording(api, space, *KINDS) as recording:
        edit(api, space, "back", PAIRING_EDIT | {"decode": {"template": NOWHERE}})
        dark = wait_dark(api, space, "back")
        assert waits.has(dark, "Ready", "True") and waits.kstatus(dark) == "InProgress"
        assert dark["status"]["currentRevision"] != dark["status"]["updatedRevision"]
        waits.until(
            "the scheduler's word in the status",
            lambda: (
                "nodeSelector" in str(waits.conditions(api.get("PDDeployment", space, "back"))["Progressing"]["message"])
                or "node(s) didn't match" in str(waits.conditions(api.get("PDDeployment", space, "back"))["Progressing"]["message"])
            ),
            show=lambda: waits.describe(api.get("PDDeployment", space, "back")),
        )
        edit(api, space, "back", {"engine": {"args": None}, "decode": {"template": None}})
        done = waits.ready(api, space, "back")
        until_single(api, space, "back")
    assert done["status"]["currentRevision"] == old["status"]["currentRevision"]
    assert state.uids(state.pods(api, space, "back")) == before
    pairing.assert_never_paired(recording, "back")
    pairing.assert_door_never_closed(recording, "back")
    pairing.assert_door_leads_to_whole_pairs(recording, "back")


def test_a_third_revision_half_way(api: Api, operator: Operator, space: str) -> None:
    api.create(state.pdd(space, "third"))
    old = waits.ready(api, space, "third")["status"]["currentRevision"]
    with Recording(api, space, *KINDS) as recording:
        edit(api, space, "third", PAIRING_EDIT | {"decode": {"template": NOWHERE}})
        second = wait_dark(api, space, "third")["status"]["updatedRevision"]
        edit(api, space, "third", {"engine": {"args": ["--max-num-seqs=16"]}, "decode": {"template": None}})
        third = waits.ready(api, space, "third")["status"]["currentRevision"]
        until_single(api, space, "third")
    assert len({old, second, third}) == 3
    pairing.assert_never_paired(recording, "third")
    pairing.assert_door_never_closed(recording, "third")
    pairing.assert_door_leads_to_whole_pairs(recording, "third")
    # The second revision is at zero before the third begins.
    assert pairing.first(recording, "third", "engines-gone", second) < pairing.first(recording, "third", "dark", third)
    assert revisions(api, space, "third") == {third}


def test_there_and_back_at_any_moment(api: Api, operator: Operator, space: str) -> None:
    """The user changes his mind while the first change is on its way, wherever it is."""
    pauses = {f"flip{number}": number * 0.25 for number in range(6)}
    for name in pauses:
        api.create(state.pdd(space, name, router={"replicas": 1}))
    old = {name: waits.ready(api, space, name)["status"]["currentRevision"] for name in pauses}
    with Recording(api, space, *KINDS) as recording:
        begin = time.monotonic()
        for name in pauses:
            edit(api, space, name, PAIRING_EDIT)
        for name, pause in pauses.items():
            time.sleep(max(0.0, begin + pause - time.monotonic()))
            edit(api, space, name, {"engine": {"args": None}})
        for name in pauses:
            assert waits.ready(api, space, name)["status"]["currentRevision"] == old[name]
            until_single(api, space, name)
    for name in pauses:
        assert revisions(api, space, name) == {old[name]}
        pairing.assert_never_paired(recording, name)
        pairing.assert_door_never_closed(recording, name)
        pairing.assert_door_leads_to_whole_pairs(recording, name)


def test_where_both_do_not_fit_the_old_one_goes_first(api: Api, operator: Operator, space: str, tight: Tight) -> None:
    """Begun before all other tests of this module: the operator is patient with a pod that finds no GPU."""
    done = waits.ready(api, space, "tight", timeout=120)
    until_single(api, space, "tight")
    old, new, recording = tight.old, done["status"]["currentRevision"], tight.recording
    tight.stack.close()
    assert new != old
    pairing.assert_never_paired(recording, "tight")
    said = [waits.conditions(e.object)["Progressing"] for e in recording.events("PDDeployment", "tight") if e.type == "MODIFIED"]
    told = [c for c in said if c["reason"] == "NoCapacityForPair"]
    assert told and all(c["status"] == "False" and "Insufficient nvidia.com/gpu" in c["message"] for c in told), said
    assert pairing.first(recording, "tight", "routers-gone", old) < pairing.first(recording, "tight", "engines-going", old)
    assert pairing.first(recording, "tight", "engines-going", old) < pairing.first(recording, "tight", "complete", new)
    notes = [
        e["note"] for e in api.list("Event", space) if e["reason"] == "NoCapacityForPair" and e["regarding"]["name"] == "tight"
    ]
    assert notes and all("Insufficient nvidia.com/gpu" in note for note in notes), notes
