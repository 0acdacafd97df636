"""Invariant I1: the operator writes nothing into the user's object but status, through a whole life of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from opsrunner import state, waits
from opsrunner.api import Api, Object
from opsrunner.process import Operator
from opsrunner.recording import Recording

pytest_plugins = ("opsrunner.fixtures",)

OURS = {"team": "search", "app.kubernetes.io/part-of": "shop", "app.kubernetes.io/managed-by": "argocd"}
NOTES = {
    "argocd.argoproj.io/tracking-id": "shop:pdserve.dev/PDDeployment:x/chat",
    "kubectl.kubernetes.io/last-applied-configuration": "{}",
}


def users_part(obj: Object) -> dict[str, Any]:
    """What belongs to the user."""
    metadata = {key: obj["metadata"].get(key) for key in ("labels", "annotations", "finalizers", "ownerReferences", "generation")}
    return {"metadata": metadata, "spec": obj["spec"]}


@pytest.fixture(scope="module")
def life(api: Api, operator: Operator, space: str) -> tuple[Recording, list[dict[str, Any]]]:
    """Events of an object that is created, edited, refused, mended, suspended and taken up again; what the user wrote each time."""
    wrote: list[dict[str, Any]] = []
    with Recording(api, space, "PDDeployment", "Deployment", "Service", "Pod") as recording:
        manifest = state.pdd(space, "chat")
        manifest["metadata"] |= {"labels": OURS, "annotations": NOTES}
        wrote.append(users_part(api.create(manifest)))
        waits.ready(api, space, "chat")
        edits: list[tuple[dict[str, Any], Any]] = [
            ({"engine": {"args": ["--max-num-seqs=8"]}}, None),
            ({"router": {"type": "dynamo"}}, ("Accepted", "False", "NotImplemented")),
            ({"router": {"type": "smg"}}, None),
            ({"suspend": True}, ("Ready", "False", "Suspended")),
            ({"suspend": False}, None),
        ]
        for patch, waited in edits:
            wrote.append(users_part(api.merge("PDDeployment", space, "chat", {"spec": patch})))
            if waited:
                waits.condition(api, space, "chat", *waited)
            else:
                waits.ready(api, space, "chat")
    return recording, wrote


def test_the_object_is_always_what_the_user_wrote(life: tuple[Recording, list[dict[str, Any]]]) -> None:
    recording, wrote = life
    events = recording.events("PDDeployment", "chat")
    assert len(events) > 2 * len(wrote)  # status was written many times
    for event in events:
        assert users_part(event.object) == wrote[event.object["metadata"]["generation"] - 1]


def test_our_field_manager_holds_status_only(life: tuple[Recording, list[dict[str, Any]]]) -> None:
    recording, _ = life
    for event in recording.events("PDDeployment", "chat"):
        ours = [entry for entry in event.object["metadata"]["managedFields"] if "pd-operator" in entry["manager"]]
        for entry in ours:
            assert (entry["operation"], entry.get("subresource"), set(entry["fieldsV1"])) == ("Apply", "status", {"f:status"})
    assert len(ours) == 1


def test_no_label_or_annotation_of_the_user_reaches_a_child(life: tuple[Recording, list[dict[str, Any]]]) -> None:
    recording, _ = life
    children = [event for event in recording.events(name="chat") if event.kind != "PDDeployment"]
    assert {event.kind for event in children} == {"Deployment", "Service", "Pod"}
    for event in children:
        text = json.dumps({key: event.object["metadata"].get(key) for key in ("labels", "annotations")})
        assert not any(word in text for word in ("team", "shop", "argo", "last-applied")), (event.kind, event.name)
        assert event.labels["app.kubernetes.io/managed-by"] == "pd-operator"
