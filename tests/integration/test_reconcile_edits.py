"""What an edit touches: one role's pods roll alone (class B); live fields restart no engine pod (class C)."""

from __future__ import annotations

import time
from typing import Any

import pytest

from cluster.handle import Cluster
from opsrunner import state, waits
from opsrunner.api import Api, Object
from opsrunner.process import Operator
from opsrunner.recording import Recording

pytest_plugins = ("opsrunner.fixtures",)


def engine_uids(api: Api, space: str, name: str) -> set[str]:
    """Uids of the engine pods."""
    return state.uids(state.pods(api, space, name, component="engine"))


def until_pods(api: Api, space: str, name: str, count: int, **labels: str) -> list[Object]:
    """Wait until there are so many pods, all ready."""

    def right() -> list[Object] | bool:
        found = state.pods(api, space, name, **labels)
        ready = [p for p in found if {c["type"]: c["status"] for c in p["status"].get("conditions", [])}.get("Ready") == "True"]
        return len(ready) == len(found) == count and (found or True)

    answer = waits.until(
        f"{count} ready pods of {name} {labels}", right, show=lambda: waits.describe(api.get("PDDeployment", space, name))
    )
    return answer if isinstance(answer, list) else []


@pytest.fixture(scope="module")
def serving(api: Api, operator: Operator, space: str) -> str:
    """An object with 2 P, 2 D and an LMCache server each, Ready."""
    api.create(state.pdd(space, "chat", prefill={"replicas": 2}, decode={"replicas": 2}, lmcache={"l1Size": "1Gi"}))
    waits.ready(api, space, "chat")
    return "chat"


def engine(pod: Object) -> Object:
    """Its engine container."""
    found: Object = pod["spec"]["containers"][0]
    return found


@pytest.mark.parametrize(
    ("role", "patch", "seen"),
    [
        (
            "prefill",
            {"template": {"metadata": {"annotations": {"example.org/a": "b"}}}},
            lambda pod: pod["metadata"]["annotations"]["example.org/a"] == "b",
        ),
        (
            "decode",
            {"resources": {"limits": {"cpu": "200m"}}},
            lambda pod: engine(pod)["resources"]["limits"]["cpu"] == "200m",
        ),
        (
            "decode",
            {"parallelism": {"tensor": 2}},
            lambda pod: "--tensor-parallel-size" in " ".join(engine(pod)["args"]),
        ),
    ],
    ids=["prefill-template", "decode-resources", "decode-parallelism"],
)
def test_an_edit_of_one_roles_pods_rolls_that_role_only(
    api: Api, space: str, serving: str, role: str, patch: dict[str, Any], seen: Any
) -> None:
    other = "decode" if role == "prefill" else "prefill"
    before = api.must_get("PDDeployment", space, serving)["status"]
    mine, others = state.uids(state.pods(api, space, serving, role=role)), state.uids(state.pods(api, space, serving, role=other))
    routers = state.uids(state.pods(api, space, serving, component="router"))
    with Recording(api, space, "PDDeployment", "Pod") as recording:
        edited = api.merge("PDDeployment", space, serving, {"spec": {role: patch}})["metadata"]["generation"]
        done = waits.ready(api, space, serving)
    rolled = until_pods(api, space, serving, 2, role=role)
    assert not mine & state.uids(rolled) and all(seen(pod) for pod in rolled)
    assert state.uids(state.pods(api, space, serving, role=other)) == others
    assert state.uids(state.pods(api, space, serving, component="router")) == routers
    assert done["status"]["currentRevision"] == before["currentRevision"]  # the same slice
    # Whoever waits by kstatus is not told "Current" while an old pod is left that nobody has told to end.
    for event, world in recording.states("PDDeployment", "Pod", name=serving):
        if event.kind == "PDDeployment" and event.object["status"]["observedGeneration"] == edited:
            stay = (pod["metadata"] for (kind, _), pod in world.items() if kind == "Pod")
            left = mine & {metadata["uid"] for metadata in stay if not metadata.get("deletionTimestamp")}
            assert waits.kstatus(event.object) == "InProgress" or not left, waits.describe(event.object)


def test_l1_size_rolls_both_roles_inside_the_slice(api: Api, space: str, serving: str) -> None:
    before, revision = engine_uids(api, space, serving), api.must_get("PDDeployment", space, serving)["status"]["currentRevision"]
    api.merge("PDDeployment", space, serving, {"spec": {"lmcache": {"l1Size": "2Gi"}}})
    assert waits.ready(api, space, serving)["status"]["currentRevision"] == revision
    pods = until_pods(api, space, serving, 4, component="engine")
    assert not before & state.uids(pods)
    assert all("2" in " ".join(p["spec"]["initContainers"][0]["args"]).split("--l1-size-gb ")[1].split()[0] for p in pods)


@pytest.mark.parametrize(
    ("patch", "engines", "routers"),
    [
        ({"decode": {"replicas": 3}}, 5, 2),
        ({"decode": {"replicas": 2}}, 4, 2),
        ({"router": {"replicas": 3}}, 4, 3),
        ({"router": {"replicas": 2}}, 4, 2),
        ({"router": {"args": ["--log-level", "debug"]}}, 4, 2),
        ({"router": {"type": "vllm-router"}}, 4, 2),
        ({"router": {"type": "smg", "args": None}}, 4, 2),
        ({"router": {"template": {"metadata": {"annotations": {"example.org/a": "b"}}}}}, 4, 2),
        ({"verification": "Advisory"}, 4, 2),
        ({"verification": "Disabled"}, 4, 2),
        ({"rollout": {"type": "Recreate"}}, 4, 2),
        ({"rollout": {"type": "RollingUpdate"}}, 4, 2),
    ],
    ids=lambda value: str(value).replace("'", "") if isinstance(value, dict) else "",
)
def test_an_edit_of_a_live_field_ends_no_engine_pod(
    api: Api, space: str, serving: str, patch: dict[str, Any], engines: int, routers: int
) -> None:
    before = engine_uids(api, space, serving)
    api.merge("PDDeployment", space, serving, {"spec": patch})
    obj = waits.ready(api, space, serving)
    now = state.uids(until_pods(api, space, serving, engines, component="engine"))
    until_pods(api, space, serving, routers, component="router")
    assert before <= now or now <= before  # more or fewer, never others
    assert waits.has(obj, "UpdateAvailable", "False")


def test_a_drain_timeout_rolls_decode_only(api: Api, space: str, serving: str) -> None:
    """It stands in the grace period of decode pods, and in no other's."""
    prefill, decode = (state.uids(state.pods(api, space, serving, role=role)) for role in ("prefill", "decode"))
    api.merge("PDDeployment", space, serving, {"spec": {"rollout": {"drainTimeout": "300s"}}})
    assert waits.has(waits.ready(api, space, serving), "UpdateAvailable", "False")
    assert not decode & state.uids(until_pods(api, space, serving, 2, role="decode"))
    assert state.uids(state.pods(api, space, serving, role="prefill")) == prefill


def test_suspend_takes_the_pools_to_zero_and_back(api: Api, space: str, serving: str, kwok_cluster: Cluster) -> None:
    revision = api.must_get("PDDeployment", space, serving)["status"]["currentRevision"]
    kept = {key: obj["metadata"]["uid"] for key, obj in state.children(api, space, serving).items()}
    api.merge("PDDeployment", space, serving, {"spec": {"suspend": True}})
    until_pods(api, space, serving, 0, component="engine")
    obj = waits.condition(api, space, serving, "Ready", "False", "Suspended")
    assert (
        waits.has(obj, "Placed", "False", "Suspended")
        and waits.has(obj, "Stalled", "False")
        and waits.has(obj, "Reconciling", "False")
    )
    waits.until(
        "the columns to say 0/0",
        lambda: kwok_cluster.kubectl("get", "pdd", serving, "-n", space, "--no-headers").split()[1:3] == ["0/0", "0/0"],
    )
    # The pools keep the number to come back to.
    assert [api.must_get("PDPool", space, f"{serving}-{role}")["spec"]["replicas"] for role in ("prefill", "decode")] == [2, 2]
    api.merge("PDDeployment", space, serving, {"spec": {"suspend": False}})
    assert waits.ready(api, space, serving)["status"]["currentRevision"] == revision
    until_pods(api, space, serving, 4, component="engine")
    assert {key: obj["metadata"]["uid"] for key, obj in state.children(api, space, serving).items()} == kept


def test_suspend_together_with_a_pairing_edit(api: Api, operator: Operator, space: str) -> None:
    """No new slice can get ready while suspended, so the old one must not wait for it and hold its GPUs."""
    api.create(state.pdd(space, "both"))
    old = waits.ready(api, space, "both")["status"]["currentRevision"]
    api.merge("PDDeployment", space, "both", {"spec": {"suspend": True, "engine": {"args": ["--max-num-seqs=8"]}}})
    until_pods(api, space, "both", 0, component="engine")
    waits.condition(api, space, "both", "Ready", "False", "Suspended")
    api.merge("PDDeployment", space, "both", {"spec": {"suspend": False}})
    assert waits.ready(api, space, "both")["status"]["currentRevision"] != old
    until_pods(api, space, "both", 2, component="engine")


def test_created_suspended(api: Api, operator: Operator, space: str) -> None:
    api.create(state.pdd(space, "asleep", suspend=True))
    waits.condition(api, space, "asleep", "Ready", "False", "Suspended")
    assert engine_uids(api, space, "asleep") == set()
    api.merge("PDDeployment", space, "asleep", {"spec": {"suspend": False}})
    waits.ready(api, space, "asleep")


def test_edits_while_the_operator_is_down(api: Api, operator: Operator, space: str) -> None:
    """Level-triggered: what is missed while down is caught up, and nothing stops meanwhile (invariant I11)."""
    api.create(state.pdd(space, "down"))
    waits.ready(api, space, "down")
    before = engine_uids(api, space, "down")
    assert operator.stop() == 0
    api.merge("PDDeployment", space, "down", {"spec": {"decode": {"replicas": 2}}})
    api.merge("PDDeployment", space, "down", {"spec": {"router": {"replicas": 1}}})
    api.delete("Service", space, "down")
    assert engine_uids(api, space, "down") == before
    begin = time.monotonic()
    operator.start()
    waits.until("the front Service to be made again", lambda: api.get("Service", space, "down"), timeout=90)
    waits.ready(api, space, "down", timeout=90)
    print(f"caught up {time.monotonic() - begin:.1f} s after its start")
    assert before < state.uids(until_pods(api, space, "down", 3, component="engine"))
    until_pods(api, space, "down", 1, component="router")
