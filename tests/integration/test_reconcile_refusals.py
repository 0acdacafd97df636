"""Specs that are refused: nothing is made, nothing that serves is touched, the status says why; mended, it goes on by itself."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import manifests
from opsrunner import state, waits
from opsrunner.api import Api, Object
from opsrunner.process import Operator

pytest_plugins = ("opsrunner.fixtures",)

RECHECK = 15  # seconds between two looks at what is missing


def events(api: Api, space: str, name: str, reason: str) -> list[Object]:
    """Events about an object with this reason."""
    return [e for e in api.list("Event", space) if e["reason"] == reason and e["regarding"]["name"] == name]


def nudge(api: Api, space: str, name: str) -> None:
    """An event of the object, so that a test need not wait for RECHECK."""
    api.merge("PDDeployment", space, name, {"metadata": {"labels": {"nudge": "1"}}})


def assert_refused(obj: Object, reason: str, *words: str) -> None:
    """Accepted, Ready, Stalled and Reconciling all say so, with the reason and the words."""
    assert waits.has(obj, "Accepted", "False", reason) and waits.has(obj, "Ready", "False", reason), waits.describe(obj)
    assert waits.has(obj, "Stalled", "True", reason) and waits.has(obj, "Reconciling", "False"), waits.describe(obj)
    assert waits.kstatus(obj) == "Failed"
    for word in words:
        assert word in waits.conditions(obj)["Accepted"]["message"], waits.describe(obj)


def foreign(kind: str, space: str, name: str, labels: dict[str, str], owners: list[dict[str, Any]]) -> Object:
    """Somebody else's object."""
    body: dict[str, Any] = {"spec": {"ports": [{"port": 1}], "selector": {"app": "theirs"}}} if kind == "Service" else {}
    return {
        "apiVersion": "v1",
        "kind": kind,
        "metadata": {"name": name, "namespace": space, "labels": labels, "ownerReferences": owners},
        **body,
    }


# Labels prove nothing: they are copied with `kubectl get -o yaml`, and stay after `kubectl delete --cascade=orphan`.
LABELLED = {"app.kubernetes.io/managed-by": "pd-operator", "app.kubernetes.io/component": "front"}


NEEDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # kind -> (a spec that names it, its body)
    "Secret": (
        {"engine": {"env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "the-secret", "key": "token"}}}]}},
        {"stringData": {"token": "not-a-token"}},
    ),
    "ConfigMap": (
        {"prefill": {"template": {"spec": {"volumes": [{"name": "c", "configMap": {"name": "the-configmap"}}]}}}},
        {"data": {"a": "b"}},
    ),
    "PersistentVolumeClaim": (
        {"model": {"uri": "pvc://the-persistentvolumeclaim/llama"}},
        {"spec": {"accessModes": ["ReadOnlyMany"], "storageClassName": "none", "resources": {"requests": {"storage": "1Gi"}}}},
    ),
}
CLASHES = [
    (f"clash{index}{'l' if labelled else ''}", kind, suffix, labelled)
    for index, (kind, suffix) in enumerate((("Service", ""), ("ServiceAccount", "-router")))
    for labelled in (False, True)
]


@pytest.fixture(scope="module")
def waiting(api: Api, operator: Operator, space: str) -> dict[str, Object]:
    """Objects that lack something, and objects whose name somebody else's object has; those others, by PDDeployment."""
    theirs: dict[str, Object] = {}
    for name, kind, suffix, labelled in CLASHES:
        labels = LABELLED | {"pdserve.dev/deployment": name} if labelled else {"app": "theirs"}
        theirs[name] = api.create(foreign(kind, space, name + suffix, labels, []))
    for kind, (spec, _) in NEEDS.items():
        api.create(state.pdd(space, f"needs-{kind.lower()}", **spec))
    time.sleep(0.5)  # the watch has shown those that carry our labels
    for name, *_rest in CLASHES:
        api.create(state.pdd(space, name))
    return theirs


def test_a_missing_reference_is_named(api: Api, space: str, waiting: dict[str, Object]) -> None:
    for kind in NEEDS:
        obj = waits.condition(api, space, f"needs-{kind.lower()}", "Accepted", "False", "MissingReference")
        assert_refused(obj, "MissingReference", f"{kind} the-{kind.lower()} does not exist")
        assert state.children(api, space, f"needs-{kind.lower()}") == {}


def test_an_object_of_our_name_that_is_not_ours(api: Api, space: str, waiting: dict[str, Object]) -> None:
    """Invariant I7: neither adopted nor changed, and named; deleting ours takes none of theirs."""
    for again in (True, False):
        for name, kind, suffix, _labelled in CLASHES:
            obj = waits.condition(api, space, name, "Accepted", "False", "NameConflict")
            assert_refused(obj, "NameConflict", f"{kind} {name}{suffix} exists and is not ours")
            now = api.must_get(kind, space, name + suffix)
            assert now["metadata"]["resourceVersion"] == waiting[name]["metadata"]["resourceVersion"]
            made = {key for key in state.children(api, space, name) if key != (kind, name + suffix)}
            assert made == set(), made
            if again:
                api.delete("PDDeployment", space, name)
                api.create(state.pdd(space, name))


@pytest.fixture(scope="module")
def mended(api: Api, space: str, waiting: dict[str, Object]) -> datetime:
    """What was missing is made and what was in the way is removed, at this time."""
    for kind, (_, body) in NEEDS.items():
        api.create({"apiVersion": "v1", "kind": kind, "metadata": {"name": f"the-{kind.lower()}", "namespace": space}, **body})
    for name, kind, suffix, _labelled in CLASHES:
        api.delete(kind, space, name + suffix)
    return datetime.now(UTC)


@pytest.mark.parametrize(
    ("patch", "undo", "reason", "words"),
    [
        ({"router": {"type": "dynamo"}}, {"router": {"type": "smg"}}, "NotImplemented", ["spec.router.type"]),
        (
            {"engine": {"version": "0.25.0"}, "lmcache": {}},
            {"engine": {"version": "0.32.0"}, "lmcache": None},
            "UnsupportedVersion",
            ["0.25.0"],
        ),
        ({"engine": {"type": "sglang"}}, {"engine": {"type": "vllm"}}, "NotImplemented", ["spec.engine.type", "vllm"]),
    ],
    ids=["router", "version", "engine"],
)
def test_a_refused_edit_leaves_what_serves_alone(
    api: Api,
    operator: Operator,
    mended: datetime,
    space: str,
    request: pytest.FixtureRequest,
    patch: dict[str, Any],
    undo: dict[str, Any],
    reason: str,
    words: list[str],
) -> None:
    name = f"serves-{request.node.callspec.id}"
    api.create(state.pdd(space, name))
    before = waits.ready(api, space, name)
    pods, children = state.uids(state.pods(api, space, name)), state.versions(api, space, name)
    engines = state.uids(state.pods(api, space, name, component="engine"))
    # Together with edits that would change pods, were it accepted.
    api.merge("PDDeployment", space, name, {"spec": manifests.merge({"decode": {"replicas": 3}, "router": {"replicas": 1}}, patch)})
    obj = waits.condition(api, space, name, "Accepted", "False", reason)
    assert_refused(obj, reason, *words)
    assert "keeps serving" in waits.conditions(obj)["Ready"]["message"]
    assert obj["status"]["currentRevision"] == before["status"]["currentRevision"] and obj["status"]["servingSlices"] == 1
    # A nudge must not make it act, nor say it twice.
    nudge(api, space, name)
    time.sleep(1)
    assert state.versions(api, space, name) == children and state.uids(state.pods(api, space, name)) == pods
    (event,) = [e for e in events(api, space, name, reason) if "Accepted=False" in e["note"]]
    assert event["type"] == "Warning" and "series" not in event and all(word in event["note"] for word in words)
    api.merge("PDDeployment", space, name, {"spec": undo})
    waits.ready(api, space, name)
    waits.until("the other edits to take effect", lambda: len(state.pods(api, space, name, role="decode")) == 3)
    assert engines <= state.uids(state.pods(api, space, name, component="engine"))
    assert len(state.pods(api, space, name, component="router")) == 1
    api.delete("PDDeployment", space, name)


def test_a_refused_new_object_makes_nothing(api: Api, operator: Operator, space: str) -> None:
    api.create(state.pdd(space, "never", engine={"image": "", "version": "0.9.0"}, lmcache={}))
    assert_refused(waits.condition(api, space, "never", "Accepted", "False"), "UnsupportedVersion", "spec.engine.version")
    time.sleep(0.5)
    assert state.children(api, space, "never") == {} and state.pods(api, space, "never") == []


TEMPLATES: dict[str, tuple[dict[str, Any], str, str]] = {
    "typo": ({"nodeSelectr": {"a": "b"}}, "WriteRefused", "spec.template.spec.nodeSelectr: field not declared in schema"),
    "type": ({"nodeSelector": {"a": 5}}, "WriteRefused", "spec.template.spec.nodeSelector.a: expected string"),
    "twice": ({"volumes": [{"name": "a"}, {"name": "a"}]}, "WriteRefused", "spec.template.spec.volumes: duplicate entries"),
    "value": (
        {"tolerations": [{"key": "a", "operator": "Is"}]},
        "WriteRefused",
        'tolerations[0].operator: Unsupported value: "Is"',
    ),
}


def test_a_template_that_the_server_refuses(api: Api, operator: Operator, space: str) -> None:
    """No schema of ours knows a PodTemplateSpec: what the server says about it has to reach the user, not only the log."""
    for name, (template, _, _) in TEMPLATES.items():
        api.create(state.pdd(space, f"bad-{name}", prefill={"template": {"spec": template}}))
    for name, (_, reason, words) in TEMPLATES.items():
        assert_refused(waits.condition(api, space, f"bad-{name}", "Accepted", "False", reason), reason, words)
        api.merge("PDDeployment", space, f"bad-{name}", {"spec": {"prefill": {"template": None}}})
    for name in TEMPLATES:
        waits.ready(api, space, f"bad-{name}")
        api.delete("PDDeployment", space, f"bad-{name}")


def test_a_clash_beside_what_serves(api: Api, operator: Operator, space: str) -> None:
    """An edit that needs a name which is taken changes nothing of what serves."""
    api.create(state.pdd(space, "half"))
    first = waits.ready(api, space, "half")["status"]["currentRevision"]
    api.merge("PDDeployment", space, "half", {"spec": {"engine": {"args": ["--max-num-seqs=8"]}}})
    second = waits.ready(api, space, "half")["status"]["currentRevision"]
    api.merge("PDDeployment", space, "half", {"spec": {"engine": {"args": None}}})
    waits.ready(api, space, "half")
    pods = state.uids(state.pods(api, space, "half"))
    api.create(foreign("Service", space, f"half-{second}-0", {"app": "theirs"}, []))
    api.merge("PDDeployment", space, "half", {"spec": {"engine": {"args": ["--max-num-seqs=8"]}}})
    obj = waits.condition(api, space, "half", "Accepted", "False", "NameConflict")
    assert obj["status"]["currentRevision"] == first and obj["status"]["servingSlices"] == 1
    assert state.uids(state.pods(api, space, "half")) == pods
    api.delete("Service", space, f"half-{second}-0")
    nudge(api, space, "half")
    waits.ready(api, space, "half")
    api.delete("PDDeployment", space, "half")


def test_an_orphaned_child_is_not_adopted(api: Api, operator: Operator, space: str) -> None:
    """After a deletion that orphans, the children carry our labels and no owner: a namesake leaves them alone and says so."""
    api.create(state.pdd(space, "orphan"))
    waits.ready(api, space, "orphan")
    api.delete("PDDeployment", space, "orphan", propagation="Orphan")
    waits.until("the object to be gone", lambda: api.get("PDDeployment", space, "orphan") is None)
    waits.until(
        "the owner references to be gone",
        lambda: not any(c["metadata"].get("ownerReferences") for c in state.children(api, space, "orphan").values()),
    )
    left = state.versions(api, space, "orphan")
    assert len(left) == 16
    api.create(state.pdd(space, "orphan"))
    waits.condition(api, space, "orphan", "Accepted", "False", "NameConflict")
    time.sleep(1)
    assert state.versions(api, space, "orphan") == left
    for kind, name in left:
        api.delete(kind, space, name)
    nudge(api, space, "orphan")
    waits.ready(api, space, "orphan")
    api.delete("PDDeployment", space, "orphan")


@pytest.mark.parametrize("pause", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("propagation", ["Background", "Foreground"])
def test_deleted_and_made_again_at_once(api: Api, operator: Operator, space: str, propagation: str, pause: float) -> None:
    """The new object waits for what is left of the old one, and takes over none of it."""
    name = f"again-{propagation.lower()[0]}{int(pause * 100)}"
    api.create(state.pdd(space, name, decode={"replicas": 3}))
    waits.ready(api, space, name)
    old = {key: obj["metadata"]["uid"] for key, obj in state.children(api, space, name).items()}
    pods = state.uids(state.pods(api, space, name))
    api.delete("PDDeployment", space, name, propagation=propagation)
    waits.until("the name to be free", lambda: api.get("PDDeployment", space, name) is None)
    time.sleep(pause)
    made = api.create(state.pdd(space, name))
    waits.ready(api, space, name, timeout=90)
    now = state.children(api, space, name)
    assert {obj["metadata"]["ownerReferences"][0]["uid"] for obj in now.values()} == {made["metadata"]["uid"]}
    assert all(len(obj["metadata"]["ownerReferences"]) == 1 for obj in now.values())
    kept = {key for key, obj in now.items() if old.get(key) == obj["metadata"]["uid"]}
    assert kept == set(), f"taken over from the deleted object: {kept}"
    assert not pods & state.uids(state.pods(api, space, name))
    assert api.must_get("PDPool", space, f"{name}-decode")["spec"]["replicas"] == 1
    api.delete("PDDeployment", space, name)


def test_what_waited_goes_on_by_itself(api: Api, space: str, mended: datetime) -> None:
    """Nobody has touched the objects since: the operator looks again after RECHECK seconds, while the tests above ran."""
    names = [f"needs-{kind.lower()}" for kind in NEEDS] + [name for name, *_ in CLASHES]
    for name in names:
        obj = waits.condition(api, space, name, "Accepted", "True", timeout=RECHECK + 30)
        since = datetime.fromisoformat(waits.conditions(obj)["Accepted"]["lastTransitionTime"])
        assert since - mended < timedelta(seconds=RECHECK + 30)
    for name in names:
        if name != "needs-persistentvolumeclaim":
            waits.ready(api, space, name)
    waits.condition(api, space, "needs-persistentvolumeclaim", "Placed", "False")  # the claim is never bound here
    for name, kind, suffix, _ in CLASHES:
        assert api.must_get(kind, space, name + suffix)["metadata"]["ownerReferences"][0]["name"] == name
